"""Several ranks on one GPU, to see that they work and agree: gloo in place of NCCL, which refuses
such ranks, and each rank's share of the SMs. Kernels that wait for each other must run side by
side, so the ranks must be clients of an MPS daemon (megatron_mok.compare.mps)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SharedGPU:
    """How ranks share their GPU.

    Attributes:
        ranks_per_gpu: how many there are on each GPU.
        ctas_per_rank: most CTAs of a kernel of the engine that waits for peers.
        environment: variables of MPS, for the ranks.
    """

    ranks_per_gpu: int
    ctas_per_rank: int
    environment: dict[str, str] = field(default_factory=dict)


_shared: SharedGPU | None = None


def enable(shared: SharedGPU) -> None:
    """Make this process one of several ranks on a GPU. Before it uses CUDA, and before Megatron
    reads LOCAL_RANK, which becomes the number of the GPU."""
    global _shared
    from torch.distributed import ProcessGroup

    _shared = shared
    os.environ |= shared.environment
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    os.environ["LOCAL_RANK"] = str(local_rank // shared.ranks_per_gpu)
    # Megatron's DDP coalesces all-reduces, which gloo does not do for CUDA tensors.
    ProcessGroup.allreduce_coalesced = _one_by_one


def max_ctas() -> int:
    """Most CTAs of this rank's kernels; 0 where no GPU is shared."""
    if _shared is None:
        return 0
    import torch

    # Percentages of MPS are rounded to whole SMs, up: all ranks together would have too many.
    visible = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return min(visible, _shared.ctas_per_rank)


class _Works:
    """Waits for several works, as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> bool:
        return all([work.wait() for work in self._works])


def _one_by_one(group: Any, tensors: list[Any], options: Any) -> _Works:
    from torch.distributed import AllreduceOptions

    single = AllreduceOptions()
    single.reduceOp = options.reduceOp
    return _Works([group.allreduce([tensor], single) for tensor in tensors])
