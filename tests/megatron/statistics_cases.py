"""Rank side: what --mok-log-statistics logs, next to the same computed one call at a time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_mok.megatron import MoKOptions, set_options, statistics
from megatron_mok.megatron.flags import get_options
from megatron_mok.ops import routes_from_map
from megatron_mok.runtime import LayerShape, RuntimeOptions, get_workspace
from megatron_mok.runtime.schedule import make_schedule
from tests.megatron import moe_metrics
from tests.megatron.moe_cases import set_up_parallel, use_output_discarding_without_te
from tests.megatron.train_cases import MICROBATCHES, Board, Trainer

HIDDEN, EXPERTS, LAYERS, FLOAT_BYTES = 64, 8, 2, 4
# Of pre-activations, by the factor that training() sets: 0.1 x 96 tokens x top-2.
SAVED_BLOCKS = 1

Scalars = dict[str, float]


def training(
    ep: int, pp: int = 1, mode: str = "fused", log: bool = True, **changes: Any
) -> tuple[Scalars, Scalars, str | None]:
    """MoK's scalars after a training step and an evaluation, those computed from the routing maps
    of the step, and the log line; on each rank."""
    set_up_parallel(ep, pp=pp, mode=mode)
    use_output_discarding_without_te()
    set_options(replace(get_options(), saved_rows_factor=0.1, log_statistics=log))
    trainer = Trainer("mok", **changes)
    # Whole layers that are recomputed run first without gradients: the step as such.
    recomputed = "moe" in changes.get("recompute_modules", ()) or (
        changes.get("recompute_granularity") == "full"
    )
    calls: dict[int, list[list[int]]] = defaultdict(list)

    def watch(index):
        def look(_module, _inputs, outputs):
            if torch.is_grad_enabled() is not recomputed:
                calls[index].append(outputs[1].sum(0).tolist())

        return look

    for layer in trainer.model.modules():
        if isinstance(layer, MoELayer):
            index = layer.layer_number - 1 + (LAYERS if layer.is_mtp_layer else 0)
            layer.router.register_forward_hook(watch(index))
    trainer.step()
    assert calls
    assert all(len(of_layer) == MICROBATCHES for of_layer in calls.values())
    expected = _expected(dict(calls), moves=4 if mode == "dispatch" else 5)
    trainer.evaluate()
    return *_logged(mtp_num_layers=changes.get("mtp_num_layers")), expected


def _logged(**kwargs: Any) -> tuple[Scalars, str | None]:
    board, run = Board(), Board()
    kwargs |= {"num_layers": LAYERS, "wandb_writer": run}
    line = moe_metrics.write_report(board, MICROBATCHES, **kwargs)
    assert run.scalars == board.scalars
    return {name: v for name, v in board.scalars.items() if "mok_" in name}, line


def _expected(calls: dict[int, list[list[int]]], moves: int) -> Scalars:
    """From every rank's routes to each expert, in each call of each layer."""
    group = parallel_state.get_expert_model_parallel_group()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (dist.get_process_group_ranks(group), calls))
    groups = sorted({tuple(ranks) for ranks, _ in everyone})
    by_layer = defaultdict(list)
    for ranks in groups:
        for layer, of_layer in everyone[ranks[0]][1].items():
            by_layer[layer] += [
                _of_call([everyone[rank][1][layer][call] for rank in ranks], moves)
                for call in range(len(of_layer))
            ]
    per_layer = {
        layer: {name: mean(call[name] for call in found) for name in found[0]}
        for layer, found in by_layer.items()
    }
    scalars = {
        name: mean(values[name] for values in per_layer.values())
        for name in next(iter(per_layer.values()))
    }
    for layer, values in per_layer.items():
        scalars |= {f"moe/{name}_layer_{layer}": value for name, value in values.items()}
    return scalars


def _of_call(sent: list[list[int]], moves: int) -> Scalars:
    """Of one call: `sent[rank][expert]` routes."""
    local = EXPERTS // len(sent)
    got = [sum(of_rank[expert] for of_rank in sent) for expert in range(EXPERTS)]
    blocks = [(rows + 127) // 128 for rows in got]
    by_rank = [slice(rank * local, (rank + 1) * local) for rank in range(len(sent))]
    remote = sum(sum(sent[rank]) - sum(sent[rank][own]) for rank, own in enumerate(by_rank))
    again = sum(max(0, sum(blocks[own]) - SAVED_BLOCKS) for own in by_rank)
    values = {
        "mok_tokens_per_expert_min": min(got),
        "mok_tokens_per_expert_mean": mean(got),
        "mok_tokens_per_expert_max": max(got),
        "mok_expert_imbalance": max(got) / mean(got),
        "mok_rank_imbalance": max(sum(got[own]) for own in by_rank) / (sum(got) / len(sent)),
        "mok_padding_percent": 100 * (1 - sum(got) / (128 * sum(blocks))),
        "mok_exchanged_mb": remote * moves * HIDDEN * FLOAT_BYTES / len(sent) / 1e6,
        "mok_recomputed_percent": 100 * again / sum(blocks),
    }
    if moves == 4:  # mode dispatch
        del values["mok_recomputed_percent"]
    return values


def against_the_engine() -> tuple[Scalars, Scalars]:
    """Statistics of uneven calls of several blocks per expert, and what the engine's schedules of
    these calls have."""
    set_up_parallel(4)
    group = parallel_state.get_expert_model_parallel_group()
    set_options(MoKOptions(log_statistics=True))
    shape = LayerShape(HIDDEN, 64, EXPERTS, topk=2, max_tokens=1024, dtype=torch.float32)
    workspace = get_workspace(shape, group, torch.device("cpu"), RuntimeOptions())
    saved_rows = 3 * 128
    facts = statistics.LayerFacts(group, route_bytes=1000, saved_rows=saved_rows)
    generator = torch.Generator().manual_seed(3 + group.rank())
    truth = torch.zeros(3, 4, dtype=torch.float64)
    for call in range(3):
        tokens = (700, 40, 0)[call] + group.rank()
        scores_TE = torch.rand(tokens, EXPERTS, generator=generator) + torch.arange(EXPERTS) / 9
        map_TE = torch.zeros(tokens, EXPERTS, dtype=torch.bool)
        map_TE.scatter_(1, scores_TE.topk(2).indices, True)
        statistics.statistics.count(0, facts, map_TE)
        schedule = make_schedule(workspace, *routes_from_map(map_TE.float(), map_TE, 2))
        source = torch.from_numpy(schedule.rows["rank"].copy())
        truth[call] = torch.tensor(
            [
                len(source),
                (source == -1).sum(),
                ((source != -1) & (source != group.rank())).sum(),
                max(0, len(source) - saved_rows),
            ]
        )
    dist.all_reduce(truth)
    rows, padding, remote, again = truth.unbind(1)
    board = Board()
    statistics.report(1, board, num_layers=LAYERS)
    return board.scalars, {
        "mok_padding_percent": float((100 * padding / rows).mean()),
        "mok_exchanged_mb": float((remote * 1000 / 4 / 1e6).mean()),
        "mok_recomputed_percent": float((100 * again / rows).mean()),
    }


def stage_without_experts() -> Scalars:
    """What is logged on each rank where the first stage of a pipeline has no MoE layer."""
    set_up_parallel(2, pp=2)
    set_options(MoKOptions(log_statistics=True))
    if parallel_state.is_pipeline_last_stage():
        group = parallel_state.get_expert_model_parallel_group()
        map_TE = torch.zeros(3, EXPERTS, dtype=torch.bool)
        map_TE[:, group.rank()] = True
        facts = statistics.LayerFacts(group, route_bytes=1, saved_rows=0)
        statistics.statistics.count(1, facts, map_TE)
    board = Board()
    statistics.report(1, board, per_layer_logging=True, num_layers=LAYERS)
    return board.scalars


def without_waiting() -> Scalars:
    """Statistics of a call on a GPU, which is an error if the CPU waits for it before the end."""
    set_up_parallel(1)
    group = parallel_state.get_expert_model_parallel_group()
    groups = (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    )
    facts = statistics.LayerFacts(group, route_bytes=1, saved_rows=0)
    map_TE = torch.ones(300, EXPERTS, dtype=torch.bool, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        statistics.statistics.count(0, facts, map_TE)
        table = statistics.statistics.table(1, *groups)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        statistics.statistics.clear()
    return dict(zip(statistics.NAMES, table[0, 1:].tolist(), strict=True))
