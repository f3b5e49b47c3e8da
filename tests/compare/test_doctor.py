"""`megatron-mok doctor` on this machine, and with parts of it missing."""

import importlib.metadata
import json

import pytest

from megatron_mok.cli import doctor
from megatron_mok.cli.main import main
from megatron_mok.compare import probe


def test_this_machine(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for line in ("yes  alltoall", "yes  mok ", "yes  host (CPU)", "yes  mok_dispatch"):
        assert line in text
    assert "forward within" in text


def test_json(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    versions = {f["name"]: f for f in report["installed"]}
    # Megatron adds the commit of the checkout that it lies in, be it its own or not.
    release, _, _ = versions["megatron-core"]["detail"].partition("+")
    assert release == importlib.metadata.version("megatron-core")
    assert all(f["problem"] for f in report["arms, device: cpu"] if f["name"] == "deepep")


@pytest.fixture
def nothing(monkeypatch):
    monkeypatch.setattr(probe, "no_engine", lambda device: "not built")
    return monkeypatch


def test_machine_without_engines(nothing, capsys):
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert text.count("not built") >= 3  # two engines, and mok on a CPU


def test_engine_that_computes_something_else(monkeypatch):
    monkeypatch.setattr(doctor, "_layer_differences", lambda device: (0.003, 0.5))
    finding = doctor._try_engine("host", "cpu")
    assert finding.problem.startswith(
        "wrong: forward within 3e-03 of PyTorch, gradients within 5e-01"
    )


def test_engine_that_fails(monkeypatch):
    def fail(device):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(doctor, "_layer_differences", fail)
    assert doctor._try_engine("host", "cpu").problem == "RuntimeError: out of memory"
