"""Real benchmarks of a tiny layer on the CPU, their checks and their timing."""

import dataclasses
import json
import re
import shutil

import pytest
import torch

from megatron_mok.bench import runner
from megatron_mok.bench.arms import ARMS
from megatron_mok.bench.check import check_backward, check_forward, compute_reference
from megatron_mok.bench.config import TimingOptions
from megatron_mok.bench.layer import make_inputs
from megatron_mok.bench.mok_arm import MokLayer
from megatron_mok.bench.presets import PRESETS
from megatron_mok.bench.timing import Task, time_in_blocks
from megatron_mok.bench.torch_arms import ComposedLayer
from megatron_mok.cli.main import main
from megatron_mok.runtime.engine import LIBRARY_DIR

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--warmup-s", "0", "--time-s", "0.001", "--repeats", "2"]


def bench(tmp_path, *args):
    """Exit status and rows by (direction, arm)."""
    path = tmp_path / "bench.json"
    status = main(["bench", *QUICK, "--json", str(path), *args])
    tree = json.loads(path.read_text())
    return status, tree, {(row["direction"], row["arm"]): row for row in tree["rows"]}


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 1e-2), ("fp32", 1e-6)])
def test_mok_and_torch_eager(tmp_path, capsys, dtype, tolerance):
    arms, directions = ["mok", "torch_eager"], ["forward", "backward", "both"]
    status, tree, rows = bench(
        tmp_path,
        *("--tokens", "100", "--routing", "zipf", "--dtype", dtype),
        *("--arms", ",".join(arms), "--direction", ",".join(directions)),
    )
    assert status == 0
    assert list(rows) == [(direction, arm) for direction in directions for arm in arms]
    for (direction, _), row in rows.items():
        assert (row["tokens"], row["routing"], row["dtype"]) == (100, "zipf", dtype)
        assert 0 < row["error"] < tolerance
        assert 0 < row["p10"] <= row["ms"] <= row["p90"]
        factor = {"forward": 6, "backward": 12, "both": 18}[direction]
        assert row["tflops"] == pytest.approx(factor * 100 * 2 * 128 * 64 / row["ms"] / 1e9)
        assert row["fraction_of_dense"] == pytest.approx(row["tflops"] / tree["dense_tflops"])
    assert tree["gpu"] is None
    printed = capsys.readouterr().out
    assert "100 zipf both" in printed
    assert "say nothing about speed on GPUs" in printed


def test_another_build_of_the_engine(tmp_path):
    other = shutil.copy(LIBRARY_DIR / "libmok_host.so", tmp_path / "before.so")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    args = ("--tokens", "50", "--arms", "mok", "--direction", "forward,both")
    status, _, rows = bench(tmp_path, *args, "--engine", f"before={other}")
    assert status == 0
    arms = ("mok", "before")
    assert list(rows) == [(direction, arm) for direction in ("forward", "both") for arm in arms]
    assert all(row["ms"] > 0 for row in rows.values())
    assert main(["bench", *QUICK, *args, "--engine", f"broken={broken}"]) == 1


def test_composition_compiles_as_one_graph():
    inputs = make_inputs(PRESETS["tiny"], 32, "zipf", CPU, torch.bfloat16, 1)
    eager, traced = (ComposedLayer(inputs) for _ in range(2))
    traced._moe = torch.compile(eager._moe, backend="aot_eager", dynamic=False, fullgraph=True)
    outputs = [layer.forward() for layer in (eager, traced)]
    torch.testing.assert_close(*outputs)
    grads = [layer.backward(output) for layer, output in zip((eager, traced), outputs, strict=True)]
    for field in dataclasses.fields(grads[0]):
        torch.testing.assert_close(*(getattr(g, field.name) for g in grads))


def test_unavailable_arm_is_a_row(tmp_path):
    status, _, rows = bench(tmp_path, "--arms", "mok,megatron_te_alltoall")
    row = rows["forward", "megatron_te_alltoall"]
    assert status == 0
    assert row["failure"] == "unavailable: needs --device cuda and --dtype bf16"
    assert row["ms"] is row["error"] is None
    assert rows["forward", "mok"]["ms"] > 0


def test_required_arm_must_be_there(capsys):
    arms = ["--arms", "mok,megatron_te_alltoall", "--require", "megatron_te_alltoall"]
    assert main(["bench", *QUICK, *arms]) == 1
    assert "megatron_te_alltoall is required and cannot run: needs" in capsys.readouterr().err


class _Wrong(ComposedLayer):
    """A layer with a mistake in the output or in a gradient."""

    mistake = "output"

    def forward(self):
        output_TH = super().forward()
        if self.mistake == "row":  # hardly moves the error of 1000 rows
            output_TH = output_TH * torch.where(torch.arange(len(output_TH)) == 7, 0.5, 1)[:, None]
        return output_TH.to(self.inputs.dtype) * (2 if self.mistake == "output" else 1)

    def backward(self, output_TH):
        grads = super().backward(output_TH)
        changes = {
            "hidden": {"hidden": torch.full_like(grads.hidden, torch.nan)},
            "probs": {"probs": grads.probs + 1},
            "fc1": {"fc1": torch.where(torch.arange(8) == 3, 0, 1)[:, None, None] * grads.fc1},
        }
        return dataclasses.replace(grads, **changes.get(self.mistake, {}))


@pytest.mark.parametrize(
    ("mistake", "problem"),
    [
        ("output", r"output: relative error 1\.0e\+00, allowed is 1e-02"),
        ("row", r"output: row 7 has relative error .*, allowed is 1e-01"),
        ("hidden", r"gradient of the hidden states: relative error nan"),
        ("probs", r"gradient of the probs: relative error"),
        ("fc1", r"gradient of fc1: relative error"),
    ],
)
def test_checks_find_mistakes(mistake, problem):
    inputs = make_inputs(PRESETS["tiny"], 5000, "uniform", CPU, torch.bfloat16, 1)
    reference = compute_reference(inputs, backward=True)
    layer = _Wrong(inputs)
    layer.mistake = mistake
    forward = check_forward(layer, reference)
    if mistake in ("output", "row"):
        found = forward
    else:
        assert forward.problem is None
        found = check_backward(layer, reference)
    assert re.search(problem, found.problem or ""), found


def test_one_wrong_expert_is_found():
    inputs = make_inputs(PRESETS["tiny"], 256, "zipf", CPU, torch.bfloat16, 1)
    reference = compute_reference(inputs, backward=True)
    idlest = int(inputs.routing_map_TE.sum(0).argmin())

    class Wrong(ComposedLayer):
        def backward(self, output_TH):
            grads = super().backward(output_TH)
            grads.fc2[idlest].mul_(0.8)
            return grads

    problem = check_backward(Wrong(inputs), reference).problem
    assert problem is not None
    assert problem.startswith("gradient of fc2")


def test_gradients_of_an_expert_without_rows_must_be_zero():
    inputs = make_inputs(PRESETS["tiny"], 3, "uniform", CPU, torch.float32, 1)
    assert not inputs.routing_map_TE.any(0).all()
    reference = compute_reference(inputs, backward=True)
    layer = MokLayer(inputs)
    assert check_forward(layer, reference).problem is None
    assert check_backward(layer, reference).problem is None

    class Wrong(MokLayer):
        def backward(self, output_TH):
            grads = super().backward(output_TH)
            idle = int(inputs.routing_map_TE.sum(0).argmin())
            grads.fc1[idle][0, 0] = 1e-20
            return grads

    problem = check_backward(Wrong(inputs), reference).problem
    assert re.search("gradient of fc1: expert . has relative error inf", problem)


def test_main_grads_of_the_check_start_at_zero():
    inputs = make_inputs(PRESETS["tiny"], 64, "uniform", CPU, torch.float32, 1)
    reference = compute_reference(inputs, backward=True)
    layer = MokLayer(inputs)
    for _ in range(2):
        assert check_backward(layer, reference).problem is None
    layer.backward(layer.forward())
    torch.testing.assert_close(layer.fc1[0].main_grad, 2 * reference.gradients.fc1[0].float())


def _arm(monkeypatch, name, build):
    monkeypatch.setitem(ARMS, name, dataclasses.replace(ARMS[name], build=build))


def test_failing_arms_are_rows_and_others_go_on(tmp_path, monkeypatch, capsys):
    class BackwardIsMissing(ComposedLayer):
        def backward(self, output_TH):
            raise NotImplementedError("no backward\nyet")

    def out_of_memory(inputs):
        raise torch.OutOfMemoryError("too large")

    _arm(monkeypatch, "torch_eager", BackwardIsMissing)
    _arm(monkeypatch, "torch_compiled", out_of_memory)
    status, _, rows = bench(
        tmp_path, "--arms", "mok,torch_eager,torch_compiled", "--direction", "forward,both"
    )
    assert status == 1
    assert rows["forward", "torch_eager"]["ms"] > 0
    assert rows["both", "torch_eager"]["failure"] == "NotImplementedError: no backward yet"
    assert rows["both", "torch_eager"]["ms"] is None
    assert rows["forward", "torch_compiled"]["failure"] == "OutOfMemoryError: too large"
    assert all(rows[d, "mok"]["failure"] is None for d in ("forward", "both"))
    assert "both, torch_eager: NotImplementedError" in capsys.readouterr().out


def test_wrong_arm_is_not_timed(tmp_path, monkeypatch):
    class Wrong(ComposedLayer):
        def forward(self):
            return super().forward() * 1.5

    _arm(monkeypatch, "torch_eager", lambda inputs: Wrong(inputs))
    status, _, rows = bench(tmp_path, "--arms", "torch_eager")
    row = rows["forward", "torch_eager"]
    assert status == 1
    assert row["error"] == pytest.approx(0.5, rel=0.01)
    assert row["ms"] is None
    assert row["failure"] == "output: relative error 5.0e-01, allowed is 1e-02"


def test_case_that_cannot_be_set_up(tmp_path, monkeypatch):
    def fail(inputs, backward):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(runner, "compute_reference", fail)
    status, tree, rows = bench(tmp_path, "--arms", "mok,megatron_te_alltoall")
    assert status == 1
    failure = "inputs and reference: OutOfMemoryError: too large"
    assert rows["forward", "mok"]["failure"] == failure
    assert rows["forward", "megatron_te_alltoall"]["failure"].startswith("unavailable")
    assert tree["dense_tflops"] is None


def test_cases_are_all_combinations(tmp_path):
    path = tmp_path / "bench.json"
    cases = ["--tokens", "16,32", "--routing", "uniform,zipf", "--direction", "both,forward"]
    main(["bench", *QUICK, "--json", str(path), "--arms", "mok", *cases])
    rows = json.loads(path.read_text())["rows"]
    assert [(r["tokens"], r["routing"], r["direction"]) for r in rows] == [
        (tokens, routing, direction)
        for tokens in (16, 32)
        for routing in ("uniform", "zipf")
        for direction in ("both", "forward")
    ]


def test_results_are_written_after_each_case(tmp_path, monkeypatch):
    case = runner._Run.case

    def only_one(self, preset, tokens, routing):
        if tokens == 32:
            raise KeyboardInterrupt
        case(self, preset, tokens, routing)

    monkeypatch.setattr(runner._Run, "case", only_one)
    status, _, rows = bench(tmp_path, "--arms", "mok", "--tokens", "16,32")
    assert status == 130
    assert rows["forward", "mok"]["tokens"] == 16


class _Clock:
    """A clock that tasks move on, in place of the real one."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("megatron_mok.bench.timing.time.perf_counter", lambda: self.now)

    def sleep(self, seconds):
        self.now += seconds


def test_blocks_are_shuffled_and_only_run_is_timed(monkeypatch):
    clock, calls = _Clock(monkeypatch), []

    def task(name):
        def run(_):
            calls.append(name)
            clock.sleep(0.001)

        return Task(name, run, prepare=lambda: clock.sleep(0.1))

    names = ["a", "b", "c"]
    options = TimingOptions(warmup_s=0, time_s=0, repeats=8, seed=1)
    samples = time_in_blocks([task(name) for name in names], options, CPU)
    # Per block: one launch, two to learn how long they take, three timed ones.
    blocks = calls[::6]
    assert calls == [name for name in blocks for _ in range(6)]
    orders = {tuple(blocks[i : i + 3]) for i in range(0, 24, 3)}
    assert all(sorted(order) == names for order in orders)
    assert len(orders) > 2
    assert all(samples[name].ms == pytest.approx([1.0] * 24) for name in names)


def test_blocks_last_as_long_as_asked(monkeypatch):
    clock, launches = _Clock(monkeypatch), []

    def run(_):
        launches.append(1)
        clock.sleep(0.002)

    options = TimingOptions(warmup_s=0.1, time_s=0.2, repeats=1, seed=1)
    samples = time_in_blocks([Task("sleep", run)], options, CPU)["sleep"]
    assert 100 <= len(samples.ms) <= 101
    assert 3 + 50 <= len(launches) - len(samples.ms) <= 3 + 51
    assert samples.ms == pytest.approx([2.0] * len(samples.ms))


def test_a_task_that_fails_is_left_out():
    calls = []

    def fail(_):
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("lost")

    options = TimingOptions(warmup_s=0, time_s=0, repeats=4, seed=1)
    samples = time_in_blocks([Task("bad", fail), Task("good", lambda _: None)], options, CPU)
    assert samples["bad"].failure == "RuntimeError: lost"
    assert len(calls) == 8
    assert samples["good"].failure is None
    assert len(samples["good"].ms) == 12


def test_dispatch_and_combine(tmp_path, capsys):
    status, _, rows = bench(
        tmp_path,
        *("--tokens", "100", "--direction", "dispatch,combine"),
        *("--arms", "mok,torch_eager,torch_compiled"),
    )
    assert status == 0
    # The compiled composition has no dispatch of its own.
    assert list(rows) == [(d, a) for d in ("dispatch", "combine") for a in ("mok", "torch_eager")]
    for row in rows.values():
        assert row["error"] < 1e-2
        assert row["tflops"] is row["fraction_of_dense"] is None
        assert row["gb_per_s"] == pytest.approx(3 * 100 * 128 * 2 / row["ms"] / 1e6)
    assert "GB/s" in capsys.readouterr().out


def test_a_wrong_combine_is_found(tmp_path, monkeypatch):
    combine = MokLayer.combine
    monkeypatch.setattr(MokLayer, "combine", lambda self, rows: combine(self, rows) * 1.5)
    status, _, rows = bench(tmp_path, "--arms", "mok", "--direction", "combine")
    assert status == 1
    assert "dispatch and combine: relative error" in rows["combine", "mok"]["failure"]
