"""Choosing how ranks map each other's memory."""

import pytest
import torch

from megatron_mok.runtime import MoKUnsupportedError, RuntimeOptions
from megatron_mok.runtime.segments import SymmetricSegment


def test_unknown_provider():
    with pytest.raises(ValueError, match="peer_memory is 'nvshmem'; allowed are ipc, symm_mem"):
        RuntimeOptions(peer_memory="nvshmem")


def test_symmetric_memory_is_refused_on_cpus():
    with pytest.raises(MoKUnsupportedError, match="'symm_mem' is for GPUs, not for cpu"):
        SymmetricSegment.allocate_all(1024, None, torch.device("cpu"))
