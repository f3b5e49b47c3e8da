"""Layers of known models, as the slice that one expert-parallel rank computes."""

from dataclasses import dataclass


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


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("deepseek_v3", 7168, 2048, 8, 8192, 256, 8, "arXiv:2412.19437, section 4.2"),
        Preset("glm_4_5", 5120, 1536, 8, 8192, 160, 8, "arXiv:2508.06471, table 1"),
        Preset("qwen3_30b", 2048, 768, 8, 16384, 128, 1, "config of Qwen3-30B-A3B"),
        Preset("qwen3_235b", 4096, 1536, 8, 8192, 128, 8, "config of Qwen3-235B-A22B"),
        Preset("kimi_k2", 7168, 2048, 8, 8192, 384, 8, "arXiv:2507.20534, table 2"),
        Preset("tiny", 128, 64, 2, 256, 8, 1, "no model; for a first look on a CPU"),
    )
}
"""Every preset by name, in the order in which help texts list them."""
