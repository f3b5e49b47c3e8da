"""Ranges of MoK's calls, in traces of torch.profiler and as NVTX ranges."""

import pytest


@pytest.mark.parametrize("fusion", [False, True], ids=["returned", "main_grad"])
def test_trace_of_the_fused_layer(ranks, fusion):
    assert ranks.run("range_cases.traced", 2, "fused", fusion) == 4 * [
        {
            "mok.fused.forward.layer_1": ["mok::moe_forward"],
            "mok.fused.backward.layer_1": ["mok::moe_backward"],
        }
    ]


def test_trace_of_mode_dispatch(ranks):
    assert ranks.run("range_cases.traced", 2, "dispatch") == 4 * [
        {
            "mok.dispatch.forward.layer_1": ["mok::dispatch"],
            "mok.combine.forward.layer_1": ["mok::combine"],
            "mok.combine.backward.layer_1": ["mok::combine_backward"],
            "mok.dispatch.backward.layer_1": ["mok::dispatch_backward"],
        }
    ]


NVTX = {
    "fused": ["fused.forward", "fused.backward"],
    "dispatch": ["dispatch.forward", "combine.forward", "combine.backward", "dispatch.backward"],
}


@pytest.mark.parametrize("mode", NVTX)
def test_nvtx_ranges(ranks, mode):
    calls = [f"{sign} mok.{call}.layer_1" for call in NVTX[mode] for sign in "+-"]
    assert ranks.run("range_cases.nvtx", 2, mode) == 4 * [calls]


@pytest.mark.parametrize("mode", ["fused", "dispatch"])
def test_no_ranges_where_nobody_looks(ranks, mode):
    assert ranks.run("range_cases.unwatched", 2, mode) == 4 * [0]
