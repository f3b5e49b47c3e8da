"""Names, hooks, gradients and refusals of the fused layer inside Megatron's module tree."""

import os

import pytest


@pytest.mark.skipif("MOK_TEST_MEGATRON" not in os.environ, reason="make test-matrix sets it")
def test_megatron_is_the_version_asked_for(ranks):
    assert ranks.run("hook_cases.megatron_version") == [os.environ["MOK_TEST_MEGATRON"]] * 4


def test_names_are_native(ranks):
    assert all(ranks.run("hook_cases.names"))


def test_pre_hooks_reach_every_parameter(ranks):
    assert ranks.run("hook_cases.uncovered_parameters") == [[]] * 4


def test_returned_gradients(ranks):
    for result in ranks.run("hook_cases.gradient_hooks", False):
        assert result["runs"] == {2}
        assert result["worst"] <= 1e-5
        assert result["added"] == {False}


def test_gradients_into_main_grad(ranks):
    for result in ranks.run("hook_cases.gradient_hooks", True):
        assert result["runs"] == {2}
        assert result["worst"] <= 1e-5
        assert result["added"] == {True}


def test_frozen_experts(ranks):
    assert all(ranks.run("hook_cases.frozen_experts"))


def test_conversions_keep_parameters_together(ranks):
    assert max(ranks.run("hook_cases.conversions")) <= 1e-2


@pytest.mark.parametrize("ep", [1, 2])
def test_grouped_experts(ranks, ep):
    for differences in ranks.run("hook_cases.grouped_experts", ep):
        assert max(differences.values()) <= 1e-5


def test_changed_experts_are_refused(ranks):
    for said in ranks.run("hook_cases.bypasses"):
        assert "linear_fc2 was replaced by Adapter" in said["module"]
        assert "parameter weight" in said["parameter"]
        for kind in ("forward_pre_hook", "forward_hook", "full_backward_hook"):
            assert "hook " in said[kind]
        assert all("set --mok-mode dispatch, or use" in text for text in said.values())


def test_layers_refused_at_construction(ranks):
    answers = ranks.run("hook_cases.refused_layers")
    said = answers[0]
    assert "OwnLayer" in said["subclass"]
    assert "hidden is 96" in said["shape"]
    assert "topk is 33" in said["shape"]
    assert "--mok-max-tokens-per-rank" in said["tokens"]
    assert "drop --moe-expert-capacity-factor" in said["late"]
    for said in answers:
        assert "the EP group spans the hosts" in said["hosts"]
        assert "or use --moe-token-dispatcher-type alltoall" in said["hosts"]


def test_calls_refused(ranks):
    said = ranks.run("hook_cases.refused_calls")[0]
    assert "--mok-max-tokens-per-rank 97" in said["tokens"]
    assert "in parts" in said["partial"]
    assert "in parts" in said["map"]


def test_configs_refused_without_argparse(ranks):
    """As from YAML: no argparse choice stands before the config."""
    several = {
        "expert_tensor_parallel_size": 2,
        "moe_expert_capacity_factor": 1.0,
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    }
    dense = {"num_moe_experts": None, "expert_model_parallel_size": 1, "moe_ffn_hidden_size": None}
    texts = ranks.run("hook_cases.configs", [several, dense, {}])[0]
    assert "set --expert-tensor-parallel-size 1" in texts[0]
    assert "drop --moe-expert-capacity-factor" in texts[0]
    assert "drop --moe-apply-probs-on-input" in texts[0]
    assert texts[1:] == ["", ""]


def test_yaml_configs_are_checked_like_flags(ranks, tmp_path):
    """Megatron's --yaml-cfg: no argparse, nested sections, the plugin's options at the top."""
    top = {"seq_length": 16, "micro_batch_size": 2}

    def load(name, top, **model):
        return ranks.run("hook_cases.from_yaml", str(tmp_path / name), top, model)[0]

    assert load("fine.yaml", top) == ("", 32)
    assert load("option.yaml", {**top, "mok_max_tokens_per_rank": 40}) == ("", 40)
    said, _ = load("wrong.yaml", {**top, "mok_mode": "both"}, moe_expert_capacity_factor=1.0)
    assert "--mok-mode 'both': allowed are fused, dispatch" in said
    assert "drop --moe-expert-capacity-factor" in said


def test_less_fused_is_a_warning_once_on_one_rank(ranks):
    answers = ranks.run("hook_cases.less_fused")
    assert all(off for off, _ in answers)
    overlap, moe_act = answers[0][1]
    assert "moe_shared_expert_overlap has no effect" in overlap
    assert "moe_act has no effect" in moe_act
    assert all(said == [] for _, said in answers[1:])


def test_one_line_says_what_runs(ranks):
    lines = ranks.run("hook_cases.announcements")
    assert lines[1:] == [[]] * 3
    (line,) = lines[0]
    for part in ("fused", "engine host", "expert-parallel group of 2", "MiB per rank", "ffn 320"):
        assert part in line


@pytest.mark.parametrize("mtp", [False, True])
def test_specs_that_name_the_layer(ranks, mtp):
    for found in ranks.run("hook_cases.own_spec", mtp):
        assert found["hooks"] == {"MoELayer"}
        assert found["layers"] == {"FusedMoELayer"}
        assert found["given"] == {"MoELayer"}
        assert "drop --moe-pad-expert-input-to-capacity" in found["refused"]


def test_install_is_idempotent(ranks):
    assert all(ranks.run("hook_cases.installs_once"))


def test_messages_name_real_flags_and_fields(ranks):
    flags = set(ranks.run("hook_cases.unknown_flags")[0])
    # One of the two, by version.
    assert flags - {"--cuda-graph-modules", "--cuda-graph-scope"} == set()
    if ranks.run("hook_cases.megatron_version")[0].startswith("0.19."):
        # Only in Megatron after 0.19: its own megakernels.
        assert ranks.run("hook_cases.unknown_fields")[0] == ["moe_megakernel_backend"]
