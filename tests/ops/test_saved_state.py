"""What a forward keeps for its backward: the bytes that docs/tuning.md states, and no more."""

import pytest
import torch

from megatron_mok.ops import fused_moe
from tests.in_process import leaf, make_workspaces, random_layer

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 75, 64, 128, 4, 2


def kept_bytes(forward, parameters):
    """Bytes of the memory that autograd keeps for `forward()`, parameters left out."""
    known = {p.untyped_storage().data_ptr() for p in parameters}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    return sum(kept.values()), output


@pytest.mark.parametrize("saved_rows", [0, 128, 640])
@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("has_addend", [False, True])
def test_input_routes_and_saved_rows(saved_rows, main_grads, has_addend):
    layer = random_layer(TOKENS, HIDDEN, FFN, EXPERTS, TOPK, torch.bfloat16, seed=31)
    (workspace,) = make_workspaces(1, **layer.shape)
    fc1, fc2 = [leaf(w) for w in layer.fc1], [leaf(w) for w in layer.fc2]
    for w in (*fc1, *fc2) if main_grads else ():
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)

    def forward():
        return fused_moe(
            leaf(layer.hidden_TH),
            layer.expert_ids_TK.clone(),
            leaf(layer.probs_TK),
            fc1,
            fc2,
            workspace,
            addend_TH=leaf(layer.hidden_TH) if has_addend else None,
            saved_rows=saved_rows,
            accumulate_into_main_grad=main_grads,
        )

    routes = TOKENS * TOPK * (4 + 4)  # an id and a weight each
    expected = TOKENS * 2 * HIDDEN + saved_rows * 4 * FFN + routes
    first, output_1 = kept_bytes(forward, (*fc1, *fc2))
    second, output_2 = kept_bytes(forward, (*fc1, *fc2))  # another microbatch in flight
    assert first == second == expected
    (output_1.sum() + output_2.sum()).backward()
