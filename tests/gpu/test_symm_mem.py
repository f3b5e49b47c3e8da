"""PyTorch's symmetric memory as provider of peer memory, as far as one GPU can show it."""

import os

import pytest
import torch

from tests.gpu.layers import gpu_layer
from tests.in_process import run_fused
from tests.processes import join_group, run_processes

pytestmark = pytest.mark.gpu


def symmetric_rank(rank, ep_size, port, results):
    import torch.distributed as dist

    from megatron_mok.runtime import LayerShape, MoKError, RuntimeOptions, Workspace
    from megatron_mok.runtime.engine import load_engine
    from megatron_mok.runtime.segments import SymmetricSegment

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(0)
    join_group(rank, ep_size, port)
    layer = gpu_layer(300, 256, 128, 8, 2, seed=95)
    shape, device = LayerShape(**layer.shape), torch.device("cuda", 0)
    options = RuntimeOptions(first_wait_s=10, inner_wait_s=10, peer_memory="symm_mem")
    try:
        workspace = Workspace.create(shape, dist.group.WORLD, device, options)
        # A rank alone has no peers to map, so Workspace.create takes plain memory: try it directly.
        segments = SymmetricSegment.allocate_all(1 << 26, dist.group.WORLD, device)
        direct = Workspace(load_engine("cuda"), shape, 0, segments, device, options)
        same = torch.equal(run_fused(layer, workspace), run_fused(layer, direct))
        results.put((rank, f"same output: {same}"))
    except MoKError as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
    dist.destroy_process_group()


def test_a_rank_alone():
    assert run_processes(1, symmetric_rank) == ["same output: True"]


def test_two_ranks_on_one_gpu_are_an_error_on_both():
    for text in run_processes(2, symmetric_rank):
        assert text.startswith("MoKError: cannot share memory: EP rank 0: "), text
