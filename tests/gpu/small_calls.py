"""Every entry point of the Hopper engine, on a small layer: a program for compute-sanitizer."""

import torch

from megatron_mok.ops import routes_from_map
from megatron_mok.runtime import MoKInvalidArgumentError
from megatron_mok.runtime.schedule import make_schedule
from tests.dispatch_layer import run_dispatched_layer
from tests.gpu.layers import gpu_layer, workspaces_for
from tests.in_process import run_layer


def main():
    layer = gpu_layer(150, 192, 64, 4, 2, seed=91)
    workspaces = workspaces_for(layer, 1)
    (workspace,) = workspaces
    run_layer(layer, workspaces, [0, 150], 128, "cuda")
    run_dispatched_layer(layer, workspaces, [0, 150], "cuda")
    make_schedule(workspace, layer.expert_ids_TK, layer.probs_TK)
    bad_TK = layer.expert_ids_TK.clone()
    bad_TK[0, 0] = 1000
    try:
        make_schedule(workspace, bad_TK, layer.probs_TK)
    except MoKInvalidArgumentError as error:
        print(error)
    map_TE = torch.rand(150, 4, device="cuda") < 0.4
    routes_from_map(map_TE.float(), map_TE, 4)
    torch.cuda.synchronize()
    workspace.check()
    print("every call made")


if __name__ == "__main__":
    main()
