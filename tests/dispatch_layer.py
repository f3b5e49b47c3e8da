"""A whole MoE layer of plain torch experts between `dispatch` and `combine`, for both engines."""

from functools import partial

import torch

from megatron_mok.ops import combine, dispatch
from megatron_mok.runtime import abi
from tests.in_process import Result, run_ranks_of_layer


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


def compute(part, workspace, capacity):
    ids_TK = part.expert_ids_TK
    room = None if capacity is None else capacity(workspace.ep_rank)
    sent = dispatch(part.hidden_TH, ids_TK, part.probs_TK, workspace, capacity=room)
    done_RH = run_experts(sent.rows_RH, sent.probs_R, sent.expert_rows_L, part.fc1, part.fc2)
    return combine(done_RH, ids_TK, workspace)


def run_dispatched_layer(layer, workspaces, cuts, device="cpu", capacity=None) -> Result:
    """This layer, as `run_ranks_of_layer` says. capacity(rank): rows of each rank's buffer."""
    body = partial(compute, capacity=capacity)
    return run_ranks_of_layer(layer, workspaces, cuts, device, body)
