"""Peers that die, stall or do something else: an error on every rank that is left, never a hang."""

import multiprocessing
import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_mok.runtime import (
    LayerShape,
    MoKInvalidArgumentError,
    MoKTimeoutError,
    MoKWorkspacePoisonedError,
    RuntimeOptions,
    Workspace,
    abi,
)
from megatron_mok.runtime.schedule import make_schedule
from tests.in_process import make_workspaces, random_layer, run_fused, run_ranks

SHAPE = {
    "hidden": 64,
    "ffn": 64,
    "num_experts": 4,
    "topk": 2,
    "max_tokens": 8,
    "dtype": torch.float32,
}
SHORT = RuntimeOptions(first_wait_s=2, inner_wait_s=2, workers=1)


def forward(layer, workspace, rank, ep_size):
    """Every rank has all tokens."""
    part = layer.part(rank, ep_size)
    return run_fused(replace(layer, fc1=part.fc1, fc2=part.fc2), workspace)


def rank_process(rank, world, port, reports):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    layer = random_layer(512, 256, 256, 2 * world, 2, torch.float32, seed=rank)
    workspace = Workspace.create(
        LayerShape(**layer.shape), dist.group.WORLD, torch.device("cpu"), SHORT
    )
    calls = 0
    try:
        while True:
            forward(layer, workspace, rank, world)
            calls += 1
            reports.put(("call", calls, time.monotonic()))
    except MoKTimeoutError as error:
        reports.put(("timeout", str(error), time.monotonic()))
    try:
        forward(layer, workspace, rank, world)
    except MoKWorkspacePoisonedError as error:
        reports.put(("poisoned", str(error), time.monotonic()))


@pytest.mark.parametrize("world", [2, 3])
def test_killed_rank_becomes_a_timeout_on_every_survivor(world):
    context = multiprocessing.get_context("spawn")
    # One queue each: a rank that is killed may hold the lock of its queue.
    reports = [context.Queue() for _ in range(world)]
    port = 29000 + os.getpid() % 2000 + world
    ranks = [
        context.Process(target=rank_process, args=(r, world, port, reports[r]))
        for r in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        for rank in range(world):
            for _ in range(3):
                kind, value, _ = reports[rank].get(timeout=90)
                assert kind == "call", value
        os.kill(ranks[-1].pid, signal.SIGKILL)
        killed_at = time.monotonic()
        outcomes = {}
        for rank in range(world - 1):
            while (rank, "poisoned") not in outcomes:
                kind, value, when = reports[rank].get(timeout=60)
                outcomes[rank, kind] = (value, when)
        for rank in range(world - 1):
            text, when = outcomes[rank, "timeout"]
            assert when - killed_at < 20
            assert re.match(
                rf"mok_forward: rank {rank} of EP {world} "
                r"(waited 2000 ms|stopped) in phase '[a-z0-9 ]+'(, task \d+)?, for "
                r"(rank \d|its own tasks)(, because rank \d gave up waiting| \(call \d+\))$",
                text,
            ), text
            assert text.removeprefix("mok_forward: ") in outcomes[rank, "poisoned"][0]
        # A survivor may wait for another that waits for the dead rank; someone names the dead one.
        assert any(
            f"for rank {world - 1}" in text
            for text, _ in outcomes.values()
            if isinstance(text, str)
        ), outcomes
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_peer_that_never_enters_is_named_with_its_phase():
    layer = random_layer(16, 64, 64, 4, 2, torch.float32, seed=1)
    workspaces = make_workspaces(2, SHORT, **layer.shape)
    with pytest.raises(
        MoKTimeoutError,
        match=r"rank 1 of EP 2 waited 2000 ms in phase 'entry', "
        r"for rank 0 \(call 1\)",
    ):
        forward(layer, workspaces[1], 1, 2)
    # The late peer hears of it at once instead of waiting for its own timeout.
    with pytest.raises(
        MoKTimeoutError, match=r"rank 0 of EP 2 stopped in phase 'entry', .* because rank 1"
    ):
        forward(layer, workspaces[0], 0, 2)
    with pytest.raises(MoKWorkspacePoisonedError):
        forward(layer, workspaces[1], 1, 2)
    with pytest.raises(MoKWorkspacePoisonedError):
        workspaces[1].check()


def test_ranks_in_different_calls_get_an_error_and_can_go_on():
    layer = random_layer(16, 64, 64, 4, 2, torch.float32, seed=1)
    workspaces = make_workspaces(2, SHORT, **layer.shape)

    calls = (
        lambda: forward(layer, workspaces[0], 0, 2),
        lambda: make_schedule(workspaces[1], layer.expert_ids_TK, layer.probs_TK),
    )

    def mixed(rank):
        with pytest.raises(MoKInvalidArgumentError, match="same calls in the same order") as error:
            calls[rank]()
        return str(error.value)

    assert (
        "rank 1 of the EP group calls schedule while this rank calls forward"
        in run_ranks(2, mixed)[0]
    )
    run_ranks(2, lambda r: forward(layer, workspaces[r], r, 2))


def test_closed_workspace():
    (workspace,) = make_workspaces(1, **SHAPE)
    workspace.close()
    with pytest.raises(MoKInvalidArgumentError, match="closed"):
        workspace.call("mok_forward", abi.MokForwardArgs())
    with pytest.raises(MoKInvalidArgumentError, match="closed"):
        workspace.check()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden": 100}, "hidden is 100; allowed is a positive multiple of 64"),
        ({"ffn": 0}, "ffn is 0; allowed is a positive multiple of 64"),
        ({"num_experts": 1025}, "num_experts is 1025; allowed is 1 to 1024"),
        ({"topk": 33}, "topk is 33; allowed is 1 to 32"),
        ({"max_tokens": 0}, "max_tokens is 0; allowed is at least 1"),
        ({"dtype": torch.float16}, "dtype is torch.float16; allowed are torch.float32"),
        ({"num_experts": 3}, "num_experts is 3; it must be a multiple of the EP size 2"),
    ],
)
def test_impossible_shapes_are_refused_with_the_rule(change, text):
    with pytest.raises(ValueError, match=text):
        make_workspaces(2, **(SHAPE | change))
