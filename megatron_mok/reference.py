"""The MoE layer in plain PyTorch: what every engine is checked against.

Differentiable by autograd and written for clarity. Feed it float64 for a reference, or BF16 for the
composed layer whose rounding an engine may not exceed by much.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def moe_layer(
    hidden_TH: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    probs_TK: torch.Tensor,
    fc1: Sequence[torch.Tensor],
    fc2: Sequence[torch.Tensor],
    addend_TH: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output of the routed experts, all of them local.

    Args:
        hidden_TH: [T, H].
        expert_ids_TK: [T, K] integers; -1 is no route.
        probs_TK: [T, K]; multiplies the activation before FC2.
        fc1: [2F, H] for each expert, gate rows, then up rows.
        fc2: [H, F] for each expert.
        addend_TH: [T, H] added to the output.

    Returns:
        [T, H] of the dtype of `hidden_TH`. Matrix products run in that dtype; the sum over the
        routes of a token goes by ascending expert id in at least FP32.
    """
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)
    output_TH = torch.zeros(hidden_TH.shape, dtype=wide, device=hidden_TH.device)
    for expert, (w1, w2) in enumerate(zip(fc1, fc2, strict=True)):
        token_R, k_R = torch.nonzero(expert_ids_TK == expert, as_tuple=True)
        if token_R.numel() == 0:
            continue
        gate_RF, up_RF = F.linear(hidden_TH[token_R], w1).chunk(2, dim=-1)
        act_RF = F.silu(gate_RF) * up_RF
        act_RF = (act_RF * probs_TK[token_R, k_R].unsqueeze(-1)).to(hidden_TH.dtype)
        output_TH = output_TH.index_add(0, token_R, F.linear(act_RF, w2).to(wide))
    if addend_TH is not None:
        output_TH = output_TH + addend_TH
    return output_TH.to(hidden_TH.dtype)
