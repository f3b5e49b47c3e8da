"""Dispatch and combine alone on the Hopper engine."""

import pytest
import torch

from megatron_mok.ops import combine, dispatch
from megatron_mok.runtime import abi
from tests.dispatch_layer import run_dispatched_layer
from tests.gpu.layers import SHAPES, gpu_layer, workspaces_for
from tests.in_process import (
    even_cuts,
    make_workspaces,
    random_layer,
    relative_error,
    run_fused,
    run_ranks,
    run_reference,
    shapes_and_ranks,
)

pytestmark = pytest.mark.gpu


def round_trip(layer, workspaces, cuts, device, addend_TH=None):
    """Per rank all operators' results, but for rows behind the last block; and the combined output
    of all ranks."""

    def body(rank):
        own = slice(cuts[rank], cuts[rank + 1])
        ids_TK = layer.expert_ids_TK[own].contiguous()
        addend = addend_TH[own] if addend_TH is not None else None
        sent = dispatch(layer.hidden_TH[own], ids_TK, layer.probs_TK[own], workspaces[rank])
        output_TH = combine(sent.rows_RH, ids_TK, workspaces[rank], addend_TH=addend)
        back_TH, probs_TK = torch.ops.mok.dispatch_backward(
            sent.rows_RH, sent.probs_R, ids_TK, workspaces[rank].handle
        )
        again_RH = torch.ops.mok.combine_backward(
            output_TH, ids_TK, workspaces[rank].handle, len(sent.rows_RH)
        )
        blocks = sum(-(-n // abi.BLOCK_ROWS) for n in sent.expert_rows_L.tolist())
        used = slice(0, blocks * abi.BLOCK_ROWS)
        rows = sent.rows_RH[used], sent.probs_R[used], again_RH[used]
        return *rows, sent.expert_rows_L, back_TH, probs_TK, output_TH

    results = run_ranks(len(workspaces), body, device)
    for workspace in workspaces:
        workspace.check()
    return results, torch.cat([r[-1] for r in results])


OTHER_SHAPES = {name: shape for name, shape in SHAPES.items() if name != "odd"}


@pytest.mark.parametrize(("shape", "ep_size"), shapes_and_ranks(OTHER_SHAPES, [1, 2, 4]))
def test_bitwise_the_host_engines(shape, ep_size):
    tokens, hidden, _, experts, topk = SHAPES[shape]
    host = random_layer(tokens, hidden, 64, experts, topk, torch.bfloat16, seed=tokens)
    host_addend_TH = host.grad_output_TH
    cuts = even_cuts(tokens, ep_size, first_is_empty=True)
    on_host, host_TH = round_trip(
        host, make_workspaces(ep_size, **host.shape), cuts, "cpu", host_addend_TH
    )
    layer = gpu_layer(tokens, hidden, 64, experts, topk, seed=tokens)
    workspaces = workspaces_for(layer, ep_size)
    for _ in range(2):
        on_gpu, output_TH = round_trip(layer, workspaces, cuts, "cuda", layer.grad_output_TH)
        assert torch.equal(output_TH.cpu(), host_TH)
        for mine, theirs in zip(on_gpu, on_host, strict=True):
            for x, y in zip(mine, theirs, strict=True):
                assert torch.equal(x.cpu(), y)


def test_layer_between_dispatch_and_combine():
    layer = gpu_layer(900, 256, 192, 8, 3, seed=51)
    layer.probs_TK[::3] = 0.0
    result = run_dispatched_layer(layer, workspaces_for(layer, 1), [0, 900], "cuda")
    exact = run_reference(layer, torch.float64)
    for name, got in result.tensors().items():
        assert relative_error(got, exact.tensors()[name]) < 2e-2, name


def test_bitwise_equal_at_every_ep_size():
    layer = gpu_layer(1500, 512, 64, 16, 4, seed=52)
    _, alone_TH = round_trip(layer, workspaces_for(layer, 1), [0, 1500], "cuda")
    for ep_size in (2, 4, 8):
        cuts = even_cuts(1500, ep_size, first_is_empty=True)
        _, output_TH = round_trip(layer, workspaces_for(layer, ep_size), cuts, "cuda")
        assert torch.equal(alone_TH, output_TH), ep_size


def test_calls_of_all_kinds_follow_each_other_while_a_rank_is_late():
    """What a rank stages and pushes must stay until its peers are done with it."""
    ep_size, tokens = 2, 600
    layers = [gpu_layer(tokens, 512, 128, 8, 3, seed=s) for s in (53, 54, 55)]
    workspaces = workspaces_for(layers[0], ep_size)
    cuts = [0, 250, tokens]
    expected = []
    for layer in layers:
        (workspace,) = workspaces_for(layer, 1)
        expected.append(layer_results(layer, workspace))

    torch.cuda._sleep(1000)  # loads its kernel, see load_pytorch_kernels

    def body(rank):
        results = []
        for i, layer in enumerate(layers * 4):
            if i % 2 == rank:
                torch.cuda._sleep(2_000_000)  # cycles: about a millisecond
            results.append(layer_results(layer.part(rank, ep_size, cuts), workspaces[rank]))
        return results

    by_rank = run_ranks(ep_size, body, "cuda")
    for call, pair in enumerate(zip(*by_rank, strict=True)):
        for kind, parts in enumerate(zip(*pair, strict=True)):
            wanted = expected[call % len(layers)][kind]
            assert torch.equal(torch.cat(parts), wanted), (call, kind)


def layer_results(part, workspace):
    """Output of the fused layer, and of dispatch and combine, back to back."""
    sent = dispatch(part.hidden_TH, part.expert_ids_TK, part.probs_TK, workspace)
    fused_TH = run_fused(part, workspace)
    return fused_TH, combine(sent.rows_RH, part.expert_ids_TK, workspace)


def test_graph_replay_follows_routing_that_changes_in_place():
    layer = gpu_layer(700, 512, 64, 8, 2, seed=56)
    (workspace,) = workspaces_for(layer, 1)

    def call():
        sent = dispatch(layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK, workspace)
        return combine(sent.rows_RH, layer.expert_ids_TK, workspace)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output_TH = call()
    for seed in range(3):
        other = gpu_layer(700, 512, 64, 8, 2, seed=seed)
        layer.expert_ids_TK.copy_(other.expert_ids_TK)
        layer.hidden_TH.copy_(other.hidden_TH)
        graph.replay()
        torch.cuda.synchronize()
        routes_T = (layer.expert_ids_TK >= 0).sum(dim=1, keepdim=True)
        assert torch.equal(output_TH, (layer.hidden_TH.float() * routes_T).bfloat16())
        assert torch.equal(output_TH, call())


@pytest.mark.parametrize("ep_size", [1, 2])
def test_capacity_that_just_suffices(ep_size):
    layer = gpu_layer(900, 256, 192, 8, 3, seed=57)
    cuts = even_cuts(900, ep_size, first_is_empty=True)
    counts_E = layer.expert_ids_TK.flatten().cpu()
    per_rank = 8 // ep_size

    def exact(rank):
        experts = range(rank * per_rank, (rank + 1) * per_rank)
        blocks = [-(-int((counts_E == e).sum()) // abi.BLOCK_ROWS) for e in experts]
        return sum(blocks) * abi.BLOCK_ROWS

    results = [
        run_dispatched_layer(layer, workspaces_for(layer, ep_size), cuts, "cuda", room)
        for room in (None, exact)
    ]
    results[0].assert_bitwise_equal(results[1])


def test_nothing_beyond_a_capacity_that_is_too_small_is_touched():
    """A GPU cannot tell that it is too small; but it must not write there."""
    layer = gpu_layer(900, 256, 64, 8, 3, seed=58)
    (workspace,) = workspaces_for(layer, 1)
    sent = dispatch(layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK, workspace)
    rows_RH = torch.full_like(sent.rows_RH, 3.0)
    probs_R = torch.full_like(sent.probs_R, 3.0)
    expert_rows_L = torch.empty_like(sent.expert_rows_L)
    args = abi.MokDispatchArgs(
        routes=abi.MokRoutes.of(layer.expert_ids_TK, layer.probs_TK),
        hidden=layer.hidden_TH.data_ptr(),
        rows=rows_RH.data_ptr(),
        row_probs=probs_R.data_ptr(),
        expert_rows=expert_rows_L.data_ptr(),
        capacity=512,
        stream=workspace.current_stream(),
    )
    workspace.call("mok_dispatch", args)
    assert torch.equal(expert_rows_L, sent.expert_rows_L)
    assert int(expert_rows_L.sum()) > 512
    assert torch.equal(rows_RH[:512], sent.rows_RH[:512])
    assert torch.equal(probs_R[:512], sent.probs_R[:512])
    assert (rows_RH[512:] == 3.0).all()
    assert (probs_R[512:] == 3.0).all()
