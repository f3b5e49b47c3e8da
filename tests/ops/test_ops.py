"""The torch operators: declared behaviour, autograd, argument errors, routes, main_grad."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mok.ops import fused_moe, routes_from_map
from tests.in_process import leaf, make_workspaces, random_layer, relative_error, run_reference


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def case(request):
    layer = random_layer(37, 64, 128, 4, 2, request.param, seed=13)
    (workspace,) = make_workspaces(1, **layer.shape)
    return layer, workspace


def test_opcheck_forward(case):
    layer, workspace = case
    args = (
        leaf(layer.hidden_TH),
        layer.expert_ids_TK,
        leaf(layer.probs_TK),
        [leaf(w) for w in layer.fc1],
        [leaf(w) for w in layer.fc2],
        leaf(torch.randn_like(layer.hidden_TH)),
        workspace.handle,
        128,
    )
    # Pre-activations of padding rows are undefined, so compare what is defined: save nothing.
    torch.library.opcheck(torch.ops.mok.moe_forward.default, (*args[:-1], 0))
    torch.library.opcheck(
        torch.ops.mok.moe_forward.default,
        args,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("accumulate", [False, True])
def test_opcheck_backward(case, accumulate):
    layer, workspace = case
    grads = [
        [torch.ones_like(w, dtype=torch.float32) for w in weights]
        for weights in (layer.fc1, layer.fc2)
    ]
    grads[0][1] = torch.empty(0)  # nobody wants this one
    torch.library.opcheck(
        torch.ops.mok.moe_backward.default,
        (
            layer.grad_output_TH,
            layer.hidden_TH,
            layer.expert_ids_TK,
            layer.probs_TK,
            layer.fc1,
            layer.fc2,
            layer.hidden_TH.new_empty(0, 256),
            *grads,
            accumulate,
            workspace.handle,
        ),
    )


@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_come_in_the_dtype_of_their_input(case, probs_dtype):
    layer, workspace = case
    probs_TK = leaf(layer.probs_TK.to(probs_dtype))
    fc1 = [leaf(w) for w in layer.fc1]
    output_TH = fused_moe(layer.hidden_TH, layer.expert_ids_TK, probs_TK, fc1, layer.fc2, workspace)
    output_TH.sum().backward()  # an expanded, non-contiguous gradient
    assert probs_TK.grad.dtype == probs_dtype
    assert all(w.grad.dtype == w.dtype for w in fc1)


def test_no_grad_and_frozen_weights(case):
    layer, workspace = case
    args = (layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK)
    with torch.no_grad():
        silent = fused_moe(*args, layer.fc1, layer.fc2, workspace, saved_rows=10**6)
    fc1 = [leaf(w) if i % 2 else w for i, w in enumerate(layer.fc1)]
    output_TH = fused_moe(*args, fc1, layer.fc2, workspace, saved_rows=10**6)
    assert torch.equal(silent, output_TH)
    output_TH.backward(layer.grad_output_TH)
    reference = run_reference(layer, torch.float64)
    for i, w in enumerate(fc1):
        if i % 2:
            assert relative_error(w.grad, reference.grad_fc1[i]) < 1e-2
        else:
            assert w.grad is None


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_main_grad_collects_microbatches_and_hooks_fire(case, main_dtype):
    layer, workspace = case
    fc1 = [torch.nn.Parameter(w) for w in layer.fc1]
    fc2 = [torch.nn.Parameter(w) for w in layer.fc2]
    fc2[0].requires_grad_(False)
    plain = fc1[3]  # without main_grad: a real gradient beside the accumulated ones
    with_main = [p for p in (*fc1, *fc2) if p.requires_grad and p is not plain]
    fired = []
    for p in with_main:
        p.main_grad = torch.full(p.shape, 0.5, dtype=main_dtype)
        p.grad_added_to_main_grad = False
        p.register_post_accumulate_grad_hook(fired.append)
    for _ in range(2):
        fused_moe(
            layer.hidden_TH,
            layer.expert_ids_TK,
            layer.probs_TK,
            fc1,
            fc2,
            workspace,
            accumulate_into_main_grad=True,
        ).backward(layer.grad_output_TH)
        for p in with_main:
            assert p.grad_added_to_main_grad
            assert p.grad.shape == p.shape
            p.grad = None
    assert len(fired) == 2 * len(with_main)
    reference = run_reference(layer, torch.float64)
    limit = 1e-5 if layer.hidden_TH.dtype == torch.float32 else 1e-2
    exact = dict(zip((*fc1, *fc2), (*reference.grad_fc1, *reference.grad_fc2), strict=True))
    for p in with_main:
        if main_dtype == torch.float32:
            assert relative_error(p.main_grad - 0.5, 2 * exact[p]) < limit
        else:
            assert relative_error(p.main_grad, 0.5 + 2 * exact[p]) < 1e-2
    assert relative_error(plain.grad, 2 * exact[plain]) < limit
    assert fc2[0].grad is None


def test_main_grad_of_idle_experts_is_untouched():
    ids_TK = torch.zeros(20, 1, dtype=torch.int32)
    layer = random_layer(20, 64, 64, 2, 1, torch.float32, seed=3, expert_ids_TK=ids_TK)
    (workspace,) = make_workspaces(1, **layer.shape)
    fc1 = [torch.nn.Parameter(w) for w in layer.fc1]
    for p in fc1:
        p.main_grad = torch.full(p.shape, -0.0)
    fused_moe(
        layer.hidden_TH,
        layer.expert_ids_TK,
        layer.probs_TK,
        fc1,
        layer.fc2,
        workspace,
        accumulate_into_main_grad=True,
    ).backward(layer.grad_output_TH)
    assert fc1[0].main_grad.abs().max() > 0
    assert torch.equal(fc1[1].main_grad.view(torch.int32), torch.full((128, 64), -(2**31)).int())
    assert fc1[1].grad_added_to_main_grad


@pytest.mark.parametrize("mixed", [False, True], ids=["all", "beside_fp32"])
def test_sums_in_bf16_main_grad_are_rounded_once(mixed):
    layer = random_layer(37, 64, 128, 4, 2, torch.float32, seed=13)
    (workspace,) = make_workspaces(1, **layer.shape)
    weights = [torch.nn.Parameter(w) for w in (*layer.fc1, *layer.fc2)]

    def backward():
        fused_moe(
            layer.hidden_TH,
            layer.expert_ids_TK,
            layer.probs_TK,
            weights[:4],
            weights[4:],
            workspace,
            accumulate_into_main_grad=True,
        ).backward(layer.grad_output_TH)

    backward()
    sums = [w.grad for w in weights]  # none had a main_grad
    start = [torch.randn(w.shape).bfloat16() for w in weights]
    for i, (w, value) in enumerate(zip(weights, start, strict=True)):
        w.main_grad = value.float() if mixed and i % 2 else value.clone()
    backward()
    for w, value, total in zip(weights, start, sums, strict=True):
        assert torch.equal(w.main_grad, (value.float() + total).to(w.main_grad.dtype))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_TH": lambda x: x[:, :32]}, r"hidden has shape \[37, 32\]; it must be \[\*, 64\]"),
        ({"hidden_TH": lambda x: x.double()}, "hidden has dtype torch.float64; it must be torch"),
        ({"hidden_TH": lambda x: x.t().contiguous().t()}, "hidden must be contiguous"),
        ({"expert_ids_TK": lambda x: x.long()}, "expert_ids has dtype torch.int64; it must be"),
        ({"expert_ids_TK": lambda x: x[:36]}, r"expert_ids has shape \[36, 2\]; .* \[37, 2\]"),
        ({"probs_TK": lambda x: x[:, :1]}, r"probs has shape \[37, 1\]; it must be \[37, 2\]"),
        ({"fc1": lambda x: x[:3]}, "fc1 has 3 matrices; this rank has 4 local experts"),
        ({"fc2": lambda x: [w.t() for w in x]}, r"fc2\[0\] has shape \[128, 64\]; .* \[64, 128\]"),
        ({"hidden_TH": lambda x: x.to("meta")}, "hidden is on meta"),
    ],
)
def test_wrong_arguments_are_named(change, text):
    layer = random_layer(37, 64, 128, 4, 2, torch.float32, seed=13)
    (workspace,) = make_workspaces(1, **layer.shape)
    (name, edit), *_ = change.items()
    args = {n: getattr(layer, n) for n in ("hidden_TH", "expert_ids_TK", "probs_TK", "fc1", "fc2")}
    args[name] = edit(args[name])
    with pytest.raises(ValueError, match=text):
        fused_moe(**args, workspace=workspace)


def test_unknown_workspace_handle(case):
    layer, _ = case
    with pytest.raises(ValueError, match="no workspace has handle 0"):
        torch.ops.mok.moe_forward(
            layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK, layer.fc1, layer.fc2, None, 0, 0
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), st.integers(1, 12), st.integers(1, 14), st.integers(0, 2**32 - 1))
def test_routes_from_map(tokens, experts, topk, seed):
    g = torch.Generator().manual_seed(seed)
    keys_TE = torch.rand(tokens, experts, generator=g)
    ranks_TE = keys_TE.argsort(dim=1).argsort(dim=1)
    routing_map_TE = (ranks_TE < topk) & (keys_TE < 0.8)
    probs_TE = leaf(torch.rand(tokens, experts, generator=g).round(decimals=1))  # zeros and ties
    ids_TK, probs_TK = routes_from_map(probs_TE, routing_map_TE, topk)
    assert ids_TK.dtype == torch.int32
    assert ids_TK.shape == probs_TK.shape == (tokens, topk)
    for t in range(tokens):
        chosen = routing_map_TE[t].nonzero().flatten().tolist()
        assert ids_TK[t].tolist() == chosen + [-1] * (topk - len(chosen))
        assert probs_TK[t].tolist() == probs_TE[t, chosen].tolist() + [0.0] * (topk - len(chosen))
    weights_TK = torch.rand(tokens, topk, generator=g)
    (probs_TK * weights_TK).sum().backward()
    expected_TE = torch.zeros(tokens, experts)
    for t, k in (ids_TK >= 0).nonzero().tolist():
        expected_TE[t, ids_TK[t, k]] = weights_TK[t, k]
    assert torch.equal(probs_TE.grad, expected_TE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opcheck_routes_from_map(dtype):
    routing_map_TE = torch.rand(9, 6) < 0.4
    probs_TE = leaf(torch.rand(9, 6).to(dtype))
    # The aot_dispatch test of opcheck cannot take an output of integers.
    torch.library.opcheck(
        torch.ops.mok.routes_from_map.default,
        (probs_TE, routing_map_TE, 6),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    _, probs_TK = routes_from_map(probs_TE, routing_map_TE, 6)
    assert probs_TK.dtype == torch.float32
    probs_TK.sum().backward()
    assert torch.equal(probs_TE.grad, routing_map_TE.to(dtype))


@pytest.mark.parametrize(
    ("probs_TE", "routing_map_TE", "text"),
    [
        (torch.rand(4, 3), torch.ones(4, 2, dtype=torch.bool), "must have the same shape"),
        (torch.rand(4, 3), torch.ones(4, 3), "routing_map has dtype torch.float32"),
        (torch.rand(4, 3).half(), torch.ones(4, 3, dtype=torch.bool), "probs has dtype"),
    ],
)
def test_maps_that_do_not_fit(probs_TE, routing_map_TE, text):
    with pytest.raises(ValueError, match=text):
        routes_from_map(probs_TE, routing_map_TE, 2)


def test_too_many_routes_are_an_error():
    with pytest.raises(ValueError, match="token 0 has 3 routes; topk is 2"):
        routes_from_map(torch.rand(4, 3), torch.ones(4, 3, dtype=torch.bool), 2)
