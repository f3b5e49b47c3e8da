"""Calls that a rank refuses: every rank learns of it soon, and the workspaces live on."""

import time

import pytest
import torch

from megatron_mok.ops import combine, dispatch, fused_moe
from megatron_mok.runtime import MoKInvalidArgumentError
from tests.gpu.layers import gpu_layer, options
from tests.in_process import make_workspaces, relative_error, run_ranks, run_reference

pytestmark = pytest.mark.gpu

TOKENS, EXPERTS = 40, 4


@pytest.fixture
def layer():
    return gpu_layer(TOKENS, 128, 64, EXPERTS, 2, seed=61)


def make(layer, ep_size):
    shape = layer.shape | {"max_tokens": TOKENS // ep_size}
    return make_workspaces(ep_size, options(ep_size, wait_s=8), "cuda", **shape)


def forward(layer, workspace, tokens=None, ids_TK=None):
    rank, ep_size = workspace.ep_rank, workspace.ep_size
    own = tokens or slice(TOKENS * rank // ep_size, TOKENS * (rank + 1) // ep_size)
    experts = slice(EXPERTS * rank // ep_size, EXPERTS * (rank + 1) // ep_size)
    return fused_moe(
        layer.hidden_TH[own],
        layer.expert_ids_TK[own] if ids_TK is None else ids_TK,
        layer.probs_TK[own],
        layer.fc1[experts],
        layer.fc2[experts],
        workspace,
    )


def assert_alive(layer, workspaces):
    """All ranks can call again, and get the right results."""
    outputs = run_ranks(len(workspaces), lambda r: forward(layer, workspaces[r]), "cuda")
    for workspace in workspaces:
        workspace.check()
    exact = run_reference(layer, torch.float64)
    assert relative_error(torch.cat(outputs), exact.output_TH) < 1e-2


def refuse_on_rank_0(layer, workspaces):
    """Rank 0 passes a token too many; the others make the call, and return in time."""

    def body(rank):
        if rank > 0:
            forward(layer, workspaces[rank])
            return
        with pytest.raises(MoKInvalidArgumentError, match="got 21 tokens; the workspace takes 0"):
            forward(layer, workspaces[0], slice(0, 21))

    start = time.monotonic()
    run_ranks(2, body, "cuda")
    assert time.monotonic() - start < 4


def test_arguments_refused_by_the_host(layer):
    workspaces = make(layer, 2)
    for _ in range(3):  # both banks of counts
        refuse_on_rank_0(layer, workspaces)
        workspaces[0].check()
        with pytest.raises(
            MoKInvalidArgumentError,
            match=r"rank 1 of EP 2 did not make call \d+ \(forward\), whose results are undefined: "
            r"rank 0 of the EP group refused its arguments \(more tokens than the workspace takes",
        ):
            workspaces[1].check()
        workspaces[1].check()  # reported once
        assert_alive(layer, workspaces)


def test_the_next_call_reports_it_and_is_made(layer):
    workspaces = make(layer, 2)
    refuse_on_rank_0(layer, workspaces)

    def body(rank):
        if rank == 0:
            return forward(layer, workspaces[0])
        with pytest.raises(MoKInvalidArgumentError, match="rank 0 of the EP group refused"):
            forward(layer, workspaces[1])
        return None

    output_TH, _ = run_ranks(2, body, "cuda")
    exact = run_reference(layer, torch.float64)
    assert relative_error(output_TH, exact.output_TH[:20]) < 1e-2
    assert_alive(layer, workspaces)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("bad", [EXPERTS, -2, 2**31 - 1])
def test_expert_ids_refused_by_the_device(layer, ep_size, bad):
    workspaces = make(layer, ep_size)
    wrong_TK = layer.expert_ids_TK[: TOKENS // ep_size].clone()
    wrong_TK[3, 1] = bad
    wrong_TK[7, 0] = bad
    run_ranks(
        ep_size,
        lambda r: forward(layer, workspaces[r], ids_TK=wrong_TK if r == 0 else None),
        "cuda",
    )
    with pytest.raises(
        MoKInvalidArgumentError,
        match=rf"expert id {bad} at token 3, k 1; allowed are -1 \(no route\) to {EXPERTS - 1}",
    ):
        workspaces[0].check()
    for workspace in workspaces[1:]:
        with pytest.raises(
            MoKInvalidArgumentError,
            match=r"rank 0 of the EP group refused its arguments \(an expert id out of range\)",
        ):
            workspace.check()
    assert_alive(layer, workspaces)


def test_ranks_in_different_calls(layer):
    workspaces = make(layer, 2)
    ids_TK, probs_TK = layer.expert_ids_TK[:20], layer.probs_TK[:20]
    rows_RH = layer.hidden_TH.new_zeros(workspaces[1].max_rows, 128)

    def body(rank):
        if rank == 0:
            dispatch(layer.hidden_TH[:20], ids_TK, probs_TK, workspaces[0])
        else:
            combine(rows_RH, ids_TK, workspaces[1])

    run_ranks(2, body, "cuda")
    for workspace, text in zip(
        workspaces,
        (
            "rank 1 of the EP group calls combine while this rank calls dispatch",
            "rank 0 of the EP group calls dispatch while this rank calls combine",
        ),
        strict=True,
    ):
        with pytest.raises(MoKInvalidArgumentError, match=text):
            workspace.check()
    assert_alive(layer, workspaces)
