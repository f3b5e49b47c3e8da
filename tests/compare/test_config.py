import copy
from pathlib import Path

import pytest

from megatron_mok.compare.config import ConfigError, from_dict, load

CONFIGS = Path(__file__).parents[2] / "configs"

VALID = {
    "device": "cpu",
    "precision": "fp32",
    "seed": 1,
    "arms": ["alltoall"],
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 64,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 64,
    },
    "parallel": {"ranks": 2, "expert_model_parallel_size": 2},
    "train": {"steps": 10, "micro_batch_size": 2, "global_batch_size": 8, "lr": 1e-3},
}


def changed(key, value):
    """VALID with the dotted `key` set to `value`."""
    tree = copy.deepcopy(VALID)
    *path, last = key.split(".")
    node = tree
    for name in path:
        node = node.setdefault(name, {})
    node[last] = value
    return tree


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configs_are_valid(path):
    assert load(path).name == path.stem


def test_defaults():
    config = from_dict(VALID, name="x")
    assert config.name == "x"
    assert config.data.source == "stdlib"
    assert config.tokens_per_step == 8 * 64
    assert config.parallel.data_parallel_size == 2


@pytest.mark.parametrize("text", ["1e-3", 1e-3, "0.001"])
def test_numbers_that_yaml_reads_as_strings(text):
    assert from_dict(changed("train.lr", text)).train.lr == 1e-3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("modle", {}, "modle: unknown key; did you mean model?"),
        ("model.moe_router_top_k", 2, "did you mean model.moe_router_topk?"),
        ("train.warmup", 2, "train.warmup: unknown key"),
        ("device", "gpu", "device: must be one of cpu, cuda (given: 'gpu')"),
        ("precision", 16, "precision: must be one of fp32, bf16 (given: 16)"),
        ("seed", 0, "seed: must be at least 1 (given: 0)"),
        ("model", [1], "model: must be a mapping"),
        ("model.num_layers", "two", "model.num_layers: must be an integer (given: 'two')"),
        ("model.num_layers", True, "model.num_layers: must be an integer (given: True)"),
        ("model.num_layers", 0, "model.num_layers: must be at least 1"),
        ("model.moe_router_topk", 5, "is more than model.num_experts (4)"),
        ("model.qk_head_dim", 16, "needs model.multi_latent_attention"),
        ("model.moe_router_dtype", "bf16", "must be one of fp32, fp64"),
        ("parallel.expert_model_parallel_size", 3, "does not divide parallel.ranks (2)"),
        ("parallel.tensor_model_parallel_size", 4, "parallel.ranks: 2 is not a multiple"),
        ("parallel.overlap_param_gather", True, "needs distributed_optimizer: true"),
        ("parallel.sequence_parallel", True, "needs device: cuda"),
        ("parallel.ranks_per_gpu", 3, "does not divide parallel.ranks (2)"),
        ("parallel.ranks_per_gpu", 2, "must be 1 with device: cpu (given: 2)"),
        ("train.global_batch_size", 6, "is not a multiple of"),
        ("train.lr", 0, "train.lr: must be above 0"),
        ("train.lr_warmup_steps", 10, "must be from 0 to train.steps - 1 = 9"),
        ("train.recompute_modules", ["moe"], "needs train.recompute_granularity: selective"),
        ("train.recompute_modules", "moe", "must be a list of strings (given: 'moe')"),
        ("data.split", "90,10", "is not three numbers"),
        ("arms", [], "arms: empty; allowed are alltoall"),
        ("arms", ["alltoall", "deep"], "arms: 'deep' is not known; allowed are alltoall"),
        ("arms", ["alltoall", "alltoall"], "an arm is named twice"),
    ],
)
def test_errors_name_key_value_and_allowed(key, value, message):
    with pytest.raises(ConfigError) as error:
        from_dict(changed(key, value))
    assert message in str(error.value)


@pytest.mark.parametrize("key", ["device", "train.lr", "model.num_experts"])
def test_missing_key(key):
    tree = copy.deepcopy(VALID)
    *path, last = key.split(".")
    node = tree[path[0]] if path else tree
    del node[last]
    with pytest.raises(ConfigError, match=f"{key}: missing"):
        from_dict(tree)


def test_experts_must_divide():
    tree = changed("model.num_experts", 5)
    with pytest.raises(ConfigError, match=r"does not divide model.num_experts \(5\)"):
        from_dict(tree)


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(bad)
    bad.write_text("just text")
    with pytest.raises(ConfigError, match="must be a mapping"):
        load(bad)


def test_replace_is_checked():
    config = from_dict(VALID)
    assert config.replace(arms=("allgather",), steps=3).train.steps == 3
    assert config.replace() == config
    with pytest.raises(ConfigError, match=r"train.steps: must be at least 1 \(given: 0\)"):
        config.replace(steps=0)


def test_model_from_a_base():
    tree = copy.deepcopy(VALID)
    tree["model"] = {"base": "qwen3_30b", "num_layers": 2}
    model = from_dict(tree).model
    assert (model.num_layers, model.hidden_size, model.num_experts) == (2, 2048, 128)
    tree["model"]["base"] = "qwen"
    with pytest.raises(ConfigError, match=r"model\.base: 'qwen' is not known"):
        from_dict(tree)
