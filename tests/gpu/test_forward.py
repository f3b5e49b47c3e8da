"""The Hopper engine's forward: numerics, bitwise promises, odd shapes, graphs, failures."""

import time

import pytest
import torch

from megatron_mok.ops import fused_moe, routes_from_map
from megatron_mok.runtime import MoKTimeoutError, MoKWorkspacePoisonedError
from tests.gpu.layers import SHAPES, gpu_layer, options, workspaces_for
from tests.in_process import (
    Layer,
    even_cuts,
    make_workspaces,
    relative_error,
    run_fused,
    run_ranks,
    run_reference,
    shapes_and_ranks,
)

pytestmark = pytest.mark.gpu


def forward(layer, workspaces, cuts=None, **kwargs):
    """Output of the tokens of all ranks; rank r owns tokens cuts[r] to cuts[r + 1]."""
    ep_size = len(workspaces)

    def body(rank):
        return run_fused(layer.part(rank, ep_size, cuts), workspaces[rank], **kwargs)

    return torch.cat(run_ranks(ep_size, body, "cuda"))


@pytest.mark.parametrize(("shape", "ep_size"), shapes_and_ranks(SHAPES, [1, 2]))
def test_numerics(shape, ep_size):
    layer = gpu_layer(*SHAPES[shape], seed=sum(SHAPES[shape]))
    output_TH = forward(layer, workspaces_for(layer, ep_size))
    exact_TH = run_reference(layer, torch.float64).output_TH
    composed_TH = run_reference(layer, torch.bfloat16).output_TH
    error = relative_error(output_TH, exact_TH)
    assert error < 1e-2
    assert error <= 1.1 * relative_error(composed_TH, exact_TH)


def test_bitwise_equal_at_every_ep_size():
    layer = gpu_layer(1500, 1024, 512, 16, 4, seed=11)
    alone = forward(layer, workspaces_for(layer, 1))
    for ep_size in (2, 4, 8):
        cuts = even_cuts(1500, ep_size, first_is_empty=True)
        assert torch.equal(alone, forward(layer, workspaces_for(layer, ep_size), cuts)), ep_size


def test_bitwise_equal_in_forty_repeats_beside_a_busy_stream():
    layer = gpu_layer(2000, 1024, 512, 16, 4, seed=12)
    workspaces = workspaces_for(layer, 1)
    first = forward(layer, workspaces)
    busy = torch.cuda.Stream()
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(40):
        with torch.cuda.stream(busy):
            for _ in range(4):
                noise @ noise
        assert torch.equal(first, forward(layer, workspaces))


def test_saved_pre_activations_change_nothing():
    layer = gpu_layer(900, 512, 192, 8, 3, seed=5)
    (workspace,) = workspaces_for(layer, 1)
    args = (layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK, layer.fc1, layer.fc2)
    plain = torch.ops.mok.moe_forward(*args, None, workspace.handle, 0)[0]
    for rows in (128, 1024, workspace.max_rows):
        output_TH, preact = torch.ops.mok.moe_forward(*args, None, workspace.handle, rows)
        assert torch.equal(plain, output_TH)
    # The first block holds expert 0's first tokens.
    first = (layer.expert_ids_TK == 0).any(dim=1).nonzero().flatten()[:128]
    expected = layer.hidden_TH[first].double() @ layer.fc1[0].double().t()
    assert relative_error(preact[: len(first)], expected) < 5e-3


def test_empty_ranks_missing_routes_and_one_hot_expert():
    ids_TK = torch.full((600, 3), -1, dtype=torch.int32)
    ids_TK[::2, 1] = 7  # every other token, to one expert of the last rank
    layer = gpu_layer(600, 256, 128, 8, 3, seed=3, expert_ids_TK=ids_TK)
    exact_TH = run_reference(layer, torch.float64).output_TH
    for ep_size, cuts in ((1, None), (4, [0, 0, 0, 600, 600])):
        output_TH = forward(layer, workspaces_for(layer, ep_size), cuts)
        assert relative_error(output_TH, exact_TH) < 1e-2
        assert torch.equal(output_TH[1::2], torch.zeros_like(output_TH[1::2]))
    nobody = gpu_layer(0, 256, 128, 8, 3, seed=3)
    assert forward(nobody, workspaces_for(nobody, 2)).shape == (0, 256)


def test_addend_and_other_streams():
    layer = gpu_layer(300, 256, 128, 8, 2, seed=4)
    (workspace,) = workspaces_for(layer, 1)
    args = (layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK, layer.fc1, layer.fc2, workspace)
    addend_TH = torch.randn_like(layer.hidden_TH)
    exact_TH = run_reference(layer, torch.float64).output_TH + addend_TH.double()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            output_TH = fused_moe(*args, addend_TH=addend_TH)
        torch.cuda.synchronize()
        assert relative_error(output_TH, exact_TH) < 1e-2


def test_output_follows_weights_that_change():
    layer = gpu_layer(300, 256, 128, 8, 2, seed=4)
    workspaces = workspaces_for(layer, 1)
    before = forward(layer, workspaces)
    for weight in layer.fc2:
        weight.mul_(2)
    assert torch.equal(forward(layer, workspaces), 2 * before)
    layer.fc2[:] = [w.clone() * 2 for w in layer.fc2]  # other memory
    assert torch.equal(forward(layer, workspaces), 4 * before)


def test_nan_stays_in_its_token():
    layer = gpu_layer(512, 128, 128, 4, 2, seed=8)
    layer.hidden_TH[4] = float("nan")
    output_TH = forward(layer, workspaces_for(layer, 2))
    bad = output_TH.isnan().any(dim=1).nonzero().flatten().tolist()
    assert bad == ([4] if (layer.expert_ids_TK[4] >= 0).any() else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "experts", "topk"), [(0, 8, 2), (333, 8, 2), (1000, 257, 32)])
def test_routes_from_map_equal_the_host_engines(tokens, experts, topk, dtype):
    keys_TE = torch.rand(tokens, experts)
    routing_map_TE = (keys_TE.argsort(dim=1).argsort(dim=1) < topk) & (keys_TE < 0.9)
    probs_TE = torch.rand(tokens, experts).to(dtype)
    expected = routes_from_map(probs_TE, routing_map_TE, topk)
    for got, want in zip(
        routes_from_map(probs_TE.cuda(), routing_map_TE.cuda(), topk), expected, strict=True
    ):
        assert torch.equal(got.cpu(), want)


def test_graph_replay_follows_routing_that_changes_in_place():
    layer = gpu_layer(700, 512, 256, 8, 2, seed=6)
    (workspace,) = workspaces_for(layer, 1)
    args = (layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK, layer.fc1, layer.fc2, workspace)
    fused_moe(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output_TH = fused_moe(*args)
    for seed in range(5):
        other = gpu_layer(700, 512, 256, 8, 2, seed=seed)
        layer.expert_ids_TK.copy_(other.expert_ids_TK)
        layer.hidden_TH.copy_(other.hidden_TH)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(output_TH, run_reference(layer, torch.float64).output_TH) < 1e-2
        assert torch.equal(output_TH, fused_moe(*args))  # eager calls in between


def test_several_layers_share_one_workspace():
    layers = [gpu_layer(400, 256, 128, 8, 2, seed=s) for s in range(4)]
    workspaces = workspaces_for(layers[0], 2)
    for layer in layers * 2:
        output_TH = forward(layer, workspaces)
        assert relative_error(output_TH, run_reference(layer, torch.float64).output_TH) < 1e-2


def test_rank_that_never_comes_becomes_a_timeout_and_poisons_the_workspace():
    layer = gpu_layer(64, 128, 128, 4, 2, seed=1)
    workspaces = make_workspaces(2, options(2, wait_s=1.0), "cuda", **layer.shape)

    def call(rank):
        experts = slice(2 * rank, 2 * rank + 2)
        fused_moe(
            layer.hidden_TH,
            layer.expert_ids_TK,
            layer.probs_TK,
            layer.fc1[experts],
            layer.fc2[experts],
            workspaces[rank],
        )
        torch.cuda.synchronize()

    start = time.monotonic()
    call(0)
    assert 0.9 < time.monotonic() - start < 10
    with pytest.raises(MoKTimeoutError, match=r"rank 0 of EP 2 .* phase 'entry', for rank 1"):
        call(0)
    with pytest.raises(MoKWorkspacePoisonedError):
        call(0)
    # The late rank hears of it in its first wait, and says so at its next call.
    call(1)
    with pytest.raises(MoKTimeoutError, match=r"rank 1 of EP 2 stopped .* because rank 0 gave up"):
        call(1)


def test_more_tokens_than_the_workspace_takes():
    layer = gpu_layer(65, 128, 128, 4, 2, seed=1)
    with pytest.raises(ValueError, match=r"65.*64"):
        forward(layer, workspaces_for(layer, 1, max_tokens=64))


@pytest.mark.parametrize("routes", [2**31 // 7168 + 1000])
def test_more_than_two_billion_elements(routes):
    """Slots of more than 2^31 elements: equal to the same tokens in chunks."""
    tokens, topk = -(-routes // 8), 8
    layer = gpu_layer(tokens, 7168, 128, 8, topk, seed=2)
    whole = forward(layer, workspaces_for(layer, 1))
    chunk = 10_000
    workspaces = workspaces_for(layer, 1, max_tokens=chunk)
    for first in range(0, tokens, chunk):
        own = slice(first, min(first + chunk, tokens))
        part = Layer(
            layer.hidden_TH[own],
            layer.expert_ids_TK[own],
            layer.probs_TK[own],
            layer.fc1,
            layer.fc2,
            layer.grad_output_TH[own],
        )
        assert torch.equal(whole[own], forward(part, workspaces))
