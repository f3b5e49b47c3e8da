"""The fused MoE layer as a differentiable function."""

from collections.abc import Sequence

import torch

from megatron_mok.ops.checks import check_device
from megatron_mok.ops.main_grad import WeightGradTargets
from megatron_mok.runtime import Workspace, abi


def fused_moe(
    hidden_TH: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    probs_TK: torch.Tensor,
    fc1: Sequence[torch.Tensor],
    fc2: Sequence[torch.Tensor],
    workspace: Workspace,
    *,
    addend_TH: torch.Tensor | None = None,
    saved_rows: int = 0,
    accumulate_into_main_grad: bool = False,
) -> torch.Tensor:
    """Routed experts of one MoE layer: dispatch, FC1 + SwiGLU, FC2, combine. Collective.

    For every route (t, k) with expert e: h = fc1[e] x[t]; act = silu(h[:F]) * h[F:] * probs[t, k];
    the output of t is the sum of fc2[e] act over k, in ascending order of e, plus addend[t].

    Args:
        hidden_TH: [T, H], of the workspace's dtype.
        expert_ids_TK: [T, K] int32 ids in the whole EP group, in any order; -1 is no route.
        probs_TK: [T, K], any floating dtype; computed in FP32.
        fc1: [2F, H] for each local expert, gate rows, then up rows.
        fc2: [H, F] for each local expert.
        addend_TH: [T, H] added to the output before its rounding (shared expert).
        saved_rows: rows of pre-activations kept for backward (rounded up to whole blocks of 128);
            rows beyond are recomputed. Ignored where no gradient is needed.
        accumulate_into_main_grad: add the gradient of each weight that has a `main_grad` into it,
            and set `grad_added_to_main_grad`; such a weight gets a dummy gradient that only fires
            hooks. The engine adds to FP32 ones itself; those of another dtype, as with
            `--grad-reduce-in-bf16`, get the sum from an FP32 buffer. Weights without a `main_grad`
            get real gradients.

    Returns:
        [T, H]. Differentiable in hidden, probs, the weights and addend.

    Raises:
        ValueError: an argument does not fit the workspace.
        MoKError: the engine failed; `MoKTimeoutError` when a peer did not take part.
    """
    check_device("hidden", hidden_TH, workspace)
    probs_TK = probs_TK.float()
    differentiable = [hidden_TH, probs_TK, *fc1, *fc2]
    if addend_TH is not None:
        differentiable.append(addend_TH)
    if torch.is_grad_enabled() and any(t.requires_grad for t in differentiable):
        blocks = -(-saved_rows // abi.BLOCK_ROWS)
        saved_rows = min(blocks * abi.BLOCK_ROWS, workspace.max_rows)
    else:
        saved_rows = 0
    if accumulate_into_main_grad:
        return _FusedMoEIntoMainGrad.apply(
            hidden_TH,
            expert_ids_TK,
            probs_TK,
            addend_TH,
            workspace.handle,
            saved_rows,
            len(fc1),
            *fc1,
            *fc2,
        )
    output_TH, _ = torch.ops.mok.moe_forward(
        hidden_TH,
        expert_ids_TK,
        probs_TK,
        list(fc1),
        list(fc2),
        addend_TH,
        workspace.handle,
        saved_rows,
    )
    return output_TH


class _FusedMoEIntoMainGrad(torch.autograd.Function):
    """`fused_moe` whose weight gradients go into `main_grad`.

    Apart from the operator's own autograd formula because a formula of an operator may not change
    tensors that are not its arguments.
    """

    @staticmethod
    def forward(
        ctx, hidden, expert_ids, probs, addend, workspace, saved_rows, num_experts, *weights
    ):
        output, preact = torch.ops.mok.moe_forward(
            hidden,
            expert_ids,
            probs,
            list(weights[:num_experts]),
            list(weights[num_experts:]),
            addend,
            workspace,
            saved_rows,
        )
        ctx.workspace = workspace
        ctx.num_experts = num_experts
        ctx.parameters = weights  # main_grad is an attribute of the Parameter object
        ctx.save_for_backward(hidden, expert_ids, probs, preact, *weights)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        hidden, expert_ids, probs, preact, *weights = ctx.saved_tensors
        n = ctx.num_experts
        wanted = ctx.needs_input_grad[-len(weights) :]
        fc1, fc2 = (
            WeightGradTargets(ctx.parameters[part], weights[part], wanted[part])
            for part in (slice(n), slice(n, None))
        )
        accumulate = fc1.in_place or fc2.in_place  # one call adds to all gradients or to none
        grad_hidden, grad_probs = torch.ops.mok.moe_backward(
            grad_output.contiguous(),
            hidden,
            expert_ids,
            probs,
            weights[:n],
            weights[n:],
            preact,
            fc1.for_engine(accumulate),
            fc2.for_engine(accumulate),
            accumulate,
            ctx.workspace,
        )
        return (
            grad_hidden,
            None,
            grad_probs,
            grad_output if ctx.needs_input_grad[3] else None,
            None,
            None,
            None,
            *fc1.collect(hidden.dtype),
            *fc2.collect(hidden.dtype),
        )
