"""The chart of a comparison: loss curves, their differences, and throughput."""

import textwrap
from pathlib import Path

from megatron_mok.charts import COLORS, INK, png_figure

from .config import CompareConfig
from .runner import ArmResult
from .summary import Row, loss_differences, why_functional


def write_chart(path: Path, config: CompareConfig, results: list[ArmResult], rows: list[Row]):
    """Draw the arms that ran to a PNG at `path`; draws nothing when none did."""
    good = [result for result in results if result.ok]
    if not good:
        return
    good = [result for result in good if not result.repeat]
    arms = [result for result in good if not result.yardstick]
    colors = {result.arm: COLORS[i % len(COLORS)] for i, result in enumerate(arms)}
    colors |= {result.arm: INK for result in good if result.yardstick}
    with png_figure(path, 11, 5.2) as figure:
        grid = figure.add_gridspec(2, 2, width_ratios=(2, 1), height_ratios=(2.2, 1))
        loss_axis = figure.add_subplot(grid[0, 0])
        _draw_losses(loss_axis, arms, colors)
        _draw_differences(figure.add_subplot(grid[1, 0], sharex=loss_axis), good, colors)
        timed = [row for row in rows if row.ok and not row.yardstick and not row.repeat]
        _draw_throughput(figure.add_subplot(grid[:, 1]), timed, colors, config)
        figure.suptitle(config.name, x=0.01, ha="left", fontweight="bold")


def _draw_losses(axis, results, colors) -> None:
    # Curves that agree lie on each other, so later ones are dashed and the first stays visible.
    for i, result in enumerate(results):
        losses = [step.loss for step in result.history.steps]
        axis.plot(
            range(1, len(losses) + 1),
            losses,
            color=colors[result.arm],
            linewidth=3.2 if i == 0 else 1.7,
            alpha=0.55 if i == 0 and len(results) > 1 else 1,
            linestyle="-" if i == 0 else (0, (4, 2 + i)),
            label=f"{result.arm}  {losses[-1]:.4f}",
        )
    axis.set_title("Training loss", loc="left")
    axis.set_ylabel("lm loss (nats per token)")
    axis.grid(axis="y")
    axis.legend(frameon=False, title="arm, final loss", alignment="left")
    axis.tick_params(labelbottom=False)


def _draw_differences(axis, results, colors) -> None:
    first, *others = results
    axis.set_title(f"Difference to {first.arm}", loc="left")
    axis.set_xlabel("step")
    axis.set_ylabel("|Δ loss|")
    largest = 0.0
    for result in others:
        absolute, _ = loss_differences(first, result)
        axis.plot(
            range(1, len(absolute) + 1),
            absolute,
            color=colors[result.arm],
            linewidth=0.8,
            linestyle=":" if result.yardstick else "-",
            marker="x" if result.yardstick else "o",
            markersize=3.5,
            label=result.arm,
        )
        largest = max(largest, *absolute)
    if largest > 0:
        axis.set_ylim(0, largest * 1.15)
        axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axis.yaxis.get_offset_text().set_size(8.5)
        axis.grid(axis="y")
        axis.legend(frameon=False, fontsize=8.5, loc="upper left")
    else:
        axis.set_yticks([0])
        text = "bitwise equal in every step" if others else "one arm only"
        axis.text(0.5, 0.6, text, transform=axis.transAxes, ha="center", color=INK)


def _draw_throughput(axis, rows, colors, config) -> None:
    names = [row.arm for row in rows]
    speeds = [row.tokens_per_s for row in rows]
    ends = [
        [s - s * row.step_ms / row.p90 for s, row in zip(speeds, rows, strict=True)],
        [s * row.step_ms / row.p10 - s for s, row in zip(speeds, rows, strict=True)],
    ]
    bars = axis.bar(
        names,
        speeds,
        width=0.6,
        color=[colors[name] for name in names],
        yerr=ends,
        error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 3},
    )
    for bar, speed in zip(bars, speeds, strict=True):
        middle = bar.get_x() + bar.get_width() / 2
        axis.annotate(
            f"{speed:,.0f}",
            (middle, 0),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            color="white",
            fontweight="bold",
        )
    axis.set_title("Tokens per second", loc="left")
    axis.set_ylim(0, max(s + e for s, e in zip(speeds, ends[1], strict=True)) * 1.1)
    axis.margins(x=max(0.05, 0.5 - 0.15 * len(names)))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(axis="y")
    axis.tick_params(axis="x", length=0)
    note = "bars: median, lines: p10 to p90"
    if reason := why_functional(config):
        note += f"\n{textwrap.fill(reason, 44)}"
    axis.set_xlabel(note, fontsize=8.5)
