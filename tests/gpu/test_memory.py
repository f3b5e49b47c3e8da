"""Workspaces beside PyTorch's memory on one GPU."""

import pytest
import torch

from megatron_mok.runtime import LayerShape, MoKError, Workspace, workspace_nbytes
from tests.gpu.layers import gpu_layer
from tests.in_process import relative_error, run_fused, run_reference

pytestmark = pytest.mark.gpu


@pytest.fixture
def layer():
    return gpu_layer(300, 1024, 64, 4, 2, seed=97)


@pytest.fixture
def shape(layer):
    return LayerShape(**layer.shape | {"max_tokens": 500_000})  # about 4 GiB


def fill_gpu(shape) -> torch.Tensor:
    """A tensor that leaves half of what a workspace takes."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    free, _ = torch.cuda.mem_get_info()
    left = workspace_nbytes(shape, 1, "cuda", sms) // 2
    return torch.empty(free - left, dtype=torch.uint8, device="cuda")


def assert_works(layer, shape):
    (workspace,) = Workspace.in_process(shape, 1, device="cuda")
    output_TH = run_fused(layer, workspace)
    assert relative_error(output_TH, run_reference(layer, torch.float64).output_TH) < 1e-2


def test_what_pytorch_has_cached_is_freed_for_a_workspace(layer, shape):
    tensor = fill_gpu(shape)
    del tensor
    free, _ = torch.cuda.mem_get_info()
    assert free < 3 << 30  # the rest is cached
    assert_works(layer, shape)


def test_too_little_memory(layer, shape):
    tensor = fill_gpu(shape)
    with pytest.raises(MoKError, match=r"out of memory; .* GiB are needed on GPU 0, .*max_tokens"):
        Workspace.in_process(shape, 1, device="cuda")
    del tensor
    assert_works(layer, shape)  # the failure is forgotten
