"""Routes as lists of expert ids, from the dense maps that Megatron's router returns."""

import ctypes

import torch

from megatron_mok.ops.library import library
from megatron_mok.runtime import abi
from megatron_mok.runtime.engine import load_engine

_PROBS_DTYPES = {
    torch.float32: abi.ProbsDtype.F32,
    torch.bfloat16: abi.ProbsDtype.BF16,
    torch.float64: abi.ProbsDtype.F64,
}


def routes_from_map(
    probs_TE: torch.Tensor, routing_map_TE: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns a routing map into lists of routes, in one kernel and without a host synchronisation.

    The map alone decides which experts a token goes to: its probabilities may tie or be 0.

    Args:
        probs_TE: [T, E] float32, bfloat16 or float64; differentiable.
        routing_map_TE: [T, E] bool, at most `topk` true in a row.
        topk: K.

    Returns:
        expert_ids_TK: [T, K] int32, ascending, then -1 where a token has fewer than K routes.
        probs_TK: [T, K] float32, 0 where there is no route.

    Raises:
        ValueError: shapes or dtypes do not fit; on the CPU also when a token has more than `topk`
            routes. (A GPU cannot tell without waiting; there the first `topk` are kept.)
    """
    if probs_TE.dim() != 2 or probs_TE.shape != routing_map_TE.shape:
        raise ValueError(
            f"probs {list(probs_TE.shape)} and routing_map {list(routing_map_TE.shape)} must "
            "have the same shape [T, E]"
        )
    if routing_map_TE.dtype != torch.bool:
        raise ValueError(f"routing_map has dtype {routing_map_TE.dtype}; it must be torch.bool")
    if probs_TE.dtype not in _PROBS_DTYPES:
        raise ValueError(
            f"probs has dtype {probs_TE.dtype}; allowed are float32, bfloat16 and float64"
        )
    if probs_TE.device != routing_map_TE.device:
        raise ValueError(f"probs is on {probs_TE.device}, routing_map on {routing_map_TE.device}")
    return torch.ops.mok.routes_from_map(probs_TE, routing_map_TE, topk)


def _routes_from_map(
    probs_TE: torch.Tensor, routing_map_TE: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    probs_TE, routing_map_TE = probs_TE.contiguous(), routing_map_TE.contiguous()
    expert_ids_TK, probs_TK = _routes_from_map_fake(probs_TE, routing_map_TE, topk)
    on_gpu = probs_TE.is_cuda
    args = abi.MokRouteMapArgs(
        tokens=probs_TE.shape[0],
        experts=probs_TE.shape[1],
        topk=topk,
        routing_map=routing_map_TE.data_ptr(),
        probs=probs_TE.data_ptr(),
        probs_dtype=_PROBS_DTYPES[probs_TE.dtype],
        expert_ids=expert_ids_TK.data_ptr(),
        route_probs=probs_TK.data_ptr(),
        stream=torch.cuda.current_stream(probs_TE.device).cuda_stream if on_gpu else None,
    )
    load_engine(probs_TE.device.type).call("mok_routes_from_map", ctypes.byref(args))
    return expert_ids_TK, probs_TK


def _routes_from_map_fake(probs_TE, routing_map_TE, topk):
    tokens = probs_TE.shape[0]
    return (
        probs_TE.new_empty(tokens, topk, dtype=torch.int32),
        probs_TE.new_empty(tokens, topk, dtype=torch.float32),
    )


def _setup_context(ctx, inputs, output) -> None:
    probs_TE, _, _ = inputs
    expert_ids_TK, _ = output
    ctx.mark_non_differentiable(expert_ids_TK)
    ctx.probs_shape, ctx.probs_dtype = probs_TE.shape, probs_TE.dtype
    ctx.save_for_backward(expert_ids_TK)


def _autograd_backward(ctx, _grad_ids, grad_TK):
    (expert_ids_TK,) = ctx.saved_tensors
    # Missing routes add their 0 to expert 0: whatever the order, the sum is the same.
    grad_TK = torch.where(expert_ids_TK >= 0, grad_TK, 0)
    grad_TE = grad_TK.new_zeros(ctx.probs_shape)
    grad_TE.scatter_add_(1, expert_ids_TK.clamp(min=0).long(), grad_TK)
    return grad_TE.to(ctx.probs_dtype), None, None


library.define("routes_from_map(Tensor probs, Tensor routing_map, int topk) -> (Tensor, Tensor)")
for _device in ("CPU", "CUDA"):
    library.impl("routes_from_map", _routes_from_map, _device)
torch.library.register_fake("mok::routes_from_map", _routes_from_map_fake, lib=library)
torch.library.register_autograd(
    "mok::routes_from_map", _autograd_backward, setup_context=_setup_context, lib=library
)
