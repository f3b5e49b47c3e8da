"""How this project's charts look."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COLORS = ("#4C5B70", "#E4572E", "#2E86AB", "#76B041", "#8E5EA2", "#C9A227")
INK, GRID = "#22272e", "#d9dee4"

_STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
}


@contextmanager
def png_figure(path: Path, width: float, height: float) -> Iterator:
    """A matplotlib figure of `width` x `height` inches that is saved to `path` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(width, height), layout="constrained")
        try:
            yield figure
            figure.savefig(path, dpi=150)
        finally:
            plt.close(figure)
