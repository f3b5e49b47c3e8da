"""Numerics and bitwise promises of the host engine, EP ranks as threads of this process."""

import pytest
import torch

from megatron_mok.ops import fused_moe
from megatron_mok.runtime import MoKInvalidArgumentError, RuntimeOptions
from tests.in_process import (
    even_cuts,
    make_workspaces,
    random_layer,
    relative_error,
    run_layer,
    run_ranks,
    run_reference,
    shapes_and_ranks,
)

CASES = {
    # tokens, hidden, ffn, experts, topk
    "odd_sizes": (301, 192, 320, 8, 3),
    "topk_32": (40, 64, 64, 64, 32),
    "one_expert": (333, 128, 64, 1, 1),
    "several_cuts": (1500, 64, 128, 2, 2),  # an expert has more rows than a wgrad cut
    "no_tokens": (0, 64, 64, 4, 2),
}


@pytest.mark.parametrize(("case", "ep_size"), shapes_and_ranks(CASES, [1, 2]))
def test_fp32_matches_float64_reference(case, ep_size):
    tokens, hidden, ffn, experts, topk = CASES[case]
    layer = random_layer(tokens, hidden, ffn, experts, topk, torch.float32, seed=len(case))
    workspaces = make_workspaces(ep_size, **layer.shape)
    result = run_layer(layer, workspaces, even_cuts(tokens, ep_size), saved_rows=10**6)
    reference = run_reference(layer, torch.float64)
    for name, got in result.tensors().items():
        assert relative_error(got, reference.tensors()[name]) < 2e-6, name


def test_bf16_is_no_worse_than_the_composed_layer():
    layer = random_layer(700, 256, 192, 8, 4, torch.bfloat16, seed=3)
    result = run_layer(layer, make_workspaces(2, **layer.shape), [0, 300, 700], saved_rows=10**6)
    exact = run_reference(layer, torch.float64).tensors()
    composed = run_reference(layer, torch.bfloat16).tensors()
    for name, got in result.tensors().items():
        error = relative_error(got, exact[name])
        assert error < 1e-2, name
        assert error <= 1.1 * relative_error(composed[name], exact[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_equal_at_every_ep_size(dtype):
    layer = random_layer(611, 128, 192, 8, 3, dtype, seed=11)
    alone = run_layer(layer, make_workspaces(1, **layer.shape), [0, 611], saved_rows=10**6)
    for ep_size in (2, 4, 8):
        cuts = even_cuts(611, ep_size, first_is_empty=True)
        workspaces = make_workspaces(ep_size, **layer.shape)
        alone.assert_bitwise_equal(run_layer(layer, workspaces, cuts, saved_rows=10**6))


def test_bitwise_equal_whatever_is_saved_and_however_many_threads():
    layer = random_layer(900, 64, 192, 4, 3, torch.bfloat16, seed=5)
    first = run_layer(layer, make_workspaces(2, **layer.shape), [0, 450, 900], saved_rows=10**6)
    for saved_rows, threads in ((0, 1), (300, 3), (1024, 2), (10**6, 5)):
        options = RuntimeOptions(first_wait_s=60, inner_wait_s=60, workers=threads)
        workspaces = make_workspaces(2, options, **layer.shape)
        again = run_layer(layer, workspaces, [0, 450, 900], saved_rows=saved_rows)
        first.assert_bitwise_equal(again)


def test_bitwise_equal_in_forty_repeats_on_one_workspace():
    layer = random_layer(260, 64, 64, 4, 2, torch.float32, seed=6)
    workspaces = make_workspaces(2, **layer.shape)
    first = run_layer(layer, workspaces, [0, 100, 260])
    for _ in range(39):
        first.assert_bitwise_equal(run_layer(layer, workspaces, [0, 100, 260]))


def test_duplicate_routes_and_unsorted_ids():
    ids_TK = torch.tensor([[5, 5, 5, 5], [7, 0, -1, 3], [-1, -1, -1, -1], [3, 2, 1, 0]]).int()
    layer = random_layer(4, 64, 64, 8, 4, torch.float32, seed=2, expert_ids_TK=ids_TK)
    result = run_layer(layer, make_workspaces(1, **layer.shape), [0, 4])
    reference = run_reference(layer, torch.float64)
    for name, got in result.tensors().items():
        assert relative_error(got, reference.tensors()[name]) < 2e-6, name
    assert torch.equal(result.output_TH[2], torch.zeros(64))
    assert torch.equal(result.grad_probs_TK[2], torch.zeros(4))


def test_gradient_of_zero_probs():
    layer = random_layer(200, 64, 64, 4, 2, torch.float32, seed=9)
    layer.probs_TK[::2] = 0.0
    result = run_layer(layer, make_workspaces(1, **layer.shape), [0, 200])
    reference = run_reference(layer, torch.float64)
    assert relative_error(result.grad_probs_TK, reference.grad_probs_TK) < 2e-6
    assert result.grad_probs_TK[::2].abs().max() > 0


def test_idle_experts_get_zero_gradients_after_others_used_the_memory():
    busy = random_layer(400, 64, 64, 4, 2, torch.float32, seed=1)
    workspaces = make_workspaces(1, **busy.shape)
    run_layer(busy, workspaces, [0, 400])
    ids_TK = torch.tensor([[0, 1]]).expand(400, 2).contiguous().int()
    half = random_layer(400, 64, 64, 4, 2, torch.float32, seed=2, expert_ids_TK=ids_TK)
    result = run_layer(half, workspaces, [0, 400])
    for expert in (2, 3):
        assert torch.equal(result.grad_fc1[expert], torch.zeros_like(result.grad_fc1[expert]))
        assert torch.equal(result.grad_fc2[expert], torch.zeros_like(result.grad_fc2[expert]))


def test_nan_in_one_token_stays_in_its_experts_and_routes():
    layer = random_layer(256, 64, 64, 4, 1, torch.float32, seed=8)
    layer.expert_ids_TK[:] = torch.arange(256).remainder(4).int().unsqueeze(1)
    layer.hidden_TH[4] = float("nan")  # expert 0
    result = run_layer(layer, make_workspaces(2, **layer.shape), [0, 128, 256])
    bad = result.output_TH.isnan().any(dim=1).nonzero().flatten().tolist()
    assert bad == [4]
    assert result.grad_hidden_TH.isnan().any(dim=1).nonzero().flatten().tolist() == [4]
    assert all(not g.isnan().any() for g in result.grad_fc1[1:] + result.grad_fc2[1:])


def test_addend_is_added_and_gets_the_output_gradient():
    layer = random_layer(70, 64, 64, 4, 2, torch.float32, seed=4)
    (workspace,) = make_workspaces(1, **layer.shape)
    args = (layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK, layer.fc1, layer.fc2, workspace)
    addend_TH = torch.randn(70, 64, requires_grad=True)
    with_addend = fused_moe(*args, addend_TH=addend_TH)
    torch.testing.assert_close(with_addend, fused_moe(*args) + addend_TH)
    with_addend.backward(layer.grad_output_TH)
    assert torch.equal(addend_TH.grad, layer.grad_output_TH)


def test_output_follows_weights_that_change_in_place():
    layer = random_layer(70, 64, 64, 4, 2, torch.float32, seed=4)
    (workspace,) = make_workspaces(1, **layer.shape)
    args = (layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK, layer.fc1, layer.fc2, workspace)
    before = fused_moe(*args)
    for weight in layer.fc2:
        weight.mul_(2)
    torch.testing.assert_close(fused_moe(*args), 2 * before)


@pytest.mark.parametrize("bad", ["id_too_large", "id_too_small", "too_many_tokens"])
def test_a_refusal_on_one_rank_reaches_all_ranks_and_the_workspace_lives_on(bad):
    layer = random_layer(40, 64, 64, 4, 2, torch.float32, seed=4)
    workspaces = make_workspaces(2, **(layer.shape | {"max_tokens": 20}))
    wrong_ids_TK = layer.expert_ids_TK[:20].clone()
    if bad != "too_many_tokens":
        wrong_ids_TK[3, 1] = 4 if bad == "id_too_large" else -2

    def call(rank, tokens, ids_TK):
        experts = slice(2 * rank, 2 * rank + 2)
        return fused_moe(
            layer.hidden_TH[tokens],
            ids_TK,
            layer.probs_TK[tokens],
            layer.fc1[experts],
            layer.fc2[experts],
            workspaces[rank],
        )

    def one_bad_call(rank):
        tokens = slice(0, 21) if rank == 0 and bad == "too_many_tokens" else slice(0, 20)
        right_ids_TK = layer.expert_ids_TK[tokens]
        ids_TK = wrong_ids_TK if rank == 0 and bad != "too_many_tokens" else right_ids_TK
        with pytest.raises(MoKInvalidArgumentError) as error:
            call(rank, tokens, ids_TK)
        return str(error.value)

    texts = run_ranks(2, one_bad_call)
    expected, reason = {
        "id_too_large": ("expert id 4 at token 3, k 1", "an expert id out of range"),
        "id_too_small": ("expert id -2 at token 3, k 1", "an expert id out of range"),
        "too_many_tokens": (
            "got 21 tokens; the workspace takes 0 to 20",
            "more tokens than the workspace takes",
        ),
    }[bad]
    assert expected in texts[0]
    assert f"rank 0 of the EP group refused its arguments ({reason})" in texts[1]
    for workspace in workspaces:
        workspace.check()  # nothing is left to report

    halves = (slice(0, 20), slice(20, 40))
    outputs = run_ranks(2, lambda r: call(r, halves[r], layer.expert_ids_TK[halves[r]]))
    reference = run_reference(layer, torch.float64)
    assert relative_error(torch.cat(outputs), reference.output_TH) < 2e-6
