"""Table, results file and chart of canned rows."""

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console

from megatron_mok.bench.plot import write_chart
from megatron_mok.bench.presets import PRESETS
from megatron_mok.bench.report import print_report, write_json
from megatron_mok.bench.runner import DenseRate, Report, Row
from megatron_mok.results import command_line, commit

REASON = "Transformer Engine cannot be imported: ModuleNotFoundError"


def row(preset, arm, **changes):
    p = PRESETS[preset]
    fields = {
        "preset": preset,
        "tokens": p.tokens,
        "hidden": p.hidden,
        "ffn": p.ffn,
        "experts": p.experts,
        "topk": p.topk,
        "routing": "uniform",
        "dtype": "bf16",
        "direction": "backward",
    }
    return Row(**fields, arm=arm, **changes)


def timed(preset, arm, ms, direction="backward"):
    changes = {"ms": ms, "p10": 0.98 * ms, "p90": 1.03 * ms, "error": 3.9e-3}
    figures = {"tflops": 5000 / ms, "fraction_of_dense": 5000 / ms / 680}
    return dataclasses.replace(row(preset, arm), direction=direction, **changes, **figures)


def report():
    rows = (
        timed("deepseek_v3", "mok", 8.5),
        timed("deepseek_v3", "torch_compiled", 110.8),
        row("deepseek_v3", "megatron_te_alltoall", failure=f"unavailable: {REASON}"),
        timed("qwen3_30b", "mok", 2.25),
        row("qwen3_30b", "torch_compiled", error=0.5, failure="output: relative error 5.0e-01"),
        row("qwen3_30b", "megatron_te_alltoall", failure=f"unavailable: {REASON}"),
    )
    dense = DenseRate(8192, 680.0, 670.0, 690.0)
    return Report("NVIDIA H200", dense, rows, {"megatron_te_alltoall": REASON})


def test_table_fits_80_columns_and_says_why_arms_have_no_figures():
    console = Console(width=80, record=True)
    print_report(console, report())
    text = console.export_text()
    assert "…" not in text
    for part in (
        "deepseek_v3  H 7168, F 2048, 32 of 256 experts (EP 8), top-8, bf16",
        "qwen3_30b  H 2048, F 768, 128 experts, top-8, bf16",
        "16384 uniform backward",
        "8.500",
        "8.330-8.755",
        "588.2",
        "0.865",
        "3.9e-03",
        "680.0 TFLOP/s (p10 670.0, p90 690.0)",
        f"megatron_te_alltoall cannot run here: {REASON}",
        "qwen3_30b, 16384 uniform backward, torch_compiled: output: relative error 5.0e-01",
    ):
        assert part in text


def test_forwards_say_what_they_keep():
    console = Console(width=80, record=True)
    tokens = PRESETS["deepseek_v3"].tokens
    rows = tuple(
        dataclasses.replace(
            timed("deepseek_v3", arm, 8.5, "forward"), kept_bytes=tokens * 1024 * kib
        )
        for arm, kib in (("mok", 70), ("torch_eager", 210))
    )
    print_report(console, dataclasses.replace(report(), rows=rows))
    line = "KiB a token kept for backward, 8192 uniform forward: mok 70.0, torch_eager 210.0"
    assert line in console.export_text().replace("\n", " ")


def test_only_arms_that_could_run_fail():
    assert report().failed
    rows = tuple(r for r in report().rows if not (r.failure or "").startswith("output"))
    assert not dataclasses.replace(report(), rows=rows).failed


def test_results_file(tmp_path):
    path = tmp_path / "bench.json"
    write_json(path, "megatron-mok bench", report())
    tree = json.loads(path.read_text())
    assert list(tree) == [
        "command",
        "gpu",
        "n_gpus",
        "ranks",
        "date",
        "commit",
        "torch",
        "megatron",
        "te",
        "dense_tflops",
        "rows",
    ]
    assert (tree["gpu"], tree["n_gpus"], tree["ranks"]) == ("NVIDIA H200", 1, 1)
    assert tree["dense_tflops"] == 680.0
    names = (
        "preset tokens hidden ffn experts topk routing dtype direction arm "
        "ms p10 p90 tflops gb_per_s schedule_ms kept_bytes fraction_of_dense error failure"
    )
    assert list(tree["rows"][0]) == names.split()
    assert tree["rows"][0]["ms"] == 8.5
    assert tree["rows"][2]["ms"] is None
    assert tree["rows"][2]["failure"] == f"unavailable: {REASON}"


def test_chart(tmp_path):
    import matplotlib.image

    path = tmp_path / "bench.png"
    assert write_chart(path, report())
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 400
    assert np.ptp(pixels[..., :3]) > 0.5


def test_no_chart_without_times(tmp_path):
    rows = tuple(r for r in report().rows if r.ms is None)
    assert not write_chart(tmp_path / "none.png", dataclasses.replace(report(), rows=rows))
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("ms", [0.0123, 12.3, 1234.5])
def test_times_of_any_size_fit(ms):
    console = Console(width=80, record=True)
    rows = tuple(timed("deepseek_v3", arm, ms) for arm in ("mok", "megatron_te_alltoall"))
    print_report(console, dataclasses.replace(report(), rows=rows))
    assert "…" not in console.export_text()


def test_commit_of_a_source_without_history(monkeypatch):
    monkeypatch.setenv("MOK_COMMIT", "abc123")
    assert commit() == "abc123"
    monkeypatch.setenv("MOK_COMMIT", "")
    assert commit() != ""


def test_recorded_command_names_no_folders_of_the_machine(monkeypatch):
    words = ["megatron-mok", "bench", "--json", "/home/someone/my results/bench.json", "-x", "a/b"]
    monkeypatch.setattr("sys.argv", words)
    assert command_line() == "megatron-mok bench --json bench.json -x a/b"
