"""Megatron with MoK in four processes that share a GPU under MPS, with gloo: expert parallelism
with expert data parallelism, everything overlapped, as tests/megatron has it on the CPU."""

import importlib.util

import pytest

from megatron_mok.compare.mps import find_control, share_gpu
from tests.megatron.assertions import BF16, assert_no_worse, assert_same_training
from tests.megatron.rank_pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.skipif(find_control() is None, reason="no nvidia-cuda-mps-control"),
]

SHARED = {"moe_shared_expert_intermediate_size": 64}
modes = pytest.mark.parametrize("mode", ["fused", "dispatch"])


@pytest.fixture(scope="module")
def ranks():
    with share_gpu(4) as shared:
        pool = RankPool(4, "cuda", shared)
        yield pool
        pool.close()


@modes
@pytest.mark.parametrize("ep", [2, 4])
def test_errors_of_a_layer(ranks, ep, mode):
    changes = {"mode": mode, "hidden_size": 512, "num_moe_experts": 16, **SHARED}
    assert_no_worse(ranks.run("error_cases.errors", ep, 600, "deepseek", **changes))


@pytest.mark.parametrize("fusion", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_training(ranks, ep, fusion):
    results = ranks.run("train_cases.compare", ep, "fp32", fusion=fusion, bf16=True, **SHARED)
    assert_same_training(results, BF16)


def test_training_in_mode_dispatch(ranks):
    results = ranks.run("train_cases.compare", 2, "fp32", mode="dispatch", bf16=True, **SHARED)
    assert_same_training(results, BF16)


def test_training_with_moe_recompute(ranks):
    changes = {"recompute_granularity": "selective", "recompute_modules": ["moe"], **SHARED}
    assert_same_training(ranks.run("train_cases.compare", 2, "fp32", bf16=True, **changes), BF16)


@modes
def test_training_is_bitwise_repeatable(ranks, mode):
    assert ranks.run("train_cases.train_twice", 2, mode, bf16=True) == [True] * 4
