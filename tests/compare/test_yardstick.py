import math

import pytest
import torch

from megatron_mok.compare.yardstick import is_expert, move_by_one_ulp


class Chunk(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.experts = torch.nn.Linear(4, 1, bias=False, dtype=dtype)
        self.mlp.shared_experts = torch.nn.Linear(4, 1, bias=False, dtype=dtype)
        for linear in (self.mlp.experts, self.mlp.shared_experts):
            linear.weight.data = torch.tensor([[1.0, -1.5, 0.0, 0.3]], dtype=dtype)


class Optimizer:
    reloads = 0

    def reload_model_params(self):
        self.reloads += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_weights_move_to_the_next_number(dtype):
    chunk, optimizer = Chunk(dtype), Optimizer()
    before = chunk.mlp.shared_experts.weight.detach().clone()
    move_by_one_ulp([chunk], optimizer)
    assert torch.equal(chunk.mlp.shared_experts.weight, before)
    outwards = torch.where(before < 0, -math.inf, math.inf).to(dtype)
    assert torch.equal(chunk.mlp.experts.weight, torch.nextafter(before, outwards))
    assert optimizer.reloads == 1


def test_names():
    assert is_expert("0.decoder.layers.1.mlp.experts.linear_fc1.weight3")
    assert is_expert("0.module.decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight")
    assert not is_expert("0.decoder.layers.1.mlp.shared_experts.linear_fc1.weight")
