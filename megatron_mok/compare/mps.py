"""An MPS daemon of one's own, under which kernels of several processes run side by side on a GPU.

Without one, processes take turns on the GPU, and kernels that wait for each other never end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

import psutil

from megatron_mok.megatron.shared_gpu import SharedGPU

_CONTROL = "nvidia-cuda-mps-control"
_FOLDERS = ("/usr/local/nvidia/bin",)  # of some container images, not on PATH
_PROCESSES = "nvidia-cuda-mps"  # control daemon and server
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_WAIT_SECONDS = 30
_END_SECONDS = 5
_COUNT_SMS = (
    "import torch; print(torch.cuda.get_device_properties(0).multi_processor_count, flush=True)"
)


class MPSError(RuntimeError):
    """There is no MPS daemon to share a GPU under."""


def find_control() -> str | None:
    """Path of NVIDIA's program that starts and ends the daemon, or None."""
    found = (shutil.which(_CONTROL), *(shutil.which(f"{f}/{_CONTROL}") for f in _FOLDERS))
    return next(filter(None, found), None)


@contextmanager
def share_gpu(ranks_per_gpu: int) -> Iterator[SharedGPU]:
    """What ranks need that share GPUs, under a daemon that lives as long as the context.

    Raises: MPSError as `mps_daemon`.
    """
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_SMS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.splitlines() or ["no output"])[-1]
        raise MPSError(f"the SMs of the GPU cannot be counted: {last}")
    with mps_daemon() as environment:
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 / ranks_per_gpu)
        yield SharedGPU(ranks_per_gpu, int(done.stdout) // ranks_per_gpu, environment)


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """An MPS daemon in a private directory. It ends with the context, and soon after this process
    should that be killed.

    Yields: environment variables that make a process its client.
    Raises: MPSError when NVIDIA's program is missing or fails, or a daemon runs already: a GPU has
    one.
    """
    control = find_control()
    if control is None:
        raise MPSError(f"{_CONTROL} is not there; it comes with NVIDIA's driver")
    if running := _still_running():
        raise MPSError(
            f"an MPS daemon runs already (process {running}); a GPU has one at most. End it "
            f"(echo quit | {_CONTROL}), or give each rank a GPU of its own"
        )
    folder = mkdtemp(prefix="mok-mps-")
    environment = {_PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    keeper = subprocess.Popen(
        [sys.executable, "-m", __name__, control],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the keeper
    )
    try:
        said = keeper.stdout.readline().strip()
        if said != "ready":
            raise MPSError(f"{control} -d failed: {said}")
        yield environment
    finally:
        keeper.stdin.close()  # as the end of this process would
        try:
            keeper.wait(2 * _WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()
        keeper.stdout.close()


def _still_running() -> int | None:
    """As `_running`, once one that was told to quit has had time to."""
    deadline = time.monotonic() + _END_SECONDS
    while (running := _running()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return running


def _running() -> int | None:
    """Process id of an MPS daemon or server on this host, or None."""
    for process in psutil.process_iter(["name", "status"]):
        lives = process.info["status"] != psutil.STATUS_ZOMBIE
        if lives and (process.info["name"] or "").startswith(_PROCESSES):
            return process.pid
    return None


def _keep(control: str) -> int:
    """Start the daemon, and end it when standard input ends, which it does with its writer."""
    folder = Path(os.environ[_PIPES])
    try:
        started = subprocess.run(
            [control, "-d"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_WAIT_SECONDS,
        )
        if started.returncode:
            print(" ".join(started.stderr.split()) or f"status {started.returncode}", flush=True)
            return 1
        print("ready", flush=True)
        sys.stdin.read()
        _end(control, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _end(control: str, folder: Path) -> None:
    with suppress(subprocess.TimeoutExpired):  # it waits for its clients
        subprocess.run([control], input=b"quit\n", timeout=_WAIT_SECONDS, check=False)
    with suppress(OSError, ValueError, psutil.Error):
        daemon = psutil.Process(int((folder / f"{_CONTROL}.pid").read_text()))
        try:
            daemon.wait(_END_SECONDS)
        except psutil.TimeoutExpired:
            daemon.kill()


if __name__ == "__main__":
    sys.exit(_keep(sys.argv[1]))
