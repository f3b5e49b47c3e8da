"""Memory that the EP ranks of one host map from each other."""

import ctypes
import socket
import weakref

import torch.distributed as dist

from megatron_mok.runtime import abi
from megatron_mok.runtime.engine import Engine
from megatron_mok.runtime.errors import MoKError, MoKUnsupportedError


class Segment:
    """A range of an engine's memory, this rank's own or a peer's; unmapped with this object.

    `address` is where it starts.
    """

    def __init__(self, engine: Engine, address: int, release: str):
        self.address = address
        self._engine = engine
        weakref.finalize(self, getattr(engine.lib, release), address)

    @classmethod
    def allocate(cls, engine: Engine, num_bytes: int) -> "Segment":
        """New zeroed memory, on the current device for the CUDA engine."""
        pointer = ctypes.c_void_p()
        engine.call("mok_segment_alloc", num_bytes, ctypes.byref(pointer))
        return cls(engine, pointer.value, "mok_segment_free")

    @classmethod
    def open(cls, engine: Engine, handle: bytes) -> "Segment":
        """The memory behind a handle that another process exported."""
        pointer = ctypes.c_void_p()
        engine.call("mok_segment_open", handle, ctypes.byref(pointer))
        return cls(engine, pointer.value, "mok_segment_close")

    def export(self) -> bytes:
        handle = ctypes.create_string_buffer(abi.HANDLE_BYTES)
        self._engine.call("mok_segment_export", self.address, handle)
        return handle.raw


def map_peer_segments(
    engine: Engine, num_bytes: int, group: dist.ProcessGroup | None
) -> list[Segment]:
    """One segment of `num_bytes` per rank of `group`, in rank order. Collective.

    Raises:
        MoKUnsupportedError: the ranks are on several hosts.
        MoKError: on every rank, when a rank has no memory or cannot map a peer's.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [Segment.allocate(engine, num_bytes)]
    own, problem = _attempt(lambda: Segment.allocate(engine, num_bytes))
    offers = _all_gather(
        {
            "host": socket.gethostname(),
            "handle": own.export() if own else b"",
            "problem": problem,
        },
        group,
    )
    hosts = sorted({offer["host"] for offer in offers})
    if len(hosts) > 1:
        raise MoKUnsupportedError(
            f"the EP group spans the hosts {', '.join(hosts)}; memory is shared within one host "
            "only: choose an expert parallel size that fits one host"
        )
    _raise_if_any([offer["problem"] for offer in offers])

    rank = dist.get_rank(group)
    segments, problem = _attempt(
        lambda: [
            own if r == rank else Segment.open(engine, offer["handle"])
            for r, offer in enumerate(offers)
        ]
    )
    _raise_if_any(_all_gather(problem, group))
    return segments


def _attempt(action):
    """(result, "") or (None, what went wrong): an error of one rank must reach all of them."""
    try:
        return action(), ""
    except MoKError as error:
        return None, str(error)


def _all_gather(value, group: dist.ProcessGroup) -> list:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _raise_if_any(problems: list[str]) -> None:
    text = "; ".join(f"EP rank {r}: {problem}" for r, problem in enumerate(problems) if problem)
    if text:
        raise MoKError(f"cannot share memory: {text}")
