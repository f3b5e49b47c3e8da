"""Start, watch and end one torchrun launch of the worker."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from .history import EventTail
from .worker import Job

_GRACE_SECONDS = 15  # torchrun needs some to end its workers


class Launch:
    """A running `torch.distributed.run` of one job; a context manager that leaves none behind.

    Args:
        job: what the ranks run; `job.record_dir` also gets `job.json`.
        ranks: number of processes.
        log: file for everything that torchrun, the ranks and Megatron print.
        silence_limit: seconds without a new event from rank 0 after which the run is given up.
    """

    def __init__(self, job: Job, ranks: int, log: Path, silence_limit: float):
        folder = Path(job.record_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("rank*.jsonl"):
            stale.unlink()
        job_file = folder / "job.json"
        job.write(job_file)
        self.log = log
        self._tail = EventTail(folder, 0)
        self._silence_limit = silence_limit
        self._last_event = time.monotonic()
        self.gave_up: str | None = None
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={ranks}",
            "--master-addr=127.0.0.1",
            f"--master-port={_free_port()}",
            "-m",
            "megatron_mok.compare.worker",
            str(job_file),
        ]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=_environment(ranks),
                start_new_session=True,  # Ctrl-C reaches this process only, which ends that one
            )

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.end()

    def poll(self) -> tuple[int | None, list[dict]]:
        """(exit status or None while it runs, rank 0's new events)."""
        status = self._process.poll()  # before the events, so that none is missed at the end
        events = self._tail.new_events()
        if events:
            self._last_event = time.monotonic()
        elif status is None and time.monotonic() - self._last_event > self._silence_limit:
            self.gave_up = f"no progress for {self._silence_limit / 60:.0f} minutes; ended"
            self.end()
            status = self._process.returncode
        return status, events

    def end(self) -> None:
        """End torchrun and its ranks; does nothing when they are gone."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)  # torchrun ends its workers on it
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the workers see that their parent is gone and exit
            self._process.wait()

    def log_tail(self, lines: int = 15) -> list[str]:
        """The last lines that the ranks printed (torchrun's own report of failures left out)."""
        printed = []
        for line in self.log.read_text(errors="replace").splitlines():
            if "torch/distributed/elastic/" in line:
                break
            if line.strip():
                printed.append(line)
        return printed[-lines:]


def _environment(ranks: int) -> dict[str, str]:
    env = dict(os.environ)
    # torchrun would set 1 and warn; one thread per core over all ranks is what a CPU run wants.
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    env["PYTHONUNBUFFERED"] = "1"
    # Megatron wants it for tensor and context parallelism on GPUs before Blackwell.
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return env


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
