"""What a benchmark runs. Imports no torch, so that `--help` is quick."""

from dataclasses import dataclass

from .arm import Arm
from .presets import Preset

ROUTINGS = ("uniform", "zipf")
DTYPES = ("bf16", "fp32")
DEVICES = ("cuda", "cpu")

ROUTED_FLOPS = {"forward": 6, "backward": 12, "both": 18}
"""FLOPs of each direction per route, hidden and FFN column: three matrices of H x F per expert, two
FLOPs per weight in forward, twice that in backward. Padding, SwiGLU and sums count as nothing."""

MOVED_DIRECTIONS = ("dispatch", "combine")
"""Directions that compute nothing: from hidden states to rows by expert, and from those back."""

DIRECTIONS = (*ROUTED_FLOPS, *MOVED_DIRECTIONS)


@dataclass(frozen=True)
class TimingOptions:
    """How launches are timed.

    The blocks of all arms and of the dense product are run in random order, once per repeat: GPUs
    are power-limited, so a rate depends on what ran in the seconds before.

    Attributes:
        warmup_s: seconds of untimed launches at the start of each block.
        time_s: seconds of timed launches in each block.
        repeats: blocks of each arm.
        seed: of the order.
    """

    warmup_s: float
    time_s: float
    repeats: int
    seed: int


@dataclass(frozen=True)
class BenchConfig:
    """A whole benchmark: every preset x tokens x routing x direction, for every arm.

    Attributes:
        tokens: numbers of tokens for every preset; None is each preset's own.
        arms: implementations, in the order to show them.
        require: names of `arms` that must be there; others may be unavailable.
        seed: of weights, inputs and routes.
    """

    presets: tuple[Preset, ...]
    tokens: tuple[int, ...] | None
    routings: tuple[str, ...]
    directions: tuple[str, ...]
    arms: tuple[Arm, ...]
    require: tuple[str, ...]
    device: str
    dtype: str
    seed: int
    timing: TimingOptions

    @property
    def needs_backward(self) -> bool:
        return bool({"backward", "both"} & set(self.directions))

    @property
    def needs_layer(self) -> bool:
        """Whether a direction computes the experts."""
        return bool(ROUTED_FLOPS.keys() & set(self.directions))


def routed_flops(direction: str, tokens: int, preset: Preset) -> int:
    """FLOPs of the routed experts in one launch."""
    return ROUTED_FLOPS[direction] * tokens * preset.topk * preset.hidden * preset.ffn


def moved_bytes(tokens: int, preset: Preset, element_bytes: int) -> int:
    """Least bytes of a dispatch or combine: each token once, and each of its K rows once."""
    return (1 + preset.topk) * tokens * preset.hidden * element_bytes
