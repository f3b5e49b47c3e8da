"""The arms of a comparison: ways to dispatch tokens that Megatron can be told to use."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass


def _always(device: str) -> str | None:
    return None


def _mok(device: str) -> str | None:
    if importlib.util.find_spec("megatron_mok.megatron.install") is None:
        return "this build of megatron_mok has no Megatron plugin"
    return None


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        name: as in the config and the results.
        flags: the only Megatron arguments in which arms differ.
        plugin: whether megatron_mok's hooks are installed in this arm.
        unavailable: given the device ("cpu" or "cuda"), why the arm cannot run here, or None.
    """

    name: str
    flags: tuple[str, ...]
    plugin: bool = False
    unavailable: Callable[[str], str | None] = _always


ARMS = {
    arm.name: arm
    for arm in (
        Arm("alltoall", ("--moe-token-dispatcher-type", "alltoall")),
        Arm("allgather", ("--moe-token-dispatcher-type", "allgather")),
        Arm("mok", ("--moe-token-dispatcher-type", "mok"), plugin=True, unavailable=_mok),
    )
}
"""Every arm by name, in the order in which help texts list them."""
