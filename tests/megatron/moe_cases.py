"""Single MoE layers on the test ranks: the same layer under two dispatchers, side by side."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mok.megatron import MoKOptions, set_options

MAX_TOKENS = 96


def make_config(dispatcher: str, **changes: Any) -> TransformerConfig:
    """A small MoE config; `changes` are fields of TransformerConfig."""
    fields: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=192,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_ffn_hidden_size=128,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type=dispatcher,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
    )
    fields.update(changes)
    fields.setdefault("params_dtype", torch.bfloat16 if fields.get("bf16") else torch.float32)
    return TransformerConfig(**fields)


def set_up_parallel(ep: int) -> None:
    """Process groups for expert parallelism `ep`, the rest of the ranks being data parallel."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=ep, expert_tensor_parallel_size=1
    )
    model_parallel_cuda_manual_seed(1234)
    set_options(MoKOptions(max_tokens_per_rank=MAX_TOKENS))


def make_layer(config: TransformerConfig, seed: int = 7) -> MoELayer:
    """One MoE layer, with weights that differ between ranks as experts do."""
    torch.manual_seed(seed + torch.distributed.get_rank())
    build = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build(config=config, pg_collection=groups)
    layer.set_layer_number(1)
    return layer
