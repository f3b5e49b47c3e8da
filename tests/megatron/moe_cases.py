"""Rank side: process groups, small MoE configs and layers."""

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

from megatron_mok.megatron import MoKOptions, cpu_mode, set_options
from megatron_mok.megatron.flags import get_options
from megatron_mok.megatron.layer import DispatchMoELayer, FusedMoELayer
from megatron_mok.runtime import release_workspaces
from tests.megatron.rank_pool import init_world

MAX_TOKENS = 96

# Routers by what they do, as fields of TransformerConfig.
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "fp32": {"moe_router_dtype": "fp32", "moe_z_loss_coeff": 1e-3},
    "fp64": {"moe_router_dtype": "fp64"},
    "deepseek": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "top1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all": {"moe_router_topk": 8},
}


_layout: tuple[int, int, int] | None = None


def set_up_parallel(
    ep: int, tp: int = 1, pp: int = 1, mode: str = "fused", max_tokens: int = MAX_TOKENS
) -> None:
    """Process groups for these sizes, expert tensor parallelism 1, all other ranks data parallel;
    and MoK's mode from now on.

    Groups of the last layout stay when it is the same one, and go otherwise: each has threads.
    """
    global _layout
    if _layout != (ep, tp, pp):
        if _layout is not None:
            release_workspaces()
            parallel_state.destroy_model_parallel()
        init_world()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1,
        )
        _layout = (ep, tp, pp)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    # A rank that waits in vain says for what before the pool gives up.
    set_options(MoKOptions(mode, first_timeout_s=60.0, max_tokens_per_rank=max_tokens))


def kind_of(dispatcher: str) -> type[MoELayer]:
    """The class of layers under this dispatcher, in the present mode."""
    if dispatcher != "mok":
        return MoELayer
    return {"fused": FusedMoELayer, "dispatch": DispatchMoELayer}[get_options().mode]


def make_config(dispatcher: str, **changes: Any) -> TransformerConfig:
    """A small MoE config for the present process groups; `changes` are fields of it."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
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
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=cpu_mode.is_enabled(),
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=1,
    )
    fields.update(changes)
    dtype = torch.bfloat16 if fields.get("bf16") else torch.float32
    fields.setdefault("params_dtype", dtype)
    fields.setdefault("pipeline_dtype", dtype)
    return TransformerConfig(**fields)


def make_layer(config: TransformerConfig, seed: int = 7, spec: str = "local") -> MoELayer:
    """One MoE layer. Every rank draws its own expert weights; all others are equal on all ranks.

    Args:
        spec: "local" for SequentialMLP, "te" for Transformer Engine's TEGroupedMLP.
    """
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    build = get_moe_module_spec(
        use_te=spec == "te", num_experts=config.num_moe_experts, moe_grouped_gemm=spec == "te"
    )
    layer = build(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    assert type(layer) is kind_of(config.moe_token_dispatcher_type)
    layer = layer.cuda()
    layer.set_layer_number(1)
    torch.manual_seed(seed + torch.distributed.get_rank())
    for name, parameter in layer.named_parameters():
        if name.startswith("experts."):
            torch.nn.init.normal_(parameter.data, std=0.1)
    return layer


def use_weight_gradient_fusion_without_apex() -> None:
    """Give Megatron's own linear layers what they take from apex for
    `gradient_accumulation_fusion`, where it is not there."""
    from types import SimpleNamespace

    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available:
        return

    def accumulate(x_TI, grad_TO, main_grad_OI):
        main_grad_OI.add_(grad_TO.float().t() @ x_TI.float())

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    layers._grad_accum_fusion_available = True


def use_output_discarding_without_te() -> None:
    """Let layernorm recompute run here: Megatron asks Transformer Engine whether FP8 is on."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    from megatron.core.tensor_parallel import random

    if random.HAVE_TE:
        return
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = lambda **_: nullcontext()
    random.fp8_autocast = lambda **_: nullcontext()
