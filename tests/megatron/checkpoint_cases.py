"""Rank side: distributed checkpoints that change hands between dispatchers."""

from __future__ import annotations

import os
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from tests.megatron.moe_cases import set_up_parallel
from tests.megatron.train_cases import Trainer


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(trainer: Trainer) -> dict[str, Any]:
    return trainer.model.module.sharded_state_dict(metadata=_metadata())


def _save(trainer: Trainer, folder: str) -> list[tuple]:
    """Save the model; returns where each of its tensors goes."""
    if torch.distributed.get_rank() == 0:
        os.makedirs(folder)
    torch.distributed.barrier()
    trainer.parameters()  # waits for the last all-gather
    state = _model_state(trainer)
    placed = _places(state)
    dist_checkpointing.save(state, folder)
    return placed


def _load(trainer: Trainer, folder: str) -> None:
    # The model alone: without Transformer Engine this Megatron does not restore Adam's step counts.
    state = dist_checkpointing.load(_model_state(trainer), folder, strict="raise_unexpected")
    trainer.model.module.load_state_dict(state, strict=True)
    trainer.optimizer.reload_model_params()


def _places(state: Any) -> list[tuple]:
    if isinstance(state, ShardedTensor):
        return [(state.key, state.global_shape, state.global_offset, state.replica_id)]
    if isinstance(state, dict):
        return [(name, *place) for name, value in state.items() for place in _places(value)]
    if isinstance(state, (list, tuple)):
        return [place for value in state for place in _places(value)]
    return []


def _equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[n], second[n]) for n in first)


def _difference(found: list[float], expected: list[float]) -> float:
    return max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))


def round_trip(folder: str) -> list[float]:
    """alltoall -> mok -> alltoall, training steps in between.

    Returns: relative differences of losses and gradient norms to a run that stays with alltoall,
    and of the evaluation after the way back.
    """
    set_up_parallel(2)
    saver = Trainer("alltoall")
    for _ in range(2):
        saver.step()
    saved = _save(saver, f"{folder}/native")

    stays, changes = Trainer("alltoall"), Trainer("mok")
    for trainer in (stays, changes):
        assert not _equal(trainer.parameters_now(), saver.parameters())
        _load(trainer, f"{folder}/native")
        assert _equal(trainer.parameters_now(), saver.parameters())
    differences = []
    for _ in range(3):
        (found, found_norm), (expected, expected_norm) = changes.step(), stays.step()
        differences.append(_difference([*found, found_norm], [*expected, expected_norm]))
    assert _save(changes, f"{folder}/fused") == saved
    optimizers = [
        _places(t.optimizer.sharded_state_dict(_model_state(t), metadata=_metadata()))
        for t in (changes, stays)
    ]
    assert optimizers[0]
    assert optimizers[0] == optimizers[1]

    back = Trainer("alltoall")
    _load(back, f"{folder}/fused")
    assert _equal(back.parameters_now(), changes.parameters())
    back.model.enable_forward_pre_hook()
    differences.append(_difference(back.evaluate(), changes.evaluate()))
    return differences


def other_ep_size(folder: str) -> float:
    """Relative difference of evaluation losses at EP 4 to those of the run at EP 2 that saved."""
    set_up_parallel(2)
    saver = Trainer("mok")
    for _ in range(2):
        saver.step()
    expected = saver.evaluate()
    _save(saver, folder)
    set_up_parallel(4)
    loader = Trainer("mok")
    _load(loader, folder)
    loader.model.enable_forward_pre_hook()
    return _difference(loader.evaluate(), expected)
