"""Rank side: Megatron's record of router losses, kept in `moe_logging` since 0.18."""

from __future__ import annotations

from typing import Any

try:
    from megatron.core.transformer.moe import moe_logging
except ImportError:
    moe_logging = None
from megatron.core.transformer.moe import moe_utils


def forget() -> None:
    """Drop what is recorded, and with it the process groups that it was recorded for; and the scale
    of router losses, which has another shape where no training step sets it."""
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if moe_logging is not None:
        moe_logging.destroy_moe_metrics_tracker()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()


def router_losses() -> list[float]:
    """The router losses since the last report: of each layer, by name of the loss."""
    if moe_logging is not None:
        values = {n: m.values for n, m in moe_logging.get_moe_metrics_tracker().metrics.items()}
    else:
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        values = {name: entry["values"] for name, entry in tracker.items()}
    return [float(value) for name in sorted(values) for value in values[name]]


def write_report(writer: Any, microbatches: int, num_layers: int, **kwargs: Any) -> str | None:
    """Write to a TensorBoard writer as --moe-per-layer-logging does after a step. Returns the part
    of the log line (None before 0.18)."""
    if moe_logging is not None:
        report = moe_logging.get_moe_metrics_tracker().report
    else:
        report = moe_utils.track_moe_metrics
    kwargs |= {"writer": writer, "num_layers": num_layers}
    return report(1 / microbatches, 1, per_layer_logging=True, **kwargs)
