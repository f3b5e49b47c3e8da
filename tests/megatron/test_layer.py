"""One MoE layer under `mok` computes what it computes under `alltoall`."""

import pytest

from tests.megatron.assertions import BF16, FP32, assert_close, assert_no_worse

EVEN = [48, 48, 48, 48]


@pytest.mark.parametrize("router", ["softmax", "fp32", "fp64", "deepseek", "top1", "all"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_routers(ranks, ep, router):
    assert_close(ranks.run("layer_cases.compare", ep, EVEN, router), FP32)


@pytest.mark.parametrize("router", ["softmax", "deepseek"])
@pytest.mark.parametrize("ep", [1, 2])
def test_bf16(ranks, ep, router):
    assert_close(ranks.run("layer_cases.compare", ep, EVEN, router, bf16=True), BF16)


@pytest.mark.parametrize("fusion", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("router", ["fp32", "deepseek"])
@pytest.mark.parametrize("mode", ["fused", "dispatch"])
@pytest.mark.parametrize("ep", [1, 2])
def test_errors_in_bf16(ranks, ep, mode, router, fusion):
    changes = {"mode": mode, "moe_shared_expert_intermediate_size": 64}
    results = ranks.run("error_cases.errors", ep, 400, router, fusion=fusion, **changes)
    assert_no_worse(results)


@pytest.mark.parametrize("mode", ["fused", "dispatch"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_two_microbatches_in_flight(ranks, bf16, mode):
    found = ranks.run("error_cases.two_in_flight", 2, [96, 40], mode=mode, bf16=bf16)
    assert found == [[]] * 4


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("width", [8, 100, 192])  # the experts' own is 128
def test_shared_expert(ranks, width, overlap, gate):
    changes = {
        "moe_shared_expert_intermediate_size": width,
        "moe_shared_expert_gate": gate,
        "moe_shared_expert_overlap": overlap,
    }
    assert_close(ranks.run("layer_cases.compare", 2, EVEN, **changes), FP32)


@pytest.mark.parametrize("ep", [2, 4])
def test_different_token_counts(ranks, ep):
    assert_close(ranks.run("layer_cases.compare", ep, [96, 1, 5, 37]), FP32)


@pytest.mark.parametrize("ep", [2, 4])
def test_rank_without_tokens(ranks, ep):
    assert_close(ranks.run("layer_cases.compare_below_the_router", ep, [48, 0, 5, 37]), FP32)


def test_padding_mask(ranks):
    results = ranks.run("layer_cases.compare", 2, EVEN, "fp32", padded=11)
    assert_close(results, FP32)


def test_router_replay(ranks):
    assert_close(ranks.run("layer_cases.replayed_routes", 2), FP32)


@pytest.mark.parametrize("ep", [2, 4])
def test_tensor_and_sequence_parallel(ranks, ep):
    changes = {"moe_shared_expert_intermediate_size": 64, "tp": 2}
    assert_close(ranks.run("layer_cases.compare", ep, EVEN, **changes), FP32)


@pytest.mark.parametrize("modules", [["moe"], ["shared_experts"], ["moe_act"]])
def test_selective_recompute(ranks, modules):
    changes = {
        "moe_shared_expert_intermediate_size": 64,
        "recompute_granularity": "selective",
        "recompute_modules": modules,
        "moe_grouped_gemm": "moe_act" in modules,  # Megatron asks for it; the spec stays local
    }
    assert_close(ranks.run("layer_cases.compare", 2, EVEN, "deepseek", **changes), FP32)


@pytest.mark.parametrize("ep", [1, 2])
def test_runs_are_bitwise_equal(ranks, ep):
    assert ranks.run("layer_cases.run_twice", ep, 48) == [[]] * 4


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_without_tokens_get_zero_gradients(ranks, ep):
    for zero in ranks.run("layer_cases.gradients_without_tokens", ep):
        for name, is_zero in zero.items():
            assert is_zero == (int(name.partition(".")[0]) >= 4), name


def test_output_follows_the_weights(ranks):
    assert max(ranks.run("layer_cases.follows_weights")) <= FP32


def test_evaluation_and_no_grad(ranks):
    assert max(max(pair) for pair in ranks.run("layer_cases.no_grad_and_eval")) <= FP32


def test_stage_methods_match_forward(ranks):
    assert all(ranks.run("layer_cases.stages_match_forward"))
