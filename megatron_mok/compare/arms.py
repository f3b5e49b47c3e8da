"""The arms of a comparison: ways to dispatch tokens that Megatron can be told to use."""

from collections.abc import Callable
from dataclasses import dataclass


def _always(device: str) -> str | None:
    return None


def _mok(device: str) -> str | None:
    from megatron_mok.runtime.engine import load_engine
    from megatron_mok.runtime.errors import MoKError

    try:
        load_engine(device)
    except (MoKError, OSError) as error:
        return str(error)
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
