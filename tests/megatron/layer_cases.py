"""Rank side: one MoE layer under `mok`, in either mode, against the same layer under `alltoall`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megatron_mok.megatron.layer import MoKMoELayer
from tests.megatron.moe_cases import ROUTERS, make_config, make_layer, set_up_parallel

MAIN_GRAD_START = 0.25


def run_layer(layer: Any, tokens: int, seed: int = 3, padded: int = 0) -> dict[str, torch.Tensor]:
    """Forward and backward of `tokens` random tokens of this rank.

    Returns: output, dX, and the gradient of every parameter, by name.
    """
    x, grad = random_tokens(layer.config, tokens, seed)
    mask = None
    if padded:
        mask = torch.zeros(1, tokens, dtype=torch.bool).cuda()
        mask[:, -padded:] = True
    forget_gradients(layer)
    output, bias = layer(x, padding_mask=mask)
    assert bias is None
    assert (output.shape, output.dtype) == (x.shape, x.dtype)
    output.backward(grad)
    return {"output": output.detach(), "dX": x.grad} | gradients(layer)


def random_tokens(config: Any, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, 1, H] hidden states of this rank, a leaf, and gradients of the output.

    In float64 they have the values that they have in BF16.
    """
    generator = torch.Generator().manual_seed(seed + torch.distributed.get_rank())
    drawn_as = torch.bfloat16 if config.params_dtype == torch.float64 else config.params_dtype
    shape = (tokens, 1, config.hidden_size)
    x, grad = (
        torch.randn(shape, generator=generator).to(drawn_as).to(config.params_dtype).cuda()
        for _ in range(2)
    )
    return x.requires_grad_(), grad


def forget_gradients(layer: Any) -> None:
    """Drop all gradients. With gradient accumulation fusion parameters get a `main_grad`, which
    starts as something to add to."""
    for parameter in layer.parameters():
        parameter.grad = None
        if layer.config.gradient_accumulation_fusion:
            parameter.main_grad = torch.full_like(parameter, MAIN_GRAD_START, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False


def gradients(layer: Any) -> dict[str, torch.Tensor | None]:
    """The gradient of every parameter, by name, wherever it went."""
    return {
        f"d {name}": p.main_grad - MAIN_GRAD_START
        if getattr(p, "grad_added_to_main_grad", False)
        else p.grad
        for name, p in layer.named_parameters()
    }


def relative_difference(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """||found - expected|| / ||expected||; infinite when only one of them is there."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    scale = expected.double().norm()
    difference = (found.double() - expected.double()).norm()
    return float(difference / scale) if scale > 0 else float(difference)


def pair(spec: str = "local", **changes: Any) -> tuple[MoELayer, MoKMoELayer]:
    """The same layer twice, with equal weights: under alltoall and under mok."""
    native, fused = (
        make_layer(make_config(kind, **changes), spec=spec) for kind in ("alltoall", "mok")
    )
    fused.load_state_dict(native.state_dict(), strict=True)
    return native, fused


def compare(
    ep: int,
    tokens: list[int],
    router: str = "softmax",
    tp: int = 1,
    padded: int = 0,
    mode: str = "fused",
    **changes: Any,
) -> dict[str, float]:
    """Relative differences of output, dX and every parameter gradient, mok against native."""
    set_up_parallel(ep, tp=tp, mode=mode)
    if changes.get("bf16"):
        changes["params_dtype"] = torch.bfloat16
    native, fused = pair(**ROUTERS[router], **changes)
    mine = tokens[torch.distributed.get_rank()]
    expected = run_layer(native, mine, padded=padded)
    found = run_layer(fused, mine, padded=padded)
    assert list(found) == list(expected)
    if router == "deepseek":
        counts = [layer.router.local_tokens_per_expert for layer in (native, fused)]
        assert torch.equal(*counts)
        assert counts[0].sum() == 2 * mine
    return {name: relative_difference(found[name], expected[name]) for name in expected}


def compare_below_the_router(
    ep: int, tokens: list[int], mode: str = "fused", experts: int = 8
) -> dict[str, float]:
    """As `compare`, from given routes on: Megatron's router does not take 0 tokens. All of them go
    to the first `experts` of 8."""
    set_up_parallel(ep, mode=mode)
    mine = tokens[torch.distributed.get_rank()]
    results = []
    for layer in pair():
        generator = torch.Generator().manual_seed(3 + torch.distributed.get_rank())
        x = torch.randn(mine, 1, 64, generator=generator).requires_grad_()
        scores = torch.rand(mine, 8, generator=generator)
        routing_map = torch.zeros(mine, 8, dtype=torch.bool)
        routing_map.scatter_(1, scores[:, :experts].topk(2, dim=1).indices, True)
        probs = (scores * routing_map).requires_grad_()
        hidden, weights = layer.preprocess(x, probs, routing_map)
        dispatched, weights = layer.dispatch(hidden, weights)
        output, _ = layer.routed_experts_compute(dispatched, weights)
        output = layer.postprocess(layer.combine(output), None)
        output.backward(torch.randn(output.shape, generator=generator))
        result = {"output": output.detach(), "dX": x.grad, "dprobs": probs.grad}
        result |= {f"d {name}": p.grad for name, p in layer.experts.named_parameters()}
        assert all(value is not None for value in result.values())
        results.append(result)
    expected, found = results
    return {name: relative_difference(found[name], expected[name]) for name in expected}


def replayed_routes(ep: int, mode: str = "fused") -> dict[str, float]:
    """As `compare`, with routes that Megatron's router replays from a list."""
    set_up_parallel(ep, mode=mode)
    native, fused = pair(moe_enable_routing_replay=True)
    generator = torch.Generator().manual_seed(11 + torch.distributed.get_rank())
    ids_TK = torch.rand(48, 8, generator=generator).argsort(dim=1)[:, :2]
    results = []
    for layer in (native, fused):
        replay = layer.router.router_replay
        replay.set_target_indices(ids_TK)
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        results.append(run_layer(layer, 48))
        replay.clear_router_replay_action()
        chosen = run_layer(layer, 48)["output"]
        assert relative_difference(results[-1]["output"], chosen) > 0.1  # other routes than its own
    RouterReplay.clear_global_router_replay_instances()
    expected, found = results
    return {name: relative_difference(found[name], expected[name]) for name in expected}


def run_twice(ep: int, tokens: int, mode: str = "fused", **changes: Any) -> list[str]:
    """Names of the results that differ in any bit between two runs of the layer."""
    set_up_parallel(ep, mode=mode)
    layer = make_layer(make_config("mok", moe_shared_expert_intermediate_size=64, **changes))
    first, second = run_layer(layer, tokens), run_layer(layer, tokens)
    return [name for name in first if not torch.equal(first[name], second[name])]


def gradients_without_tokens(ep: int, mode: str = "fused", **changes: Any) -> dict[str, bool]:
    """Whether each expert's weight gradients are zeros, with all tokens on experts 0 to 3, after a
    call that used all experts."""
    set_up_parallel(ep, mode=mode)
    router = ROUTERS["deepseek"] | {"moe_router_num_groups": None, "moe_router_group_topk": None}
    layer = make_layer(make_config("mok", **router, **changes))
    run_layer(layer, 32)
    layer.router.expert_bias[4:] = -100.0
    grads = run_layer(layer, 32)
    first = parallel_state.get_expert_model_parallel_rank() * layer.num_local_experts
    zero = {}
    for name, grad in grads.items():
        if name.startswith("d experts."):
            index, _, rest = name.removeprefix("d experts.local_experts.").partition(".")
            zero[f"{first + int(index)}.{rest}"] = bool((grad == 0).all())
    return zero


def follows_weights(ep: int = 2, **changes: Any) -> float:
    """Difference to native after each kind of weight change that a training run makes."""
    set_up_parallel(ep)
    native, fused = pair(**changes)
    run_layer(fused, 16)
    worst = 0.0
    for change in (_change_in_place, _change_data_pointer, _load_weights):
        for layer in (native, fused):
            change(layer)
        expected, found = run_layer(native, 16), run_layer(fused, 16)
        worst = max(worst, *(relative_difference(found[n], expected[n]) for n in expected))
    return worst


def _change_in_place(layer: Any) -> None:
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.mul_(0.5)


def _change_data_pointer(layer: Any) -> None:
    for parameter in layer.experts.parameters():
        parameter.data = parameter.data.clone().add_(0.01)


def _load_weights(layer: Any) -> None:
    layer.load_state_dict({k: v * 2 for k, v in layer.state_dict().items() if v is not None})


def no_grad_and_eval(ep: int = 2, mode: str = "fused", **changes: Any) -> list[float]:
    """Differences of outputs in evaluation and under no_grad."""
    set_up_parallel(ep, mode=mode)
    native, fused = pair(moe_shared_expert_intermediate_size=64, **changes)
    x = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(1))
    x = x.to(native.config.params_dtype).cuda()
    differences = []
    for layer in (native, fused):
        layer.eval()
    differences.append(relative_difference(fused(x)[0].detach(), native(x)[0].detach()))
    with torch.no_grad():
        differences.append(relative_difference(fused(x)[0], native(x)[0]))
    return differences


def stages_match_forward(mode: str = "fused") -> bool:
    """Whether the stage methods, called one by one, give what forward gives."""
    set_up_parallel(2, mode=mode)
    layer = make_layer(make_config("mok", moe_shared_expert_intermediate_size=64))
    layer.eval()
    x = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(1))
    shared = layer.shared_experts_compute(x)
    probs, routing_map = layer.route(x)
    hidden, weights = layer.preprocess(x, probs, routing_map)
    dispatched, weights = layer.dispatch(hidden, weights)
    output, bias = layer.routed_experts_compute(dispatched, weights)
    assert bias is None
    output = layer.postprocess(layer.combine(output), shared)
    layer.backward_dw()
    return torch.equal(output, layer(x)[0])
