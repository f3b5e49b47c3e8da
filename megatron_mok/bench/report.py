"""A benchmark's results for people and programs: a table per preset, and a results file."""

import dataclasses
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_mok import results

from .presets import PRESETS
from .runner import Report, Row


def print_report(console: Console, report: Report) -> None:
    """Print a table per preset, the dense rate, and why arms have no figures."""
    for _, rows in groupby(report.rows, key=lambda row: row.preset):
        rows = list(rows)
        console.print(table(rows))
        shares = [100 * row.schedule_ms / row.ms for row in rows if row.schedule_ms]
        if shares:
            share = f"{min(shares):.1f} to {max(shares):.1f} %"
            console.print(f"schedule of mok: {share} of a forward", soft_wrap=True)
        for case, group in groupby(rows, key=_case):
            kept = [f"{r.arm} {_kib(r.kept_bytes / r.tokens)}" for r in group if r.kept_bytes]
            if kept:
                line = f"KiB a token kept for backward, {case}: {', '.join(kept)}"
                console.print(line, soft_wrap=True)
        console.print()
    if report.dense is not None:
        console.print(f"dense: {dense_line(report)}", soft_wrap=True)
    if report.device is None:
        console.print("Times are of the CPU: they say nothing about speed on GPUs.")
    for arm, reason in report.unavailable.items():
        console.print(Text(f"{arm} cannot run here: {reason}", style="yellow"), soft_wrap=True)
    for row in report.rows:
        if row.failure is not None and row.arm not in report.unavailable:
            case = f"{row.preset}, {_case(row)}, {row.arm}"
            console.print(Text(f"{case}: {row.failure}", style="red"), soft_wrap=True)


def table(rows: list[Row]) -> Table:
    """The table of one preset; it fits 80 columns."""
    grid = Table(
        title=_title(rows[0]),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        show_edge=False,
    )
    grid.add_column("tokens, routing,\ndirection", no_wrap=True)
    for heading in ("ms", "p10-p90", "TFLOP/s", "of dense", "error"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for case, group in groupby(rows, key=_case):
        grid.add_row(Text(case, style="bold"))
        for row in group:
            grid.add_row(Text("  " + row.arm), *_cells(row))
    grid.caption = "error: largest relative error of the checked results"
    grid.caption_justify = "left"
    return grid


def dense_line(report: Report) -> str:
    """What the fractions are of."""
    dense, row = report.dense, report.rows[0]
    return (
        f"{dense.size}^3 {row.dtype} torch.matmul on {report.device or 'the CPU'}, in the same "
        f"blocks: {_rate(dense.tflops)} TFLOP/s (p10 {_rate(dense.p10)}, p90 {_rate(dense.p90)})"
    )


def write_json(path: Path, command: str, report: Report) -> None:
    """Write the results file: the machine, and a row per case and arm."""
    on_gpu = report.device is not None
    tree = results.header(
        command,
        gpu=report.device,
        n_gpus=1 if on_gpu else 0,
        ranks=1,
        versions=results.installed_versions(),
        dense_tflops=report.dense.tflops if report.dense else None,
    )
    tree["rows"] = [dataclasses.asdict(row) for row in report.rows]
    results.write(path, tree)


def _title(row: Row) -> Text:
    preset = PRESETS[row.preset]
    experts = f"{row.experts} experts"
    if preset.ep_size > 1:
        experts = f"{row.experts} of {preset.model_experts} experts (EP {preset.ep_size})"
    sizes = f"  H {row.hidden}, F {row.ffn}, {experts}, top-{row.topk}, {row.dtype}"
    return Text(row.preset, style="bold").append(sizes, style="not bold dim")


def _case(row: Row) -> str:
    return f"{row.tokens} {row.routing} {row.direction}"


def _cells(row: Row) -> Iterator[str | Text]:
    if row.ms is None:
        reason = "unavailable" if row.failure.startswith("unavailable") else "failed"
        yield Text(reason, style="yellow" if reason == "unavailable" else "bold red")
        yield from ("", "", "")
    else:
        yield _ms(row.ms)
        yield f"{_ms(row.p10)}-{_ms(row.p90)}"
        yield f"{row.gb_per_s:.0f} GB/s" if row.tflops is None else _rate(row.tflops)
        yield "-" if row.fraction_of_dense is None else f"{row.fraction_of_dense:.3f}"
    yield "" if row.error is None else f"{row.error:.1e}"


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _kib(value: float) -> str:
    return f"{value / 1024:.1f}"


def _rate(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
