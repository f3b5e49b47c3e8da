"""EP ranks as threads of one process, and fresh random layers to run on them.

On a GPU each thread has a stream of its own, and each rank its share of the SMs.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from megatron_mok.ops import fused_moe
from megatron_mok.runtime import LayerShape, RuntimeOptions, Workspace

OPTIONS = RuntimeOptions(first_wait_s=60, inner_wait_s=60, workers=2)


def run_ranks(ep_size, body, device="cpu"):
    """Runs body(rank) on one thread per rank; results in rank order. The first error is raised."""

    def on_stream(rank):
        with torch.cuda.stream(torch.cuda.Stream()):
            result = body(rank)
            torch.cuda.current_stream().synchronize()
            return result

    if device == "cuda":
        torch.cuda.synchronize()  # inputs were made on another stream
    with ThreadPoolExecutor(ep_size) as pool:
        run = on_stream if device == "cuda" else body
        futures = [pool.submit(run, rank) for rank in range(ep_size)]
        return [future.result() for future in futures]


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

    def to(self, dtype) -> "Layer":
        return Layer(
            self.hidden_TH.to(dtype),
            self.expert_ids_TK,
            self.probs_TK.to(torch.promote_types(dtype, torch.float32)),
            [w.to(dtype) for w in self.fc1],
            [w.to(dtype) for w in self.fc2],
            self.grad_output_TH.to(dtype),
        )


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


def run_layer(layer, workspaces, cuts, saved_rows=0, device="cpu") -> Result:
    """Forward and backward; rank r owns tokens cuts[r] to cuts[r + 1]."""
    per_rank = len(layer.fc1) // len(workspaces)

    def rank_body(rank):
        tokens = slice(cuts[rank], cuts[rank + 1])
        experts = slice(rank * per_rank, (rank + 1) * per_rank)
        hidden_TH, probs_TK = leaf(layer.hidden_TH[tokens]), leaf(layer.probs_TK[tokens])
        fc1, fc2 = [leaf(w) for w in layer.fc1[experts]], [leaf(w) for w in layer.fc2[experts]]
        output_TH = fused_moe(
            hidden_TH,
            layer.expert_ids_TK[tokens].contiguous(),
            probs_TK,
            fc1,
            fc2,
            workspaces[rank],
            saved_rows=saved_rows,
        )
        # In this thread: one that served several ranks could block on a full launch queue of one,
        # which waits for another.
        with torch.autograd.set_multithreading_enabled(False):
            output_TH.backward(layer.grad_output_TH[tokens])
        return (
            output_TH.detach(),
            hidden_TH.grad,
            probs_TK.grad,
            [w.grad for w in fc1],
            [w.grad for w in fc2],
        )

    out, dx, dp, g1, g2 = zip(*run_ranks(len(workspaces), rank_body, device), strict=True)
    grad_fc1, grad_fc2 = ([w for rank in g for w in rank] for g in (g1, g2))
    return Result(torch.cat(out), torch.cat(dx), torch.cat(dp), grad_fc1, grad_fc2)


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
