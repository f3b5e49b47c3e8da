"""The schedule of the Hopper engine: its tables are the host engine's, its tasks cover the work."""

import numpy as np
import pytest
import torch

from megatron_mok.runtime import RuntimeOptions, abi
from megatron_mok.runtime.schedule import make_schedule
from tests.in_process import make_workspaces, run_ranks

pytestmark = pytest.mark.gpu

CASES = {
    # experts, topk, tokens of each rank, experts that get routes
    "one_rank": (8, 3, [1000], 8),
    "no_tokens": (4, 2, [0, 0], 4),
    "uneven": (16, 8, [0, 1, 700, 64], 16),
    "one_expert": (8, 4, [500, 30], 1),
    "half_idle": (64, 6, [200, 0, 90, 333], 30),
    "no_routes": (8, 2, [50, 50], 0),
    "experts_1024": (1024, 32, [70, 150], 1024),
    "eight_ranks": (24, 5, [3, 999, 128, 0, 257, 64, 5, 1], 24),
    "many_chunks": (32, 1, [9000, 4000], 32),
}


def schedules(device, case, direction=abi.Direction.FORWARD, hidden=64, ffn=64, workers=4):
    experts, topk, tokens, allowed = CASES[case]
    options = RuntimeOptions(first_wait_s=10, inner_wait_s=10, workers=workers)
    workspaces = make_workspaces(
        len(tokens),
        options,
        device,
        hidden=hidden,
        ffn=ffn,
        num_experts=experts,
        topk=topk,
        max_tokens=max(1, *tokens),
        dtype=torch.bfloat16,
    )
    g = torch.Generator().manual_seed(sum(tokens))
    ids = [torch.randint(-1, allowed, (t, topk), generator=g, dtype=torch.int32) for t in tokens]
    probs = [torch.rand(t, topk, generator=g) for t in tokens]
    ids, probs = ([x.to(device) for x in xs] for xs in (ids, probs))
    return run_ranks(
        len(tokens), lambda r: make_schedule(workspaces[r], ids[r], probs[r], direction), device
    )


@pytest.mark.parametrize("case", CASES)
def test_tables_are_the_host_engines(case):
    pairs = zip(schedules("cuda", case), schedules("cpu", case), strict=True)
    for rank, (device, host) in enumerate(pairs):
        assert np.array_equal(device.counts_RE, host.counts_RE), rank
        assert np.array_equal(device.block_offsets, host.block_offsets), rank
        assert np.array_equal(device.rows, host.rows), rank


def tickets_of(schedule):
    """{phase: {(block or (expert, cut), tile): ticket}}; every tile once."""
    found = {phase: {} for phase in abi.Phase}
    tickets = 0
    for s in schedule.segments:
        assert s["first_ticket"] == tickets
        phase = abi.Phase(s["phase"])
        blocks = range(s["first_block"], s["first_block"] + s["num_blocks"])
        keys = [(int(s["expert"]), int(s["cut"]))] if phase == abi.Phase.WGRAD else blocks
        for tile in range(s["first_tile"], s["first_tile"] + s["num_tiles"]):
            for key in keys:
                assert (key, tile) not in found[phase]
                found[phase][key, tile] = tickets
                tickets += 1
    assert tickets == schedule.num_tickets
    return found


@pytest.mark.parametrize("direction", list(abi.Direction))
@pytest.mark.parametrize("case", ["one_rank", "uneven", "one_expert", "no_routes", "many_chunks"])
def test_tickets_cover_the_work_in_a_safe_order(case, direction):
    hidden, ffn = 640, 320
    backward = direction == abi.Direction.BACKWARD
    fc1_tiles = -(-ffn // 256) if backward else -(-ffn // 128)
    fc2_tiles = -(-hidden // 256)
    wgrad_tiles = 5 * 3 + 5 * 2  # 128 x 256 tiles of [2F, H] and of [H, F]
    for schedule in schedules("cuda", case, direction, hidden, ffn):
        order = tickets_of(schedule)
        blocks = range(int(schedule.block_offsets[-1]))

        def every(tiles, keys):
            return {(key, tile) for key in keys for tile in range(tiles)}

        assert order[abi.Phase.FC1].keys() == every(fc1_tiles, blocks)
        assert order[abi.Phase.FC2].keys() == every(fc2_tiles, blocks)
        assert not order[abi.Phase.DISPATCH]
        assert not order[abi.Phase.REDUCE]
        last_fc1 = [max(order[abi.Phase.FC1][b, t] for t in range(fc1_tiles)) for b in blocks]
        for b in blocks:
            assert last_fc1[b] < min(order[abi.Phase.FC2][b, t] for t in range(fc2_tiles))
        if not backward:
            assert not order[abi.Phase.WGRAD]
            continue
        cuts = {
            (e, c): range(first + c * 32, min(first + c * 32 + 32, end))
            for e, (first, end) in enumerate(
                zip(schedule.block_offsets, schedule.block_offsets[1:], strict=False)
            )
            for c in range(-(-int(end - first) // 32))
        }
        assert order[abi.Phase.WGRAD].keys() == every(wgrad_tiles, cuts)
        for (expert, cut), cut_blocks in cuts.items():
            tasks = [order[abi.Phase.WGRAD][(expert, cut), t] for t in range(wgrad_tiles)]
            assert max(last_fc1[b] for b in cut_blocks) < min(tasks)
            if cut > 0:
                before = [order[abi.Phase.WGRAD][(expert, cut - 1), t] for t in range(wgrad_tiles)]
                assert max(before) < min(tasks)
