"""`dispatch` and `combine` as torch operators: a layer of plain torch experts between them."""

import pytest
import torch

from megatron_mok.ops import combine, dispatch
from megatron_mok.runtime import MoKError, MoKInvalidArgumentError
from tests.dispatch_layer import run_dispatched_layer
from tests.in_process import (
    even_cuts,
    leaf,
    make_workspaces,
    random_layer,
    relative_error,
    run_reference,
)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_layer_between_dispatch_and_combine(ep_size):
    layer = random_layer(301, 64, 128, 8, 3, torch.float32, seed=41)
    layer.probs_TK[::3] = 0.0
    cuts = even_cuts(301, ep_size, first_is_empty=True)
    result = run_dispatched_layer(layer, make_workspaces(ep_size, **layer.shape), cuts)
    exact = run_reference(layer, torch.float64)
    for name, got in result.tensors().items():
        assert relative_error(got, exact.tensors()[name]) < 2e-6, name


def test_opcheck():
    layer = random_layer(37, 64, 64, 4, 2, torch.bfloat16, seed=13)
    (workspace,) = make_workspaces(1, **layer.shape)
    rows_RH = leaf(torch.randn(workspace.max_rows, 64).bfloat16())
    capacity = workspace.max_rows
    probs_R = torch.randn(capacity)
    ops, ids_TK, handle = torch.ops.mok, layer.expert_ids_TK, workspace.handle
    addend_TH = leaf(torch.randn_like(layer.hidden_TH))
    for op, args in (
        (ops.combine, (rows_RH, ids_TK, addend_TH, handle)),
        (ops.dispatch_backward, (rows_RH.detach(), probs_R, ids_TK, handle)),
    ):
        torch.library.opcheck(op.default, args)
    # Rows behind the last block are not initialised, so results of two runs cannot be compared.
    static = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op, args in (
        (ops.dispatch, (leaf(layer.hidden_TH), ids_TK, leaf(layer.probs_TK), handle, capacity)),
        (ops.combine_backward, (layer.grad_output_TH, ids_TK, handle, capacity)),
    ):
        torch.library.opcheck(op.default, args, test_utils=static)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradient_of_probs_has_their_dtype(dtype):
    layer = random_layer(37, 64, 64, 4, 2, torch.float32, seed=13)
    (workspace,) = make_workspaces(1, **layer.shape)
    probs_TK = leaf(layer.probs_TK.to(dtype))
    dispatched = dispatch(layer.hidden_TH, layer.expert_ids_TK, probs_TK, workspace)
    dispatched.probs_R.backward(torch.full_like(dispatched.probs_R, 3.0))
    expected_TK = torch.where(layer.expert_ids_TK >= 0, 3.0, 0.0).to(dtype)
    assert torch.equal(probs_TK.grad, expected_TK)


def test_arguments_that_do_not_fit():
    layer = random_layer(20, 64, 64, 4, 2, torch.float32, seed=13)
    (workspace,) = make_workspaces(1, **(layer.shape | {"max_tokens": 16}))
    hidden_TH, ids_TK, probs_TK = layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK
    with pytest.raises(MoKInvalidArgumentError, match="got 20 tokens; the workspace takes 0 to 16"):
        dispatch(hidden_TH, ids_TK, probs_TK, workspace)
    with pytest.raises(ValueError, match=r"hidden has shape \[20, 32\]"):
        dispatch(hidden_TH[:, :32].contiguous(), ids_TK, probs_TK, workspace)
    with pytest.raises(ValueError, match=r"probs has shape \[7, 2\]; it must be \[20, 2\]"):
        dispatch(hidden_TH, ids_TK, probs_TK[:7], workspace)
    with pytest.raises(ValueError, match=r"rows has shape \[20, 32\]; it must be \[\*, 64\]"):
        combine(hidden_TH[:, :32].contiguous(), ids_TK, workspace)
    few = hidden_TH[:16], ids_TK[:16], probs_TK[:16], workspace
    for capacity in (-128, 100, workspace.max_rows + 128):
        said = f"capacity is {capacity} rows; it must be a multiple of 128, at most"
        with pytest.raises(MoKInvalidArgumentError, match=said):
            dispatch(*few, capacity=capacity)
    with pytest.raises(MoKInvalidArgumentError, match="capacity is 20 rows; it must be a multiple"):
        combine(hidden_TH, ids_TK[:16], workspace)
    dispatch(*few)  # the workspace can still be used


def test_capacity_that_is_too_small_is_an_error():
    layer = random_layer(20, 64, 64, 4, 2, torch.float32, seed=13)
    (workspace,) = make_workspaces(1, **layer.shape)
    inputs = layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK, workspace
    with pytest.raises(MoKError, match="got 512 padded rows; there is room for 384"):
        dispatch(*inputs, capacity=384)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_capacity_that_just_suffices(ep_size):
    """Also for a rank whose experts get no rows at all, and so no buffer."""
    layer = random_layer(301, 64, 128, 8, 3, torch.float32, seed=41)
    layer.expert_ids_TK[layer.expert_ids_TK >= 6] = -1
    cuts = even_cuts(301, ep_size, first_is_empty=True)

    def exact(rank):
        per_rank = 8 // ep_size
        counts = [int((layer.expert_ids_TK == e).sum()) for e in range(8)]
        return sum(-(-n // 128) * 128 for n in counts[rank * per_rank : (rank + 1) * per_rank])

    results = [
        run_dispatched_layer(
            layer, make_workspaces(ep_size, **layer.shape), cuts, capacity=capacity
        )
        for capacity in (None, exact)
    ]
    for name, got in results[0].tensors().items():
        assert torch.equal(got, results[1].tensors()[name]), name
