"""The schedule against a plain numpy model of DESIGN: row order, padding, offsets, task order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mok.runtime import abi
from megatron_mok.runtime.schedule import make_schedule
from tests.in_process import make_workspaces, run_ranks

BLOCK = abi.BLOCK_ROWS


@st.composite
def routing(draw, max_tokens=80):
    ep_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    experts = ep_size * draw(st.integers(1, 6))
    topk = draw(st.integers(1, 8))
    tokens = [draw(st.integers(0, max_tokens)) for _ in range(ep_size)]
    style = draw(st.sampled_from(["uniform", "one_expert", "half", "none"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    allowed = {"uniform": experts, "one_expert": 1, "half": max(1, experts // 2), "none": 0}[style]
    ids = [rng.integers(-1, allowed, (t, topk)).astype(np.int32) for t in tokens]
    return experts, ids


def schedules(experts, ids, direction=abi.Direction.FORWARD, ffn=64, hidden=64):
    """make_schedule on every rank; also the probs that went in."""
    ep_size, topk = len(ids), ids[0].shape[1]
    workspaces = make_workspaces(
        ep_size,
        hidden=hidden,
        ffn=ffn,
        num_experts=experts,
        topk=topk,
        max_tokens=max(1, *(len(i) for i in ids)),
        dtype=torch.float32,
    )
    rng = np.random.default_rng(len(ids))
    probs = [rng.random(i.shape, dtype=np.float32) for i in ids]
    found = run_ranks(
        ep_size,
        lambda r: make_schedule(
            workspaces[r], torch.from_numpy(ids[r]), torch.from_numpy(probs[r]), direction
        ),
    )
    return found, probs


def model_rows(experts, ids, probs, rank):
    """Rows of `rank` as (rank, token, k, prob, expert), None for padding; and block offsets."""
    local = experts // len(ids)
    rows, offsets = [], [0]
    for expert in range(rank * local, (rank + 1) * local):
        mine = [
            (source, token, k, probs[source][token, k], expert)
            for source in range(len(ids))
            for token, k in np.argwhere(ids[source] == expert)
        ]
        rows += mine + [None] * (-len(mine) % BLOCK)
        offsets.append(len(rows) // BLOCK)
    return rows, offsets


@settings(max_examples=60, deadline=None)
@given(routing())
def test_rows_offsets_and_counts(case):
    experts, ids = case
    found, probs = schedules(experts, ids)
    counts = np.array([np.bincount(i[i >= 0], minlength=experts) for i in ids])
    for rank, schedule in enumerate(found):
        rows, offsets = model_rows(experts, ids, probs, rank)
        assert schedule.block_offsets.tolist() == offsets
        assert np.array_equal(schedule.counts_RE, counts)
        got = [
            None if r["rank"] < 0 else (r["rank"], r["token"], r["k"], r["prob"], r["expert"])
            for r in schedule.rows
        ]
        assert got == rows


@settings(max_examples=40, deadline=None)
@given(routing(), st.sampled_from([64, 192, 640]), st.sampled_from([64, 320]))
@pytest.mark.parametrize("direction", list(abi.Direction))
def test_tickets_cover_the_work_in_a_safe_order(direction, case, ffn, hidden):
    experts, ids = case
    found, _ = schedules(experts, ids, direction, ffn, hidden)
    fc1_tiles, fc2_tiles = -(-ffn // 128), -(-hidden // 128)
    wgrad_tiles = (-(-2 * ffn // 128) + fc1_tiles) * fc2_tiles
    for rank, schedule in enumerate(found):
        order = {phase: {} for phase in abi.Phase}  # (block or (expert, cut), tile) -> ticket
        tickets = 0
        for s in schedule.segments:
            assert s["first_ticket"] == tickets
            phase = abi.Phase(s["phase"])
            by_block = phase != abi.Phase.WGRAD
            blocks = range(s["first_block"], s["first_block"] + s["num_blocks"])
            keys = list(blocks) if by_block else [(int(s["expert"]), int(s["cut"]))]
            for tile in range(s["first_tile"], s["first_tile"] + s["num_tiles"]):
                for key in keys:
                    assert (key, tile) not in order[phase]
                    order[phase][key, tile] = tickets
                    tickets += 1
        assert tickets == schedule.num_tickets

        blocks = range(int(schedule.block_offsets[-1]))

        def every(tiles, keys):
            return {(key, tile) for key in keys for tile in range(tiles)}

        assert order[abi.Phase.DISPATCH].keys() == every(1, blocks)
        assert order[abi.Phase.FC1].keys() == every(fc1_tiles, blocks)
        assert order[abi.Phase.FC2].keys() == every(fc2_tiles, blocks)
        assert order[abi.Phase.REDUCE].keys() == every(-(-len(ids[rank]) // 64), [0])
        for b in blocks:
            dispatched = order[abi.Phase.DISPATCH][b, 0]
            fc1 = [order[abi.Phase.FC1][b, t] for t in range(fc1_tiles)]
            fc2 = [order[abi.Phase.FC2][b, t] for t in range(fc2_tiles)]
            assert dispatched < min(fc1)
            assert max(fc1) < min(fc2)
        if direction == abi.Direction.FORWARD:
            assert not order[abi.Phase.WGRAD]
            continue
        sizes = np.diff(schedule.block_offsets)
        cuts = [(e, c) for e, n in enumerate(sizes) for c in range(max(1, -(-int(n) // 8)))]
        assert order[abi.Phase.WGRAD].keys() == every(wgrad_tiles, cuts)
        for expert, cut in cuts:
            first = schedule.block_offsets[expert] + cut * 8
            last = min(first + 8, schedule.block_offsets[expert + 1])
            tasks = [order[abi.Phase.WGRAD][(expert, cut), t] for t in range(wgrad_tiles)]
            needs = [
                order[abi.Phase.FC1][b, t] for b in range(first, last) for t in range(fc1_tiles)
            ]
            if cut > 0:
                needs += [order[abi.Phase.WGRAD][(expert, cut - 1), t] for t in range(wgrad_tiles)]
            assert max(needs, default=-1) < min(tasks)


def test_largest_expert_count_and_topk():
    rng = np.random.default_rng(7)
    ids = [rng.integers(-1, 1024, (t, 32)).astype(np.int32) for t in (70, 0)]
    found, probs = schedules(1024, ids)
    for rank, schedule in enumerate(found):
        rows, offsets = model_rows(1024, ids, probs, rank)
        assert schedule.block_offsets.tolist() == offsets
        assert [int(r["token"]) for r in schedule.rows if r["rank"] >= 0] == [
            r[1] for r in rows if r
        ]


def test_all_routes_to_one_expert_of_one_rank():
    ids = [np.full((50, 4), 3, np.int32), np.full((30, 4), 3, np.int32)]
    found, probs = schedules(4, ids)
    assert found[0].block_offsets.tolist() == [0, 0, 0]
    rows, offsets = model_rows(4, ids, probs, 1)
    assert offsets == [0, 0, 3]
    assert found[1].block_offsets.tolist() == offsets
    assert [tuple(r)[:3] for r in found[1].rows[:320]] == [
        (t, s, k) for s, t, k, _, _ in rows[:320]
    ]
