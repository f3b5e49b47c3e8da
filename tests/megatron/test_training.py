"""Training steps with Megatron's own DDP, distributed optimizer and schedules.

Four ranks, expert parallelism 2 x expert data parallelism 2, everything overlapped, many buckets:
with fewer ranks, or one bucket, a layer that computes with stale weights goes unnoticed.
"""

import pytest

from tests.megatron.assertions import BF16, assert_same_training

SHARED = {"moe_shared_expert_intermediate_size": 64}


@pytest.mark.parametrize("fusion", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_training(ranks, ep, fusion):
    assert_same_training(ranks.run("train_cases.compare", ep, fusion=fusion, **SHARED))


@pytest.mark.parametrize("fusion", [False, True], ids=["returned", "main_grad"])
def test_training_with_moe_recompute(ranks, fusion):
    changes = {"recompute_granularity": "selective", "recompute_modules": ["moe", "layernorm"]}
    results = ranks.run("train_cases.compare", 2, "deepseek", fusion=fusion, **changes, **SHARED)
    assert_same_training(results)


def test_training_with_layernorm_recompute(ranks):
    changes = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    assert_same_training(ranks.run("train_cases.compare", 2, **changes, **SHARED))


def test_training_with_full_recompute(ranks):
    changes = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert_same_training(ranks.run("train_cases.compare", 2, "deepseek", **changes))


def test_training_with_mtp(ranks):
    assert_same_training(ranks.run("train_cases.compare", 2, mtp_num_layers=1))


def test_training_with_pipeline_parallel(ranks):
    assert_same_training(ranks.run("train_cases.compare", 2, pp=2, **SHARED))


def test_per_layer_logging(ranks):
    native, fused = ranks.run("train_cases.per_layer_logs")[0]
    layers = [name for name in native if name.startswith("moe/")]
    assert len(layers) == 4, native  # two losses of two layers
    assert fused == pytest.approx(native, rel=1e-5)
    assert all(native[name] > 0 for name in layers)


def test_training_in_bf16(ranks):
    assert_same_training(ranks.run("train_cases.compare", 2, fusion=True, bf16=True), BF16)


def test_training_is_bitwise_repeatable(ranks):
    assert ranks.run("train_cases.train_twice", 2) == [True] * 4


def test_topology_shows_stale_weights(ranks):
    """The setup of this file can see the fault that it is there for."""
    assert any(ranks.run("train_cases.train_without_aliases", 2))
