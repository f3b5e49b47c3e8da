"""One MoE layer as arms see it: its inputs, and what an implementation of it can do."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .presets import Preset
from .routing import draw_routes


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of one layer, the same for all arms. Arms read these tensors and never write them.

    Attributes:
        topk: K, routes of every token.
        hidden_TH: [T, H] hidden states, normal.
        probs_TE: [T, E] float32 router weights.
        routing_map_TE: [T, E] bool.
        fc1_E2FH: [E, 2F, H] gate rows, then up rows; normal / sqrt(H).
        fc2_EHF: [E, H, F], normal / sqrt(F).
        grad_output_TH: [T, H], normal.
    """

    topk: int
    hidden_TH: torch.Tensor
    probs_TE: torch.Tensor
    routing_map_TE: torch.Tensor
    fc1_E2FH: torch.Tensor
    fc2_EHF: torch.Tensor
    grad_output_TH: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.hidden_TH.shape[0]

    @property
    def hidden(self) -> int:
        return self.hidden_TH.shape[1]

    @property
    def ffn(self) -> int:
        return self.fc2_EHF.shape[2]

    @property
    def experts(self) -> int:
        return self.probs_TE.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_TH.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden_TH.device


def make_inputs(
    preset: Preset, tokens: int, routing: str, device: torch.device, dtype: torch.dtype, seed: int
) -> LayerInputs:
    """Fresh random inputs."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(scale)

    probs_TE, routing_map_TE = draw_routes(routing, tokens, preset.experts, preset.topk, seed)
    hidden, ffn = preset.hidden, preset.ffn
    return LayerInputs(
        topk=preset.topk,
        hidden_TH=normal(tokens, hidden),
        probs_TE=probs_TE.to(device),
        routing_map_TE=routing_map_TE.to(device),
        fc1_E2FH=normal(preset.experts, 2 * ffn, hidden, scale=hidden**-0.5),
        fc2_EHF=normal(preset.experts, hidden, ffn, scale=ffn**-0.5),
        grad_output_TH=normal(tokens, hidden),
    )


@dataclass(frozen=True)
class Gradients:
    """Gradients of one backward: of hidden states [T, H], probs [T, E], and each expert's weights
    [2F, H] and [H, F]."""

    hidden: torch.Tensor
    probs: torch.Tensor
    fc1: Sequence[torch.Tensor]
    fc2: Sequence[torch.Tensor]


class BenchLayer(abc.ABC):
    """One implementation of the layer over one set of inputs.

    A forward runs as in training: autograd records it and what backward needs is kept. A backward
    is `torch.autograd.grad` of one forward's output.
    """

    def __init__(self, inputs: LayerInputs):
        self.inputs = inputs
        self.hidden_TH = inputs.hidden_TH.detach().requires_grad_()
        self.probs_TE = inputs.probs_TE.detach().requires_grad_()

    @abc.abstractmethod
    def forward(self) -> torch.Tensor:
        """[T, H] output of the routed experts."""

    @abc.abstractmethod
    def backward(self, output_TH: torch.Tensor) -> Gradients:
        """Gradients for the output of `forward`. Those of weights may add up in `main_grads`."""

    @property
    def main_grads(self) -> Sequence[torch.Tensor]:
        """The FP32 buffers that backwards add weight gradients into."""
        return ()

    # Names of the kernels that begin and end the schedule inside a forward.
    schedule_kernels: tuple[str, str] | None = None

    def _grads(self, output_TH: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple:
        """Gradients of hidden, probs and `weights`, None where autograd has none."""
        return torch.autograd.grad(
            output_TH,
            [self.hidden_TH, self.probs_TE, *weights],
            self.inputs.grad_output_TH,
            allow_unused=True,
        )


class MovesRows(BenchLayer):
    """A layer whose implementation has a dispatch and a combine of their own."""

    @abc.abstractmethod
    def dispatch(self) -> Any:
        """Rows of hidden states by expert, from routing map and probs; without gradients. Returns
        what `combine` takes."""

    @abc.abstractmethod
    def combine(self, dispatched: Any) -> torch.Tensor:
        """[T, H] sums of each token's rows; without gradients."""


class MainGradLayer(BenchLayer):
    """A layer whose backward adds each expert's weight gradients into its FP32 `main_grad`."""

    def __init__(
        self, inputs: LayerInputs, fc1: Sequence[torch.Tensor], fc2: Sequence[torch.Tensor]
    ):
        super().__init__(inputs)
        self.fc1, self.fc2 = fc1, fc2
        for weight in (*fc1, *fc2):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.grad_added_to_main_grad = False  # as Megatron's DDP sets it

    @property
    def main_grads(self) -> Sequence[torch.Tensor]:
        return [weight.main_grad for weight in (*self.fc1, *self.fc2)]

    def backward(self, output_TH: torch.Tensor) -> Gradients:
        hidden, probs, *_ = self._grads(output_TH, (*self.fc1, *self.fc2))
        grads, n = self.main_grads, len(self.fc1)
        return Gradients(hidden, probs, grads[:n], grads[n:])
