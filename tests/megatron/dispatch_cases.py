"""Rank side: what only `--mok-mode dispatch` can do."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from tests.megatron import layer_cases, train_cases
from tests.megatron.checkpoint_cases import SAVED_AT, difference, load, save, train
from tests.megatron.hook_cases import grouped_experts, message_of
from tests.megatron.layer_cases import pair, relative_difference, run_layer
from tests.megatron.moe_cases import make_config, make_layer, set_up_parallel
from tests.megatron.train_cases import Trainer

# Fields of TransformerConfig that mode fused refuses, by what they are.
SETTINGS: dict[str, dict[str, Any]] = {
    "biases": {"add_bias_linear": True},
    "gelu": {"gated_linear_unit": False, "activation_func": F.gelu},
    "squared_relu": {"gated_linear_unit": False, "activation_func": squared_relu},
    "geglu_with_biases": {"activation_func": F.gelu, "add_bias_linear": True},
    "clamped": {"activation_func_clamp_value": 0.5},
    "offset": {"activation_func": quick_gelu, "glu_linear_offset": 1.0},
    "fp8_input_store": {"activation_func_fp8_input_store": True, "bias_activation_fusion": True},
    "dropped_tokens": {"moe_expert_capacity_factor": 0.75},
    "dropped_by_position": {
        "moe_expert_capacity_factor": 0.75,
        "moe_token_drop_policy": "position",
    },
    "probs_on_input": {
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
    "probs_on_input_with_biases": {
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "add_bias_linear": True,
    },
    "odd_width_of_geglu": {"moe_ffn_hidden_size": 100, "activation_func": F.gelu},
}


def settings() -> list[str]:
    """Names of all settings."""
    return list(SETTINGS)


def refused_when_fused(setting: str) -> str:
    """What mode fused says to the setting."""
    set_up_parallel(2)
    return message_of(make_config, "mok", **SETTINGS[setting])


def compare(ep: int, setting: str, tokens: list[int]) -> dict[str, float]:
    """As `layer_cases.compare`."""
    return layer_cases.compare(ep, tokens, "fp32", mode="dispatch", **SETTINGS[setting])


def grouped(ep: int, **changes: Any) -> dict[str, float] | None:
    """As `hook_cases.grouped_experts`; None where this Megatron lacks a field."""
    if not changes.keys() <= {field.name for field in fields(TransformerConfig)}:
        return None
    return grouped_experts(ep, "dispatch", **changes)


def train_with_biases(ep: int) -> dict[str, float]:
    """As `train_cases.compare`."""
    return train_cases.compare(ep, mode="dispatch", **SETTINGS["biases"])


def across_ep_sizes() -> list[str]:
    """Names of results that differ in any bit at EP 2 or 4 from EP 1, for the same 4 x 24 tokens,
    routes and experts. At EP 1 every rank computes all of them, at EP 2 each pair of ranks."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for ep in (1, 2, 4):
        set_up_parallel(ep, mode="dispatch")
        layer = make_layer(make_config("mok", add_bias_linear=True, moe_router_topk=3))
        for expert in layer.experts.local_experts:
            # At EP 1 Megatron adds the bias in place to a view, which autograd refuses.
            expert.linear_fc2.register_forward_hook(lambda m, args, out: (out[0].clone(), out[1]))
        rank, local = parallel_state.get_expert_model_parallel_rank(), layer.num_local_experts
        for index, expert in enumerate(layer.experts.local_experts):
            generator = torch.Generator().manual_seed(rank * local + index)
            for parameter in expert.parameters():
                parameter.data.normal_(std=0.1, generator=generator)
        generator = torch.Generator().manual_seed(5)
        x, grad = (torch.randn(96, 1, 64, generator=generator) for _ in range(2))
        scores = torch.rand(96, 8, generator=generator)
        routing_map = torch.zeros(96, 8, dtype=torch.bool)
        routing_map.scatter_(1, scores.topk(3, dim=1).indices, True)
        routing_map &= torch.rand(96, 8, generator=generator) > 0.2
        own = slice(96 // ep * rank, 96 // ep * (rank + 1))
        mine = x[own].clone().requires_grad_()
        probs = (scores * routing_map)[own].clone().requires_grad_()
        hidden, weights = layer.preprocess(mine, probs, routing_map[own])
        output, _ = layer.routed_experts_compute(*layer.dispatch(hidden, weights))
        output = layer.postprocess(layer.combine(output), None)
        output.backward(grad[own])
        parts = {"output": output.detach(), "dX": mine.grad, "dprobs": probs.grad}
        result = {name: _gathered(part) for name, part in parts.items()}
        for name, parameter in layer.experts.local_experts.named_parameters():
            index, _, rest = name.partition(".")
            result[f"{rank * local + int(index)}.{rest}"] = parameter.grad
        found[ep] = result
    return [
        f"{name} at EP {ep}"
        for ep in (2, 4)
        for name, value in found[ep].items()
        if not torch.equal(value, found[1][name])
    ]


def _gathered(part: torch.Tensor) -> torch.Tensor:
    group = parallel_state.get_expert_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)


class Adapter(nn.Module):
    """A LoRA-style wrapper around an expert linear."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped
        out_size, in_size = wrapped.weight.shape
        generator = torch.Generator().manual_seed(3)
        self.down = nn.Parameter(torch.randn(4, in_size, generator=generator) * 0.1)
        self.up = nn.Parameter(torch.randn(out_size, 4, generator=generator) * 0.1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.wrapped(x)[0] + x @ self.down.t() @ self.up.t(), None


def adapted_experts() -> tuple[float, int]:
    """Worst relative difference to alltoall with adapters and a hook on the experts, and how often
    the hook ran."""
    set_up_parallel(2, mode="dispatch")
    calls: list[int] = []
    layers = pair()
    for layer in layers:
        for expert in layer.experts.local_experts:
            expert.linear_fc1 = Adapter(expert.linear_fc1)
    layers[1].experts.local_experts[0].linear_fc2.register_forward_hook(
        lambda *_: calls.append(1)  # returns None: changes nothing
    )
    expected, found = (run_layer(layer, 32) for layer in layers)
    assert any("adapter" in name or ".up" in name for name in expected)
    return max(relative_difference(found[n], expected[n]) for n in expected), len(calls)


def checkpoints(folder: str) -> dict[str, Any]:
    """A run under mode dispatch at EP 2 that saves and goes on; the same steps from its checkpoint,
    at EP 2 under alltoall and at EP 4 under mode fused; and mode dispatch again from there.

    Returns: relative differences of three steps' losses and gradient norms to the run that went on.
    """
    set_up_parallel(2, mode="dispatch")
    trainer = Trainer("mok")
    for _ in range(SAVED_AT):
        trainer.step()
    save(trainer, f"{folder}/dispatch")
    expected = train(trainer)
    set_up_parallel(2)
    native = train(load("alltoall", f"{folder}/dispatch"))
    set_up_parallel(4, mode="fused")
    fused = load("mok", f"{folder}/dispatch")
    save(fused, f"{folder}/fused")
    at_ep_4 = train(fused)
    set_up_parallel(2, mode="dispatch")
    back = train(load("mok", f"{folder}/fused"))
    found = {"alltoall": native, "fused": at_ep_4}
    return {name: difference(steps, expected) for name, steps in found.items()} | {
        "back": back == expected
    }
