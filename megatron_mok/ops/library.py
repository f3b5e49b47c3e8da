"""The layer as `torch.ops.mok` operators: engine calls as PyTorch sees them.

    mok::moe_forward   routed experts of one MoE layer, dispatch to combine
    mok::moe_backward  its gradients; adds into or overwrites FP32 weight gradients in place

Shapes: T tokens, K routes per token, H hidden, F expert FFN size, L local experts.
Both are collective over the workspace's EP group.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch

from megatron_mok.ops.checks import check_grads, check_inputs, check_tensor
from megatron_mok.runtime import Workspace, abi, workspace_of

library = torch.library.Library("mok", "DEF")


def register_operator(schema: str, implementation: Callable, fake: Callable) -> None:
    """Adds an operator that one implementation serves on every engine; `fake` makes its results'
    shapes."""
    name = schema.partition("(")[0]
    library.define(schema)
    for device in ("CPU", "CUDA"):
        library.impl(name, implementation, device)
    torch.library.register_fake(f"mok::{name}", fake, lib=library)


def _pointers(tensors: Sequence[torch.Tensor]) -> ctypes.Array:
    """One pointer per tensor; NULL for empty tensors."""
    return (ctypes.c_void_p * len(tensors))(*[t.data_ptr() or None for t in tensors])


def _weights(fc1: Sequence[torch.Tensor], fc2: Sequence[torch.Tensor]) -> abi.MokWeights:
    return abi.MokWeights(fc1=_pointers(fc1), fc2=_pointers(fc2))


def _saved(preact_R2F: torch.Tensor, workspace: Workspace) -> abi.MokSaved:
    shape = workspace.shape
    check_tensor("preact", preact_R2F, (None, 2 * shape.ffn), shape.dtype, workspace.device)
    return abi.MokSaved(preact=abi.pointer(preact_R2F), rows=preact_R2F.shape[0])


def _moe_forward(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    probs: torch.Tensor,
    fc1: Sequence[torch.Tensor],
    fc2: Sequence[torch.Tensor],
    addend: torch.Tensor | None,
    workspace: int,
    saved_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    ws = workspace_of(workspace)
    check_inputs(ws, hidden, expert_ids, probs, fc1, fc2)
    if addend is not None:
        check_tensor("addend", addend, hidden.shape, ws.shape.dtype, ws.device)
    output, preact = _moe_forward_fake(
        hidden, expert_ids, probs, fc1, fc2, addend, workspace, saved_rows
    )
    ws.call(
        "mok_forward",
        abi.MokForwardArgs(
            routes=abi.MokRoutes.of(expert_ids, probs),
            hidden=hidden.data_ptr(),
            weights=_weights(fc1, fc2),
            addend=abi.pointer(addend),
            output=output.data_ptr(),
            saved=_saved(preact, ws),
            stream=ws.current_stream(),
        ),
    )
    return output, preact


def _moe_forward_fake(hidden, expert_ids, probs, fc1, fc2, addend, workspace, saved_rows):
    return torch.empty_like(hidden), hidden.new_empty(saved_rows, fc1[0].shape[0])


def _moe_backward(
    grad_output: torch.Tensor,
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    probs: torch.Tensor,
    fc1: Sequence[torch.Tensor],
    fc2: Sequence[torch.Tensor],
    preact: torch.Tensor,
    grad_fc1: Sequence[torch.Tensor],
    grad_fc2: Sequence[torch.Tensor],
    accumulate: bool,
    workspace: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    ws = workspace_of(workspace)
    check_inputs(ws, hidden, expert_ids, probs, fc1, fc2)
    check_tensor("grad_output", grad_output, hidden.shape, ws.shape.dtype, ws.device)
    check_grads("grad_fc1", grad_fc1, fc1, ws)
    check_grads("grad_fc2", grad_fc2, fc2, ws)
    grad_hidden, grad_probs = _moe_backward_fake(
        grad_output,
        hidden,
        expert_ids,
        probs,
        fc1,
        fc2,
        preact,
        grad_fc1,
        grad_fc2,
        accumulate,
        workspace,
    )
    ws.call(
        "mok_backward",
        abi.MokBackwardArgs(
            routes=abi.MokRoutes.of(expert_ids, probs),
            grad_output=grad_output.data_ptr(),
            hidden=hidden.data_ptr(),
            weights=_weights(fc1, fc2),
            saved=_saved(preact, ws),
            grad_hidden=grad_hidden.data_ptr(),
            grad_probs=grad_probs.data_ptr(),
            weight_grads=abi.MokWeightGrads(
                fc1=_pointers(grad_fc1), fc2=_pointers(grad_fc2), accumulate=accumulate
            ),
            stream=ws.current_stream(),
        ),
    )
    return grad_hidden, grad_probs


def _moe_backward_fake(
    grad_output,
    hidden,
    expert_ids,
    probs,
    fc1,
    fc2,
    preact,
    grad_fc1,
    grad_fc2,
    accumulate,
    workspace,
):
    return torch.empty_like(hidden), torch.empty_like(probs)


class FreshWeightGrads:
    """FP32 buffers for new gradients of one weight of all experts.

    They lie in one tensor: one allocation and one conversion in place of hundreds, and the engine
    sees the same addresses call after call, as far as PyTorch's allocator gives them.

    Args:
        weights: of the same shape, one for each expert.
        wanted: for each, whether it has a new gradient.
    Attributes:
        buffers: one for each weight; empty where none is wanted.
    """

    def __init__(self, weights: Sequence[torch.Tensor], wanted: Sequence[bool]):
        self._wanted = wanted
        nothing = weights[0].new_empty(0, dtype=torch.float32)
        self._all = nothing
        if any(wanted):
            self._all = nothing.new_empty(len(weights), *weights[0].shape)
        self.buffers = [self._all[i] if want else nothing for i, want in enumerate(wanted)]

    def to(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """The gradients as autograd returns them: in the weights' dtype, None where not wanted."""
        grads = self._all.to(dtype)
        return [grads[i] if want else None for i, want in enumerate(self._wanted)]


def _setup_context(ctx, inputs, output) -> None:
    hidden, expert_ids, probs, fc1, fc2, addend, workspace, _ = inputs
    _, preact = output
    ctx.workspace = workspace
    ctx.num_experts = len(fc1)
    ctx.has_addend = addend is not None
    ctx.mark_non_differentiable(preact)
    ctx.set_materialize_grads(True)
    ctx.save_for_backward(hidden, expert_ids, probs, preact, *fc1, *fc2)


def _autograd_backward(ctx, grad_output, _grad_preact):
    hidden, expert_ids, probs, preact, *weights = ctx.saved_tensors
    fc1, fc2 = weights[: ctx.num_experts], weights[ctx.num_experts :]
    grad_fc1 = FreshWeightGrads(fc1, [w.requires_grad for w in fc1])
    grad_fc2 = FreshWeightGrads(fc2, [w.requires_grad for w in fc2])
    grad_hidden, grad_probs = torch.ops.mok.moe_backward(
        grad_output.contiguous(),
        hidden,
        expert_ids,
        probs,
        fc1,
        fc2,
        preact,
        grad_fc1.buffers,
        grad_fc2.buffers,
        False,
        ctx.workspace,
    )
    return (
        grad_hidden,
        None,
        grad_probs,
        grad_fc1.to(hidden.dtype),
        grad_fc2.to(hidden.dtype),
        grad_output if ctx.has_addend else None,
        None,
        None,
    )


register_operator(
    "moe_forward(Tensor hidden, Tensor expert_ids, Tensor probs, Tensor[] fc1, Tensor[] fc2, "
    "Tensor? addend, int workspace, int saved_rows) -> (Tensor output, Tensor preact)",
    _moe_forward,
    _moe_forward_fake,
)
register_operator(
    "moe_backward(Tensor grad_output, Tensor hidden, Tensor expert_ids, Tensor probs, "
    "Tensor[] fc1, Tensor[] fc2, Tensor preact, Tensor(a!)[] grad_fc1, Tensor(b!)[] grad_fc2, "
    "bool accumulate, int workspace) -> (Tensor grad_hidden, Tensor grad_probs)",
    _moe_backward,
    _moe_backward_fake,
)
torch.library.register_autograd(
    "mok::moe_forward", _autograd_backward, setup_context=_setup_context, lib=library
)
