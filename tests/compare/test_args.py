from pathlib import Path

import pytest

from megatron_mok.compare import probe
from megatron_mok.compare.args import megatron_args, step0_load_args
from megatron_mok.compare.config import from_dict
from megatron_mok.compare.data import DataError, Dataset

from .test_config import changed

TEXT = Dataset(Path("/data/text"), Path("/data/index"))
TOKENS = Dataset(Path("/data/tokens"), Path("/data/index"), is_bytes=False)


def args_with(key, value, dataset=TEXT):
    return megatron_args(from_dict(changed(key, value)), dataset)


def test_model_keys_become_flags():
    args = args_with("model.moe_router_score_function", "sigmoid")
    assert "--moe-router-score-function=sigmoid" in args
    assert "--moe-router-topk=2" in args
    assert not any(a.startswith("--moe-router-num-groups") for a in args)  # left to Megatron
    assert not any("dispatcher" in a for a in args)  # that is the arms'


@pytest.mark.parametrize("value", [True, False])
def test_switches(value):
    args = args_with("model.moe_router_enable_expert_bias", value)
    assert ("--moe-router-enable-expert-bias" in args) == value


def test_gqa_is_switched_on_by_its_size():
    args = args_with("model.num_query_groups", 2)
    assert "--group-query-attention" in args
    assert "--num-query-groups=2" in args


def test_precision_and_device():
    assert "--bf16" not in args_with("precision", "fp32")
    assert "--bf16" in args_with("precision", "bf16")
    assert "--distributed-backend=gloo" in args_with("device", "cpu")
    assert "--distributed-backend=gloo" not in args_with("device", "cuda")


def test_modules_on_gpus_are_those_that_are_installed(monkeypatch):
    monkeypatch.setattr(probe, "no_transformer_engine", lambda: None)
    args = args_with("device", "cuda")
    assert "--transformer-impl=transformer_engine" in args
    assert "--no-rope-fusion" not in args
    monkeypatch.setattr(probe, "no_transformer_engine", lambda: "not installed")
    args = args_with("device", "cuda")
    assert "--transformer-impl=local" in args
    assert "--no-rope-fusion" in args
    assert "--moe-permute-fusion" not in args


def test_ranks_that_share_a_gpu_use_gloo():
    tree = changed("parallel.ranks_per_gpu", 2) | {"device": "cuda"}
    assert "--distributed-backend=gloo" in megatron_args(from_dict(tree), TEXT)


def test_deterministic_runs_are_runs_of_their_own():
    assert "--deterministic-mode" not in args_with("deterministic", False)
    assert "--deterministic-mode" in args_with("deterministic", True)


def test_evaluation_is_off_unless_asked_for():
    assert "--eval-iters=0" in args_with("seed", 1)
    args = args_with("train.eval_interval", 5)
    assert "--eval-interval=5" in args
    assert "--eval-iters=1" in args


def test_more_megatron_args_come_last():
    args = args_with("megatron_args", ["--log-params-norm"])
    assert args[-1] == "--log-params-norm"


def test_step0_is_loaded_as_iteration_0():
    assert step0_load_args(Path("/w")) == ["--load=/w", "--finetune"]


def test_vocabulary():
    assert "--vocab-size=256" in args_with("seed", 1)
    assert "--vocab-size=1000" in args_with("data.vocab_size", 1000, TOKENS)
    with pytest.raises(DataError, match=r"data\.vocab_size: missing"):
        args_with("seed", 1, TOKENS)
    with pytest.raises(DataError, match="must be 256 or left out"):
        args_with("data.vocab_size", 300)
