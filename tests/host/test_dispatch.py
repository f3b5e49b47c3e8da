"""Dispatch and combine alone, through the C ABI."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_mok.runtime import abi
from tests.host.test_schedule import model_rows
from tests.in_process import make_workspaces, random_layer, relative_error, run_ranks

EP, HIDDEN, EXPERTS, TOPK = 2, 64, 6, 3
CUTS = [0, 210, 400]


def routes(layer, rank):
    tokens = slice(CUTS[rank], CUTS[rank + 1])
    ids_TK, probs_TK = layer.expert_ids_TK[tokens], layer.probs_TK[tokens]
    return abi.MokRoutes(len(ids_TK), ids_TK.data_ptr(), probs_TK.data_ptr())


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dispatched(request):
    """(layer, workspaces, per rank: rows [max_rows, H], probs [max_rows], rows per expert)."""
    layer = random_layer(400, HIDDEN, 64, EXPERTS, TOPK, request.param, seed=21)
    workspaces = make_workspaces(EP, **layer.shape)

    def body(rank):
        workspace = workspaces[rank]
        rows_RH = torch.full((workspace.max_rows, HIDDEN), float("nan"), dtype=request.param)
        probs_R = torch.full((workspace.max_rows,), float("nan"))
        expert_rows_L = torch.full((workspace.num_local_experts,), -1, dtype=torch.int32)
        workspace.call(
            "mok_dispatch",
            abi.MokDispatchArgs(
                routes=routes(layer, rank),
                hidden=layer.hidden_TH[CUTS[rank] :].data_ptr(),
                rows=rows_RH.data_ptr(),
                row_probs=probs_R.data_ptr(),
                expert_rows=expert_rows_L.data_ptr(),
                capacity=workspace.max_rows,
            ),
        )
        return rows_RH, probs_R, expert_rows_L

    return layer, workspaces, run_ranks(EP, body)


def test_dispatch_brings_each_row_to_its_place_and_zeros_to_padding(dispatched):
    layer, _, results = dispatched
    bounds = list(pairwise(CUTS))
    ids = [layer.expert_ids_TK[a:b].numpy() for a, b in bounds]
    probs = [layer.probs_TK[a:b].numpy() for a, b in bounds]
    for rank, (rows_RH, probs_R, expert_rows_L) in enumerate(results):
        rows, _ = model_rows(EXPERTS, ids, probs, rank)
        local = range(rank * EXPERTS // EP, (rank + 1) * EXPERTS // EP)
        assert expert_rows_L.tolist() == [
            sum(int(np.sum(i == expert)) for i in ids) for expert in local
        ]
        for i, row in enumerate(rows):
            token = None if row is None else layer.hidden_TH[CUTS[row[0]] + row[1]]
            expected_H = torch.zeros(HIDDEN, dtype=rows_RH.dtype) if token is None else token
            assert torch.equal(rows_RH[i], expected_H)
            assert probs_R[i] == (0.0 if row is None else float(row[3]))
        assert rows_RH[len(rows) :].isnan().all(), "wrote beyond its blocks"


def test_combine_sums_each_tokens_rows(dispatched):
    layer, workspaces, results = dispatched
    addend_TH = torch.randn_like(layer.hidden_TH)

    def body(rank):
        tokens = slice(CUTS[rank], CUTS[rank + 1])
        output_TH = torch.full_like(layer.hidden_TH[tokens], float("nan"))
        workspaces[rank].call(
            "mok_combine",
            abi.MokCombineArgs(
                routes=routes(layer, rank),
                rows=results[rank][0].data_ptr(),
                capacity=workspaces[rank].max_rows,
                addend=addend_TH[tokens].data_ptr(),
                output=output_TH.data_ptr(),
            ),
        )
        return output_TH

    output_TH = torch.cat(run_ranks(EP, body))
    routes_T = (layer.expert_ids_TK >= 0).sum(dim=1, keepdim=True)
    expected_TH = layer.hidden_TH.double() * routes_T + addend_TH.double()
    limit = 1e-6 if output_TH.dtype == torch.float32 else 4e-3
    assert relative_error(output_TH, expected_TH) < limit
