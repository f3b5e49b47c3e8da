"""EP ranks as threads of one process, and fresh random layers to run on them.

On a GPU each thread has a stream of its own, and each rank its share of the SMs.
"""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from megatron_mok.ops import fused_moe
from megatron_mok.runtime import LayerShape, RuntimeOptions, Workspace

OPTIONS = RuntimeOptions(first_wait_s=60, inner_wait_s=60, workers=2)


def run_ranks(ep_size, body, device="cpu", stream_bytes=1 << 29):
    """Runs body(rank) on one thread per rank; results in rank order. The first error is raised.

    On a GPU each rank's stream has `stream_bytes` in PyTorch's cache before any rank begins. Later
    an allocation could wait for kernels of another rank, which wait for this one.
    """
    start = threading.Barrier(ep_size)

    def on_stream(rank):
        with torch.cuda.stream(torch.cuda.Stream()):
            fill_cache(stream_bytes)
            start.wait(timeout=60)
            result = body(rank)
            torch.cuda.current_stream().synchronize()
            return result

    if device == "cuda":
        torch.cuda.synchronize()  # inputs were made on another stream
    run = on_stream if device == "cuda" else body
    with no_collection(), ThreadPoolExecutor(ep_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(ep_size)]
        try:
            return [future.result() for future in futures]
        finally:
            futures.clear()  # a future has the error, the error this frame: workspaces would stay


def fill_cache(num_bytes):
    """Leaves `num_bytes` in PyTorch's cache for the current stream, and 32 MiB for small tensors,
    which have blocks of their own."""
    small = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(32)]
    large = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    del small, large


@contextmanager
def no_collection():
    """Keeps Python from collecting garbage.

    A workspace in garbage would be freed by the rank that happens to run the collection, and on a
    GPU this waits for kernels of other ranks, which wait for this one.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def make_workspaces(ep_size, options=OPTIONS, device="cpu", **shape):
    return Workspace.in_process(LayerShape(**shape), ep_size, options, device)


@dataclass(frozen=True)
class Layer:
    """One MoE layer's inputs for the tokens of all ranks."""

    hidden_TH: torch.Tensor
    expert_ids_TK: torch.Tensor
    probs_TK: torch.Tensor
    fc1: list[torch.Tensor]
    fc2: list[torch.Tensor]
    grad_output_TH: torch.Tensor

    @property
    def shape(self) -> dict:
        ffn = self.fc1[0].shape[0] // 2
        return {
            "hidden": self.hidden_TH.shape[1],
            "ffn": ffn,
            "num_experts": len(self.fc1),
            "topk": self.expert_ids_TK.shape[1],
            "max_tokens": max(1, self.hidden_TH.shape[0]),
            "dtype": self.hidden_TH.dtype,
        }

    def part(self, rank, ep_size, cuts=None) -> "Layer":
        """What one rank has: tokens cuts[rank] to cuts[rank + 1], and its experts."""
        cuts = cuts or even_cuts(len(self.hidden_TH), ep_size)
        tokens = slice(cuts[rank], cuts[rank + 1])
        per_rank = len(self.fc1) // ep_size
        experts = slice(rank * per_rank, (rank + 1) * per_rank)
        return Layer(
            self.hidden_TH[tokens],
            self.expert_ids_TK[tokens],
            self.probs_TK[tokens],
            self.fc1[experts],
            self.fc2[experts],
            self.grad_output_TH[tokens],
        )

    def to(self, dtype) -> "Layer":
        return Layer(
            self.hidden_TH.to(dtype),
            self.expert_ids_TK,
            self.probs_TK.to(torch.promote_types(dtype, torch.float32)),
            [w.to(dtype) for w in self.fc1],
            [w.to(dtype) for w in self.fc2],
            self.grad_output_TH.to(dtype),
        )


def even_cuts(tokens, ep_size, first_is_empty=False):
    """Rank r owns tokens cuts[r] to cuts[r + 1]; of several ranks the first may have none."""
    cuts = [tokens * r // ep_size for r in range(ep_size + 1)]
    if first_is_empty and ep_size > 1:
        cuts[1] = 0
    return cuts


def shapes_and_ranks(shapes, ep_sizes):
    """(name, EP size) for all of `shapes`, {name: (tokens, H, F, experts, K)}, that the experts
    allow."""
    return [
        (name, ep_size)
        for ep_size in ep_sizes
        for name, (_, _, _, experts, _) in shapes.items()
        if experts % ep_size == 0
    ]


def random_routes(tokens, topk, experts, generator):
    """[T, K] distinct experts per token where topk allows it, with some -1."""
    keys_TE = torch.rand(tokens, experts, generator=generator)
    if topk <= experts:
        ids_TK = keys_TE.topk(topk, dim=1).indices
    else:
        ids_TK = torch.randint(experts, (tokens, topk), generator=generator)
    missing_TK = torch.rand(tokens, topk, generator=generator) < 0.1
    return torch.where(missing_TK, -1, ids_TK).int()


def random_layer(tokens, hidden, ffn, experts, topk, dtype, seed, expert_ids_TK=None) -> Layer:
    g = torch.Generator().manual_seed(seed)

    def normal(*size, scale=1.0):
        return (torch.randn(*size, generator=g) * scale).to(dtype)

    if expert_ids_TK is None:
        expert_ids_TK = random_routes(tokens, topk, experts, g)
    return Layer(
        hidden_TH=normal(tokens, hidden),
        expert_ids_TK=expert_ids_TK,
        probs_TK=torch.rand(tokens, topk, generator=g),
        fc1=[normal(2 * ffn, hidden, scale=hidden**-0.5) for _ in range(experts)],
        fc2=[normal(hidden, ffn, scale=ffn**-0.5) for _ in range(experts)],
        grad_output_TH=normal(tokens, hidden),
    )


@dataclass(frozen=True)
class Result:
    output_TH: torch.Tensor
    grad_hidden_TH: torch.Tensor
    grad_probs_TK: torch.Tensor
    grad_fc1: list[torch.Tensor]
    grad_fc2: list[torch.Tensor]

    def tensors(self):
        return {
            "output": self.output_TH,
            "grad_hidden": self.grad_hidden_TH,
            "grad_probs": self.grad_probs_TK,
            **{f"grad_fc1[{i}]": g for i, g in enumerate(self.grad_fc1)},
            **{f"grad_fc2[{i}]": g for i, g in enumerate(self.grad_fc2)},
        }

    def assert_bitwise_equal(self, other):
        for name, mine in self.tensors().items():
            assert torch.equal(mine, other.tensors()[name]), f"{name} differs"


def leaf(x):
    return x.clone().requires_grad_()


def run_ranks_of_layer(layer, workspaces, cuts, device, compute) -> Result:
    """Forward and backward of compute(part, workspace), a rank's output; rank r owns tokens
    cuts[r] to cuts[r + 1]."""
    ep_size = len(workspaces)

    def rank_body(rank):
        part = layer.part(rank, ep_size, cuts)
        part = replace(
            part,
            hidden_TH=leaf(part.hidden_TH),
            probs_TK=leaf(part.probs_TK),
            fc1=[leaf(w) for w in part.fc1],
            fc2=[leaf(w) for w in part.fc2],
        )
        output_TH = compute(part, workspaces[rank])
        # In this thread: one that served several ranks could block on a full launch queue of one,
        # which waits for another.
        with torch.autograd.set_multithreading_enabled(False):
            output_TH.backward(part.grad_output_TH)
        return (
            output_TH.detach(),
            part.hidden_TH.grad,
            part.probs_TK.grad,
            [w.grad for w in part.fc1],
            [w.grad for w in part.fc2],
        )

    out, dx, dp, g1, g2 = zip(*run_ranks(ep_size, rank_body, device), strict=True)
    grad_fc1, grad_fc2 = ([w for rank in g for w in rank] for g in (g1, g2))
    return Result(torch.cat(out), torch.cat(dx), torch.cat(dp), grad_fc1, grad_fc2)


def run_fused(part, workspace, **kwargs):
    """The fused layer on what one rank has; kwargs: of `fused_moe`."""
    return fused_moe(
        part.hidden_TH,
        part.expert_ids_TK,
        part.probs_TK,
        part.fc1,
        part.fc2,
        workspace,
        **kwargs,
    )


def run_layer(layer, workspaces, cuts, saved_rows=0, device="cpu") -> Result:
    """The fused layer, as `run_ranks_of_layer` says."""
    return run_ranks_of_layer(
        layer, workspaces, cuts, device, partial(run_fused, saved_rows=saved_rows)
    )


def run_reference(layer, dtype) -> Result:
    """The plain PyTorch layer in `dtype`, by autograd."""
    from megatron_mok.reference import moe_layer

    wide = layer.to(dtype)
    hidden_TH, probs_TK = leaf(wide.hidden_TH), leaf(wide.probs_TK)
    fc1, fc2 = [leaf(w) for w in wide.fc1], [leaf(w) for w in wide.fc2]
    output_TH = moe_layer(hidden_TH, wide.expert_ids_TK, probs_TK, fc1, fc2)
    leaves = [hidden_TH, probs_TK, *fc1, *fc2]
    if output_TH.requires_grad:
        grads = torch.autograd.grad(
            output_TH, leaves, wide.grad_output_TH, allow_unused=True, materialize_grads=True
        )
    else:  # no token has a route
        grads = [torch.zeros_like(x) for x in leaves]
    n = len(fc1)
    return Result(
        output_TH.detach(), grads[0], grads[1], list(grads[2 : 2 + n]), list(grads[2 + n :])
    )


def relative_error(x, reference):
    norm = reference.double().norm()
    error = (x.double() - reference.double()).norm()
    return float(error / norm) if norm > 0 else float(error)
