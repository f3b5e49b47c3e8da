import pytest

from tests.gpu.layers import load_kernels


@pytest.fixture(scope="session", autouse=True)
def kernels():
    load_kernels()
