"""Rank side: errors of MoE layers in BF16 against float64, and microbatches in flight."""

from __future__ import annotations

import re
from typing import Any

import torch

from tests.megatron.layer_cases import (
    forget_gradients,
    gradients,
    pair,
    random_tokens,
    relative_difference,
    run_layer,
)
from tests.megatron.moe_cases import (
    ROUTERS,
    make_config,
    make_layer,
    set_up_parallel,
    use_weight_gradient_fusion_without_apex,
)

# Wide enough for errors to be those of many sums.
SIZES = {"hidden_size": 256, "moe_ffn_hidden_size": 192, "num_moe_experts": 8}


def errors(
    ep: int,
    tokens: int,
    router: str = "fp32",
    spec: str = "local",
    fusion: bool = False,
    mode: str = "fused",
    **changes: Any,
) -> dict[str, tuple[float, float]]:
    """Relative errors of output, dX and every parameter gradient of a layer in BF16, under
    alltoall and under mok, against alltoall in float64 with the same weights and routes."""
    set_up_parallel(ep, mode=mode, max_tokens=tokens)
    # Megatron asks for grouped products before it recomputes moe_act, whatever the spec.
    changes = SIZES | {"moe_grouped_gemm": True} | ROUTERS[router] | changes
    if fusion:
        use_weight_gradient_fusion_without_apex()
    native, fused = pair(
        spec,
        **changes,
        bf16=True,
        gradient_accumulation_fusion=fusion,
    )
    wide = {"params_dtype": torch.float64, "moe_router_dtype": "fp64"}
    reference = make_layer(make_config("alltoall", **changes | wide))
    reference.load_state_dict(_weights(native))
    expected, native_results, fused_results = (
        _results(layer, tokens) for layer in (reference, native, fused)
    )
    routes, *others = (r.pop("routes") for r in (expected, native_results, fused_results))
    assert all(torch.equal(routes, other) for other in others), "a near tie of router scores"
    assert expected.keys() == native_results.keys() == fused_results.keys()
    return {
        name: (
            relative_difference(native_results[name], expected[name]),
            relative_difference(fused_results[name], expected[name]),
        )
        for name in expected
    }


def _results(layer: Any, tokens: int) -> dict[str, torch.Tensor]:
    """What `run_layer` returns, by names of the local spec, and the routes."""
    maps = []
    hook = layer.router.register_forward_hook(lambda *call: maps.append(call[-1][1]))
    results = run_layer(layer, tokens)
    hook.remove()
    return {_local_name(name): value for name, value in results.items()} | {"routes": maps[0]}


def _weights(layer: Any) -> dict[str, torch.Tensor]:
    return {
        _local_name(name): value
        for name, value in layer.state_dict().items()
        if torch.is_tensor(value) and not name.endswith("_extra_state")
    }


def _local_name(name: str) -> str:
    """A parameter's name in SequentialMLP, given the one in TEGroupedMLP (or itself)."""
    return re.sub(
        r"experts\.(linear_fc\d)\.weight(\d+)$", r"experts.local_experts.\2.\1.weight", name
    )


def two_in_flight(
    ep: int, tokens: list[int], spec: str = "local", mode: str = "fused", **changes: Any
) -> list[str]:
    """Names of the results that differ in any bit when a second forward comes before the first
    backward, as in a pipeline; both orders of the backwards."""
    set_up_parallel(ep, mode=mode)
    changes = SIZES | {"moe_shared_expert_intermediate_size": 64} | changes
    config = make_config("mok", **changes, moe_grouped_gemm=spec == "te")
    layer = make_layer(config, spec=spec)
    alone = [run_layer(layer, count, seed) for seed, count in enumerate(tokens)]
    differing = []
    for order in ((0, 1), (1, 0)):
        batches = [random_tokens(config, count, seed) for seed, count in enumerate(tokens)]
        outputs = [layer(x)[0] for x, _ in batches]
        for index in order:
            x, grad = batches[index]
            forget_gradients(layer)
            outputs[index].backward(grad)
            found = {"output": outputs[index].detach(), "dX": x.grad} | gradients(layer)
            expected = alone[index]
            assert found.keys() == expected.keys()
            differing += [n for n in found if not torch.equal(found[n], expected[n])]
    return differing
