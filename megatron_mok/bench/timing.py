"""Timing in shuffled blocks."""

import math
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .config import TimingOptions

_MIN_LAUNCHES = 3  # timed ones of a block, however long they take
_MAX_LAUNCHES = 10_000


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Task:
    """Something to time: `run(prepare())`, of which `prepare` is not timed."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = _nothing


@dataclass
class Samples:
    """Times of one task, in ms, and why there are no more where it failed."""

    ms: list[float] = field(default_factory=list)
    failure: str | None = None


def time_in_blocks(
    tasks: Sequence[Task], options: TimingOptions, device: torch.device
) -> dict[str, Samples]:
    """Times every task `options.repeats` times, in a new random order each time.

    A task that raises gets its error as `failure` and is left out from then on.
    """
    order = random.Random(options.seed)
    samples = {task.name: Samples() for task in tasks}
    for _ in range(options.repeats):
        for task in order.sample(tasks, len(tasks)):
            result = samples[task.name]
            if result.failure is not None:
                continue
            try:
                result.ms += _time_block(task, options, device)
            except Exception as error:  # of whatever library the task runs
                result.failure = describe(error)
    return samples


def describe(error: Exception) -> str:
    """An error in one line of at most 300 characters: its type and its text."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")


def _time_block(task: Task, options: TimingOptions, device: torch.device) -> list[float]:
    # The first launches tell how many the block needs: the host runs ahead of a GPU, so it cannot
    # watch the clock while it launches.
    _launch(task, 1, device)
    start = time.perf_counter()
    _launch(task, 2, device)
    seconds = (time.perf_counter() - start) / 2
    _launch(task, _count(options.warmup_s, seconds, 0), device)
    return _launch(task, _count(options.time_s, seconds, _MIN_LAUNCHES), device)


def _count(wanted_s: float, launch_s: float, least: int) -> int:
    return min(max(least, math.ceil(wanted_s / launch_s)), _MAX_LAUNCHES)


def _launch(task: Task, count: int, device: torch.device) -> list[float]:
    """Launches back to back, then waits for all of them. Returns each one's time in ms."""
    if device.type == "cuda":
        return _launch_on_gpu(task, count, device)
    times = []
    for _ in range(count):
        prepared = task.prepare()
        start = time.perf_counter()
        task.run(prepared)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _launch_on_gpu(task: Task, count: int, device: torch.device) -> list[float]:
    events = []
    for _ in range(count):
        prepared = task.prepare()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        task.run(prepared)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def kernel_span(run: Callable[[], Any], first: str, last: str, launches: int = 10) -> float | None:
    """Median time in ms from the start of kernel `first` to the end of `last` within one `run()`,
    as PyTorch's profiler sees them; None where it does not see each once."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(launches):
            run()
        torch.cuda.synchronize()
    times = {
        name: [e.time_range for e in trace.events() if name in e.name] for name in (first, last)
    }
    if any(len(ranges) != launches for ranges in times.values()):
        return None
    starts = sorted(r.start for r in times[first])
    ends = sorted(r.end for r in times[last])
    return statistics.median(e - s for s, e in zip(starts, ends, strict=True)) / 1e3


def kept_bytes(run: Callable[[], torch.Tensor], device: torch.device) -> int | None:
    """GPU memory in bytes that a `run()` keeps allocated while its result is kept for backward,
    the result itself not counted; None on a CPU, where nothing counts it."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    result = run()
    kept = torch.cuda.memory_allocated(device) - before
    return kept - result.untyped_storage().nbytes()


class DenseProduct:
    """A square `torch.matmul` of random matrices: what the device reaches in this dtype.

    8192^3 on a GPU, 1024^3 on a CPU.
    """

    name = "dense"

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int):
        self.size = 8192 if device.type == "cuda" else 1024
        generator = torch.Generator(device).manual_seed(seed)
        self._a, self._b = (
            torch.randn(self.size, self.size, generator=generator, device=device, dtype=dtype)
            for _ in range(2)
        )
        self._c = torch.empty_like(self._a)

    def task(self) -> Task:
        return Task(self.name, lambda _: torch.matmul(self._a, self._b, out=self._c))

    def tflops(self, ms: float) -> float:
        return 2 * self.size**3 / (ms * 1e-3) / 1e12
