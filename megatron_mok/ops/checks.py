"""Argument checks of the ops: every error names the argument, what it is and what it must be."""

from collections.abc import Sequence

import torch

from megatron_mok.runtime import Workspace


def check_tensor(
    name: str,
    x: torch.Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Checks one tensor. A None in `shape` allows any size.

    Raises:
        ValueError: wrong shape, dtype or device, or not contiguous.
    """
    allowed = "[" + ", ".join("*" if n is None else str(n) for n in shape) + "]"
    fits = x.dim() == len(shape) and all(
        n is None or n == m for n, m in zip(shape, x.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be {allowed}")
    if x.dtype != dtype:
        raise ValueError(f"{name} has dtype {x.dtype}; it must be {dtype}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; the workspace computes on {device}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous; its strides are {x.stride()}")


def check_device(name: str, x: torch.Tensor, workspace: Workspace) -> None:
    """Before an operator is chosen by the device of `x`. Raises ValueError."""
    if x.device != workspace.device:
        raise ValueError(f"{name} is on {x.device}; the workspace computes on {workspace.device}")


def check_routes(
    workspace: Workspace,
    expert_ids_TK: torch.Tensor,
    probs_TK: torch.Tensor | None,
    tokens: int | None = None,
) -> None:
    """Checks the routes of a call; None for probs that it does not use, and for any T."""
    shape, device = (tokens, workspace.shape.topk), workspace.device
    check_tensor("expert_ids", expert_ids_TK, shape, torch.int32, device)
    if probs_TK is not None:
        check_tensor("probs", probs_TK, expert_ids_TK.shape, torch.float32, device)


def check_inputs(
    workspace: Workspace,
    hidden_TH: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    probs_TK: torch.Tensor,
    fc1: Sequence[torch.Tensor],
    fc2: Sequence[torch.Tensor],
) -> None:
    """Checks what forward and backward share against the workspace's shape."""
    shape, device = workspace.shape, workspace.device
    check_tensor("hidden", hidden_TH, (None, shape.hidden), shape.dtype, device)
    check_routes(workspace, expert_ids_TK, probs_TK, tokens=hidden_TH.shape[0])
    check_experts("fc1", fc1, (2 * shape.ffn, shape.hidden), shape.dtype, workspace)
    check_experts("fc2", fc2, (shape.hidden, shape.ffn), shape.dtype, workspace)


def check_experts(
    name: str,
    tensors: Sequence[torch.Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    workspace: Workspace,
) -> None:
    """Checks a list of one matrix per local expert."""
    if len(tensors) != workspace.num_local_experts:
        raise ValueError(
            f"{name} has {len(tensors)} matrices; this rank has "
            f"{workspace.num_local_experts} local experts"
        )
    _check_matrices(name, tensors, shape, dtype, workspace.device)


def _check_matrices(
    name: str,
    matrices: Sequence[torch.Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    may_be_empty: bool = False,
) -> None:
    # A layer has hundreds, in every call: only a matrix that does not fit is looked at closely.
    for i, x in enumerate(matrices):
        fits = x.shape == shape and x.dtype == dtype and x.device == device and x.is_contiguous()
        if not fits and not (may_be_empty and x.numel() == 0):
            check_tensor(f"{name}[{i}]", x, shape, dtype, device)


def check_grads(
    name: str,
    grads: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    workspace: Workspace,
) -> None:
    """Checks FP32 gradient buffers; an empty one stands for a gradient that nobody wants."""
    if len(grads) != len(weights):
        raise ValueError(f"{name} has {len(grads)} tensors for {len(weights)} weights")
    shape = tuple(weights[0].shape)
    _check_matrices(name, grads, shape, torch.float32, workspace.device, may_be_empty=True)
