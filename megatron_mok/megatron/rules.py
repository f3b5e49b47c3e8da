"""The tables of what MoK's layers refuse: fields of Megatron's config, and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from megatron_mok.megatron.flags import MODES

USE_ALLTOALL = "or use --moe-token-dispatcher-type alltoall"
USE_DISPATCH = f"set --mok-mode dispatch, {USE_ALLTOALL}"
FUSED = ("fused",)


@dataclass(frozen=True)
class Refusal:
    """A setting that MoK's layers would do wrong or leave undone.

    Attributes:
        name: the field of the config, or of Megatron's arguments. A Megatron may lack it.
        refuses: whether a value of the field, in its config, is refused.
        reason: why.
        way_out: the flag that resolves it.
        modes: of `--mok-mode`, that refuse it.
    """

    name: str
    refuses: Callable[[Any, Any], bool]
    reason: str
    way_out: str
    modes: tuple[str, ...] = MODES

    def problem(self, owner: Any) -> str | None:
        """The line for the error message, or None when `owner` is fine."""
        if not hasattr(owner, self.name):
            return None
        value = getattr(owner, self.name)
        if not self.refuses(value, owner):
            return None
        shown = getattr(value, "__name__", value)
        return f"{self.name} = {shown}: {self.reason}; {self.way_out}"


def _set(value: Any, _: Any) -> bool:
    return bool(value)


def _given(value: Any, _: Any) -> bool:
    return value is not None


def _above_one(value: Any, _: Any) -> bool:
    return value is not None and value > 1


def _captured(config: Any) -> set[str]:
    # Called cuda_graph_scope, and holding full_iteration too, before 0.18.
    modules = getattr(config, "cuda_graph_modules", None) or getattr(
        config, "cuda_graph_scope", None
    )
    return {getattr(m, "name", str(m)) for m in modules or ()}


def captures_iteration(impl: Any, config: Any) -> bool:
    """Whether this `cuda_graph_impl` makes one CUDA graph of a whole step."""
    return impl == "full_iteration" or (impl != "none" and "full_iteration" in _captured(config))


def _captures_moe(impl: Any, config: Any) -> bool:
    if impl not in ("local", "transformer_engine") or captures_iteration(impl, config):
        return False
    modules = _captured(config)
    # No module at all means the whole layer.
    return not modules or bool(modules & {"moe", "moe_router", "moe_preprocess"})


def _offloads_experts(modules: Any, config: Any) -> bool:
    inside = {"expert_fc1", "moe_act", "fused_group_mlp"}
    return bool(config.fine_grained_activation_offloading and inside & set(modules or ()))


_NO_BIAS = "the experts of the fused layer have no bias"
_NO_OVERLAP = (
    "the fused layer has no stages to overlap or delay, and in mode dispatch it is untested"
)
_EXACT_ROUTES = "MoK moves exactly the routes of the router, no more and no fewer"
_BF16_ONLY = "the fused layer computes in BF16, and in mode dispatch this is untested"
_NATIVE_LAYOUT = (
    "the fused layer reads one [2F, H] and one [H, F] weight per expert, gate rows first"
)
_GROUPED = (
    "the fused layer reads one tensor per expert, and in mode dispatch grouped ones are untested"
)
_HOOKED = (
    "it hooks the experts, which the fused layer never calls and mode dispatch calls with padding"
)
_OWN_EXPERTS = (
    "the fused layer computes the routed experts itself, so this would have no effect on them; in "
    "mode dispatch it is untested"
)

CONFIG_REFUSALS = (
    Refusal(
        "expert_tensor_parallel_size",
        _above_one,
        "each expert must be whole on its rank (it defaults to the tensor parallel size)",
        "set --expert-tensor-parallel-size 1",
    ),
    Refusal(
        "expert_gtp_weight_remat_size",
        _above_one,
        "each expert must be whole on its rank",
        "drop --expert-tensor-parallel-num-weight-shards",
    ),
    Refusal(
        "gtp_weight_remat_size",
        _above_one,
        "weights sharded by GTP are not supported",
        "drop --tensor-parallel-num-weight-shards",
    ),
    Refusal(
        "add_bias_linear",
        _set,
        _NO_BIAS,
        f"set --disable-bias-linear, {USE_DISPATCH}",
        FUSED,
    ),
    Refusal(
        "gated_linear_unit",
        lambda value, _: not value,
        "the fused activation is SwiGLU",
        f"set --swiglu, {USE_DISPATCH}",
        FUSED,
    ),
    Refusal(
        "activation_func",
        lambda value, _: value is not F.silu,
        "the fused activation is SwiGLU",
        f"set --swiglu, {USE_DISPATCH}",
        FUSED,
    ),
    Refusal(
        "activation_func_clamp_value",
        _given,
        "clamped SwiGLU is not supported",
        f"drop --activation-func-clamp-value, {USE_DISPATCH}",
        FUSED,
    ),
    Refusal(
        "glu_linear_offset",
        lambda value, _: value != 0.0,
        "a GLU offset is not supported",
        f"drop --glu-linear-offset, {USE_DISPATCH}",
        FUSED,
    ),
    Refusal(
        "activation_func_fp8_input_store",
        _set,
        "the fused layer keeps pre-activations in the weights' dtype",
        f"set activation_func_fp8_input_store = False in the config, {USE_DISPATCH}",
        FUSED,
    ),
    Refusal("fp16", _set, "MoK's engines know BF16 and FP32", "set --bf16 in place of --fp16"),
    Refusal("fp8", _given, _BF16_ONLY, f"drop --fp8-format, {USE_ALLTOALL}"),
    Refusal("fp4", _given, _BF16_ONLY, f"drop --fp4-format, {USE_ALLTOALL}"),
    Refusal("quant_recipe", _given, _BF16_ONLY, f"drop --te-precision-config-file, {USE_ALLTOALL}"),
    Refusal("use_kitchen", _set, _BF16_ONLY, f"drop the kitchen flags, {USE_ALLTOALL}"),
    Refusal(
        "moe_expert_capacity_factor",
        _given,
        "the fused layer is for routing without dropped tokens",
        f"drop --moe-expert-capacity-factor, {USE_DISPATCH}",
        FUSED,
    ),
    Refusal(
        "moe_expert_rank_capacity_factor",
        _given,
        _EXACT_ROUTES,
        "drop --moe-expert-rank-capacity-factor",
    ),
    Refusal(
        "moe_pad_expert_input_to_capacity",
        _set,
        _EXACT_ROUTES,
        "drop --moe-pad-expert-input-to-capacity",
    ),
    Refusal(
        "moe_pad_experts_for_cuda_graph_inference",
        _set,
        _EXACT_ROUTES,
        "drop --moe-pad-experts-for-cuda-graph-inference",
    ),
    Refusal(
        "moe_router_padding_for_quantization",
        _set,
        _EXACT_ROUTES,
        "drop --moe-router-padding-for-quantization",
    ),
    Refusal(
        "moe_token_dropping", _set, _EXACT_ROUTES, "set moe_token_dropping = False in the config"
    ),
    Refusal(
        "moe_apply_probs_on_input",
        _set,
        "router probabilities multiply the activation, not the input",
        f"drop --moe-apply-probs-on-input, {USE_DISPATCH}",
        FUSED,
    ),
    Refusal(
        "moe_latent_size",
        _given,
        "latent experts are not supported",
        f"drop --moe-latent-size, {USE_ALLTOALL}",
    ),
    Refusal("moe_single_grouped_weight", _set, _GROUPED, "drop --moe-single-grouped-weight"),
    Refusal("moe_single_grouped_bias", _set, _GROUPED, "drop --moe-single-grouped-bias"),
    Refusal(
        "moe_mlp_glu_interleave_size",
        _given,
        _NATIVE_LAYOUT,
        f"drop --moe-mlp-glu-interleave-size, {USE_DISPATCH}",
        FUSED,
    ),
    Refusal(
        "use_transformer_engine_op_fuser",
        _set,
        _OWN_EXPERTS,
        "drop --use-transformer-engine-op-fuser",
    ),
    Refusal("moe_paged_stash", _set, _OWN_EXPERTS, "drop --moe-paged-stash"),
    Refusal(
        "offload_modules",
        _offloads_experts,
        _OWN_EXPERTS,
        "drop expert_fc1, moe_act and fused_group_mlp from --offload-modules",
    ),
    Refusal(
        "overlap_moe_expert_parallel_comm",
        _set,
        _NO_OVERLAP,
        "drop --overlap-moe-expert-parallel-comm",
    ),
    Refusal("delay_wgrad_compute", _set, _NO_OVERLAP, "drop --delay-wgrad-compute"),
    Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        _set,
        _NO_OVERLAP,
        "drop --overlap-dispatch-backward-with-experts-wgrad",
    ),
    Refusal(
        "cuda_graph_impl",
        _captures_moe,
        "a graph cannot cover part of MoK's layers",
        "set --cuda-graph-impl none, capture the full iteration (in mode fused), or restrict "
        "--cuda-graph-modules (--cuda-graph-scope before 0.18) to attn and mlp",
    ),
    Refusal(
        "cuda_graph_impl",
        captures_iteration,
        "in mode dispatch the CPU waits for numbers of rows in every forward, which a graph cannot",
        "set --cuda-graph-impl none, or --mok-mode fused",
        ("dispatch",),
    ),
    Refusal(
        "transformer_impl",
        lambda value, _: value == "inference_optimized",
        "MoK's layers are for training and plain evaluation",
        "set --transformer-impl transformer_engine or local",
    ),
    Refusal(
        "moe_megakernel_backend",
        _given,
        "Megatron's own megakernel backends and this plugin exclude each other",
        f"drop --moe-megakernel-backend, {USE_ALLTOALL}",
    ),
)

ARGS_REFUSALS = (
    Refusal(
        "use_megatron_fsdp",
        _set,
        "expert weights sharded by FSDP are not supported",
        "drop --use-megatron-fsdp (--use-distributed-optimizer shards the optimizer state)",
    ),
    Refusal(
        "use_torch_fsdp2",
        _set,
        "expert weights sharded by FSDP are not supported",
        "drop --use-torch-fsdp2 (--use-distributed-optimizer shards the optimizer state)",
    ),
    Refusal(
        "fake_process_group",
        _set,
        "ranks that do not exist cannot share memory",
        f"drop --fake-process-group, {USE_ALLTOALL}",
    ),
    Refusal(
        "inprocess_restart",
        _set,
        "the workspace does not outlive the process groups that it was made for",
        "drop --inprocess-restart",
    ),
    Refusal("save_activations_interval", _given, _HOOKED, "drop --save-activations-interval"),
    Refusal("save_dgrads_interval", _given, _HOOKED, "drop --save-dgrads-interval"),
    Refusal(
        "save_tokens_per_expert_interval",
        _given,
        _HOOKED,
        "drop --save-tokens-per-expert-interval",
    ),
)
