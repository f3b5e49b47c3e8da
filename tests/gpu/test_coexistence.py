"""Beside other kernels: collectives that hold SMs until their peers run, and other workspaces."""

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_mok.compare.mps import find_control
from tests.gpu.layers import gpu_layer, workspaces_for
from tests.gpu.test_processes import mps_daemon, workspace_of_process
from tests.in_process import leaf, run_fused
from tests.processes import join_group, run_processes

pytestmark = pytest.mark.gpu

EP, HOG_CTAS, HOG_LIMIT_MS = 2, 20, 8000


def build_hog(folder) -> str:
    target = Path(folder) / "libhog.so"
    source = Path(__file__).parent / "hog.cu"
    flags = ["-std=c++20", "-O2", "-shared", "-Xcompiler=-fPIC", "-cudart=static"]
    arch = "-gencode=arch=compute_90a,code=sm_90a"
    subprocess.run(["nvcc", arch, *flags, source, "-o", target], check=True, timeout=120)
    return str(target)


class Hog:
    """Launches hog.cu: kernels on all ranks that end when all of them run."""

    def __init__(self, library, group):
        import torch.distributed as dist

        from megatron_mok.runtime.engine import load_engine
        from megatron_mok.runtime.segments import map_peer_segments

        self._lib = ctypes.CDLL(library)
        self._lib.hog.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint32),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        ]
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._segments = map_peer_segments(
            load_engine("cuda"), 8 * 128 * 4, group, torch.device("cuda")
        )
        self._flags = (ctypes.c_void_p * self._ranks)(*[s.address for s in self._segments])
        self._round = 0
        self.stream = torch.cuda.Stream()
        self.timeouts = torch.zeros(1, dtype=torch.int32, device="cuda")

    def launch(self):
        self._round += 1
        error = self._lib.hog(
            self._flags,
            self._rank,
            self._ranks,
            self._round,
            HOG_CTAS,
            HOG_LIMIT_MS,
            self.timeouts.data_ptr(),
            self.stream.cuda_stream,
        )
        assert error == 0


def hogged_rank(rank, ep_size, port, results, library):
    import torch.distributed as dist

    from megatron_mok.ops import combine, dispatch

    join_group(rank, ep_size, port)
    layer = gpu_layer(1200, 512, 256, 16, 4, seed=71)
    workspace = workspace_of_process(layer, ep_size, first_wait_s=30, inner_wait_s=10)
    hog = Hog(library, dist.group.WORLD)
    part = layer.part(rank, ep_size)
    part = replace(part, hidden_TH=leaf(part.hidden_TH))

    def all_calls():
        fused_TH = run_fused(part, workspace)
        (grad_TH,) = torch.autograd.grad(fused_TH, part.hidden_TH, part.grad_output_TH)
        sent = dispatch(part.hidden_TH, part.expert_ids_TK, part.probs_TK, workspace)
        return fused_TH, grad_TH, combine(sent.rows_RH, part.expert_ids_TK, workspace)

    first = all_calls()
    torch.cuda.synchronize()
    different = []
    for order in ("before", "after", "beside", "other way round") * 2:
        hog_first = {"before": True, "after": False}.get(order, (order == "beside") == (rank == 0))
        if hog_first:
            hog.launch()
        outputs = all_calls()
        if not hog_first:
            hog.launch()
        torch.cuda.synchronize()
        workspace.check()
        if not all(torch.equal(x, y) for x, y in zip(first, outputs, strict=True)):
            different.append(order)
    results.put((rank, (different, int(hog.timeouts))))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(find_control() is None, reason="no nvidia-cuda-mps-control")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("connections", [1, 32])
def test_kernels_that_hold_sms_until_their_peers_run(connections, tmp_path, monkeypatch):
    library = build_hog(tmp_path)
    with mps_daemon():
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(connections))
        monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(100 / EP))
        for different, timeouts in run_processes(EP, hogged_rank, library):
            assert not different
            assert timeouts == 0


def test_two_workspaces_and_several_layers_on_two_streams():
    kinds = [(900, 512, 256, 16, 4), (1100, 256, 320, 8, 2)]
    layers = [[gpu_layer(*kind, seed=s) for s in range(3)] for kind in kinds]
    workspaces = [workspaces_for(of_kind[0], 1)[0] for of_kind in layers]
    streams = [torch.cuda.Stream() for _ in kinds]

    alone = [[run_fused(x, w) for x in xs] for xs, w in zip(layers, workspaces, strict=True)]
    torch.cuda.synchronize()
    together = [[], []]
    for i in range(12):
        for kind, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                together[kind].append(run_fused(layers[kind][i % 3], workspaces[kind]))
    torch.cuda.synchronize()
    for kind in range(2):
        for i, output_TH in enumerate(together[kind]):
            assert torch.equal(output_TH, alone[kind][i % 3]), (kind, i)
