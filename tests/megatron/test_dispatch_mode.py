"""`--mok-mode dispatch`: MoK's dispatch and combine around Megatron's own experts."""

import pytest

from tests.megatron.assertions import BF16, FP32, assert_close, assert_same_training
from tests.megatron.test_layer import EVEN
from tests.megatron.test_training import SHARED

DISPATCH = {"mode": "dispatch"}
SETTINGS = [
    *("biases", "gelu", "squared_relu", "geglu_with_biases", "clamped", "offset"),
    *("fp8_input_store", "dropped_tokens", "dropped_by_position"),
    *("probs_on_input", "probs_on_input_with_biases", "odd_width_of_geglu"),
]


@pytest.mark.parametrize("router", ["softmax", "fp32", "fp64", "deepseek", "top1", "all"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_routers(ranks, ep, router):
    assert_close(ranks.run("layer_cases.compare", ep, EVEN, router, **DISPATCH), FP32)


@pytest.mark.parametrize("router", ["softmax", "deepseek"])
@pytest.mark.parametrize("ep", [1, 2])
def test_bf16(ranks, ep, router):
    assert_close(ranks.run("layer_cases.compare", ep, EVEN, router, bf16=True, **DISPATCH), BF16)


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_the_fused_layer_refuses(ranks, setting):
    """Those that only Megatron's experts can do, and what the fused layer says to them."""
    said = ranks.run("dispatch_cases.refused_when_fused", setting)[0]
    assert "set --mok-mode dispatch" in said
    # At EP 1 Megatron's SequentialMLP cannot train with biases, whatever the dispatcher.
    for ep in (2, 4):
        assert_close(ranks.run("dispatch_cases.compare", ep, setting, EVEN), FP32)


def test_settings_with_different_token_counts(ranks):
    for setting in ("biases", "probs_on_input_with_biases"):
        assert_close(ranks.run("dispatch_cases.compare", 4, setting, [96, 1, 5, 37]), FP32)


def test_all_settings_are_tested(ranks):
    assert ranks.run("dispatch_cases.settings")[0] == SETTINGS


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [{}, {"add_bias_linear": True}, {"moe_mlp_glu_interleave_size": 32}],
    ids=["plain", "biases", "interleaved"],
)
def test_grouped_experts(ranks, ep, changes):
    results = ranks.run("dispatch_cases.grouped", ep, **changes)
    if results[0] is None:
        pytest.skip("this Megatron-Core does not have it")
    assert_close(results, FP32)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_shared_expert(ranks, overlap, gate):
    changes = {
        "moe_shared_expert_intermediate_size": 100,
        "moe_shared_expert_gate": gate,
        "moe_shared_expert_overlap": overlap,
    }
    assert_close(ranks.run("layer_cases.compare", 2, EVEN, **DISPATCH, **changes), FP32)


@pytest.mark.parametrize("experts", [8, 2])
@pytest.mark.parametrize("ep", [2, 4])
def test_ranks_without_tokens_and_experts_without_rows(ranks, ep, experts):
    tokens = [48, 0, 5, 37]
    results = ranks.run(
        "layer_cases.compare_below_the_router", ep, tokens, experts=experts, **DISPATCH
    )
    assert_close(results, FP32)


def test_different_token_counts(ranks):
    assert_close(ranks.run("layer_cases.compare", 4, [96, 1, 5, 37], **DISPATCH), FP32)


def test_padding_mask(ranks):
    assert_close(ranks.run("layer_cases.compare", 2, EVEN, "fp32", padded=11, **DISPATCH), FP32)


def test_router_replay(ranks):
    assert_close(ranks.run("layer_cases.replayed_routes", 2, **DISPATCH), FP32)


def test_tensor_and_sequence_parallel(ranks):
    assert_close(ranks.run("layer_cases.compare", 2, EVEN, tp=2, **SHARED, **DISPATCH), FP32)


@pytest.mark.parametrize("modules", [["moe"], ["shared_experts"]])
def test_selective_recompute(ranks, modules):
    changes = {"recompute_granularity": "selective", "recompute_modules": modules}
    results = ranks.run("layer_cases.compare", 2, EVEN, **changes, **SHARED, **DISPATCH)
    assert_close(results, FP32)


@pytest.mark.parametrize("ep", [1, 2])
def test_runs_are_bitwise_equal(ranks, ep):
    assert ranks.run("layer_cases.run_twice", ep, 48, **DISPATCH) == [[]] * 4


def test_bitwise_equal_at_every_ep_size(ranks):
    assert ranks.run("dispatch_cases.across_ep_sizes") == [[]] * 4


def test_evaluation_and_no_grad(ranks):
    pairs = ranks.run("layer_cases.no_grad_and_eval", **DISPATCH)
    assert max(max(pair) for pair in pairs) <= FP32


def test_stage_methods_match_forward(ranks):
    assert all(ranks.run("layer_cases.stages_match_forward", **DISPATCH))


def test_adapters_and_hooks_on_experts_work(ranks):
    for worst, calls in ranks.run("dispatch_cases.adapted_experts"):
        assert worst <= FP32
        assert calls == 1


def test_one_line_says_what_runs(ranks):
    (line,) = ranks.run("hook_cases.announcements", **DISPATCH)[0]
    assert "dispatch and combine around Megatron's experts, engine host" in line


@pytest.mark.parametrize("mtp", [False, True])
def test_specs_that_name_the_layer(ranks, mtp):
    for found in ranks.run("hook_cases.own_spec", mtp, **DISPATCH):
        assert found["layers"] == {"DispatchMoELayer"}
        assert "drop --moe-pad-expert-input-to-capacity" in found["refused"]


@pytest.mark.parametrize(("ep", "fusion"), [(1, False), (2, True), (4, False)])
def test_training(ranks, ep, fusion):
    results = ranks.run("train_cases.compare", ep, fusion=fusion, **SHARED, **DISPATCH)
    assert_same_training(results)


def test_training_with_pipeline_parallel(ranks):
    assert_same_training(ranks.run("train_cases.compare", 2, pp=2, **SHARED, **DISPATCH))


def test_training_with_mtp(ranks):
    assert_same_training(ranks.run("train_cases.compare", 2, mtp_num_layers=1, **DISPATCH))


def test_training_with_full_recompute(ranks):
    changes = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    results = ranks.run("train_cases.compare", 2, "deepseek", **changes, **DISPATCH)
    assert_same_training(results)


def test_training_with_expert_biases(ranks):
    assert_same_training(ranks.run("dispatch_cases.train_with_biases", 2))


def test_training_is_bitwise_repeatable(ranks):
    assert ranks.run("train_cases.train_twice", 2, **DISPATCH) == [True] * 4


def test_checkpoints_change_mode(ranks, tmp_path):
    for found in ranks.run("dispatch_cases.checkpoints", str(tmp_path)):
        assert found["alltoall"] <= 1e-5
        assert found["fused"] <= 1e-5
        assert found["back"]
