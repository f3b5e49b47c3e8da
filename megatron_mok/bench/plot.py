"""The chart of a benchmark: fraction of the dense rate, per case and arm."""

from pathlib import Path

from megatron_mok.charts import COLORS, INK, png_figure

from .report import dense_line
from .runner import Report, Row

_BAR_INCHES = 0.42


def write_chart(path: Path, report: Report) -> bool:
    """Draw the report to a PNG at `path`; draws nothing and returns False when nothing was timed.

    A panel per direction and routing; in it a group of bars per preset and number of tokens.
    """
    from matplotlib.patches import Patch

    arms = list(dict.fromkeys(row.arm for row in report.rows))
    panels = _panels(report)
    if not panels:
        return False
    colors = {arm: COLORS[(i + 1) % len(COLORS)] for i, arm in enumerate(arms)}
    groups = max(len(groups) for groups in panels.values())
    width = max(7.8, 1.2 + _BAR_INCHES * groups * (len(arms) + 1))
    with png_figure(path, width, 1.2 + 2.6 * len(panels)) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axis, (title, cases) in zip(axes, panels.items(), strict=True):
            _draw(axis, title, cases, colors)
        patches = [Patch(color=color, label=arm) for arm, color in colors.items()]
        figure.legend(handles=patches, frameon=False, ncols=2, loc="outside upper left")
        note = f"dense: {dense_line(report)}\nbars: median, lines: p10 to p90"
        if report.device is None:
            note += "; CPU times say nothing about speed on GPUs"
        axes[-1].set_xlabel(note, fontsize=8.5, loc="left")
    return True


def _panels(report: Report) -> dict[str, dict[str, list[Row]]]:
    """Rows by panel and group, in the order of the report; panels without figures left out."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for row in report.rows:
        title = f"{row.direction}, {row.routing} routes"
        group = f"{row.preset}\n{row.tokens} tokens"
        panels.setdefault(title, {}).setdefault(group, []).append(row)
    return {
        title: groups
        for title, groups in panels.items()
        if any(row.fraction_of_dense is not None for rows in groups.values() for row in rows)
    }


def _draw(axis, title: str, cases: dict[str, list[Row]], colors: dict[str, str]) -> None:
    width = 1 / (len(colors) + 1)
    top = 1.0
    for g, rows in enumerate(cases.values()):
        for i, row in enumerate(rows):
            x = g + (i - (len(rows) - 1) / 2) * width
            if row.fraction_of_dense is None:
                axis.text(x, 0.02, "n/a", ha="center", va="bottom", color=INK, fontsize=7.5)
                continue
            fraction = row.fraction_of_dense
            ends = [
                [max(0.0, fraction - fraction * row.ms / row.p90)],
                [max(0.0, fraction * row.ms / row.p10 - fraction)],
            ]
            axis.bar(
                x,
                fraction,
                width=0.92 * width,
                color=colors[row.arm],
                yerr=ends,
                error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
            )
            inside = fraction > 0.2  # at the foot of the bar, clear of the lines
            axis.annotate(
                f"{fraction:.2f}",
                (x, 0 if inside else fraction + ends[1][0]),
                xytext=(0, 5 if inside else 2),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color="white" if inside else INK,
                fontweight="bold" if inside else "normal",
            )
            top = max(top, fraction + ends[1][0])
    axis.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axis.set_title(title, loc="left")
    axis.set_ylabel("fraction of dense")
    axis.set_ylim(0, 1.12 * top)
    axis.set_xticks(range(len(cases)), list(cases))
    axis.set_xlim(-0.6, len(cases) - 0.4)
    axis.tick_params(axis="x", length=0)
    axis.grid(axis="y")
