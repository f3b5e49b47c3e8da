"""A comparison's results for people and programs: a table, results.json and results.csv."""

import csv
import dataclasses
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_mok import results as results_file

from . import probe
from .config import CompareConfig
from .runner import ArmResult
from .summary import Row, why_functional


def table(config: CompareConfig, rows: list[Row]) -> Table:
    """The table that `compare` prints; it fits 80 columns."""
    first = next((row.arm for row in rows if row.ok), "the first")
    title = Text(config.name, style="bold").append(f"  {_setting(config)}", style="not bold dim")
    grid = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        show_edge=False,
    )
    grid.add_column("arm", style="bold", no_wrap=True)
    for heading in (
        "step ms\n(p10-p90)",
        "in\nMoE",
        "tokens/s",
        "peak\nGiB",
        "final\nloss",
        "max loss\ndiff (rel.)",
        "speed",
    ):
        grid.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.failure is not None:
            grid.add_row(_name(row), Text("failed", style="bold red"))
            continue
        if row.unavailable is not None:
            grid.add_row(_name(row), Text("not available", style="dim"))
            continue
        difference = f"{row.max_loss_diff:.1e}\n({row.max_rel_loss_diff:.1e})"
        if row.repeat:
            grid.add_row(_name(row), "", "", "", "", f"{row.final_loss:.6f}", "bitwise\nequal", "")
            continue
        if row.yardstick:
            grid.add_row(_name(row), "", "", "", "", f"{row.final_loss:.6f}", difference, "")
            continue
        grid.add_row(
            row.arm,
            f"{_ms(row.step_ms)}\n({_ms(row.p10)}-{_ms(row.p90)})",
            f"{row.moe_share:.0%}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.peak_gib:.2f}",
            f"{row.final_loss:.6f}",
            "-" if row.arm == first else difference,
            "" if row.speedup is None else f"{row.speedup:.2f}x",
        )
    grid.caption = f"loss differences over all steps, and speed, against {first}"
    grid.caption_justify = "left"
    return grid


def _name(row: Row) -> str:
    return row.arm.replace(" ", "\n", 1)


def print_report(console: Console, config: CompareConfig, results, rows: list[Row]) -> None:
    """Print the table, then why arms are missing or failed and what the times do not say."""
    console.print(table(config, rows))
    if any(row.yardstick and row.ok for row in rows):
        console.print(
            "+1 ulp: the first arm again, its expert weights moved by one last place at the start. "
            "Loss differences of this size are rounding."
        )
    if any(row.repeat and row.ok for row in rows):
        console.print(
            "again: the arm a second time. Losses and gradient norms of all steps, and the weights "
            "after the last one, are bitwise equal."
        )
    if reason := why_functional(config):
        console.print(reason)
    if config.device == "cuda" and (reason := probe.no_transformer_engine()):
        console.print(Text(f"Megatron's local modules: {reason}", style="dim"))
    for result in results:
        if result.unavailable is not None:
            console.print(Text(f"{result.arm}: not available: {result.unavailable}", style="dim"))
        if result.failure is not None:
            console.print(Text(f"{result.arm}: {result.failure}", style="red"))
            for line in result.log_tail:
                console.print(Text("  | " + line, style="dim"), soft_wrap=True)


def write_json(
    path: Path, command: str, config: CompareConfig, results: list[ArmResult], rows: list[Row]
) -> None:
    """Write results.json: the machine, a row per arm, and each arm's steps at full precision."""
    ran = next((r.history for r in results if r.ok), None)
    start = ran.start[0] if ran else {}
    on_gpu = config.device == "cuda"
    tree = results_file.header(
        command,
        gpu=start.get("device") if on_gpu else None,
        n_gpus=config.parallel.gpus if on_gpu else 0,
        ranks=config.parallel.ranks,
        versions=start,
        dense_tflops=None,
    )
    tree["rows"] = [dataclasses.asdict(row) for row in rows]
    tree["config"] = dataclasses.asdict(config)
    tree["steps"] = {r.arm: _steps(r) for r in results if r.history is not None}
    results_file.write(path, tree)


def write_csv(path: Path, rows: list[Row]) -> None:
    """Write results.csv: a line per arm with the fields of `Row`; empty where there is no value."""
    names = [field.name for field in dataclasses.fields(Row)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _steps(result: ArmResult) -> dict:
    steps = result.history.steps
    names = steps[0].losses if steps else ()
    return {
        "seconds": [s.seconds for s in steps],
        "moe_share": [s.moe_share for s in steps],
        "grad_norm": [s.grad_norm for s in steps],
        "losses": {name: [s.losses[name] for s in steps] for name in names},
        "evaluations": list(result.history.evaluations),
    }


def _setting(config: CompareConfig) -> str:
    p = config.parallel
    ranks = f"{p.ranks} {config.device} ranks"
    if p.ranks_per_gpu > 1:
        ranks += f" ({p.ranks_per_gpu} per GPU)"
    parts = [ranks, f"EP {p.expert_model_parallel_size}"]
    for name, size in (
        ("TP", p.tensor_model_parallel_size),
        ("PP", p.pipeline_model_parallel_size),
        ("CP", p.context_parallel_size),
    ):
        if size > 1:
            parts.append(f"{name} {size}")
    parts += [config.precision, f"{config.train.steps} steps of {config.tokens_per_step:,} tokens"]
    return ", ".join(parts)
