"""A whole MoE layer of plain torch experts between `dispatch` and `combine`, for both engines."""

import torch

from megatron_mok.ops import combine, dispatch
from megatron_mok.runtime import abi
from tests.in_process import Result, leaf, run_ranks


def expert_slices(expert_rows_L):
    """Where the rows of each expert lie, with their padding."""
    first = 0
    for rows in expert_rows_L.tolist():
        end = first + -(-rows // abi.BLOCK_ROWS) * abi.BLOCK_ROWS
        yield slice(first, end)
        first = end


def run_experts(rows_RH, probs_R, expert_rows_L, fc1, fc2):
    parts = []
    for own, w1, w2 in zip(expert_slices(expert_rows_L), fc1, fc2, strict=True):
        gate, up = (rows_RH[own] @ w1.t()).chunk(2, dim=-1)
        activation = torch.nn.functional.silu(gate) * up * probs_R[own, None].to(gate.dtype)
        parts.append(activation @ w2.t())
    done = torch.cat(parts)
    return torch.cat([done, rows_RH.new_zeros(len(rows_RH) - len(done), rows_RH.shape[1])])


def run_dispatched_layer(layer, workspaces, cuts, device="cpu") -> Result:
    """Forward and backward; rank r owns tokens cuts[r] to cuts[r + 1]."""
    per_rank = len(layer.fc1) // len(workspaces)

    def rank_body(rank):
        tokens = slice(cuts[rank], cuts[rank + 1])
        experts = slice(rank * per_rank, (rank + 1) * per_rank)
        ids_TK = layer.expert_ids_TK[tokens].contiguous()
        hidden_TH, probs_TK = leaf(layer.hidden_TH[tokens]), leaf(layer.probs_TK[tokens])
        fc1, fc2 = [leaf(w) for w in layer.fc1[experts]], [leaf(w) for w in layer.fc2[experts]]
        sent = dispatch(hidden_TH, ids_TK, probs_TK, workspaces[rank])
        done_RH = run_experts(sent.rows_RH, sent.probs_R, sent.expert_rows_L, fc1, fc2)
        output_TH = combine(done_RH, ids_TK, workspaces[rank])
        with torch.autograd.set_multithreading_enabled(False):  # as in run_layer
            output_TH.backward(layer.grad_output_TH[tokens])
        return (
            output_TH.detach(),
            hidden_TH.grad,
            probs_TK.grad,
            [torch.zeros_like(w) if w.grad is None else w.grad for w in fc1],
            [torch.zeros_like(w) if w.grad is None else w.grad for w in fc2],
        )

    out, dx, dp, g1, g2 = zip(*run_ranks(len(workspaces), rank_body, device), strict=True)
    grad_fc1, grad_fc2 = ([w for rank in g for w in rank] for g in (g1, g2))
    return Result(torch.cat(out), torch.cat(dx), torch.cat(dp), grad_fc1, grad_fc2)
