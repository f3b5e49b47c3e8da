"""One real comparison on two CPU ranks, from the command line to the files that it writes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatron_mok.cli.main import main
from megatron_mok.compare.history import read_history

STEPS = 12

CONFIG = {
    "device": "cpu",
    "precision": "fp32",
    "seed": 5,
    "arms": ["alltoall"],
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 2,
        "num_query_groups": 1,
        "seq_length": 64,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 64,
        "moe_layer_freq": "([0]*1+[1]*1)",
    },
    "parallel": {"ranks": 2, "expert_model_parallel_size": 2},
    "data": {"max_bytes": 200_000},
    "train": {
        "steps": STEPS,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "lr": 1e-2,
        "lr_warmup_steps": 1,
    },
}


def write_config(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """(exit status, output folder) of a run of arms of which one cannot run here."""
    folder = tmp_path_factory.mktemp("compare")
    patch = pytest.MonkeyPatch()
    patch.setenv("MEGATRON_MOK_CACHE", str(folder / "cache"))
    config = write_config(folder)
    status = main(
        ["compare", str(config), "--out", str(folder), "--arms", "alltoall,deepep,mok,mok_dispatch"]
    )
    patch.undo()
    return status, folder


@pytest.fixture(scope="module")
def results(comparison):
    return json.loads((comparison[1] / "results.json").read_text())


def test_all_arms_run(comparison, results):
    status, folder = comparison
    assert status == 0, [row["failure"] for row in results["rows"]]
    assert [row["arm"] for row in results["rows"]] == [
        "alltoall",
        "alltoall +1 ulp",
        "deepep",
        "mok",
        "mok_dispatch",
    ]
    assert len((folder / "results.csv").read_text().splitlines()) == 6
    assert (folder / "report.png").stat().st_size > 10_000
    assert "iteration        1/" in (folder / "alltoall" / "megatron.log").read_text()
    assert not list(folder.rglob("checkpoint"))  # the step-0 weights are not left behind


def test_loss_falls_on_text(results):
    losses = results["steps"]["alltoall"]["losses"]["lm loss"]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(5.5, abs=0.25)  # ln 256
    assert losses[-1] < losses[0] - 1.2


def test_arm_that_cannot_run_says_why_and_stops_nothing(results):
    row = results["rows"][2]
    assert row["unavailable"] == "needs GPUs (device: cuda)"
    assert row["failure"] is None
    assert "deepep" not in results["steps"]


def test_time_in_moe_layers_is_a_part_of_the_step(results):
    for row in results["rows"]:
        if row["unavailable"] is None:
            assert 0.05 < row["moe_share"] < 0.95


def test_replicas_are_equal_at_start_and_end(comparison):
    # The workers check it; look that they did, and on parameters that have replicas.
    for arm in ("alltoall", "mok", "mok_dispatch"):
        history = read_history(comparison[1] / arm, 2)
        for a, b in ((history.start[0], history.start[1]), (history.end[0], history.end[1])):
            shared = [name for name in a["weights"] if ".experts." not in name]
            experts = [name for name in a["weights"] if ".experts." in name]
            assert len(shared) > 5
            assert all(a["weights"][name] == b["weights"][name] for name in shared)
            # Expert parallelism 2: same names, other experts.
            assert all(a["weights"][name] != b["weights"][name] for name in experts)
            assert experts


def test_arms_agree(results):
    first, _, _, *both = results["rows"]
    for mok in both:
        # FP32 sums in another order: the largest of 12 steps was 1e-6.
        assert 0 <= mok["max_loss_diff"] < 2e-5
        assert mok["final_loss"] == pytest.approx(first["final_loss"], abs=2e-5)


def test_arms_run_in_their_modes(comparison):
    said = [(comparison[1] / arm / "megatron.log").read_text() for arm in ("mok", "mok_dispatch")]
    assert "megatron_mok: fused MoE layers" in said[0]
    assert "megatron_mok: dispatch and combine around Megatron's experts" in said[1]


def test_one_last_place_in_the_experts_is_felt(results):
    _, yardstick, *_ = results["rows"]
    assert yardstick["yardstick"]
    assert 0 < yardstick["max_loss_diff"] < 2e-5


def test_deterministic_comparison(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_MOK_CACHE", str(tmp_path / "cache"))
    arguments = ["compare", str(write_config(tmp_path)), "--arms", "mok", "--steps", "4"]
    arguments += ["--deterministic", "--no-yardstick", "--out", str(tmp_path)]
    assert main(arguments) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["arm"], row["repeat"]) for row in rows] == [("mok", False), ("mok again", True)]
    for folder in ("mok", "mok_again"):
        log = (tmp_path / folder / "megatron.log").read_text()
        assert re.search(r"deterministic_mode \.+ True", log)


@pytest.mark.parametrize("name", ["tiny_deepseek_v3", "tiny_glm", "tiny_qwen3_moe"])
def test_shipped_configs_train(name, tmp_path):
    path = Path(__file__).parents[2] / "configs" / f"{name}.yaml"
    arguments = ["compare", str(path), "--steps", "6", "--no-yardstick", "--out", str(tmp_path)]
    assert main(arguments) == 0
    alltoall, mok = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert alltoall["final_loss"] < 5.5  # ln 256 is 5.55, where they start
    assert mok["max_loss_diff"] < 2e-5


def test_required_arm_that_cannot_run_is_an_error(tmp_path, capsys):
    path = write_config(tmp_path)
    arguments = ["compare", str(path), "--arms", "alltoall,deepep", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--require", "deepep"]) == 1
    assert "deepep: needs GPUs (device: cuda)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--require", "mok"]) == 2
    assert "--require: 'mok' is not among the arms (alltoall, deepep)" in capsys.readouterr().err
    assert main(["compare", str(path), "--arms", "deepep", "--out", str(tmp_path / "out")]) == 1
    assert "no arm can run here" in capsys.readouterr().err


def test_failing_arm_is_a_row_and_an_exit_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEGATRON_MOK_CACHE", str(tmp_path / "cache"))
    config = yaml.safe_load(write_config(tmp_path).read_text())
    config["megatron_args"] = ["--no-such-flag"]
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["compare", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "--no-such-flag" in capsys.readouterr().err


def test_wrong_config_is_exit_status_2(tmp_path, capsys):
    path = write_config(tmp_path)
    assert main(["compare", str(path), "--arms", "alltoall,nothing"]) == 2
    assert "arms: 'nothing' is not known" in capsys.readouterr().err


def test_interrupt_ends_the_children(tmp_path):
    environment = {**os.environ, "MEGATRON_MOK_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "megatron_mok", "compare", str(write_config(tmp_path))]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], env=environment, stdout=subprocess.DEVNULL
    ) as process:
        job = tmp_path / "out" / "step0" / "job.json"
        deadline = time.monotonic() + 60
        while not job.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=40) == 130
    assert not _processes_with(str(job))


def _processes_with(text: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it ended
            continue
        if text in command:
            found.append(command)
    return found
