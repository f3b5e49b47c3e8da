"""Memory of the engines beside PyTorch's."""

from collections.abc import Callable

import torch

from megatron_mok.runtime.engine import Engine
from megatron_mok.runtime.errors import MoKError

GIB = 1 << 30


def allocating[Result](engine: Engine, num_bytes: int, action: Callable[[], Result]) -> Result:
    """The result of `action`, which makes `engine` allocate about `num_bytes`.

    PyTorch keeps memory of freed tensors in a cache, out of reach of an engine on the same GPU.
    Where that leaves too little, the cache is emptied and `action` called once more.

    Raises:
        MoKError: there is too little memory; says on a GPU who has it.
    """
    try:
        return action()
    except MoKError as error:
        if not _is_out_of_gpu_memory(engine, error):
            raise
    torch.cuda.empty_cache()
    try:
        return action()
    except MoKError as error:
        if not _is_out_of_gpu_memory(engine, error):
            raise
        raise MoKError(f"{error}; {_gpu_memory_text(num_bytes)}") from None


def _is_out_of_gpu_memory(engine: Engine, error: MoKError) -> bool:
    # The CUDA runtime's text for cudaErrorMemoryAllocation.
    return engine.device_type == "cuda" and "out of memory" in str(error)


def _gpu_memory_text(num_bytes: int) -> str:
    free, total = torch.cuda.mem_get_info()
    return (
        f"{num_bytes / GIB:.2f} GiB are needed on GPU {torch.cuda.current_device()}, where "
        f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free and this process's tensors hold "
        f"{torch.cuda.memory_allocated() / GIB:.2f} GiB, PyTorch's cache being empty; make the "
        "workspace for fewer tokens (max_tokens), or leave it more memory"
    )
