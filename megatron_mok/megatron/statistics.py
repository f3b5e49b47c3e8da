"""`--mok-log-statistics`: how the router's choices load MoK, among Megatron's own MoE metrics.

Layers keep the number of routes to each expert on the device, in training steps that Megatron's
`--log-interval` selects. When Megatron reports its MoE metrics for such a step, the ranks add up
what they kept, and the values go to the writers and the log line that the metrics go to. Nothing
waits for the device before that, and no other step has any of it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_mok.megatron.flags import get_options, megatron_args
from megatron_mok.megatron.patching import replace_function
from megatron_mok.runtime.abi import BLOCK_ROWS

TOKENS = ("mok_tokens_per_expert_min", "mok_tokens_per_expert_mean", "mok_tokens_per_expert_max")
NAMES = (
    *TOKENS,
    "mok_expert_imbalance",
    "mok_rank_imbalance",
    "mok_padding_percent",
    "mok_exchanged_mb",
    "mok_recomputed_percent",
)


@dataclass(frozen=True)
class LayerFacts:
    """What makes statistics of a layer's counts.

    Attributes:
        ep_group: the expert-parallel group, whose ranks hold the experts in order.
        route_bytes: bytes that a route to another rank moves, forward and backward together.
        saved_rows: rows whose pre-activations a rank keeps for backward; None where it keeps all.
    """

    ep_group: Any
    route_bytes: int
    saved_rows: int | None


class Statistics:
    """Routes of the calls since the last report, by layer."""

    def __init__(self) -> None:
        self._facts: dict[int, LayerFacts] = {}
        self._counts: dict[int, list[torch.Tensor]] = defaultdict(list)

    def count(self, layer: int | None, facts: LayerFacts, routing_map_TE: torch.Tensor) -> None:
        """Keep the number of routes to each expert. Once for each call of the layer in training.

        A forward that is recomputed runs first without and then with gradients, so that only calls
        with gradients count, as for Megatron's own metrics.

        Args:
            layer: index of the layer in the model, from 0; layers of multi-token prediction last.
                None is not counted.
            facts: of the layer.
            routing_map_TE: [T, E] bool.
        """
        if layer is not None and torch.is_grad_enabled() and _is_due(None):
            self._facts[layer] = facts
            self._counts[layer].append(routing_map_TE.sum(0, dtype=torch.int64))

    def clear(self) -> None:
        """Forget all calls."""
        self._facts.clear()
        self._counts.clear()

    def table(self, num_layers: int, pp_group: Any, expert_dp_group: Any) -> torch.Tensor:
        """Statistics of the calls since the last report. Collective over all training ranks.

        Args:
            num_layers: of the whole model, those of multi-token prediction included.
            pp_group: the pipeline.
            expert_dp_group: ranks with the same experts.
        Returns: [num_layers, 1 + len(NAMES)] float64 on the device: 1 and the layer's values, means
            over its calls and over expert-parallel groups; zeros for a layer without calls.
        """
        counts = {layer: torch.stack(self._counts[layer]) for layer in sorted(self._counts)}
        device = next(iter(counts.values())).device if counts else _device()
        table = torch.zeros(num_layers, 1 + len(NAMES), dtype=torch.float64, device=device)
        if counts:
            for layer, sums in self._summed(counts).items():
                table[layer, 0] = 1
                table[layer, 1:] = _values(*sums, self._facts[layer]).mean(0)
            dist.all_reduce(table, group=expert_dp_group)
            table /= expert_dp_group.size()
        dist.all_reduce(table, group=pp_group)
        return table

    def _summed(
        self, counts: dict[int, torch.Tensor]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """For each layer the sums over its expert-parallel group: [C, E] routes to each expert in
        each call, and [C] how many of them come from another rank."""
        own = {}
        for layer, counts_CE in counts.items():
            group = self._facts[layer].ep_group
            local = counts_CE.chunk(group.size(), dim=1)[group.rank()].sum(1, keepdim=True)
            remote = counts_CE.sum(1, keepdim=True) - local
            own[layer] = torch.cat([counts_CE, remote], dim=1)
        # One exchange for all layers: they have the same group.
        flat = torch.cat([both.flatten() for both in own.values()])
        dist.all_reduce(flat, group=next(iter(self._facts.values())).ep_group)
        parts = flat.split([both.numel() for both in own.values()])
        sums = {}
        for (layer, both), part in zip(own.items(), parts, strict=True):
            part = part.view_as(both).double()
            sums[layer] = part[:, :-1], part[:, -1]
        return sums


statistics = Statistics()


def _values(counts_CE: torch.Tensor, remote_C: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """[C, len(NAMES)] values of calls, from sums over the expert-parallel group."""
    ranks = facts.ep_group.size()
    rows_CR = counts_CE.unflatten(1, (ranks, -1)).sum(2)
    blocks_CE = (counts_CE / BLOCK_ROWS).ceil()
    blocks_CR = blocks_CE.unflatten(1, (ranks, -1)).sum(2)
    all_blocks_C = blocks_CR.sum(1)
    padding_C = all_blocks_C * BLOCK_ROWS - counts_CE.sum(1)
    if facts.saved_rows is None:
        recomputed_C = torch.zeros_like(remote_C)
    else:
        saved_blocks = -(-facts.saved_rows // BLOCK_ROWS)
        recomputed_C = (blocks_CR - saved_blocks).clamp(min=0).sum(1)
    columns = (
        counts_CE.amin(1),
        counts_CE.mean(1),
        counts_CE.amax(1),
        _ratio(counts_CE.amax(1), counts_CE.mean(1)),
        _ratio(rows_CR.amax(1), rows_CR.mean(1)),
        100 * _ratio(padding_C, all_blocks_C * BLOCK_ROWS),
        remote_C * facts.route_bytes / ranks / 1e6,
        100 * _ratio(recomputed_C, all_blocks_C),
    )
    return torch.stack(columns, dim=1)


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    # A call without a single route has nothing to be uneven.
    return torch.where(whole > 0, part / whole, 0.0)


def _device() -> torch.device:
    return torch.empty(0, device="cuda").device  # in CPU mode the CPU's


def _is_due(iteration: int | None) -> bool:
    """Whether statistics of this step are to be logged; None is the step that is running."""
    args = megatron_args()
    interval = getattr(args, "log_interval", None)
    if iteration is None:
        # Megatron counts it up after the step, and logs the step under the new number.
        done = getattr(args, "curr_iteration", None)
        iteration = None if done is None else done + 1
    return interval is None or iteration is None or iteration % interval == 0


def _is_on() -> bool:
    args = megatron_args()
    chosen = getattr(args, "moe_token_dispatcher_type", "mok")
    return chosen == "mok" and get_options().log_statistics


def report(
    iteration: int,
    writer: Any = None,
    wandb_writer: Any = None,
    per_layer_logging: bool = False,
    num_layers: int | None = None,
    mtp_num_layers: int | None = None,
    pg_collection: Any = None,
    **_: Any,
) -> str:
    """Log the statistics of a step, where they are wanted. Collective over all training ranks.

    Args: as those of Megatron's report of its MoE metrics.
    Returns: their part of the log line, on the last rank, which prints it.
    """
    if not _is_on():
        return ""
    try:
        if not _is_due(iteration):
            return ""
        # Hybrid models pass the number of their MoE layers only.
        layers = max(num_layers or 0, getattr(megatron_args(), "num_layers", None) or 0)
        table = statistics.table(layers + (mtp_num_layers or 0), *_groups(pg_collection))
    finally:
        statistics.clear()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if writer is None and wandb_writer is None and not is_last:
        return ""
    layer_values = {i: row[1:] for i, row in enumerate(table.tolist()) if row[0]}
    if not layer_values:
        return ""
    shown = _shown_names()
    means = {
        name: sum(values[i] for values in layer_values.values()) / len(layer_values)
        for i, name in enumerate(NAMES)
        if name in shown
    }
    scalars = dict(means)
    if per_layer_logging:
        for layer, values in layer_values.items():
            for name, value in zip(NAMES, values, strict=True):
                if name in shown:
                    scalars[f"moe/{name}_layer_{layer}"] = value
    for name, value in scalars.items():
        if writer is not None:
            writer.add_scalar(name, value, iteration)
        if wandb_writer is not None:
            wandb_writer.log({name: value}, iteration)
    return "".join(f" {name}: {value:.2f} |" for name, value in means.items()) if is_last else ""


def _shown_names() -> tuple[str, ...]:
    # Megatron's own experts, of mode dispatch, keep what they keep.
    return NAMES if get_options().mode == "fused" else NAMES[:-1]


def _groups(pg_collection: Any) -> tuple[Any, Any]:
    """The pipeline's group, and that of the ranks with the same experts."""
    pp = getattr(pg_collection, "pp", None)
    expert_dp = getattr(pg_collection, "expt_dp", None)
    return (
        parallel_state.get_pipeline_model_parallel_group() if pp is None else pp,
        parallel_state.get_expert_data_parallel_group() if expert_dp is None else expert_dp,
    )


def hook_reports() -> None:
    """Make Megatron's report of its MoE metrics report the statistics too."""
    try:
        logging = importlib.import_module("megatron.core.transformer.moe.moe_logging")
    except ImportError:
        _hook_report_function()
        return
    cls = logging.MoEMetricsTracker
    cls.report = _with_statistics(cls.report, lambda native, text, _: (native or "") + text)


def _hook_report_function() -> None:
    # 0.17: a function, whose metrics get into the log line as losses do. These get a line.
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")

    def print_line(_: None, text: str, iteration: int) -> None:
        if text:
            print(f"megatron_mok: iteration {iteration} |{text}", flush=True)

    hooked = _with_statistics(moe_utils.track_moe_metrics, print_line)
    replace_function(moe_utils, "track_moe_metrics", hooked)


def _with_statistics(native: Callable, result: Callable) -> Callable:
    signature = inspect.signature(native)

    @functools.wraps(native)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        found = native(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        return result(found, report(**given), given["iteration"])

    return hooked
