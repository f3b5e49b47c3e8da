"""Every rule of the tables, on its own."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_mok.megatron import MoKOptions, flags, set_options, validation
from megatron_mok.megatron.errors import MoKConfigError
from megatron_mok.megatron.rules import ARGS_REFUSALS, CONFIG_REFUSALS
from megatron_mok.megatron.validation import (
    check_config,
    config_problems,
    layer_problems,
    workspace_shape,
)
from megatron_mok.runtime import MoKUnsupportedError

FINE = {
    "moe_token_dispatcher_type": "mok",
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "hidden_size": 128,
    "moe_ffn_hidden_size": 192,
    "params_dtype": torch.bfloat16,
    "expert_model_parallel_size": 2,
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


# What Megatron's own experts can do; each is tested in test_dispatch_mode.py.
FUSED_ALONE = {
    "add_bias_linear",
    "gated_linear_unit",
    "activation_func",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "activation_func_fp8_input_store",
    "moe_expert_capacity_factor",
    "moe_apply_probs_on_input",
    "moe_mlp_glu_interleave_size",
}


def problems(mode="fused", **changes):
    return config_problems(config(**changes), None, MoKOptions(mode))


def test_fine_config_has_no_problems():
    assert problems() == problems("dispatch") == []
    assert config_problems(config(), SimpleNamespace(use_megatron_fsdp=False), MoKOptions()) == []
    check_config(config())


@pytest.mark.parametrize("name", REFUSED)
def test_each_setting_is_refused(name):
    (line,) = problems(**{name: REFUSED[name]})
    assert line.startswith(f"{name} = ")
    way_out = line.split("; ", 1)[1]
    assert "--" in way_out or "in the config" in way_out
    assert ("--mok-mode dispatch" in way_out) == (name in FUSED_ALONE)


@pytest.mark.parametrize("name", REFUSED)
def test_mode_dispatch_refuses_what_is_not_only_a_matter_of_the_experts(name):
    lines = problems("dispatch", **{name: REFUSED[name]})
    assert [line.split(" = ")[0] for line in lines] == [name] * (name not in FUSED_ALONE)
    assert not any("mode dispatch, or" in line for line in lines)


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
    assert problems("dispatch", cuda_graph_impl=impl, cuda_graph_modules=["moe_router"])
    assert not problems("dispatch", cuda_graph_impl=impl, cuda_graph_modules=["attn", "mlp"])


def test_graphs_of_the_whole_iteration_are_for_mode_fused():
    (line,) = problems("dispatch", cuda_graph_impl="full_iteration")
    assert "the CPU waits for numbers of rows" in line
    assert "set --cuda-graph-impl none, or --mok-mode fused" in line


def test_graphs_of_the_whole_iteration_count_no_calls():
    options = MoKOptions(log_statistics=True)
    (line,) = config_problems(config(cuda_graph_impl="full_iteration"), None, options)
    assert line.startswith("--mok-log-statistics: ")
    assert not config_problems(config(), None, options)


def test_partial_cuda_graphs_before_0_18():
    def captured(*scopes, mode="fused"):
        owner = config(cuda_graph_impl="local", cuda_graph_scope=list(scopes))
        del owner.cuda_graph_modules
        return config_problems(owner, None, MoKOptions(mode))

    assert captured("moe_router")
    assert captured()
    assert not captured("full_iteration")
    assert len(captured("full_iteration", mode="dispatch")) == 1
    assert not captured("attn")


@pytest.mark.parametrize("rule", ARGS_REFUSALS, ids=lambda rule: rule.name)
def test_arguments_are_refused(rule):
    args = SimpleNamespace(**{rule.name: True})
    (line,) = config_problems(config(), args, MoKOptions())
    assert line.startswith(f"{rule.name} = True: ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 96}, "hidden_size: hidden is 96; allowed is a positive multiple of 64"),
        ({"moe_ffn_hidden_size": 1000}, "moe_ffn_hidden_size: ffn is 1000; allowed"),
        ({"num_moe_experts": 2048}, "num_moe_experts: num_experts is 2048; allowed is 1 to 1024"),
        ({"moe_router_topk": 33}, "moe_router_topk: topk is 33; allowed is 1 to 32"),
        ({"params_dtype": torch.float64}, "params_dtype: dtype is torch.float64; allowed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sizes_that_no_engine_takes(change, said):
    (line,) = problems(**change)
    assert line.startswith(said)
    assert "change --" in line


def test_experts_of_any_width_in_mode_dispatch():
    assert problems("dispatch", moe_ffn_hidden_size=1000) == []
    (line,) = problems("dispatch", hidden_size=96)
    assert line.startswith("hidden_size: hidden is 96")
    shapes = [
        workspace_shape(config(moe_ffn_hidden_size=ffn), MoKOptions("dispatch", 8)).ffn
        for ffn in (1000, 1024)
    ]
    assert shapes == [1024, 1024]


@pytest.mark.parametrize("size", [{"hidden_size": 2880}, {"hidden_size": 3584}])
@pytest.mark.parametrize("ffn", [768, 1408])
def test_sizes_of_real_models(size, ffn):
    assert problems(**size, moe_ffn_hidden_size=ffn, num_moe_experts=1024, moe_router_topk=32) == []


@pytest.mark.parametrize(
    ("ranks", "refused"), [("1", True), ("2", False), ("3", True), ("8", False)]
)
def test_expert_parallel_group_beyond_one_host(monkeypatch, ranks, refused):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    lines = problems()
    assert len(lines) == refused
    way_out = f"set --expert-model-parallel-size to a divisor of {ranks}"
    assert all(way_out in line for line in lines)


def test_unknown_number_of_ranks_per_host(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert problems(expert_model_parallel_size=64) == []


def test_what_a_layer_needs_besides(monkeypatch):
    def no_engine(*_):
        raise MoKUnsupportedError("it was not built")

    known = MoKOptions(max_tokens_per_rank=8)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert layer_problems(config(), known, cpu) == []
    monkeypatch.setattr("megatron_mok.runtime.engine.load_engine", lambda *_: None)
    assert layer_problems(config(), known, gpu) == []
    (line,) = layer_problems(config(params_dtype=torch.float32), known, gpu)
    assert line.endswith("set --bf16")
    monkeypatch.setattr("megatron_mok.runtime.engine.load_engine", no_engine)
    lines = layer_problems(config(), MoKOptions(), gpu)
    assert "set --mok-max-tokens-per-rank" in lines[0]
    assert "no engine for cuda tensors: it was not built" in lines[1]


def test_all_conflicts_in_one_error(monkeypatch):
    """Of config, arguments, options, sizes and device."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    args = SimpleNamespace(
        use_torch_fsdp2=True, mok_mode="both", mok_host_threads=-1, mok_inner_timeout_s=0.0
    )
    monkeypatch.setattr(validation, "megatron_args", lambda: args)
    monkeypatch.setattr(flags, "megatron_args", lambda: args)
    wrong = config(**REFUSED, hidden_size=96, moe_router_topk=33)
    with pytest.raises(MoKConfigError) as caught:
        check_config(wrong, torch.device("cpu"))
    # Beyond the tables: FSDP, three options, two sizes, one host, no number of tokens.
    assert len(caught.value.problems) == len(REFUSED) + 8
    assert all(line in str(caught.value) for line in caught.value.problems)
    named = " ".join(caught.value.problems)
    for flag in ("--mok-host-threads", "--mok-inner-timeout-s", "--mok-mode", "--use-torch-fsdp2"):
        assert flag in named


def test_other_dispatchers_and_dense_models_are_left_alone():
    check_config(config(**REFUSED | {"moe_token_dispatcher_type": "alltoall"}))
    check_config(config(**REFUSED | {"num_moe_experts": None}))


def test_the_mode_in_force_decides():
    biased = config(add_bias_linear=True)
    with pytest.raises(MoKConfigError, match="set --disable-bias-linear, set --mok-mode dispatch"):
        check_config(biased)
    set_options(MoKOptions(mode="dispatch"))
    try:
        check_config(biased)
    finally:
        set_options(None)


def test_fields_that_a_version_lacks_are_no_problem():
    owner = config()
    del owner.moe_megakernel_backend
    assert config_problems(owner, None, MoKOptions()) == []
