"""Checks of an arm's results against the reference, before anything is timed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_mok.reference import moe_layer

from .layer import BenchLayer, Gradients, LayerInputs, MovesRows

TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Largest relative error ||x - reference|| / ||reference|| of an output or gradient."""

_PART_TOLERANCE = 10
"""How much more one row (or expert's weight gradient) may have: one wrong row among thousands
hardly moves the error of the whole."""


@dataclass(frozen=True)
class Verdict:
    """What a check found: the largest relative error, and what is wrong.

    Attributes:
        error: None where there is no number.
        problem: None where all is well.
    """

    error: float | None
    problem: str | None = None


@dataclass(frozen=True)
class Reference:
    """What arms are compared with, computed from the same inputs in higher precision."""

    output_TH: torch.Tensor
    gradients: Gradients | None


def compute_reference(inputs: LayerInputs, backward: bool) -> Reference:
    """The layer in float32 for BF16 inputs, in float64 for float32 inputs."""
    wide = torch.float64 if inputs.dtype == torch.float32 else torch.float32

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(wide, copy=True).requires_grad_(backward)

    hidden_TH, probs_TE = leaf(inputs.hidden_TH), leaf(inputs.probs_TE)
    fc1, fc2 = [leaf(w) for w in inputs.fc1_E2FH], [leaf(w) for w in inputs.fc2_EHF]
    # Every token has K routes, so the K-column list of experts is the map's true entries in order.
    ids_TK = inputs.routing_map_TE.nonzero()[:, 1].view(inputs.tokens, inputs.topk)
    output_TH = moe_layer(hidden_TH, ids_TK, probs_TE.gather(1, ids_TK), fc1, fc2)
    if not backward:
        return Reference(output_TH, None)
    hidden, probs, *weights = torch.autograd.grad(
        output_TH,
        [hidden_TH, probs_TE, *fc1, *fc2],
        inputs.grad_output_TH.to(wide),
        allow_unused=True,
    )
    weights = [
        torch.zeros_like(w) if grad is None else grad  # an expert without routes
        for w, grad in zip((*fc1, *fc2), weights, strict=True)
    ]
    n = len(fc1)
    return Reference(output_TH.detach(), Gradients(hidden, probs, weights[:n], weights[n:]))


def check_forward(layer: BenchLayer, reference: Reference) -> Verdict:
    """Runs one forward."""
    _poison(layer.inputs)
    return _compare({"output": (layer.forward(), reference.output_TH)}, layer.inputs.dtype)


def check_backward(layer: BenchLayer, reference: Reference) -> Verdict:
    """Runs one forward and its backward."""
    output_TH = layer.forward()
    for main_grad in layer.main_grads:
        main_grad.zero_()
    _poison(layer.inputs)
    got, want = layer.backward(output_TH), reference.gradients
    pairs = {
        "gradient of the hidden states": (got.hidden, want.hidden),
        "gradient of the probs": (got.probs, want.probs),
        "gradient of fc1": (got.fc1, want.fc1),
        "gradient of fc2": (got.fc2, want.fc2),
    }
    return _compare(pairs, layer.inputs.dtype)


def check_moves(layer: MovesRows) -> Verdict:
    """Runs dispatch and combine with nothing in between: K times the hidden states."""
    _poison(layer.inputs)
    expected_TH = layer.inputs.hidden_TH.float() * layer.inputs.topk
    pairs = {"dispatch and combine": (layer.combine(layer.dispatch()), expected_TH)}
    return _compare(pairs, layer.inputs.dtype)


def _poison(inputs: LayerInputs) -> None:
    # PyTorch hands freed memory out again: results of another arm must not be found in memory that
    # this arm was given and did not write.
    blocks = [torch.full_like(inputs.hidden_TH, math.nan) for _ in range(4)]
    blocks.append(torch.full_like(inputs.probs_TE, math.nan))
    del blocks


def _compare(pairs: dict[str, tuple], dtype: torch.dtype) -> Verdict:
    tolerance = TOLERANCE[dtype]
    worst, problem = 0.0, None
    for name, (got, want) in pairs.items():
        whole, part, where = _errors(got, want)
        worst = max(worst, whole) if not math.isnan(worst + whole) else math.nan
        if problem is not None:
            continue
        if not whole <= tolerance:
            problem = f"{name}: relative error {whole:.1e}, allowed is {tolerance:.0e}"
        elif not part <= _PART_TOLERANCE * tolerance:
            kind = "row" if isinstance(want, torch.Tensor) else "expert"
            problem = (
                f"{name}: {kind} {where} has relative error {part:.1e}, allowed is "
                f"{_PART_TOLERANCE * tolerance:.0e}"
            )
    return Verdict(worst if math.isfinite(worst) else None, problem)


@torch.no_grad()
def _errors(
    got: torch.Tensor | Sequence[torch.Tensor], want: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[float, float, int]:
    """Relative error of the whole, of its worst part, and which part that is.

    Parts are the rows of a matrix, whose error is relative to their root mean square where they
    are smaller, or the matrices of a list.
    """
    if isinstance(want, torch.Tensor):
        error_P = torch.linalg.vector_norm(got.to(want.dtype) - want, dim=1)
        norm_P = torch.linalg.vector_norm(want, dim=1)
        # Rows are of one scale; in one that is small by chance, rounding is not.
        scale_P = norm_P.clamp(min=float(norm_P.square().mean().sqrt()))
    else:
        pairs = list(zip(got, want, strict=True))
        error_P = torch.stack([torch.linalg.vector_norm(g.to(w.dtype) - w) for g, w in pairs])
        norm_P = scale_P = torch.stack([torch.linalg.vector_norm(w) for _, w in pairs])
    whole = float(torch.linalg.vector_norm(error_P) / torch.linalg.vector_norm(norm_P))
    # A part that should be zero has no error if it is, and an infinite one if not.
    part_P = torch.where(error_P == 0, 0.0, error_P / scale_P)
    worst, where = part_P.max(0)
    return whole, float(worst), int(where)
