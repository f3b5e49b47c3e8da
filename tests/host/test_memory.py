"""Memory that an engine allocates beside PyTorch's: what happens when there is too little."""

import types

import pytest
import torch
import torch.distributed as dist

from megatron_mok.runtime import LayerShape, MoKError, RuntimeOptions, Workspace
from megatron_mok.runtime.engine import Engine
from megatron_mok.runtime.memory import allocating
from tests.processes import join_group, run_processes

GPU_ENGINE = types.SimpleNamespace(device_type="cuda")
HOST_ENGINE = types.SimpleNamespace(device_type="cpu")


class Allocation:
    """Fails with `text` the first `failures` times."""

    def __init__(self, failures, text="mok_segment_alloc: allocating 7 bytes: out of memory"):
        self.calls, self._failures, self._text = 0, failures, text

    def __call__(self):
        self.calls += 1
        if self.calls <= self._failures:
            raise MoKError(self._text)
        return "memory"


def test_pytorchs_cache_is_emptied_once(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    allocation = Allocation(failures=1)
    assert allocating(GPU_ENGINE, 7, allocation) == "memory"
    assert (allocation.calls, len(emptied)) == (2, 1)
    assert allocating(GPU_ENGINE, 7, allocation) == "memory"
    assert len(emptied) == 1


def test_error_says_who_has_the_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 120 << 30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with pytest.raises(
        MoKError,
        match=r"allocating 7 bytes: out of memory; 5.50 GiB are needed on GPU 3, where 1.00 of "
        r"140.00 GiB are free and this process's tensors hold 120.00 GiB, .* \(max_tokens\)",
    ):
        allocating(GPU_ENGINE, 11 << 29, Allocation(failures=2))


@pytest.mark.parametrize(
    ("engine", "text"), [(GPU_ENGINE, "invalid device function"), (HOST_ENGINE, "out of memory")]
)
def test_other_errors_are_not_tried_again(engine, text):
    allocation = Allocation(failures=1, text=text)
    with pytest.raises(MoKError, match=text):
        allocating(engine, 7, allocation)
    assert allocation.calls == 1


def rank_with_little_memory(rank, ep_size, port, results):
    """Rank 1 cannot make its workspace."""
    join_group(rank, ep_size, port)
    if rank == 1:
        call = Engine.call

        def fails(self, function, *args):
            if function == "mok_workspace_create":
                raise MoKError(f"{function}: out of host memory")
            call(self, function, *args)

        Engine.call = fails
    shape = LayerShape(64, 64, 4, 2, 8, torch.float32)
    try:
        Workspace.create(shape, dist.group.WORLD, torch.device("cpu"), RuntimeOptions(workers=1))
        results.put((rank, "made"))
    except MoKError as error:
        results.put((rank, str(error)))


def test_a_rank_without_memory_is_an_error_on_all():
    text = "cannot make the workspace: EP rank 1: mok_workspace_create: out of host memory"
    assert run_processes(2, rank_with_little_memory) == [text, text]
