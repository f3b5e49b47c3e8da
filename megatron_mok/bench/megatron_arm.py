"""The arm `megatron_te_alltoall`: Megatron's own MoE layer with Transformer Engine's experts.

The one place in this package that imports Megatron, and only when the arm is asked for.
"""

import atexit
import importlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .layer import LayerInputs, MainGradLayer, MovesRows
from .timing import describe


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or dtype != torch.bfloat16:
        return "needs --device cuda and --dtype bf16"
    for name, module in (
        ("Megatron-Core", "megatron.core"),
        ("Transformer Engine", "transformer_engine.pytorch"),
    ):
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a broken installation raises on import
            return f"{name} cannot be imported: {describe(error)}"
    return None


class MegatronLayer(MainGradLayer, MovesRows):
    """MoELayer of one rank, with fused permutation, grouped GEMMs, fused SwiGLU and weight
    gradients added into FP32 `main_grad`. Its router is there but not called. Dispatch and combine
    alone are its fused permutations, all that its dispatcher launches on a rank alone but for the
    counts."""

    def __init__(self, inputs: LayerInputs):
        self._layer = _make_layer(inputs)
        experts = self._layer.experts
        fc1, fc2 = (
            [getattr(linear, f"weight{i}") for i in range(inputs.experts)]
            for linear in (experts.linear_fc1, experts.linear_fc2)
        )
        with torch.no_grad():
            for own, given in ((fc1, inputs.fc1_E2FH), (fc2, inputs.fc2_EHF)):
                for weight, value in zip(own, given, strict=True):
                    weight.copy_(value)
        super().__init__(inputs, fc1, fc2)

    def forward(self) -> torch.Tensor:
        return forward_without_router(
            self._layer, self.hidden_TH, self.probs_TE, self.inputs.routing_map_TE
        )

    @torch.no_grad()
    def dispatch(self):
        from megatron.core.transformer.moe.moe_utils import permute

        tokens, topk = self.inputs.tokens, self.inputs.topk
        rows, _, sorted_indices, *_ = permute(
            self.hidden_TH,
            self.inputs.routing_map_TE,
            probs=self.probs_TE,
            num_out_tokens=tokens * topk,
            fused=True,
        )
        return rows, sorted_indices

    @torch.no_grad()
    def combine(self, dispatched) -> torch.Tensor:
        from megatron.core.transformer.moe.moe_utils import unpermute

        return unpermute(*dispatched, restore_shape=self.hidden_TH.shape, fused=True)


def forward_without_router(layer, hidden_TH, probs_TE, routing_map_TE) -> torch.Tensor:
    """The stages of `MoELayer.forward` after its router, for a layer without shared experts."""
    tokens, hidden = hidden_TH.shape
    x_SBH = hidden_TH.view(tokens, 1, hidden)
    x, probs = layer.preprocess(x_SBH, probs_TE, routing_map_TE)
    x, probs = layer.dispatch(x, probs)
    output, _ = layer.routed_experts_compute(x, probs)
    output = layer.combine(output)
    return layer.postprocess(output, None).view(tokens, hidden)


def _make_layer(inputs: LayerInputs):
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    _join_world_of_one()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=inputs.hidden,
        num_attention_heads=16,
        num_moe_experts=inputs.experts,
        moe_ffn_hidden_size=inputs.ffn,
        moe_router_topk=inputs.topk,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=True,
        gradient_accumulation_fusion=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=inputs.dtype,
    )
    build = get_moe_module_spec(True, inputs.experts, True)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build(config=config, pg_collection=groups).to(inputs.device)
    layer.set_layer_number(1)
    return layer.train()


def _join_world_of_one() -> None:
    """Megatron's process groups, each of this process alone."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if parallel_state.model_parallel_is_initialized():
        return
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
