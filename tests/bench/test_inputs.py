"""Presets, routes, inputs and counted FLOPs."""

import pytest
import torch

from megatron_mok.bench.config import routed_flops
from megatron_mok.bench.layer import make_inputs
from megatron_mok.bench.presets import PRESETS
from megatron_mok.bench.routing import draw_routes
from megatron_mok.runtime import LayerShape


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_every_token_has_topk_routes_and_probs_on_them_alone(routing):
    probs_TE, map_TE = draw_routes(routing, 300, 16, 5, seed=3)
    assert map_TE.sum(1).eq(5).all()
    assert probs_TE[~map_TE].eq(0).all()
    assert probs_TE[map_TE].gt(0).all()
    torch.testing.assert_close(probs_TE.sum(1), torch.ones(300))


def test_loads_follow_the_popularity():
    tokens, experts, topk = 20_000, 32, 8
    mean = tokens * topk / experts
    loads = {}
    for routing in ("uniform", "zipf"):
        _, map_TE = draw_routes(routing, tokens, experts, topk, seed=1)
        loads[routing] = map_TE.sum(0).sort(descending=True).values / mean
    assert loads["uniform"][0] < 1.05
    assert loads["uniform"][-1] > 0.95
    assert 3.6 < loads["zipf"][0] < 3.9
    assert 0.2 < loads["zipf"][-1] < 0.5


def test_one_route_has_zipf_frequencies():
    _, map_TE = draw_routes("zipf", 50_000, 4, 1, seed=2)
    frequencies = map_TE.float().mean(0).sort(descending=True).values
    weights = 1 / torch.arange(1, 5)
    torch.testing.assert_close(frequencies, weights / weights.sum(), atol=0.01, rtol=0)


def test_routes_depend_on_the_seed_alone():
    first, second, other = (draw_routes("zipf", 64, 8, 2, seed)[1] for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_unknown_routing():
    with pytest.raises(ValueError, match="'even'; allowed are uniform and zipf"):
        draw_routes("even", 4, 4, 2, seed=1)


def test_inputs_have_unit_scale_through_the_layer():
    inputs = make_inputs(PRESETS["tiny"], 64, "uniform", torch.device("cpu"), torch.float32, 1)
    assert (inputs.tokens, inputs.hidden, inputs.ffn, inputs.experts) == (64, 128, 64, 8)
    assert inputs.fc1_E2FH.shape == (8, 128, 128)
    assert float(inputs.hidden_TH.std()) == pytest.approx(1, rel=0.05)
    assert float(inputs.fc1_E2FH.std()) == pytest.approx(128**-0.5, rel=0.05)
    assert float(inputs.fc2_EHF.std()) == pytest.approx(64**-0.5, rel=0.05)


def test_flops_of_deepseek_v3():
    forward = routed_flops("forward", 8192, PRESETS["deepseek_v3"])
    assert forward == 6 * 8192 * 8 * 7168 * 2048
    assert routed_flops("backward", 8192, PRESETS["deepseek_v3"]) == 2 * forward
    assert routed_flops("both", 8192, PRESETS["deepseek_v3"]) == 3 * forward


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_presets_are_shapes_that_the_engines_take(preset):
    assert preset.experts * preset.ep_size == preset.model_experts
    assert preset.topk <= preset.experts
    LayerShape(
        preset.hidden, preset.ffn, preset.experts, preset.topk, preset.tokens, torch.bfloat16
    )


def test_local_experts():
    experts = {name: preset.experts for name, preset in PRESETS.items()}
    assert experts == {
        "deepseek_v3": 32,
        "glm_4_5": 20,
        "qwen3_30b": 128,
        "qwen3_235b": 16,
        "kimi_k2": 48,
        "tiny": 8,
    }
