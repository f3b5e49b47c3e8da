import gc

import pytest
import torch

from tests.gpu.layers import load_pytorch_kernels


@pytest.fixture(scope="session", autouse=True)
def kernels():
    load_pytorch_kernels()
    gc.collect()
    gc.freeze()  # what lives now lives on: collecting after each test is then quick


@pytest.fixture(autouse=True)
def memory_of_one_test():
    """Frees workspaces of tests that failed, and PyTorch's cache.

    PyTorch caches memory for each of its 32 streams apart, of which every rank takes the next. Over
    many tests that would fill the GPU; PyTorch then frees memory in the middle of a call, which
    waits for kernels of other ranks of the process, which wait for this one.
    """
    yield
    gc.collect()
    torch.cuda.empty_cache()
