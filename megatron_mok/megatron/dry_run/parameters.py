"""How many parameters a GPT model has, and how many of them each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_mok.megatron.dry_run.stages import Chunk, has_experts


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        dense: of all but the routed experts; each data-parallel rank has them.
        experts: of the routed experts; each expert-data-parallel rank has them.
    """

    dense: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a whole model.

    Attributes:
        total: without multi-token prediction.
        active: those of `total` that one token meets: all but the experts it is not routed to.
        mtp: of multi-token prediction; it shares embedding and output layer with the model.
    """

    total: int
    active: int
    mtp: int


class ParameterCounter:
    """Counts the parameters of a GPT model with SwiGLU layers and without linear biases.

    Args:
        config: Megatron's TransformerConfig.
        args: Megatron's arguments, for what is not in the config.
        vocab: rows of the embedding, padding included.
        tp, ep, etp: sizes that the parameters are spread over; 1 for the whole model.
    """

    def __init__(
        self, config: Any, args: Any, vocab: int, tp: int = 1, ep: int = 1, etp: int = 1
    ) -> None:
        self._config = config
        self._args = args
        self._vocab = vocab
        self._tp = tp
        self._experts_over = ep * etp
        self._norm = config.hidden_size * self._norm_weights

    @classmethod
    def model_size(cls, config: Any, args: Any, vocab: int) -> ModelSize:
        """The size of the whole model."""
        whole = cls(config, args, vocab)
        experts = tuple(has_experts(config))
        main = whole.chunk(Chunk(experts=experts, mtp=(), first=True, last_norm=True, output=True))
        mtp = experts[-1:] * (config.mtp_num_layers or 0)
        active = main.dense
        if config.num_moe_experts:
            active += main.experts * config.moe_router_topk // config.num_moe_experts
        return ModelSize(main.total, active, sum(whole._mtp(kind).total for kind in mtp))

    def chunk(self, chunk: Chunk) -> Parameters:
        """Of one chunk on one rank. An output layer that is tied to the embedding of another
        pipeline rank is a copy, and counts."""
        count = Parameters()
        for kind in chunk.experts:
            count = count + self._layer(kind)
        for kind in chunk.mtp:
            count = count + self._mtp(kind)
        if chunk.embedding:
            count = count + Parameters(dense=self._embedding())
        if chunk.last_norm:
            count = count + Parameters(dense=self._norm)
        tied = not self._args.untie_embeddings_and_output_weights and chunk.embedding
        if chunk.output and not tied:
            count = count + Parameters(dense=self._embedding_rows())
        return count

    @property
    def _norm_weights(self) -> int:
        return 2 if self._config.normalization == "LayerNorm" else 1

    def _embedding_rows(self) -> int:
        return self._vocab // self._tp * self._config.hidden_size

    def _embedding(self) -> int:
        count = self._embedding_rows()
        if self._args.position_embedding_type == "learned_absolute":
            count += self._args.max_position_embeddings * self._config.hidden_size
        return count

    def _mtp(self, experts: bool) -> Parameters:
        hidden = self._config.hidden_size
        # Norms of the two inputs, their projection, the layer, its last norm.
        return self._layer(experts) + Parameters(
            dense=3 * self._norm + 2 * hidden * hidden // self._tp
        )

    def _layer(self, experts: bool) -> Parameters:
        config = self._config
        dense = 2 * self._norm + self._attention()
        if not experts:
            return Parameters(dense=dense + self._swiglu(config.ffn_hidden_size) // self._tp)
        dense += config.num_moe_experts * config.hidden_size  # router
        shared = config.moe_shared_expert_intermediate_size
        if shared:
            dense += self._swiglu(shared) // self._tp
            dense += config.hidden_size if config.moe_shared_expert_gate else 0
        routed = config.num_moe_experts * self._swiglu(config.moe_ffn_hidden_size)
        return Parameters(dense, routed // self._experts_over)

    def _swiglu(self, ffn: int) -> int:
        return 3 * self._config.hidden_size * ffn

    def _attention(self) -> int:
        if self._config.multi_latent_attention:
            return self._latent_attention()
        config = self._config
        heads, head = config.num_attention_heads, config.kv_channels
        groups = config.num_query_groups or heads
        columns = (heads + 2 * groups) * head
        count = columns * config.hidden_size // self._tp
        if config.add_qkv_bias:
            count += columns // self._tp
        if config.qk_layernorm:
            count += 2 * head * self._norm_weights
        return count + heads * head * config.hidden_size // self._tp

    def _latent_attention(self) -> int:
        config = self._config
        hidden, heads = config.hidden_size, config.num_attention_heads
        query_columns = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
        # Transformer Engine's layers have the down projections whole on every rank.
        down_over = self._tp if config.transformer_impl == "local" else 1
        if config.q_lora_rank is None:
            count = hidden * query_columns // self._tp
        else:
            count = hidden * config.q_lora_rank // down_over
            count += config.q_lora_rank * query_columns // self._tp
            count += config.q_lora_rank * self._norm_weights * bool(config.qk_layernorm)
        count += hidden * (config.kv_lora_rank + config.qk_pos_emb_head_dim) // down_over
        count += config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim) // self._tp
        count += config.kv_lora_rank * self._norm_weights * bool(config.qk_layernorm)
        return count + heads * config.v_head_dim * hidden // self._tp


# Fields of the config or of Megatron's arguments that change what a layer consists of.
_OTHER_MODELS = {
    "add_bias_linear": "--disable-bias-linear is not set",
    "experimental_attention_variant": "--experimental-attention-variant",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "hybrid_override_pattern": "--hybrid-override-pattern",
    "moe_latent_size": "--moe-latent-size",
    "attention_output_gate": "--attention-output-gate",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
}


def not_counted(config: Any, args: Any) -> list[str]:
    """Settings that ParameterCounter knows nothing of: with any of these it would be wrong."""
    found = [
        text
        for name, text in _OTHER_MODELS.items()
        if getattr(config, name, None) or getattr(args, name, None)
    ]
    return found if config.gated_linear_unit else [*found, "--swiglu is not set"]
