"""The Hopper engine's backward: gradients against float64, bitwise promises, main_grad."""

import pytest
import torch

from megatron_mok.ops import fused_moe
from tests.gpu.layers import SHAPES, gpu_layer, workspaces_for
from tests.in_process import (
    Layer,
    even_cuts,
    leaf,
    relative_error,
    run_layer,
    run_reference,
    shapes_and_ranks,
)

pytestmark = pytest.mark.gpu


def gradients(layer, ep_size=1, cuts=None, saved_rows=0):
    cuts = cuts or even_cuts(len(layer.hidden_TH), ep_size)
    return run_layer(layer, workspaces_for(layer, ep_size), cuts, saved_rows, "cuda")


def joined(result):
    """The gradients as few tensors, so that small experts do not decide over an error."""
    return {
        "grad_hidden": result.grad_hidden_TH,
        "grad_probs": result.grad_probs_TK,
        "grad_fc1": torch.stack(result.grad_fc1),
        "grad_fc2": torch.stack(result.grad_fc2),
    }


def assert_accurate(layer, result):
    exact = joined(run_reference(layer, torch.float64))
    composed = joined(run_reference(layer, torch.bfloat16))
    for name, grad in joined(result).items():
        error = relative_error(grad, exact[name])
        assert error < 1e-2, f"{name}: {error}"
        allowed = 1.1 * relative_error(composed[name], exact[name])
        assert error <= allowed, f"{name}: {error} > {allowed}"


@pytest.mark.parametrize(("shape", "ep_size"), shapes_and_ranks(SHAPES, [1, 2]))
def test_numerics(shape, ep_size):
    layer = gpu_layer(*SHAPES[shape], seed=sum(SHAPES[shape]))
    assert_accurate(layer, gradients(layer, ep_size, saved_rows=1 << 20))


def test_saved_recomputed_and_half_saved_are_bitwise_equal():
    layer = gpu_layer(1001, 2880, 1408, 16, 4, seed=21)
    saved = gradients(layer, saved_rows=1 << 20)
    assert_accurate(layer, saved)
    gradients(layer, saved_rows=0).assert_bitwise_equal(saved)
    gradients(layer, saved_rows=1280).assert_bitwise_equal(saved)


def test_bitwise_equal_at_every_ep_size():
    layer = gpu_layer(1500, 1024, 512, 16, 4, seed=22)
    alone = gradients(layer, saved_rows=1 << 20)
    for ep_size in (2, 4, 8):
        cuts = even_cuts(1500, ep_size, first_is_empty=True)
        gradients(layer, ep_size, cuts, saved_rows=1280).assert_bitwise_equal(alone)


def test_bitwise_equal_in_forty_repeats_beside_a_busy_stream():
    layer = gpu_layer(2000, 1024, 512, 16, 4, seed=23)
    workspaces = workspaces_for(layer, 1)
    first = run_layer(layer, workspaces, [0, 2000], 1 << 20, "cuda")
    busy = torch.cuda.Stream()
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(40):
        with torch.cuda.stream(busy):
            for _ in range(4):
                noise @ noise
        run_layer(layer, workspaces, [0, 2000], 1 << 20, "cuda").assert_bitwise_equal(first)


def test_experts_of_many_cuts():
    """More rows than a cut, also where fresh gradients are written, at two EP sizes."""
    ids_TK = torch.randint(0, 2, (9000, 1), dtype=torch.int32)  # experts 2 and 3 get nothing
    layer = gpu_layer(9000, 320, 192, 4, 1, seed=24, expert_ids_TK=ids_TK)
    alone = gradients(layer, saved_rows=1 << 20)
    assert_accurate(layer, alone)
    assert not alone.grad_fc1[3].any()
    assert not alone.grad_fc2[2].any()
    gradients(layer, 2).assert_bitwise_equal(alone)


def test_probs_of_zero_and_missing_routes():
    ids_TK = torch.full((600, 3), -1, dtype=torch.int32)
    ids_TK[::2, 1] = 7  # every other token, to one expert of the last rank
    layer = gpu_layer(600, 256, 128, 8, 3, seed=25, expert_ids_TK=ids_TK)
    layer.probs_TK[::4] = 0.0
    for ep_size, cuts in ((1, None), (4, [0, 0, 0, 600, 600])):
        result = gradients(layer, ep_size, cuts, saved_rows=1 << 20)
        assert_accurate(layer, result)
        assert not result.grad_hidden_TH[1::2].any()
        assert not result.grad_hidden_TH[::4].any()
        assert result.grad_probs_TK[::4, 1].all()
        assert not result.grad_probs_TK[:, [0, 2]].any()
    nobody = gpu_layer(0, 256, 128, 8, 3, seed=25)
    empty = gradients(nobody, 2, [0, 0, 0])
    assert not torch.stack(empty.grad_fc1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes_of_probs(dtype):
    layer = gpu_layer(500, 256, 192, 8, 3, seed=26)
    probs_TK = leaf(layer.probs_TK.to(dtype))
    (workspace,) = workspaces_for(layer, 1)
    output_TH = fused_moe(
        layer.hidden_TH, layer.expert_ids_TK, probs_TK, layer.fc1, layer.fc2, workspace
    )
    output_TH.backward(layer.grad_output_TH)
    assert probs_TK.grad.dtype == dtype
    exact = run_reference(
        Layer(**{**vars(layer), "probs_TK": probs_TK.detach().float()}), torch.float64
    )
    assert relative_error(probs_TK.grad, exact.grad_probs_TK) < 1e-2


def main_grad_run(layer, workspaces, weights, saved_rows=1 << 20):
    hidden_TH, probs_TK = leaf(layer.hidden_TH), leaf(layer.probs_TK)
    n = len(layer.fc1)
    fused_moe(
        hidden_TH,
        layer.expert_ids_TK,
        probs_TK,
        weights[:n],
        weights[n:],
        workspaces[0],
        saved_rows=saved_rows,
        accumulate_into_main_grad=True,
    ).backward(layer.grad_output_TH)


def test_main_grads_are_added_to_and_frozen_weights_skipped():
    ids_TK = torch.randint(0, 6, (5000, 2), dtype=torch.int32)  # experts 6 and 7 get nothing
    layer = gpu_layer(5000, 576, 320, 8, 2, seed=27, expert_ids_TK=ids_TK)
    fresh = gradients(layer, saved_rows=1 << 20)
    exact = run_reference(layer, torch.float64)
    weights = [torch.nn.Parameter(w) for w in (*layer.fc1, *layer.fc2)]
    before = [torch.randn(w.shape, device="cuda") for w in weights]
    for w, start in zip(weights, before, strict=True):
        w.main_grad = start.clone()
    frozen = weights[2]
    frozen.requires_grad_(False)
    workspaces = workspaces_for(layer, 1)
    main_grad_run(layer, workspaces, weights)
    grads = [*fresh.grad_fc1, *fresh.grad_fc2]
    exact_grads = [*exact.grad_fc1, *exact.grad_fc2]
    assert torch.equal(frozen.main_grad, before[2])
    for i, (w, start) in enumerate(zip(weights, before, strict=True)):
        if w is frozen:
            continue
        assert w.grad_added_to_main_grad
        change = w.main_grad.double() - start.double()
        if not grads[i].any():
            assert torch.equal(w.main_grad, start)
            continue
        assert relative_error(change, exact_grads[i]) < 1e-2
    # A second microbatch adds the same again.
    once = [w.main_grad.clone() for w in weights]
    main_grad_run(layer, workspaces, weights)
    for w, start, first in zip(weights, before, once, strict=True):
        if w is not frozen:
            twice = w.main_grad.double() - start.double()
            assert relative_error(twice, 2 * (first.double() - start.double())) < 1e-5


def test_bf16_main_grads_are_added_to():
    layer = gpu_layer(2000, 256, 192, 4, 2, seed=28)
    fresh = gradients(layer, saved_rows=1 << 20)
    weights = [torch.nn.Parameter(w) for w in (*layer.fc1, *layer.fc2)]
    before = [torch.randn(w.shape, device="cuda").bfloat16() for w in weights]
    for w, start in zip(weights, before, strict=True):
        w.main_grad = start.clone()
    main_grad_run(layer, workspaces_for(layer, 1), weights)
    for w, start, grad in zip(weights, before, [*fresh.grad_fc1, *fresh.grad_fc2], strict=True):
        assert w.grad_added_to_main_grad
        assert relative_error(w.main_grad, start.double() + grad.double()) < 3e-3
