"""Memory that the EP ranks map from each other.

Two providers: handles that the ranks of one host exchange (CUDA IPC on GPUs), and PyTorch's
symmetric memory, https://docs.pytorch.org/docs/stable/symmetric_memory.html.
"""

import ctypes
import socket
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_mok.runtime import abi
from megatron_mok.runtime.engine import Engine
from megatron_mok.runtime.errors import MoKError, MoKUnsupportedError
from megatron_mok.runtime.memory import allocating

PEER_MEMORY = ("ipc", "symm_mem")
"""Names of the providers."""

_SHARING = "share memory"


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
        allocating(
            engine,
            num_bytes,
            lambda: engine.call("mok_segment_alloc", num_bytes, ctypes.byref(pointer)),
        )
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


class SymmetricSegment:
    """One rank's part of an allocation in PyTorch's symmetric memory; freed with this object.

    `address` is where this rank sees it.
    """

    def __init__(self, memory: torch.Tensor):
        self.address = memory.data_ptr()
        self._memory = memory

    @classmethod
    def allocate_all(
        cls, num_bytes: int, group: dist.ProcessGroup, device: torch.device
    ) -> list["SymmetricSegment"]:
        """The zeroed parts of all ranks of `group`, in rank order. Collective.

        Raises:
            MoKUnsupportedError: no GPU, or this PyTorch has no symmetric memory.
            MoKError: on every rank, when a rank cannot take part: without a GPU of its own, say.
        """
        if device.type != "cuda":
            raise MoKUnsupportedError(
                f"peer_memory 'symm_mem' is for GPUs, not for {device}; choose 'ipc'"
            )
        try:
            import torch.distributed._symmetric_memory as symm_mem
        except ImportError as error:
            raise MoKUnsupportedError(
                f"torch {torch.__version__} has no symmetric memory; choose peer_memory 'ipc'"
            ) from error

        def rendezvous():
            own = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
            torch.cuda.synchronize(device)  # peers may write as soon as they see it
            handle = symm_mem.rendezvous(own, group)
            others = range(dist.get_world_size(group))
            rank = dist.get_rank(group)
            return [
                cls(own if r == rank else handle.get_remote_tensor(r, own.shape, own.dtype))
                for r in others
            ]

        return on_every_rank(rendezvous, _SHARING, group)


def map_peer_segments(
    engine: Engine,
    num_bytes: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    provider: str = "ipc",
) -> list[Segment] | list[SymmetricSegment]:
    """One segment of `num_bytes` per rank of `group`, in rank order. Collective.

    Args:
        provider: of PEER_MEMORY. A rank alone needs none.

    Raises:
        MoKUnsupportedError: the ranks are on several hosts, or the provider is not there.
        MoKError: on every rank, when a rank has no memory or cannot map a peer's.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [Segment.allocate(engine, num_bytes)]
    if provider == "symm_mem":
        return SymmetricSegment.allocate_all(num_bytes, group, device)
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
            f"the EP group spans the hosts {', '.join(hosts)}; peer_memory 'ipc' shares memory "
            "within one host: choose an expert parallel size that fits one host"
        )
    _raise_if_any([offer["problem"] for offer in offers], _SHARING)

    rank = dist.get_rank(group)
    return on_every_rank(
        lambda: [
            own if r == rank else Segment.open(engine, offer["handle"])
            for r, offer in enumerate(offers)
        ],
        _SHARING,
        group,
    )


def on_every_rank[Result](
    action: Callable[[], Result], doing: str, group: dist.ProcessGroup
) -> Result:
    """The result of `action`, if it succeeds on every rank of `group`. Collective.

    Raises:
        MoKError: on every rank, when it failed on one; "cannot <doing>" and why.
    """
    result, problem = _attempt(action)
    _raise_if_any(_all_gather(problem, group), doing)
    return result


def _attempt(action):
    """(result, "") or (None, what went wrong): an error of one rank must reach all of them."""
    try:
        return action(), ""
    except RuntimeError as error:  # MoKError, or PyTorch's
        return None, str(error)


def _all_gather(value, group: dist.ProcessGroup) -> list:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _raise_if_any(problems: list[str], doing: str) -> None:
    text = "; ".join(f"EP rank {r}: {problem}" for r, problem in enumerate(problems) if problem)
    if text:
        raise MoKError(f"cannot {doing}: {text}")
