"""An unmodified training script through the launcher, on two CPU ranks at EP 2."""

import gzip
import json
import re

import pytest

from tests.megatron.assertions import FP32
from tests.megatron.script_runs import SAVE_EVERY, STEPS, assert_losses_agree, run

DIE_AT = 5


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    status, losses, log = run(folder, "mok", "mok")
    assert status == 0, log[-3000:]
    assert len(losses) == 2 * STEPS
    return losses, log


def test_says_what_runs(uninterrupted):
    lines = [line for line in uninterrupted[1].splitlines() if line.startswith("megatron_mok: ")]
    assert len(lines) == 1
    assert "fused MoE layers, engine host, expert-parallel group of 2" in lines[0]


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    status, losses, log = run(tmp_path_factory.mktemp("alltoall"), "alltoall", "alltoall")
    assert status == 0, log[-3000:]
    assert "megatron_mok: " not in log
    return losses


def test_losses_are_those_of_alltoall(uninterrupted, native):
    assert_losses_agree(uninterrupted[0], native, FP32)


def test_mode_dispatch(native, tmp_path):
    status, losses, log = run(tmp_path, "dispatch", "mok", "--mok-mode=dispatch")
    assert status == 0, log[-3000:]
    said = "megatron_mok: dispatch and combine around Megatron's experts, engine host"
    assert log.count(said) == 1
    assert_losses_agree(losses, native, FP32)


def test_resumes_bitwise_after_kill_9(uninterrupted, tmp_path):
    """Killed between two completed saves, and started again with the same command."""
    checkpoint = [f"--save={tmp_path / 'checkpoint'}", f"--load={tmp_path / 'checkpoint'}"]
    status, killed, log = run(tmp_path, "killed", "mok", *checkpoint, die_at=DIE_AT)
    assert status != 0
    assert {step for _, step in killed} == set(range(1, DIE_AT + 1)), log[-3000:]
    saved = (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").read_text()
    assert int(saved) == SAVE_EVERY

    status, resumed, log = run(tmp_path, "resumed", "mok", *checkpoint)
    assert status == 0, log[-3000:]
    assert {step for _, step in resumed} == set(range(SAVE_EVERY + 1, STEPS + 1))
    for key, losses in resumed.items():
        assert losses == uninterrupted[0][key], key


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """(losses, log, folder) of a run with everything on that shows what MoK does."""
    folder = tmp_path_factory.mktemp("observed")
    status, losses, log = run(
        folder,
        "mok",
        "mok",
        *("--mok-log-statistics", "--log-interval=3", "--moe-per-layer-logging"),
        *("--profile", "--use-pytorch-profiler", "--profile-step-start=3", "--profile-step-end=4"),
        f"--tensorboard-dir={folder / 'tensorboard'}",
    )
    assert status == 0, log[-3000:]
    return losses, log, folder


def test_statistics_are_in_the_log(uninterrupted, observed):
    losses, log, _ = observed
    assert losses == uninterrupted[0]
    means = re.findall(r"mok_tokens_per_expert_mean: ([\d.]+) \|", log)
    # Steps 3 and 6; two ranks with two sequences of 32 tokens each, top 2 of 4 experts.
    assert means == ["64.00", "64.00"]
    assert len(re.findall(r"mok_padding_percent: 50\.00 \|", log)) == 2
    assert "| mok_" not in uninterrupted[1]


def test_statistics_are_in_tensorboard(observed):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(observed[2] / "tensorboard"))
    events.Reload()
    for name in ("mok_padding_percent", "moe/mok_padding_percent_layer_1"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(3, 50.0), (6, 50.0)]


def test_ranges_are_in_the_trace(observed):
    _, _, folder = observed
    for rank in range(2):
        with gzip.open(folder / "torch_profile" / f"rank-{rank}.json.gz", "rt") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        for layer in range(2):
            for direction in ("forward", "backward"):
                # One step of two micro batches.
                assert names.count(f"mok.fused.{direction}.layer_{layer}") == 2
