"""A GPT model with experts: its configuration, and that as Megatron's command line."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from .schema import ConfigError, at_least

# What all models have in common, besides the fields of ModelConfig.
_COMMON_FLAGS = (
    "--swiglu",
    "--disable-bias-linear",
    "--normalization=RMSNorm",
    "--position-embedding-type=rope",
    "--untie-embeddings-and-output-weights",
    "--attention-dropout=0",
    "--hidden-dropout=0",
)


@dataclass(frozen=True)
class ModelConfig:
    """The GPT model. SwiGLU, RMSNorm, RoPE, no dropout, untied embeddings; no biases but those of
    `add_qkv_bias`.

    A field is named like the flag that it sets (`moe_router_topk` is --moe-router-topk); None and
    False leave Megatron's default.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    num_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    ffn_hidden_size: int  # of the dense layers
    vocab_size: int | None = None  # rows of the embedding; a comparison takes its data's
    norm_epsilon: float | None = None
    # Attention: either GQA ...
    num_query_groups: int | None = None
    kv_channels: int | None = None
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    rotary_percent: float | None = None
    rotary_base: int | None = None
    # ... or multi-latent attention.
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_type: Literal["rope", "yarn"] | None = None
    # Mixture of experts.
    moe_layer_freq: str | None = None  # a list expression such as ([0]*1+[1]*3): 0 is dense
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_grouped_gemm: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_pre_softmax: bool = False
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"  # DeepEP and HybridEP take fp32 only
    moe_router_load_balancing_type: (
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] | None
    ) = None
    moe_aux_loss_coeff: float | None = None
    moe_z_loss_coeff: float | None = None
    # Multi-token prediction.
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float | None = None
    init_method_std: float | None = None

    def check(self) -> None:
        for key in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
            at_least("model", self, key, 1)
        for key in ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "ffn_hidden_size"):
            at_least("model", self, key, 1)
        if self.moe_router_topk > self.num_experts:
            raise ConfigError(
                f"model.moe_router_topk: {self.moe_router_topk} is more than model.num_experts "
                f"({self.num_experts})"
            )
        mla = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim")
        mla += ("v_head_dim", "rope_type")
        given = [key for key in mla if getattr(self, key) is not None]
        if given and not self.multi_latent_attention:
            raise ConfigError(f"model.{given[0]}: needs model.multi_latent_attention: true")
        if self.multi_latent_attention and self.num_query_groups is not None:
            raise ConfigError("model.num_query_groups: not with model.multi_latent_attention")

    def flags(self) -> list[str]:
        """The model as flags of Megatron. The vocabulary is left to the caller, who knows the
        tokenizer and by how much its size is padded."""
        flags = list(_COMMON_FLAGS)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "vocab_size":
                continue
            name = "--" + field.name.replace("_", "-")
            if value is True:
                flags.append(name)
            elif value is not None and value is not False:
                flags.append(f"{name}={value}")
        if self.num_query_groups is not None:
            flags.append("--group-query-attention")
        if self.multi_latent_attention and self.rope_type == "rope":
            flags.append("--no-rope-fusion")  # Megatron's fused kernel for MLA is YaRN's
        flags.append(f"--max-position-embeddings={self.seq_length}")
        return flags
