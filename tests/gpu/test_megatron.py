"""Megatron's MoE layer and training steps with MoK on a GPU: one rank in a process of its own.

The cases are those of tests/megatron, in BF16, with Megatron's local modules and with Transformer
Engine's.
"""

import importlib.util

import pytest

from tests.megatron.assertions import BF16, assert_close, assert_no_worse, assert_same_training
from tests.megatron.rank_pool import RankPool


def missing(package):
    return importlib.util.find_spec(package) is None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing("megatron"), reason="needs megatron-core"),
]

SHARED = {"moe_shared_expert_intermediate_size": 64}
SPECS = [
    "local",
    pytest.param(
        "te",
        marks=pytest.mark.skipif(missing("transformer_engine"), reason="needs Transformer Engine"),
    ),
]
fusions = pytest.mark.parametrize("fusion", [False, True], ids=["returned", "main_grad"])
specs = pytest.mark.parametrize("spec", SPECS)
modes = pytest.mark.parametrize("mode", ["fused", "dispatch"])


@pytest.fixture(scope="module")
def rank():
    pool = RankPool(1, "cuda")
    yield pool
    pool.close()


def fields(spec):
    return {"bf16": True, "moe_grouped_gemm": spec == "te"}


@fusions
@specs
@modes
@pytest.mark.parametrize("router", ["fp32", "deepseek"])
def test_errors_of_a_layer(rank, router, mode, spec, fusion):
    results = rank.run(
        *("error_cases.errors", 1, 1000, router, spec, fusion, mode),
        **SHARED | {"hidden_size": 512, "num_moe_experts": 16},
    )
    assert_no_worse(results)


@specs
@pytest.mark.parametrize("modules", [["moe"], ["shared_experts"], ["moe_act"]])
def test_selective_recompute_in_a_layer(rank, modules, spec):
    changes = {"recompute_granularity": "selective", "recompute_modules": modules}
    results = rank.run("error_cases.errors", 1, 500, "fp32", spec, **changes, **SHARED)
    assert_no_worse(results)


@specs
@modes
def test_two_microbatches_in_flight(rank, mode, spec):
    assert rank.run("error_cases.two_in_flight", 1, [96, 40], spec, mode, bf16=True) == [[]]


@modes
def test_runs_of_a_layer_are_bitwise_equal(rank, mode):
    assert rank.run("layer_cases.run_twice", 1, 48, mode, bf16=True) == [[]]


def test_experts_without_tokens_get_zero_gradients(rank):
    (zero,) = rank.run("layer_cases.gradients_without_tokens", 1, bf16=True)
    for name, is_zero in zero.items():
        assert is_zero == (int(name.partition(".")[0]) >= 4), name


def test_output_follows_the_weights(rank):
    assert rank.run("layer_cases.follows_weights", 1, bf16=True)[0] <= BF16


def test_evaluation_and_no_grad(rank):
    assert_close([dict(enumerate(rank.run("layer_cases.no_grad_and_eval", 1, bf16=True)[0]))], BF16)


@fusions
@specs
@modes
def test_training(rank, mode, spec, fusion):
    """With mcore's DDP, the distributed optimizer and both overlaps."""
    changes = fields(spec) | SHARED | {"mode": mode}
    results = rank.run("train_cases.compare", 1, "fp32", spec=spec, fusion=fusion, **changes)
    assert_same_training(results, BF16)


RECOMPUTE = {
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@specs
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_training_with_recompute(rank, recompute, spec):
    changes = fields(spec) | RECOMPUTE[recompute]
    results = rank.run("train_cases.compare", 1, "fp32", spec=spec, **changes)
    assert_same_training(results, BF16)


@specs
def test_training_with_mtp(rank, spec):
    changes = fields(spec) | {"mtp_num_layers": 1}
    assert_same_training(rank.run("train_cases.compare", 1, spec=spec, **changes), BF16)


@modes
def test_training_is_bitwise_repeatable(rank, mode):
    assert rank.run("train_cases.train_twice", 1, mode, bf16=True) == [True]


@modes
@pytest.mark.parametrize("recompute", [None, *RECOMPUTE])
def test_statistics(rank, mode, recompute):
    changes = RECOMPUTE.get(recompute, {}) | {"mode": mode, "bf16": True}
    ((logged, _, expected),) = rank.run("statistics_cases.training", 1, **changes)
    assert logged == pytest.approx(expected, rel=1e-5)


def test_statistics_wait_for_nothing(rank):
    (values,) = rank.run("statistics_cases.without_waiting")
    assert values["mok_tokens_per_expert_mean"] == 300
    assert values["mok_padding_percent"] == pytest.approx(100 * (1 - 300 / 384))
    assert values["mok_recomputed_percent"] == 100


@fusions
def test_ranges_of_the_fused_layer(rank, fusion):
    assert rank.run("range_cases.traced", 1, "fused", fusion, bf16=True) == [
        {
            "mok.fused.forward.layer_1": ["mok::moe_forward"],
            "mok.fused.backward.layer_1": ["mok::moe_backward"],
        }
    ]
