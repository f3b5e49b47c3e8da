"""Layers, workspaces and shapes of the GPU tests.

Ranks are threads of this process with a stream each and their share of the SMs.
"""

import torch

from megatron_mok.ops import combine, dispatch
from megatron_mok.runtime import RuntimeOptions
from tests.in_process import Layer, make_workspaces, random_layer, run_layer

SHAPES = {
    # tokens, hidden, ffn, experts, topk
    "odd": (1001, 2880, 1408, 16, 4),
    "smallest": (130, 64, 64, 4, 2),
    "ffn_768": (777, 2048, 768, 64, 8),
    "topk_32": (200, 512, 192, 64, 32),
    "experts_1024": (512, 256, 128, 1024, 8),
    "one_expert": (700, 320, 320, 1, 1),
    "more_routes_than_experts": (100, 128, 128, 2, 5),
}


def options(ep_size, wait_s=10.0):
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return RuntimeOptions(first_wait_s=wait_s, inner_wait_s=wait_s, workers=sms // ep_size)


def on_gpu(layer) -> Layer:
    return Layer(
        layer.hidden_TH.cuda(),
        layer.expert_ids_TK.cuda(),
        layer.probs_TK.cuda(),
        [w.cuda() for w in layer.fc1],
        [w.cuda() for w in layer.fc2],
        layer.grad_output_TH.cuda(),
    )


def gpu_layer(tokens, hidden, ffn, experts, topk, seed, expert_ids_TK=None):
    return on_gpu(
        random_layer(tokens, hidden, ffn, experts, topk, torch.bfloat16, seed, expert_ids_TK)
    )


def load_pytorch_kernels():
    """Runs once what ranks run.

    CUDA loads a kernel at its first launch, and may then wait for the device to be idle: which it
    is not while a rank of this process waits there for another. The engine loads its own when a
    workspace is made.
    """
    layer = gpu_layer(140, 64, 64, 4, 2, seed=1)
    (alone,) = workspaces_for(layer, 1)
    run_layer(layer, [alone], [0, 140], 0, "cuda")
    sent = dispatch(layer.hidden_TH, layer.expert_ids_TK, layer.probs_TK, alone)
    combine(sent.rows_RH, layer.expert_ids_TK, alone)
    torch.cuda.synchronize()


def workspaces_for(layer, ep_size, **changes):
    return make_workspaces(ep_size, options(ep_size), "cuda", **(layer.shape | changes))
