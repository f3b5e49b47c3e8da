"""What arms need, and how a machine that lacks it is told."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_mok.compare import probe
from megatron_mok.compare.arms import ARMS
from megatron_mok.compare.config import from_dict

from .test_config import changed


def comparison(key="seed", value=1, device="cuda"):
    return from_dict({**changed(key, value), "device": device})


@pytest.fixture
def gpus(monkeypatch):
    """A machine that has everything; tests take things away."""
    monkeypatch.setattr(probe, "no_gpu", lambda: None)
    for name in ("no_engine", "no_flex_backend"):
        monkeypatch.setattr(probe, name, lambda _: None)
    return monkeypatch


def test_arms_differ_in_flags_alone():
    assert list(ARMS) == [
        *("alltoall", "allgather", "deepep", "hybridep", "ncclep", "mok", "mok_dispatch")
    ]
    assert len({arm.flags for arm in ARMS.values()}) == len(ARMS)
    assert {arm.name for arm in ARMS.values() if arm.plugin} == {"mok", "mok_dispatch"}


def test_all_arms_run_where_everything_is_there(gpus):
    assert {arm.unavailable(comparison()) for arm in ARMS.values()} == {None}


@pytest.mark.parametrize("name", ["deepep", "ncclep"])
def test_dispatchers_between_ranks_need_several(gpus, name):
    config = comparison("parallel.expert_model_parallel_size", 1)
    assert "more than one rank" in ARMS[name].unavailable(config)
    assert ARMS["hybridep"].unavailable(config) is None


@pytest.mark.parametrize("name", ["deepep", "hybridep", "ncclep"])
def test_flex_dispatchers_need_fp32_probs_and_gpus(gpus, name):
    config = comparison("model.moe_router_dtype", "fp64")
    assert "needs moe_router_dtype: fp32 (given: fp64)" in ARMS[name].unavailable(config)
    assert ARMS[name].unavailable(comparison(device="cpu")) == "needs GPUs (device: cuda)"
    gpus.setattr(probe, "no_flex_backend", lambda backend: f"no {backend}")
    assert ARMS[name].unavailable(comparison()) == f"no {name}"


def test_arms_on_gpus_need_gpus(gpus):
    gpus.setattr(probe, "no_gpu", lambda: "no CUDA device")
    for arm in ARMS.values():
        assert arm.unavailable(comparison()) == "no CUDA device"
    assert ARMS["alltoall"].unavailable(comparison(device="cpu")) is None


def test_mok_needs_an_engine_for_the_device(gpus):
    gpus.setattr(probe, "no_engine", lambda device: f"no engine for {device}")
    for name in ("mok", "mok_dispatch"):
        assert ARMS[name].unavailable(comparison()) == "no engine for cuda"
        assert ARMS[name].unavailable(comparison(device="cpu")) == "no engine for cpu"


def test_gpu_of_another_generation(monkeypatch):
    import torch

    monkeypatch.setattr("megatron_mok.runtime.engine.load_engine", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "A100 has 8.0" in probe.no_engine("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert probe.no_engine("cuda") is None


def module(monkeypatch, name, **names):
    made = ModuleType(name)
    made.__dict__.update(names)
    monkeypatch.setitem(sys.modules, name, made)


def test_deepep_without_what_megatron_imports(monkeypatch):
    """As with its newer versions."""
    module(monkeypatch, "deep_ep", Buffer=1)
    module(monkeypatch, "deep_ep.utils", EventHandle=1)
    assert probe._import_problem("deepep").startswith("deep_ep.utils has no EventOverlap; ")
    assert probe._import_problem("hybridep").startswith("deep_ep has no HybridEPBuffer; ")
    module(monkeypatch, "deep_ep.utils", EventHandle=1, EventOverlap=1)
    assert probe._import_problem("deepep") is None


def test_missing_and_broken_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert "deep_ep cannot be imported" in probe._import_problem("deepep")
    assert "hybrid-ep" in probe._import_problem("deepep")


def test_megatron_that_cannot_be_imported(monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nImportError: no nvrtc\n")
    monkeypatch.setattr(probe.subprocess, "run", lambda *args, **kwargs: failed)
    probe._megatron.cache_clear()
    try:
        assert probe.no_megatron() == "Megatron-Core cannot be imported: ImportError: no nvrtc"
        assert probe.no_flex_backend("deepep") == probe.no_megatron()
        assert probe.megatron_version() is None
    finally:
        probe._megatron.cache_clear()
