"""Workspaces: the memory and state that the collective calls of one EP group share."""

import ctypes
import itertools
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_mok.runtime import abi
from megatron_mok.runtime.engine import Engine, dtype_code, load_engine
from megatron_mok.runtime.errors import MoKInvalidArgumentError
from megatron_mok.runtime.memory import allocating
from megatron_mok.runtime.segments import (
    PEER_MEMORY,
    Segment,
    SymmetricSegment,
    map_peer_segments,
    on_every_rank,
)


@dataclass(frozen=True)
class LayerShape:
    """What a workspace is made for; equal on every rank of the EP group.

    Attributes:
        hidden: H, a multiple of 64.
        ffn: F, intermediate size of one expert, a multiple of 64.
        num_experts: E, experts of the whole EP group, at most 1024.
        topk: K, most routes of a token, at most 32.
        max_tokens: most tokens that a rank passes in one call.
        dtype: torch.float32 or torch.bfloat16; of hidden states, weights and activations.

    Raises:
        ValueError: a value is out of range; names it, what was given and what is allowed.
    """

    hidden: int
    ffn: int
    num_experts: int
    topk: int
    max_tokens: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        rules = {
            "hidden": (self.hidden >= 64 and self.hidden % 64 == 0, "a positive multiple of 64"),
            "ffn": (self.ffn >= 64 and self.ffn % 64 == 0, "a positive multiple of 64"),
            "num_experts": (1 <= self.num_experts <= abi.MAX_EXPERTS, f"1 to {abi.MAX_EXPERTS}"),
            "topk": (1 <= self.topk <= abi.MAX_TOPK, f"1 to {abi.MAX_TOPK}"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
        }
        for name, (ok, allowed) in rules.items():
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed is {allowed}")
        dtype_code(self.dtype)


@dataclass(frozen=True)
class RuntimeOptions:
    """How a workspace runs.

    Attributes:
        first_wait_s: seconds a call waits for its peers to enter it; they may be saving a
            checkpoint or compiling.
        inner_wait_s: seconds every later wait of a call may take.
        workers: threads of the host engine on this rank (0: CPUs divided by ranks), or CTAs of the
            CUDA engine (0: one per SM; fewer where ranks share a GPU).
        peer_memory: how ranks map each other's memory. "ipc": handles that processes of one host
            exchange. "symm_mem": PyTorch's symmetric memory, on GPUs only, one for each rank.
    """

    first_wait_s: float = 600.0
    inner_wait_s: float = 60.0
    workers: int = 0
    peer_memory: str = "ipc"

    def __post_init__(self) -> None:
        for name in ("first_wait_s", "inner_wait_s"):
            value = getattr(self, name)
            if not 0.001 <= value <= 2_000_000:
                raise ValueError(f"{name} is {value}; allowed is 0.001 to 2,000,000 seconds")
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}; allowed is 0 (automatic) or more")
        if self.peer_memory not in PEER_MEMORY:
            raise ValueError(
                f"peer_memory is {self.peer_memory!r}; allowed are {', '.join(PEER_MEMORY)}"
            )


_handles = itertools.count(1)
_by_handle: weakref.WeakValueDictionary[int, "Workspace"] = weakref.WeakValueDictionary()


class Workspace:
    """One rank's handle on the shared workspace of an EP group.

    Make it with `create` (collective) or `in_process`. Calls on it are collective and must come in
    the same order on every rank. After a `MoKTimeoutError` it is poisoned for good.

    Attributes:
        shape: what it was made for.
        device: of the tensors it computes on.
        ep_size, ep_rank: the EP group, and this rank's place in it.
        nbytes: bytes of memory that this rank provides (shared and private).
        max_rows: padded rows in the worst case, when every route of the group comes to this rank.
        handle: names this workspace in torch ops.
    """

    def __init__(
        self,
        engine: Engine,
        shape: LayerShape,
        ep_rank: int,
        segments: list[Segment] | list[SymmetricSegment],
        device: torch.device,
        options: RuntimeOptions,
    ):
        self.shape = shape
        self.device = device
        self.options = options
        self.ep_size = len(segments)
        self.ep_rank = ep_rank
        self.num_local_experts = shape.num_experts // self.ep_size
        self._engine = engine
        self._segments = segments
        c_shape = _c_shape(shape, self.ep_size, ep_rank)
        layout = _layout(engine, c_shape, options)
        self.nbytes = layout.peer_bytes + layout.local_bytes
        self.max_rows = layout.max_rows
        desc = abi.MokWorkspaceDesc(shape=c_shape, options=_c_options(options))
        for rank, segment in enumerate(segments):
            desc.peers[rank] = segment.address
        pointer = ctypes.c_void_p()
        allocating(
            engine,
            layout.local_bytes,
            lambda: engine.call("mok_workspace_create", ctypes.byref(desc), ctypes.byref(pointer)),
        )
        self._pointer = pointer
        self._destroy = weakref.finalize(self, engine.lib.mok_workspace_destroy, pointer)
        self.handle = next(_handles)
        _by_handle[self.handle] = self

    @classmethod
    def create(
        cls,
        shape: LayerShape,
        group: dist.ProcessGroup | None,
        device: torch.device,
        options: RuntimeOptions | None = None,
        library: Path | None = None,
    ) -> "Workspace":
        """Makes the workspace of `group` together with its other ranks. Collective.

        Args:
            group: the EP group; None is a group of this rank alone.
            device: of the tensors to come; chooses the engine.
            library: another build of that engine, as `load_engine` takes it.

        Raises:
            ValueError: the experts do not divide over the ranks, or ranks disagree on the shape.
            MoKUnsupportedError: no engine for the device, or the ranks cannot share memory.
            MoKError: on every rank, when a rank has too little memory, also without what PyTorch's
                cache held.
        """
        options = options or RuntimeOptions()
        device = _with_index(device)
        engine = load_engine(device.type, library)
        ep_size = dist.get_world_size(group) if group is not None else 1
        ep_rank = dist.get_rank(group) if group is not None else 0
        _check_same_on_all_ranks(shape, group, ep_size)
        with _current(device):
            layout = _layout(engine, _c_shape(shape, ep_size, ep_rank), options)
            segments = map_peer_segments(
                engine, layout.peer_bytes, group, device, options.peer_memory
            )

            def make():
                return cls(engine, shape, ep_rank, segments, device, options)

            return make() if ep_size == 1 else on_every_rank(make, "make the workspace", group)

    @classmethod
    def in_process(
        cls,
        shape: LayerShape,
        ep_size: int,
        options: RuntimeOptions | None = None,
        device: torch.device | str = "cpu",
    ) -> list["Workspace"]:
        """The workspaces of `ep_size` ranks that all live in this process.

        Each needs its own thread on the CPU, its own stream on a GPU.
        """
        options = options or RuntimeOptions()
        device = _with_index(torch.device(device))
        engine = load_engine(device.type)
        with _current(device):
            layout = _layout(engine, _c_shape(shape, ep_size, 0), options)
            segments = [Segment.allocate(engine, layout.peer_bytes) for _ in range(ep_size)]
            return [cls(engine, shape, r, segments, device, options) for r in range(ep_size)]

    @property
    def engine(self) -> str:
        """Name of the engine that runs it, e.g. "host"."""
        return self._engine.name

    def call(self, function: str, args: ctypes.Structure) -> None:
        """Calls `function` of the C ABI on this workspace."""
        if not self._destroy.alive:
            raise MoKInvalidArgumentError(f"{function}: the workspace is closed")
        with _current(self.device):
            self._engine.call(function, self._pointer, ctypes.byref(args))

    def check(self) -> None:
        """Reports what earlier calls have left behind, without waiting for them.

        Calls on a GPU return before the device has met its peers: that a peer refused its
        arguments, or that a wait timed out, is reported by the next call or by this. Synchronise
        first for an answer about all calls so far.

        Raises:
            MoKInvalidArgumentError: a rank refused a call, so no rank made it; results of that call
                are undefined. The workspace can be used again.
            MoKTimeoutError, MoKWorkspacePoisonedError: as from a call.
        """
        if not self._destroy.alive:
            raise MoKInvalidArgumentError("mok_check: the workspace is closed")
        self._engine.call("mok_check", self._pointer)

    def current_stream(self) -> int | None:
        """The CUDA stream that calls go to, as the C ABI takes it; None on the CPU."""
        if self.device.type == "cpu":
            return None
        return torch.cuda.current_stream(self.device).cuda_stream

    def close(self) -> None:
        """Frees the engine's memory. Peers must have finished their calls."""
        self._destroy()

    def __repr__(self) -> str:
        return f"Workspace({self.shape}, ep_rank={self.ep_rank}/{self.ep_size}, {self.engine})"


def workspace_of(handle: int) -> Workspace:
    """The live workspace with this handle. Raises ValueError when there is none."""
    workspace = _by_handle.get(handle)
    if workspace is None:
        raise ValueError(f"no workspace has handle {handle}; it was closed or garbage-collected")
    return workspace


_shared: dict[tuple, Workspace] = {}


def get_workspace(
    shape: LayerShape,
    group: dist.ProcessGroup | None,
    device: torch.device,
    options: RuntimeOptions | None = None,
) -> Workspace:
    """The workspace of (group, shape), made at the first call and shared by all layers.

    The first call is collective over the group; all ranks must ask for the same shapes in the same
    order, as they do when they build the same model.
    """
    device = _with_index(device)
    key = (group, shape, device, options)
    if key not in _shared:
        _shared[key] = Workspace.create(shape, group, device, options)
    return _shared[key]


def release_workspaces() -> None:
    """Forgets and closes all that `get_workspace` made."""
    for workspace in _shared.values():
        workspace.close()
    _shared.clear()


def workspace_nbytes(shape: LayerShape, ep_size: int, device_type: str, workers: int) -> int:
    """Bytes that each rank will provide for a workspace, without making one; needs no GPU.

    Args:
        device_type: "cpu" or "cuda"; chooses the engine, which must have been built.
        workers: threads, or CTAs of the GPUs that it is for (one per SM).

    Raises:
        ValueError: the experts do not divide over the ranks.
        MoKUnsupportedError: no such engine.
    """
    layout = _layout(
        load_engine(device_type), _c_shape(shape, ep_size, 0), RuntimeOptions(workers=workers)
    )
    return layout.peer_bytes + layout.local_bytes


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _current(device: torch.device) -> AbstractContextManager:
    """Makes a CUDA device the current one: the engine allocates and launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _c_shape(shape: LayerShape, ep_size: int, ep_rank: int) -> abi.MokShape:
    if shape.num_experts % ep_size != 0:
        raise ValueError(
            f"num_experts is {shape.num_experts}; it must be a multiple of the EP size {ep_size}"
        )
    return abi.MokShape(
        ep_size=ep_size,
        ep_rank=ep_rank,
        num_experts=shape.num_experts,
        topk=shape.topk,
        hidden=shape.hidden,
        ffn=shape.ffn,
        max_tokens=shape.max_tokens,
        dtype=dtype_code(shape.dtype),
    )


def _c_options(options: RuntimeOptions) -> abi.MokOptions:
    return abi.MokOptions(
        workers=options.workers,
        first_wait_ms=int(options.first_wait_s * 1000),
        inner_wait_ms=int(options.inner_wait_s * 1000),
    )


def _layout(engine: Engine, c_shape: abi.MokShape, options: RuntimeOptions) -> abi.MokLayout:
    layout = abi.MokLayout()
    c_options = _c_options(options)
    engine.call("mok_layout", ctypes.byref(c_shape), ctypes.byref(c_options), ctypes.byref(layout))
    return layout


def _check_same_on_all_ranks(
    shape: LayerShape, group: dist.ProcessGroup | None, ep_size: int
) -> None:
    if ep_size == 1:
        return
    shapes: list[LayerShape | None] = [None] * ep_size
    dist.all_gather_object(shapes, shape, group=group)
    for rank, other in enumerate(shapes):
        if other != shape:
            raise ValueError(
                f"EP rank {rank} makes its workspace for {other}, this rank for {shape}; "
                "all ranks must use the same model and the same maximum of tokens"
            )
