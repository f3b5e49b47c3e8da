"""The arms of a comparison: ways to dispatch tokens that Megatron can be told to use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import probe

if TYPE_CHECKING:
    from .config import CompareConfig


def _training(device: str) -> str | None:
    return probe.no_gpu() if device == "cuda" else None


def _any_config(config: CompareConfig) -> str | None:
    return None


def _flex(backend: str) -> Callable[[str], str | None]:
    def unavailable(device: str) -> str | None:
        if device == "cpu":
            return "needs GPUs (device: cuda)"
        return _training(device) or probe.no_flex_backend(backend)

    return unavailable


def _between_ranks(config: CompareConfig) -> str | None:
    # Megatron asserts it when it builds the dispatcher.
    sizes = config.parallel
    if sizes.expert_model_parallel_size * sizes.tensor_model_parallel_size > 1:
        return None
    return "needs more than one rank (expert x tensor parallel size is 1)"


def _fp32_probs(config: CompareConfig) -> str | None:
    if config.model.moe_router_dtype != "fp32":
        return f"needs moe_router_dtype: fp32 (given: {config.model.moe_router_dtype})"
    return None


def _fp32_probs_between_ranks(config: CompareConfig) -> str | None:
    return _between_ranks(config) or _fp32_probs(config)


def _mok(device: str) -> str | None:
    return _training(device) or probe.no_engine(device)


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        name: as in the config and the results.
        flags: the only Megatron arguments in which arms differ.
        plugin: whether megatron_mok's hooks are installed in this arm.
        missing: given the device ("cpu" or "cuda"), what this machine lacks for it, or None.
        unfit: given the comparison, why the arm cannot do it, or None.
    """

    name: str
    flags: tuple[str, ...]
    plugin: bool = False
    missing: Callable[[str], str | None] = _training
    unfit: Callable[[CompareConfig], str | None] = _any_config

    def unavailable(self, config: CompareConfig) -> str | None:
        """Why the arm cannot run this comparison here, or None."""
        return self.unfit(config) or self.missing(config.device)


_DISPATCHER = "--moe-token-dispatcher-type"
_BACKEND = "--moe-flex-dispatcher-backend"

ARMS = {
    arm.name: arm
    for arm in (
        Arm("alltoall", (_DISPATCHER, "alltoall")),
        Arm("allgather", (_DISPATCHER, "allgather")),
        Arm(
            "deepep",
            (_DISPATCHER, "flex", _BACKEND, "deepep"),
            missing=_flex("deepep"),
            unfit=_fp32_probs_between_ranks,
        ),
        Arm(
            "hybridep",
            (_DISPATCHER, "flex", _BACKEND, "hybridep"),
            missing=_flex("hybridep"),
            unfit=_fp32_probs,
        ),
        Arm(
            "ncclep",
            (_DISPATCHER, "flex", _BACKEND, "ncclep"),
            missing=_flex("ncclep"),
            unfit=_fp32_probs_between_ranks,
        ),
        Arm("mok", (_DISPATCHER, "mok"), plugin=True, missing=_mok),
        Arm(
            "mok_dispatch",
            (_DISPATCHER, "mok", "--mok-mode", "dispatch"),
            plugin=True,
            missing=_mok,
        ),
    )
}
"""Every arm by name, in the order in which help texts list them."""
