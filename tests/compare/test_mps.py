"""Sharing a GPU: the MPS daemon's life, with a stand-in for NVIDIA's program, and what ranks do."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_mok.compare import mps
from megatron_mok.compare.worker import Job
from megatron_mok.megatron import shared_gpu
from megatron_mok.megatron.shared_gpu import SharedGPU
from tests.processes import join_group, run_processes

# Starts itself in the background with -d, and ends when told "quit": as NVIDIA's program does.
CONTROL = r"""#!/bin/bash
pid_file=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
case $1 in
-d)
  [[ -z $FAKE_FAILS ]] || { echo "no GPU" >&2; exit 1; }
  setsid "$0" --serve </dev/null >/dev/null 2>&1 &
  until [[ -s $pid_file ]]; do sleep 0.02; done ;;
--serve)
  echo $$ >"$pid_file"
  trap exit TERM
  while true; do sleep 0.02; done ;;
*)
  read -r command
  [[ $command == quit ]] && kill "$(<"$pid_file")" ;;
esac
"""


# Other than that of NVIDIA's program, and of tests that run on this host at the same time.
NAME = f"mps-{os.getpid()}-fake"[:15]


@pytest.fixture
def control(tmp_path, monkeypatch):
    monkeypatch.setattr(mps, "_CONTROL", NAME)
    monkeypatch.setattr(mps, "_PROCESSES", NAME)
    program = tmp_path / "bin" / NAME
    program.parent.mkdir()
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield program
    for process in daemons():
        process.kill()


def daemons():
    """Not those that ended and stay as zombies, as in containers without an init."""
    return [
        process
        for process in psutil.process_iter(["name", "status"])
        if process.info["name"].startswith(NAME) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def gone(folder, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not daemons() and not Path(folder).exists():
            return True
        time.sleep(0.05)
    return False


def test_daemon_lives_as_long_as_the_context(control):
    with mps.mps_daemon() as environment:
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert len(daemons()) == 1
        assert Path(folder, "nvidia-cuda-mps-control.pid").exists()
    assert gone(folder, 0.5)


def test_daemon_that_is_about_to_end_is_waited_for(control):
    with mps.mps_daemon():
        (running,) = daemons()
        threading.Timer(0.5, running.terminate).start()
        with mps.mps_daemon() as environment:
            assert running.pid not in [daemon.pid for daemon in daemons()]
            assert Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()


def test_second_daemon_is_refused(control, monkeypatch):
    monkeypatch.setattr(mps, "_END_SECONDS", 0.1)
    with mps.mps_daemon():
        (running,) = daemons()
        with (
            pytest.raises(mps.MPSError, match=f"runs already .process {running.pid}."),
            mps.mps_daemon(),
        ):
            pass


def test_daemon_of_a_killed_process_ends(control):
    code = (
        "import time\nfrom megatron_mok.compare import mps\n"
        f"mps._CONTROL = mps._PROCESSES = {NAME!r}\n"
        "with mps.mps_daemon() as environment:\n"
        "    print(environment['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        folder = run.stdout.readline().strip()
        assert len(daemons()) == 1
        run.send_signal(signal.SIGKILL)
    assert gone(folder)


def test_daemon_that_does_not_start(control, monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_FAILS", "1")
    with pytest.raises(mps.MPSError, match="-d failed: no GPU"), mps.mps_daemon():
        pass
    assert not list(tmp_path.glob("mok-mps-*"))


def test_missing_program(monkeypatch):
    monkeypatch.setattr(mps.shutil, "which", lambda name: None)
    with pytest.raises(mps.MPSError, match="comes with NVIDIA's driver"), mps.mps_daemon():
        pass


def test_ranks_get_equal_shares(control, monkeypatch):
    monkeypatch.setattr(mps, "_COUNT_SMS", "print(132)")
    with mps.share_gpu(8) as shared:
        assert (shared.ranks_per_gpu, shared.ctas_per_rank) == (8, 16)
        assert shared.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12.5"
    with mps.share_gpu(1) as shared:
        assert shared.ctas_per_rank == 132


def test_jobs_keep_what_ranks_share(tmp_path):
    for shared in (None, SharedGPU(2, 66, {"A": "b"})):
        job = Job("cuda", True, ("--bf16",), "out", 1, shared_gpu=shared)
        job.write(tmp_path / "job.json")
        assert Job.read(tmp_path / "job.json") == job


def rank_of_a_shared_gpu(rank, size, port, results):
    import torch
    import torch.distributed as dist
    from torch.distributed import _coalescing_manager

    os.environ["LOCAL_RANK"] = str(2 + rank)
    shared_gpu.enable(SharedGPU(2, 66, {"MOK_TEST_SHARED": "yes"}))
    join_group(rank, size, port)
    tensors = [torch.full((n,), float(n + rank)) for n in (3, 5)]
    with _coalescing_manager(async_ops=True) as works:
        for tensor in tensors:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
    works.wait()
    found = [tensor.unique().tolist() for tensor in tensors]
    results.put((rank, (found, os.environ["LOCAL_RANK"], os.environ["MOK_TEST_SHARED"])))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_of_a_shared_gpu():
    """On the CPU: the coalesced all-reduce is the one for CUDA tensors."""
    assert run_processes(2, rank_of_a_shared_gpu) == [([[4.0], [6.0]], "1", "yes")] * 2
