"""EP ranks as processes that share one GPU under MPS, memory mapped with CUDA IPC.

Without the MPS daemon the kernels of processes do not run side by side; ranks only take turns.
"""

import os
import subprocess
import tempfile
from contextlib import contextmanager

import pytest
import torch

from megatron_mok.compare.mps import find_control
from tests.processes import join_group, run_processes

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 1500, 1024, 512, 16, 4


@contextmanager
def mps_daemon():
    """A private MPS daemon for the processes started inside."""
    control = find_control()
    with tempfile.TemporaryDirectory() as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ |= names
        subprocess.run([control, "-d"], check=True, timeout=30)
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit\n", timeout=30, check=False)
            for name in names:
                os.environ.pop(name)


def workspace_of_process(layer, ep_size, first_wait_s, inner_wait_s):
    """With this rank's share of the GPU."""
    import torch.distributed as dist

    from megatron_mok.runtime import LayerShape, RuntimeOptions, Workspace

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    options = RuntimeOptions(first_wait_s, inner_wait_s, workers=min(sms, 132 // ep_size))
    return Workspace.create(
        LayerShape(**layer.shape), dist.group.WORLD, torch.device("cuda"), options
    )


def rank_process(rank, ep_size, port, results):
    import torch.distributed as dist

    from tests.gpu.layers import gpu_layer
    from tests.in_process import run_fused

    join_group(rank, ep_size, port)
    layer = gpu_layer(TOKENS, HIDDEN, FFN, EXPERTS, TOPK, seed=31)
    workspace = workspace_of_process(layer, ep_size, first_wait_s=60, inner_wait_s=20)
    outputs = [run_fused(layer.part(rank, ep_size), workspace) for _ in range(3)]
    torch.cuda.synchronize()
    same = all(torch.equal(outputs[0], other) for other in outputs)
    results.put((rank, (same, outputs[0].cpu().view(torch.int16).numpy())))
    dist.barrier()
    dist.destroy_process_group()


def output_bits(ep_size):
    """Output of all tokens, as the bits of BF16."""
    parts = run_processes(ep_size, rank_process)
    assert all(same for same, _ in parts), "three calls differ"
    return torch.cat([torch.from_numpy(bits) for _, bits in parts])


@pytest.mark.skipif(find_control() is None, reason="no nvidia-cuda-mps-control")
def test_bitwise_equal_at_every_ep_size_across_processes(monkeypatch):
    with mps_daemon():
        monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
        alone = output_bits(1)
        for ep_size in (2, 4, 8):
            monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(100 / ep_size))
            assert torch.equal(alone, output_bits(ep_size)), ep_size
