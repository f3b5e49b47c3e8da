"""Rank side: distributed checkpoints that change hands between dispatchers and EP sizes."""

from __future__ import annotations

import os
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from tests.megatron.moe_cases import set_up_parallel
from tests.megatron.train_cases import Trainer

SAVED_AT = 2  # steps before a checkpoint


def _metadata() -> dict[str, Any]:
    # As --dist-ckpt-optim-fully-reshardable: the one format that allows other parallel sizes.
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _state(trainer: Trainer, is_loading: bool, optimizer: bool = True) -> dict[str, Any]:
    model = trainer.model.module.sharded_state_dict(metadata=_metadata())
    if not optimizer:
        return {"model": model}
    states = trainer.optimizer.sharded_state_dict(model, is_loading, metadata=_metadata())
    return {"model": model, "optimizer": states}


def save(trainer: Trainer, folder: str) -> list[tuple]:
    """Save model and optimizer; returns where each of their tensors goes."""
    if torch.distributed.get_rank() == 0:
        os.makedirs(folder)
    torch.distributed.barrier()
    trainer.parameters()  # waits for the last all-gather
    state = _state(trainer, is_loading=False)
    placed = _places(state)
    dist_checkpointing.save(state, folder)
    return placed


def load(dispatcher: str, folder: str, optimizer: bool = True) -> Trainer:
    """A fresh trainer at the checkpoint in `folder`, with or without its optimizer's state."""
    trainer = Trainer(dispatcher)
    strict = "raise_all" if optimizer else "raise_unexpected"
    target = _state(trainer, is_loading=True, optimizer=optimizer)
    state = dist_checkpointing.load(target, folder, strict=strict)
    trainer.model.module.load_state_dict(state["model"], strict=True)
    if optimizer:
        trainer.optimizer.load_state_dict(state["optimizer"])
    else:
        trainer.optimizer.reload_model_params()
    trainer.model.enable_forward_pre_hook()
    trainer.steps = SAVED_AT
    return trainer


def _places(state: Any) -> list[tuple]:
    if isinstance(state, ShardedTensor):
        return [(state.key, state.global_shape, state.global_offset, state.replica_id)]
    if isinstance(state, dict):
        return [(name, *place) for name, value in state.items() for place in _places(value)]
    if isinstance(state, (list, tuple)):
        return [place for value in state for place in _places(value)]
    return []


def train(trainer: Trainer) -> list[float]:
    """Losses and gradient norms of three more steps."""
    numbers = []
    for _ in range(3):
        losses, grad_norm = trainer.step()
        numbers += [*losses, grad_norm]
    return numbers


def difference(found: list[float], expected: list[float]) -> float:
    return max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))


def journey(folder: str) -> dict[str, Any]:
    """alltoall at EP 2 -> mok at EP 2, 4 and 1 -> alltoall at EP 2.

    Returns:
        same_logits: whether mok gives bitwise the same logits at all EP sizes.
        logits: relative difference of those to the logits under alltoall that were saved.
        steps: relative differences of three more steps at EP 2 and 4, with the optimizer's state,
            to those of the run that saved and went on with alltoall.
        same_places: whether both dispatchers put every tensor at the same place.
        logits_back, steps_back: whether alltoall is bitwise where it was, after the way through
            mok at EP 4.
        model_alone: the difference of the three steps when the optimizer's state stays behind.
    """
    set_up_parallel(2)
    saver = Trainer("alltoall")
    for _ in range(SAVED_AT):
        saver.step()
    native_logits = saver.logits()
    native_places = save(saver, f"{folder}/native")
    native_steps = train(saver)
    model_alone = difference(train(load("mok", f"{folder}/native", False)), native_steps)

    logits, steps = {}, {}
    for ep in (2, 4, 1):
        set_up_parallel(ep)
        # Megatron has one optimizer at EP 1 and two elsewhere, and cannot load one as the other.
        trainer = load("mok", f"{folder}/native", optimizer=ep > 1)
        logits[ep] = trainer.logits()
        if ep == 2:
            fused_places = _places(_state(trainer, is_loading=False))
        if ep == 4:
            save(trainer, f"{folder}/fused")
        if ep > 1:
            steps[ep] = difference(train(trainer), native_steps)

    set_up_parallel(2)
    back = load("alltoall", f"{folder}/fused")
    return {
        "same_logits": all(torch.equal(logits[2], logits[ep]) for ep in (4, 1)),
        "logits": float((logits[2] - native_logits).norm() / native_logits.norm()),
        "steps": steps,
        "same_places": fused_places == native_places and len(native_places) > 0,
        "logits_back": torch.equal(back.logits(), native_logits),
        "steps_back": train(back) == native_steps,
        "model_alone": model_alone,
    }
