"""Real Megatron ranks for tests: processes that stay up between tests.

On the CPU in CPU mode with gloo; on the first GPU with NCCL, or with gloo where several share it.
Importing Megatron takes seconds per process, so every test of a session shares the same ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_mok.megatron import shared_gpu
from megatron_mok.megatron.shared_gpu import SharedGPU

START_TIMEOUT_S = 180.0
BUILD_TIMEOUT_S = 400.0
BUILD_FOLDER = Path(__file__).parents[2] / "build" / "torch_extensions"
# What Megatron compiles at the first recomputation of a process, where it has it.
BUILD = """
from megatron.core.tensor_parallel import random
getattr(random, "_get_share_storage", lambda: None)()
"""


class RankPool:
    """`size` ranks of one world, with megatron_mok installed.

    Args:
        device: "cpu", or "cuda" for the first GPU.
        shared: how several ranks share it.
    Raises: RuntimeError when the ranks do not start.
    """

    def __init__(self, size: int, device: str = "cpu", shared: SharedGPU | None = None) -> None:
        self.size = size
        self._device = device
        self._shared = shared
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: str, *args: Any, timeout_s: float = 90.0, **kwargs: Any) -> list:
        """Call `function`, "module.name" in this folder, on all ranks.

        Returns: what each of them returned.

        By name, so that the process of pytest does not import Megatron.

        Raises: AssertionError with the tracebacks of the ranks that failed, or when one does not
        answer in `timeout_s`. After either, the ranks are replaced (peers may be stuck in a
        collective).
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs, timeout_s))
        answers = self._collect(timeout_s)
        problems = [f"rank {r}: {text}" for r, (ok, text) in enumerate(answers) if not ok]
        if problems:
            self.close()
            raise AssertionError("\n".join(problems))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the ranks; the next `run` starts new ones."""
        for process in self._processes:
            # With the helpers that it started: Megatron's checkpoint writer has some.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # a rank that is not yet the head of a group
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        _build_megatron_extension()
        context = get_context("spawn")
        self._folder = TemporaryDirectory(prefix="mok-ranks-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            # Not daemons: saving a checkpoint starts processes. They end when the pipe closes.
            process = context.Process(
                target=_rank_main,
                args=(rank, self.size, self._device, self._shared, self._folder.name, theirs),
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        problems = [text for ok, text in self._collect(START_TIMEOUT_S) if not ok]
        if problems:
            self.close()
            raise RuntimeError("the test ranks did not start:\n" + "\n".join(problems))

    def _collect(self, timeout_s: float) -> list[tuple[bool, Any]]:
        answers: list[tuple[bool, Any]] = [(False, f"no answer in {timeout_s} s")] * self.size
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        end = time.monotonic() + timeout_s
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, "the process died")
            if any(not answers[r][0] for r in range(self.size) if r not in waiting.values()):
                # A failed rank leaves its peers in a collective; give them a moment to fail too.
                end = min(end, time.monotonic() + 5.0)
        return answers


@functools.cache
def _build_megatron_extension() -> None:
    """Compile Megatron's C++ extension before ranks need it.

    Not in the ranks: a rank that is ended while it compiles leaves a lock file, for which every
    later one waits without end.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(BUILD_FOLDER)
    for lock in BUILD_FOLDER.glob("*/lock"):
        lock.unlink()
    command = [sys.executable, "-c", BUILD]
    subprocess.run(command, check=True, timeout=BUILD_TIMEOUT_S)


def _rank_main(
    rank: int,
    size: int,
    device: str,
    shared: SharedGPU | None,
    folder: str,
    pipe: Connection,
) -> None:
    os.setpgrp()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MOK_TEST_RENDEZVOUS=folder,
        MOK_TEST_BACKEND="nccl" if device == "cuda" and shared is None else "gloo",
    )
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if shared is not None:
        shared_gpu.enable(shared)
    pipe.send(_guarded(_set_up_rank, device))
    while True:
        try:
            function, args, kwargs, timeout_s = pipe.recv()
        except EOFError:  # pytest is gone
            os.killpg(0, signal.SIGKILL)
        # A rank that is going to be late says where it is.
        faulthandler.dump_traceback_later(0.9 * timeout_s, file=sys.__stderr__)
        pipe.send(_guarded(_call, function, *args, **kwargs))
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()


def _call(function: str, *args: Any, **kwargs: Any) -> Any:
    module, name = function.rsplit(".", 1)
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*args, **kwargs)


def _guarded(function: Callable, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
    try:
        return True, function(*args, **kwargs)
    except BaseException:
        return False, traceback.format_exc()


def _set_up_rank(device: str) -> None:
    import torch

    from megatron_mok.megatron import cpu_mode, install

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # Megatron's, about optional packages
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if device == "cpu":
        cpu_mode.enable()
    else:
        torch.cuda.set_device(0)
    install()
    init_world()


_worlds = itertools.count()


def init_world() -> None:
    """Rank side: make the world of all ranks; the one before goes, with all its groups."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        os.environ["MOK_TEST_BACKEND"],
        init_method=f"file://{os.environ['MOK_TEST_RENDEZVOUS']}/{next(_worlds)}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
