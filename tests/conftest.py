import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA Hopper GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
