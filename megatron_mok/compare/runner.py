"""Run the arms of a comparison one after the other from the same step-0 weights."""

import importlib.util
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .args import megatron_args, step0_load_args, step0_save_args
from .arms import ARMS, Arm
from .config import CompareConfig
from .data import Dataset, check_split, prepare
from .history import History, read_history
from .launch import Launch
from .worker import Job

_POLL_SECONDS = 0.1


class CompareError(RuntimeError):
    """The comparison as a whole cannot go on."""


@dataclass(frozen=True)
class ArmResult:
    """One arm's outcome.

    Attributes:
        arm: its name.
        history: what its ranks recorded; None when it never started.
        failure: why it has no valid result, or None.
        log_tail: end of the traceback or of the log when it failed.
    """

    arm: str
    history: History | None
    failure: str | None = None
    log_tail: tuple[str, ...] = ()


class Display(Protocol):
    """Where the runner tells how far it is (see progress.py)."""

    def stage(self, name: str, total: int | None) -> None:
        """A stage begins: set-up (total None) or an arm of `total` steps."""

    def step(self, name: str, event: dict) -> None:
        """A `step` event of the stage."""

    def finished(self, name: str, note: str) -> None:
        """The stage ended; `note` is "" when all went well."""


def run_comparison(config: CompareConfig, out: Path, display: Display) -> list[ArmResult]:
    """Prepare the data and the step-0 weights, then train every arm of `config`.

    Args:
        out: folder for each arm's log, job and records (`<out>/<arm>/`); made if needed.

    Returns:
        One result per arm, in the order of `config.arms`. A failing arm does not stop the others.

    Raises:
        DataError: there is no usable data.
        CompareError: this host cannot run it, or the step-0 weights could not be made.
        KeyboardInterrupt: after the children were ended.
    """
    if config.device == "cuda":
        _check_gpus(config.parallel.ranks)
    out.mkdir(parents=True, exist_ok=True)
    display.stage("data", None)
    dataset = prepare(config.data.source, config.data.max_bytes)
    check_split(dataset, config.data.split, evaluates=config.train.eval_interval is not None)
    display.finished("data", "")
    common = megatron_args(config, dataset)
    step0 = out / "step0" / "checkpoint"
    try:
        if any(ARMS[name].unavailable(config.device) is None for name in config.arms):
            _make_step0(config, common, dataset, step0, display)
        results: list[ArmResult] = []
        for name in config.arms:
            first = next((r for r in results if r.failure is None), None)
            results.append(_run_arm(config, ARMS[name], common, step0, out / name, first, display))
        return results
    finally:
        shutil.rmtree(step0, ignore_errors=True)  # as large as the model; the seed remakes it


def _check_gpus(ranks: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if found < ranks:
        raise CompareError(
            f"parallel.ranks is {ranks}, with one GPU each, but this host has {found}; "
            "lower it, or use device: cpu"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise CompareError(
            "device: cuda needs Transformer Engine: pip install 'megatron-mok[te]', or use an "
            "image that has it"
        )


def _make_step0(config, common, dataset: Dataset, step0: Path, display: Display) -> None:
    shutil.rmtree(step0, ignore_errors=True)
    dataset.index_cache.mkdir(parents=True, exist_ok=True)
    job = Job(
        device=config.device,
        plugin=False,
        megatron_args=(*common, *ARMS["alltoall"].flags, *step0_save_args(step0)),
        record_dir=str(step0.parent),
        runner_pid=os.getpid(),
        save_step0=str(step0),
    )
    name = "step-0 weights"
    display.stage(name, None)
    status, launch = _wait(config, job, name, display)
    if status != 0:
        history = read_history(step0.parent, config.parallel.ranks)
        reason = _reason(history, launch, status)
        display.finished(name, reason)
        raise CompareError(
            f"the step-0 weights could not be made: {reason}\n"
            + "\n".join(_tail(history, launch))
            + f"\nThe whole log: {launch.log}"
        )
    display.finished(name, "")


def _run_arm(
    config: CompareConfig,
    arm: Arm,
    common: list[str],
    step0: Path,
    folder: Path,
    first: ArmResult | None,
    display: Display,
) -> ArmResult:
    """Train one arm; `first` is the arm with whose weights and tokens it must start, if any."""
    reason = arm.unavailable(config.device)
    if reason is not None:
        display.stage(arm.name, config.train.steps)
        display.finished(arm.name, f"not available: {reason}")
        return ArmResult(arm.name, None, f"not available: {reason}")
    job = Job(
        device=config.device,
        plugin=arm.plugin,
        megatron_args=(*common, *arm.flags, *step0_load_args(step0)),
        record_dir=str(folder),
        runner_pid=os.getpid(),
    )
    display.stage(arm.name, config.train.steps)
    status, launch = _wait(config, job, arm.name, display)
    history = read_history(folder, config.parallel.ranks)
    failure = None
    if status != 0 or history.error is not None:
        failure = _reason(history, launch, status)
    elif len(history.steps) != config.train.steps or len(history.end) != config.parallel.ranks:
        failure = f"ended after {len(history.steps)} of {config.train.steps} steps"
    elif first is not None:
        problem = _difference(first.history, history)
        failure = None if problem is None else f"not comparable to {first.arm}: {problem}"
    display.finished(arm.name, failure or "")
    return ArmResult(arm.name, history, failure, _tail(history, launch) if failure else ())


def _wait(config, job: Job, name: str, display: Display) -> tuple[int, Launch]:
    log = Path(job.record_dir) / "megatron.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # Collectives time out first, and say more; this is for a rank that hangs outside of one.
    silence_limit = (config.parallel.timeout_minutes + 2) * 60
    with Launch(job, config.parallel.ranks, log, silence_limit) as launch:
        while True:
            status, events = launch.poll()
            for event in events:
                if event["event"] == "step":
                    display.step(name, event)
            if status is not None:
                return status, launch
            time.sleep(_POLL_SECONDS)


def _reason(history: History, launch: Launch, status: int) -> str:
    if history.error is not None:
        # Some of Megatron's assertions have no message; the line that failed says what it was.
        message = history.error["message"] or _tail(history, launch)[-2].strip()
        return f"{history.error['type']}: {message}"
    if launch.gave_up is not None:
        return launch.gave_up
    return f"torchrun ended with exit status {status}"


def _tail(history: History, launch: Launch) -> tuple[str, ...]:
    """The lines to show of a failed run: the first error's traceback, else the end of the log."""
    if history.error is not None:
        return tuple(history.error["traceback"].splitlines()[-12:])
    return tuple(launch.log_tail())


def _difference(first: History, other: History) -> str | None:
    """How two complete runs differ in their step-0 weights or their tokens; None if they do not."""
    for rank, (a, b) in enumerate(zip(first.start, other.start, strict=True)):
        names = a["weights"].keys() | b["weights"].keys()
        differing = sorted(n for n in names if a["weights"].get(n) != b["weights"].get(n))
        if differing:
            return (
                f"{len(differing)} of {len(names)} weights at step 0 differ on rank {rank}, "
                f"first {differing[0]}"
            )
    for number, (a, b) in enumerate(zip(first.steps, other.steps, strict=True), start=1):
        if a.tokens != b.tokens:
            return f"other token ids in step {number}"
    return None
