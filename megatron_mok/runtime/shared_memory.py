"""Memory that the EP ranks of one host map from each other, for the host engine."""

import ctypes
import mmap
import os
import socket
import uuid
from pathlib import Path

import torch.distributed as dist

from megatron_mok.runtime.errors import MoKError, MoKUnsupportedError

SHM_DIR = Path("/dev/shm")


class Segment:
    """A mapped range of zeroed memory; `address` is where it starts."""

    def __init__(self, mapping: mmap.mmap):
        self._mapping = mapping
        self._anchor = ctypes.c_char.from_buffer(mapping)
        self.address = ctypes.addressof(self._anchor)

    @classmethod
    def private(cls, num_bytes: int) -> "Segment":
        """Memory of this process alone."""
        return cls(mmap.mmap(-1, num_bytes))

    @classmethod
    def of_file(cls, path: Path, num_bytes: int) -> "Segment":
        fd = os.open(path, os.O_RDWR)
        try:
            return cls(mmap.mmap(fd, num_bytes))
        finally:
            os.close(fd)

    def close(self) -> None:
        del self._anchor
        self._mapping.close()


def map_peer_segments(num_bytes: int, group: dist.ProcessGroup | None) -> list[Segment]:
    """One zeroed segment of `num_bytes` per rank of `group`, in rank order. Collective.

    Segments are files in /dev/shm that are unlinked as soon as every rank has mapped them, so a
    killed rank leaves nothing behind.

    Raises:
        MoKUnsupportedError: the ranks are on several hosts.
        MoKError: /dev/shm has no room, or a peer could not set up its segment.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [Segment.private(num_bytes)]
    path = SHM_DIR / f"mok-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    problem = _create(path, num_bytes)
    try:
        mine = {"host": socket.gethostname(), "path": str(path), "problem": problem}
        peers: list[dict] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(peers, mine, group=group)
        hosts = sorted({p["host"] for p in peers})
        if len(hosts) > 1:
            raise MoKUnsupportedError(
                f"the EP group spans the hosts {', '.join(hosts)}; the host engine shares memory "
                "within one host only: choose an expert parallel size that fits one host"
            )
        problems = [f"rank {r}: {p['problem']}" for r, p in enumerate(peers) if p["problem"]]
        if problems:
            raise MoKError("cannot share memory: " + "; ".join(problems))
        segments = [Segment.of_file(Path(p["path"]), num_bytes) for p in peers]
        dist.barrier(group=group)
        return segments
    finally:
        path.unlink(missing_ok=True)


def _create(path: Path, num_bytes: int) -> str:
    """Creates the file with all its blocks, or returns what went wrong."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Reserve now: running out later would be a SIGBUS in the middle of a kernel.
            os.posix_fallocate(fd, 0, num_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        return (
            f"{num_bytes} bytes in {SHM_DIR}: {error.strerror}; enlarge it (containers: "
            "--ipc=host or --shm-size) or lower the maximum tokens per rank"
        )
    return ""
