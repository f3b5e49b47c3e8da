"""Dispatch and combine alone, around any experts: `torch.ops.mok` operators with autograd.

    mok::dispatch           rows of this rank's experts, expert by expert
    mok::dispatch_backward  its gradient: a combine that also brings a value of each row back
    mok::combine            sum of each token's rows
    mok::combine_backward   its gradient: a dispatch

Shapes: T tokens, K routes per token, H hidden, L local experts, R rows of the buffer. All are
collective over the workspace's EP group.
"""

from dataclasses import dataclass

import torch

from megatron_mok.ops.checks import check_device, check_routes, check_tensor
from megatron_mok.ops.library import library, register_operator
from megatron_mok.runtime import Workspace, abi, workspace_of


@dataclass(frozen=True)
class Dispatched:
    """What a rank's experts work on.

    Attributes:
        rows_RH: [R, H] rows of the first expert in the order (source rank, token, k), zeros up to
            a multiple of 128 rows, rows of the second expert, and so on. Rows behind the last
            expert's are not initialised.
        probs_R: [R] float32, the probability of each row's route, 0 in padding.
        expert_rows_L: [L] int32, rows of each local expert without padding.
    """

    rows_RH: torch.Tensor
    probs_R: torch.Tensor
    expert_rows_L: torch.Tensor


def dispatch(
    hidden_TH: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    probs_TK: torch.Tensor,
    workspace: Workspace,
    *,
    capacity: int | None = None,
) -> Dispatched:
    """Brings each token to the ranks of its experts. Collective; no host synchronisation.

    Args:
        hidden_TH: [T, H], of the workspace's dtype.
        expert_ids_TK: [T, K] int32 ids in the whole EP group, in any order; -1 is no route.
        probs_TK: [T, K], any floating dtype; carried in FP32.
        capacity: R, rows to make room for: a multiple of 128 (`abi.BLOCK_ROWS`), at least this
            rank's padded rows. By default `workspace.max_rows`, which always is enough, and much
            more than balanced routing needs. The CPU engine fails where it is too small. A GPU
            cannot tell without waiting: there, rows beyond it are lost and all results undefined.

    Returns:
        Differentiable in hidden and probs; the gradient of hidden is summed over a token's rows in
        ascending expert id, in FP32. Gradients of rows that are not real rows are ignored.

    Raises:
        ValueError: an argument does not fit the workspace.
        MoKError: the engine failed; `MoKTimeoutError` when a peer did not take part.
    """
    check_device("hidden", hidden_TH, workspace)
    return Dispatched(
        *torch.ops.mok.dispatch(
            hidden_TH,
            expert_ids_TK,
            probs_TK.float(),
            workspace.handle,
            workspace.max_rows if capacity is None else capacity,
        )
    )


def combine(
    rows_RH: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    workspace: Workspace,
    *,
    addend_TH: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums each token's rows, where they came from. Collective; no host synchronisation.

    Args:
        rows_RH: [R, H] in the order that `dispatch` gave for the same routes.
        expert_ids_TK: [T, K] int32, as in `dispatch`.
        addend_TH: [T, H] added before the sum is rounded (shared expert).

    Returns:
        [T, H]: FP32 sums in ascending expert id, rounded once. Differentiable in rows and addend;
        gradients of padding are 0, those behind the last expert's rows not initialised.

    Raises:
        ValueError: an argument does not fit the workspace.
        MoKError: the engine failed; `MoKTimeoutError` when a peer did not take part.
    """
    check_device("rows", rows_RH, workspace)
    return torch.ops.mok.combine(rows_RH, expert_ids_TK, addend_TH, workspace.handle)


def _call_dispatch(
    ws: Workspace,
    source_TH: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    probs_TK: torch.Tensor | None,
    capacity: int,
) -> Dispatched:
    check_routes(ws, expert_ids_TK, probs_TK)
    tokens = expert_ids_TK.shape[0]
    check_tensor("hidden", source_TH, (tokens, ws.shape.hidden), ws.shape.dtype, ws.device)
    room = max(0, min(capacity, ws.max_rows))  # the engine refuses any other, with the peers
    out = Dispatched(*_dispatch_fake(source_TH, expert_ids_TK, probs_TK, ws.handle, room))
    ws.call(
        "mok_dispatch",
        abi.MokDispatchArgs(
            routes=abi.MokRoutes.of(expert_ids_TK, probs_TK),
            hidden=source_TH.data_ptr(),
            rows=out.rows_RH.data_ptr(),
            row_probs=out.probs_R.data_ptr() if probs_TK is not None else None,
            expert_rows=out.expert_rows_L.data_ptr(),
            capacity=capacity,
            stream=ws.current_stream(),
        ),
    )
    return out


def _call_combine(
    ws: Workspace,
    rows_RH: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    addend_TH: torch.Tensor | None,
    row_probs_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_routes(ws, expert_ids_TK, None)
    shape = ws.shape
    tokens = expert_ids_TK.shape[0]
    check_tensor("rows", rows_RH, (None, shape.hidden), shape.dtype, ws.device)
    if addend_TH is not None:
        check_tensor("addend", addend_TH, (tokens, shape.hidden), shape.dtype, ws.device)
    output_TH = rows_RH.new_empty(tokens, shape.hidden)
    probs_TK = None
    if row_probs_R is not None:
        check_tensor("row_probs", row_probs_R, rows_RH.shape[:1], torch.float32, ws.device)
        probs_TK = row_probs_R.new_empty(tokens, shape.topk)
    ws.call(
        "mok_combine",
        abi.MokCombineArgs(
            routes=abi.MokRoutes.of(expert_ids_TK),
            rows=rows_RH.data_ptr(),
            capacity=rows_RH.shape[0],
            addend=abi.pointer(addend_TH),
            output=output_TH.data_ptr(),
            row_probs=abi.pointer(row_probs_R),
            route_probs=abi.pointer(probs_TK),
            stream=ws.current_stream(),
        ),
    )
    return output_TH, probs_TK


def _dispatch(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    probs: torch.Tensor,
    workspace: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = _call_dispatch(workspace_of(workspace), hidden, expert_ids, probs, capacity)
    return out.rows_RH, out.probs_R, out.expert_rows_L


def _dispatch_fake(hidden, expert_ids, probs, workspace, capacity):
    ws = workspace_of(workspace)
    return (
        hidden.new_empty(capacity, ws.shape.hidden),
        hidden.new_empty(capacity, dtype=torch.float32),
        hidden.new_empty(ws.num_local_experts, dtype=torch.int32),
    )


def _dispatch_backward(
    grad_rows: torch.Tensor, grad_row_probs: torch.Tensor, expert_ids: torch.Tensor, workspace: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _call_combine(workspace_of(workspace), grad_rows, expert_ids, None, grad_row_probs)


def _dispatch_backward_fake(grad_rows, grad_row_probs, expert_ids, workspace):
    tokens, hidden = expert_ids.shape[0], grad_rows.shape[1]
    return grad_rows.new_empty(tokens, hidden), grad_row_probs.new_empty(expert_ids.shape)


def _combine(
    rows: torch.Tensor, expert_ids: torch.Tensor, addend: torch.Tensor | None, workspace: int
) -> torch.Tensor:
    return _call_combine(workspace_of(workspace), rows, expert_ids, addend)[0]


def _combine_fake(rows, expert_ids, addend, workspace):
    return rows.new_empty(expert_ids.shape[0], rows.shape[1])


def _combine_backward(
    grad_output: torch.Tensor, expert_ids: torch.Tensor, workspace: int, capacity: int
) -> torch.Tensor:
    return _call_dispatch(workspace_of(workspace), grad_output, expert_ids, None, capacity).rows_RH


def _combine_backward_fake(grad_output, expert_ids, workspace, capacity):
    return grad_output.new_empty(capacity, grad_output.shape[1])


def _setup_dispatch(ctx, inputs, output) -> None:
    _, expert_ids, _, ctx.workspace, _ = inputs
    _, _, expert_rows = output
    ctx.mark_non_differentiable(expert_rows)
    ctx.save_for_backward(expert_ids)


def _dispatch_gradients(ctx, grad_rows, grad_row_probs, _grad_expert_rows):
    (expert_ids,) = ctx.saved_tensors
    grad_hidden, grad_probs = torch.ops.mok.dispatch_backward(
        grad_rows.contiguous(), grad_row_probs.contiguous(), expert_ids, ctx.workspace
    )
    return grad_hidden, None, grad_probs, None, None


def _setup_combine(ctx, inputs, output) -> None:
    rows, expert_ids, addend, ctx.workspace = inputs
    ctx.capacity = rows.shape[0]
    ctx.has_addend = addend is not None
    ctx.save_for_backward(expert_ids)


def _combine_gradients(ctx, grad_output):
    (expert_ids,) = ctx.saved_tensors
    grad_rows = torch.ops.mok.combine_backward(
        grad_output.contiguous(), expert_ids, ctx.workspace, ctx.capacity
    )
    return grad_rows, None, grad_output if ctx.has_addend else None, None


register_operator(
    "dispatch(Tensor hidden, Tensor expert_ids, Tensor probs, int workspace, int capacity) "
    "-> (Tensor rows, Tensor row_probs, Tensor expert_rows)",
    _dispatch,
    _dispatch_fake,
)
register_operator(
    "dispatch_backward(Tensor grad_rows, Tensor grad_row_probs, Tensor expert_ids, int workspace) "
    "-> (Tensor grad_hidden, Tensor grad_probs)",
    _dispatch_backward,
    _dispatch_backward_fake,
)
register_operator(
    "combine(Tensor rows, Tensor expert_ids, Tensor? addend, int workspace) -> Tensor",
    _combine,
    _combine_fake,
)
register_operator(
    "combine_backward(Tensor grad_output, Tensor expert_ids, int workspace, int capacity) "
    "-> Tensor",
    _combine_backward,
    _combine_backward_fake,
)
torch.library.register_autograd(
    "mok::dispatch", _dispatch_gradients, setup_context=_setup_dispatch, lib=library
)
torch.library.register_autograd(
    "mok::combine", _combine_gradients, setup_context=_setup_combine, lib=library
)
