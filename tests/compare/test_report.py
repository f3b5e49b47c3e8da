import csv
import dataclasses
import json
import struct

import numpy as np
import pytest
from rich.console import Console

from megatron_mok.compare.config import from_dict
from megatron_mok.compare.history import History, Step, read_history
from megatron_mok.compare.plot import write_chart
from megatron_mok.compare.record import record_path
from megatron_mok.compare.report import print_report, write_csv, write_json
from megatron_mok.compare.runner import ArmResult, _difference, _other_course
from megatron_mok.compare.summary import summarize

from .test_config import changed

SECONDS = [9.0, 9.0, 9.0, 0.1, 0.2, 0.3]  # three that the timing skips
LOSSES = [5.0, 4.0, 3.0, 2.5, 2.0, 1.5]


def history(
    losses=LOSSES,
    scale=1.0,
    weights="w",
    tokens="t",
    peaks=(2**30, 2**31),
    grad_norm=1.0,
    end_weights="e",
):
    steps = tuple(
        Step(s * scale, 0.25, loss, {"lm loss": loss}, grad_norm, (tokens, tokens))
        for s, loss in zip(SECONDS, losses, strict=True)
    )
    start = {"weights": {"a": weights}, "flops": 4e12, "device": "H", "torch": "2", "te": None}
    end = tuple({"peak_bytes": p, "weights": {"a": end_weights}} for p in peaks)
    return History((start, start), steps, (), end, None)


def config(**changes):
    tree = changed("arms", ["alltoall", "mok"])
    tree["train"]["steps"] = len(LOSSES)
    return from_dict({**tree, **changes}, name="canned")


RESULTS = [
    ArmResult("alltoall", history()),
    ArmResult("mok", history([5.0, 4.0, 3.0, 2.5, 2.25, 1.5], scale=0.5)),
    ArmResult("allgather", None, "boom", ("last words",)),
    ArmResult("deepep", None, unavailable="no deep_ep"),
]
YARDSTICK = ArmResult("alltoall +1 ulp", history([*LOSSES[:-1], 1.5625]), yardstick=True)


def test_rows():
    first, mok, failed, missing = summarize(config(), RESULTS)
    assert first.step_ms == pytest.approx(200)
    assert (first.p10, first.p90) == (pytest.approx(120), pytest.approx(280))
    assert first.tokens_per_s == pytest.approx(8 * 64 / 0.2)
    assert first.peak_gib == 2.0
    assert (first.final_loss, first.max_loss_diff, first.speedup) == (1.5, 0.0, 1.0)
    assert mok.max_loss_diff == 0.25
    assert mok.max_rel_loss_diff == 0.125
    assert mok.speedup == pytest.approx(2.0)
    assert mok.functional
    assert mok.tflops_per_gpu is None
    assert (failed.failure, failed.steps, failed.step_ms) == ("boom", 0, None)
    assert (missing.failure, missing.unavailable, missing.steps) == (None, "no deep_ep", 0)
    assert [row.ok for row in (first, mok, failed, missing)] == [True, True, False, False]


def test_gpu_rows_have_flops_and_are_not_functional():
    row = summarize(config(device="cuda"), RESULTS)[0]
    assert not row.functional
    assert row.tflops_per_gpu == pytest.approx(4e12 / 0.2 / 2 / 1e12)


def test_deterministic_rows_have_no_speed_and_say_that_repeats_are_equal():
    cfg = config(device="cuda", deterministic=True)
    results = [*RESULTS[:2], ArmResult("mok again", RESULTS[1].history, repeat=True)]
    rows = summarize(cfg, results)
    assert [(row.speedup, row.functional) for row in rows] == [(None, True)] * 3
    console = Console(width=80, record=True)
    print_report(console, cfg, results, rows)
    text = console.export_text()
    assert "equal" in text
    assert "say nothing about speed" in text
    assert "x\n" not in text  # no ratio
    assert "…" not in text


def test_ranks_that_share_a_gpu_have_no_speed():
    tree = changed("parallel.ranks_per_gpu", 2) | {"device": "cuda", "arms": ["alltoall", "mok"]}
    tree["train"]["steps"] = len(LOSSES)
    cfg = from_dict(tree, name="shared")
    rows = summarize(cfg, RESULTS)
    assert (rows[0].speedup, rows[1].speedup, rows[1].functional) == (None, None, True)
    console = Console(width=80, record=True)
    print_report(console, cfg, RESULTS, rows)
    assert "2 cuda ranks (2 per GPU)" in console.export_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        (
            {"losses": [*LOSSES[:2], 3.0000001, *LOSSES[3:]]},
            "losses {'lm loss': 3.0000001} in step 3",
        ),
        ({"grad_norm": 1.5}, "gradient norm 1.5 in step 1, before 1.0"),
        ({"end_weights": "v"}, "other weights after the last step on rank 0"),
    ],
)
def test_repeats_must_be_bitwise_equal(change, message):
    found = _other_course(history(), history(**change))
    assert (found is None) if message is None else (message in found)


def test_first_arm_that_ran_is_the_reference():
    results = [ArmResult("alltoall", None, "boom"), RESULTS[1]]
    row = summarize(config(), results)[1]
    assert (row.max_loss_diff, row.speedup) == (0.0, 1.0)


def test_table_fits_80_columns_and_says_why_arms_failed():
    console = Console(width=80, record=True)
    cfg = config()
    results = [RESULTS[0], YARDSTICK, *RESULTS[1:], ArmResult("mok_dispatch", history())]
    print_report(console, cfg, results, summarize(cfg, results))
    text = console.export_text()
    assert "…" not in text
    for part in (
        "200.0",
        "25%",
        "2,560",
        "1.500000",
        "2.5e-01",
        "2.00x",
        "allgather: boom",
        "last words",
        "deepep: not available: no deep_ep",
        "+1 ulp",
        "6.2e-02",
    ):
        assert part in text


def test_json_keeps_every_digit(tmp_path):
    loss = struct.unpack("<f", bytes.fromhex("cdcccc3f"))[0]  # a float32 that is not short
    results = [ArmResult("alltoall", history([*LOSSES[:-1], loss]))]
    path = tmp_path / "results.json"
    write_json(path, "megatron-mok compare x", config(), results, summarize(config(), results))
    tree = json.loads(path.read_text())
    assert tree["steps"]["alltoall"]["losses"]["lm loss"][-1] == loss
    assert tree["rows"][0]["arm"] == "alltoall"
    assert {"gpu", "n_gpus", "ranks", "date", "commit", "torch", "megatron", "te"} <= tree.keys()


def test_csv_has_a_line_per_arm(tmp_path):
    rows = summarize(config(), [RESULTS[0], YARDSTICK, *RESULTS[1:]])
    write_csv(tmp_path / "results.csv", rows)
    with (tmp_path / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["arm"] for line in lines] == [row.arm for row in rows]
    assert [float(line["step_ms"] or "nan") for line in lines[:3]] == [r.step_ms for r in rows[:3]]
    assert lines[-1]["unavailable"] == "no deep_ep"
    assert lines[-1]["step_ms"] == ""
    assert [line["yardstick"] for line in lines[:2]] == ["False", "True"]


def test_chart(tmp_path):
    path = tmp_path / "report.png"
    results = [RESULTS[0], YARDSTICK, *RESULTS[1:]]
    write_chart(path, config(), results, summarize(config(), results))
    import matplotlib.image

    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 500
    assert np.ptp(pixels[..., :3]) > 0.5
    write_chart(tmp_path / "none.png", config(), RESULTS[2:], summarize(config(), RESULTS[2:]))
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"weights": "other"}, "1 of 1 weights at step 0 differ on rank 0, first a"),
        ({"tokens": "other"}, "other token ids in step 1"),
    ],
)
def test_arms_must_start_alike(change, message):
    assert _difference(history(), history(**change)) == message


def test_yardstick_must_start_with_other_experts_and_nothing_else():
    def start(**weights):
        run = history()
        return dataclasses.replace(run, start=tuple({**s, "weights": weights} for s in run.start))

    name = "0.decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
    first = start(a="w", **{name: "w"})
    moved, unmoved = start(a="w", **{name: "v"}), start(a="w", **{name: "w"})
    assert _difference(first, moved, experts_moved=True) is None
    assert "did not move on rank 0" in _difference(first, unmoved, experts_moved=True)
    wrong = start(a="v", **{name: "v"})
    assert "1 of 2 weights at step 0 differ" in _difference(first, wrong, experts_moved=True)
    assert name in _difference(first, moved)


def test_history_takes_the_slowest_rank_and_whole_lines(tmp_path):
    def step(seconds, losses):
        return {
            "event": "step",
            "time": 0,
            "seconds": seconds,
            "moe_seconds": seconds / 4,
            "losses": losses,
            "grad_norm": 2.0,
            "tokens": "t",
        }

    first = [step(1.0, {}), step(2.0, {})]
    last = [step(3.0, {"lm loss": 5.0}), step(1.5, {"lm loss": 4.0})]
    error = {"event": "error", "time": 3, "type": "ValueError", "message": "m", "traceback": ""}
    for rank, events in enumerate([first, [*last, error]]):
        lines = "".join(json.dumps(e) + "\n" for e in events)
        record_path(tmp_path, rank).write_text(lines + '{"event": "st')
    read = read_history(tmp_path, 2)
    assert [s.seconds for s in read.steps] == [3.0, 2.0]
    assert [s.loss for s in read.steps] == [5.0, 4.0]
    assert [s.moe_share for s in read.steps] == [0.25, 0.25]
    assert read.error["message"] == "m"
    assert read.peak_bytes is None
