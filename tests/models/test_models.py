import pytest

from megatron_mok.models import MODELS, ConfigError, load_model, resolve_base


@pytest.mark.parametrize("name", MODELS)
def test_known_models_are_valid(name):
    model = load_model(name)
    assert model.vocab_size % 128 == 0
    # As many layers as the pattern of dense and expert layers says.
    pattern = model.moe_layer_freq or f"([1]*{model.num_layers})"
    layers = [part.strip("()[]").split("]*") for part in pattern.split("+")]
    assert sum(int(count) for _, count in layers) == model.num_layers


def test_unknown_model():
    with pytest.raises(ConfigError, match=r"'deepseek' is not known; allowed are deepseek_v3, "):
        load_model("deepseek")


def test_own_keys_win_over_those_of_the_base():
    tree = resolve_base({"base": "deepseek_v3", "num_layers": 3, "mtp_num_layers": None})
    assert tree["num_layers"] == 3
    assert tree["mtp_num_layers"] is None
    assert tree["hidden_size"] == 7168
    assert "base" not in tree


def test_without_a_base_nothing_changes():
    assert resolve_base({"num_layers": 3}) == {"num_layers": 3}
    assert resolve_base([1]) == [1]


def test_errors_name_the_key():
    with pytest.raises(ConfigError, match=r"^model\.base: 'gpt' is not known"):
        resolve_base({"base": "gpt"}, "model.")


def test_flags():
    flags = load_model("glm_4_5").flags()
    assert "--add-qkv-bias" in flags
    assert "--rotary-percent=0.5" in flags
    assert "--group-query-attention" in flags
    assert not any(flag.startswith("--vocab-size") for flag in flags)
    assert "--qk-layernorm" not in load_model("glm_4_5_air").flags()
