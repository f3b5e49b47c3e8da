"""Every rule of the tables, on its own."""

from types import SimpleNamespace

import pytest
import torch.nn.functional as F

from megatron_mok.megatron import MoKOptions
from megatron_mok.megatron.errors import MoKConfigError
from megatron_mok.megatron.validation import (
    ARGS_REFUSALS,
    CONFIG_REFUSALS,
    check_config,
    config_problems,
)

FINE = {
    "moe_token_dispatcher_type": "mok",
    "num_moe_experts": 8,
    "moe_shared_expert_overlap": False,
    "recompute_granularity": None,
    "expert_tensor_parallel_size": 1,
    "expert_gtp_weight_remat_size": 1,
    "gtp_weight_remat_size": 1,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "activation_func_fp8_input_store": False,
    "fp16": False,
    "fp8": None,
    "fp4": None,
    "quant_recipe": None,
    "use_kitchen": False,
    "moe_expert_capacity_factor": None,
    "moe_expert_rank_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_pad_experts_for_cuda_graph_inference": False,
    "moe_router_padding_for_quantization": False,
    "moe_token_dropping": False,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_single_grouped_weight": False,
    "moe_single_grouped_bias": False,
    "moe_mlp_glu_interleave_size": None,
    "use_transformer_engine_op_fuser": False,
    "moe_paged_stash": False,
    "fine_grained_activation_offloading": False,
    "offload_modules": ["expert_fc1"],
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "overlap_dispatch_backward_with_experts_wgrad": False,
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    "transformer_impl": "transformer_engine",
    "moe_megakernel_backend": None,
}
REFUSED = {
    "expert_tensor_parallel_size": 2,
    "expert_gtp_weight_remat_size": 2,
    "gtp_weight_remat_size": 2,
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": F.gelu,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "activation_func_fp8_input_store": True,
    "fp16": True,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "quant_recipe": object(),
    "use_kitchen": True,
    "moe_expert_capacity_factor": 1.0,
    "moe_expert_rank_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_pad_experts_for_cuda_graph_inference": True,
    "moe_router_padding_for_quantization": True,
    "moe_token_dropping": True,
    "moe_apply_probs_on_input": True,
    "moe_latent_size": 64,
    "moe_single_grouped_weight": True,
    "moe_single_grouped_bias": True,
    "moe_mlp_glu_interleave_size": 32,
    "use_transformer_engine_op_fuser": True,
    "moe_paged_stash": True,
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "overlap_dispatch_backward_with_experts_wgrad": True,
    "cuda_graph_impl": "local",
    "transformer_impl": "inference_optimized",
    "moe_megakernel_backend": "mok",
}


def config(**changes):
    return SimpleNamespace(**FINE | changes)


def problems(**changes):
    return config_problems(config(**changes), None, MoKOptions())


def test_fine_config_has_no_problems():
    assert problems() == []
    check_config(config(), SimpleNamespace(use_megatron_fsdp=False), MoKOptions())


@pytest.mark.parametrize("name", REFUSED)
def test_each_setting_is_refused(name):
    (line,) = problems(**{name: REFUSED[name]})
    assert line.startswith(f"{name} = ")
    way_out = line.split("; ", 1)[1]
    assert "--" in way_out or "in the config" in way_out


def test_every_rule_is_tested():
    assert {rule.name for rule in CONFIG_REFUSALS} == {*REFUSED, "offload_modules"}


def test_offloading_of_experts_is_refused():
    (line,) = problems(fine_grained_activation_offloading=True)
    assert "--offload-modules" in line
    assert not problems(fine_grained_activation_offloading=True, offload_modules=["core_attn"])


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_partial_cuda_graphs(impl):
    for modules in (["moe_router"], ["attn", "moe_preprocess"], ["moe"], []):
        assert problems(cuda_graph_impl=impl, cuda_graph_modules=modules)
    assert not problems(cuda_graph_impl=impl, cuda_graph_modules=["attn", "mlp"])
    assert not problems(cuda_graph_impl="full_iteration")


@pytest.mark.parametrize("rule", ARGS_REFUSALS, ids=lambda rule: rule.name)
def test_arguments_are_refused(rule):
    args = SimpleNamespace(**{rule.name: True})
    (line,) = config_problems(config(), args, MoKOptions())
    assert line.startswith(f"{rule.name} = True: ")


def test_all_conflicts_in_one_error():
    with pytest.raises(MoKConfigError) as caught:
        check_config(
            config(**REFUSED),
            SimpleNamespace(use_torch_fsdp2=True),
            MoKOptions(mode="dispatch"),
        )
    assert len(caught.value.problems) == len(REFUSED) + 2
    assert all(line in str(caught.value) for line in caught.value.problems)


def test_other_dispatchers_and_dense_models_are_left_alone():
    check_config(config(**REFUSED | {"moe_token_dispatcher_type": "alltoall"}), None, MoKOptions())
    check_config(config(**REFUSED | {"num_moe_experts": None}), None, MoKOptions())


def test_fields_that_a_version_lacks_are_no_problem():
    owner = config()
    del owner.moe_megakernel_backend
    assert config_problems(owner, None, MoKOptions()) == []
