"""What an arm of a benchmark is. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .layer import BenchLayer, LayerInputs


@dataclass(frozen=True)
class Arm:
    """One implementation.

    Attributes:
        summary: one line for help texts.
        unavailable: why it cannot run on this device in this dtype, or None.
        build: makes the layer for some inputs.
    """

    name: str
    summary: str
    unavailable: Callable[[torch.device, torch.dtype], str | None]
    build: Callable[[LayerInputs], BenchLayer]
