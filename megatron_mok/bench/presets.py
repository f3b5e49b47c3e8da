"""Layers of known models, as the slice that one expert-parallel rank computes."""

from dataclasses import dataclass

from megatron_mok.models import load_model


@dataclass(frozen=True)
class Preset:
    """The routed experts of one MoE layer on one rank.

    With balanced routes, a rank of an EP group receives as many rows as its own tokens have routes.
    So the slice routes all K routes of its tokens among its local experts: the work of one rank,
    without the traffic between ranks.

    Attributes:
        hidden: H.
        ffn: F, intermediate size of one expert.
        experts: local experts, `model_experts` / `ep_size`.
        topk: K, routes of a token.
        tokens: default number of tokens.
        model_experts: routed experts of the model's layer.
        ep_size: expert-parallel ranks that they are spread over.
        source: where the sizes are from.
    """

    name: str
    hidden: int
    ffn: int
    topk: int
    tokens: int
    model_experts: int
    ep_size: int
    source: str

    @property
    def experts(self) -> int:
        return self.model_experts // self.ep_size


def _slice(name: str, ep_size: int, tokens: int) -> Preset:
    """What one of `ep_size` ranks has of the model that the preset is named like."""
    model = load_model(name)
    return Preset(
        name=name,
        hidden=model.hidden_size,
        ffn=model.moe_ffn_hidden_size,
        topk=model.moe_router_topk,
        tokens=tokens,
        model_experts=model.num_experts,
        ep_size=ep_size,
        source=f"megatron_mok/models/{name}.yaml",
    )


PRESETS = {
    preset.name: preset
    for preset in (
        _slice("deepseek_v3", ep_size=8, tokens=8192),
        _slice("glm_4_5", ep_size=8, tokens=8192),
        _slice("qwen3_30b", ep_size=1, tokens=16384),
        _slice("qwen3_235b", ep_size=8, tokens=8192),
        _slice("kimi_k2", ep_size=8, tokens=8192),
        Preset("tiny", 128, 64, 2, 256, 8, 1, "no model; for a first look on a CPU"),
    )
}
"""Every preset by name, in the order in which help texts list them."""
