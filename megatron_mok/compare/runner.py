"""Run the arms of a comparison one after the other from the same step-0 weights."""

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from megatron_mok.megatron.shared_gpu import SharedGPU

from . import yardstick as yardsticks
from .args import megatron_args, step0_load_args, step0_save_args
from .arms import ARMS, Arm
from .config import CompareConfig
from .data import Dataset, check_split, prepare
from .history import History, read_history
from .launch import Launch
from .mps import MPSError, share_gpu
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
        failure: why it has no valid result although it ran, or None.
        log_tail: end of the traceback or of the log when it failed.
        unavailable: why it cannot run here and was left out, or None.
        yardstick: whether this is the first arm again with its experts moved by 1 ulp.
        repeat: whether this is the arm before again, which must be bitwise equal to it.
    """

    arm: str
    history: History | None
    failure: str | None = None
    log_tail: tuple[str, ...] = ()
    unavailable: str | None = None
    yardstick: bool = False
    repeat: bool = False

    @property
    def ok(self) -> bool:
        """Whether it ran, with a valid result."""
        return self.failure is None and self.unavailable is None


class Display(Protocol):
    """Where the runner tells how far it is (see progress.py)."""

    def stage(self, name: str, total: int | None) -> None:
        """A stage begins: set-up (total None) or an arm of `total` steps."""

    def step(self, name: str, event: dict) -> None:
        """A `step` event of the stage."""

    def finished(self, name: str, note: str) -> None:
        """The stage ended; `note` is "" when all went well."""


def run_comparison(
    config: CompareConfig, out: Path, display: Display, require: Sequence[str] = ()
) -> list[ArmResult]:
    """Prepare the data and the step-0 weights, then train every arm of `config`.

    Args:
        out: folder for each arm's log, job and records (`<out>/<arm>/`); made if needed.
        require: of the arms, those without which there is no use in going on.

    Returns:
        One result per arm, in the order of `config.arms`; after the first one that ran, its
        yardstick; after each of a deterministic comparison, its repeat. An arm that fails or
        cannot run here does not stop the others.

    Raises:
        DataError: there is no usable data.
        CompareError: this host cannot run it, ranks cannot share its GPUs, a required arm or all
            of them cannot run here, or the step-0 weights could not be made.
        KeyboardInterrupt: after the children were ended.
    """
    if config.device == "cuda":
        _check_gpus(config.parallel.gpus)
    unavailable = {name: ARMS[name].unavailable(config) for name in config.arms}
    _check_required(unavailable, require)
    out.mkdir(parents=True, exist_ok=True)
    display.stage("data", None)
    dataset = prepare(config.data.source, config.data.max_bytes)
    check_split(dataset, config.data.split, evaluates=config.train.eval_interval is not None)
    display.finished("data", "")
    common = megatron_args(config, dataset)
    step0 = out / "step0" / "checkpoint"
    try:
        with _shared_gpus(config) as shared:
            _make_step0(config, common, dataset, step0, display, shared)
            results: list[ArmResult] = []
            first: ArmResult | None = None
            for name in config.arms:
                if reason := unavailable[name]:
                    display.stage(name, config.train.steps)
                    display.finished(name, f"not available: {reason}")
                    results.append(ArmResult(name, None, unavailable=reason))
                    continue
                arm = ARMS[name]
                run = partial(_run_arm, config, arm, common, step0, out, display, shared)
                result = run(first=first)
                results.append(result)
                if config.deterministic and result.ok:
                    results.append(run(first=result, repeat=True))
                if first is None and result.ok:
                    first = result
                    if config.yardstick:
                        results.append(run(first=first, yardstick=True))
            return results
    except MPSError as error:
        raise CompareError(f"parallel.ranks_per_gpu: {error}") from error
    finally:
        shutil.rmtree(step0, ignore_errors=True)  # as large as the model; the seed remakes it


def _shared_gpus(config: CompareConfig) -> AbstractContextManager[SharedGPU | None]:
    """What ranks need to share GPUs, for as long as the context; None where they do not."""
    ranks_per_gpu = config.parallel.ranks_per_gpu
    return nullcontext() if ranks_per_gpu == 1 else share_gpu(ranks_per_gpu)


def _check_required(unavailable: dict[str, str | None], require: Sequence[str]) -> None:
    missing = {name: reason for name, reason in unavailable.items() if reason is not None}
    lines = [f"{name}: {reason}" for name, reason in missing.items()]
    required = [line for name, line in zip(missing, lines, strict=True) if name in require]
    if required:
        raise CompareError("required arms cannot run here:\n  " + "\n  ".join(required))
    if len(missing) == len(unavailable):
        raise CompareError("no arm can run here:\n  " + "\n  ".join(lines))


def _check_gpus(needed: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if found < needed:
        raise CompareError(
            f"parallel.ranks / parallel.ranks_per_gpu is {needed}, but this host has {found} GPUs; "
            "lower parallel.ranks, let ranks share GPUs, or use device: cpu"
        )


def _make_step0(
    config,
    common,
    dataset: Dataset,
    step0: Path,
    display: Display,
    shared: SharedGPU | None,
) -> None:
    shutil.rmtree(step0, ignore_errors=True)
    dataset.index_cache.mkdir(parents=True, exist_ok=True)
    job = Job(
        device=config.device,
        plugin=False,
        megatron_args=(*common, *ARMS["alltoall"].flags, *step0_save_args(step0)),
        record_dir=str(step0.parent),
        runner_pid=os.getpid(),
        save_step0=str(step0),
        shared_gpu=shared,
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
    out: Path,
    display: Display,
    shared: SharedGPU | None,
    *,
    first: ArmResult | None,
    yardstick: bool = False,
    repeat: bool = False,
) -> ArmResult:
    """Train one arm; `first` is the arm with whose weights and tokens it must start, if any, and
    as which all of it must be when it is a repeat."""
    name = yardsticks.arm_name(arm.name) if yardstick else arm.name
    if repeat:
        name += " again"
    folder = out / name.replace(" ", "_")
    job = Job(
        device=config.device,
        plugin=arm.plugin,
        megatron_args=(*common, *arm.flags, *step0_load_args(step0)),
        record_dir=str(folder),
        runner_pid=os.getpid(),
        move_experts=yardstick,
        shared_gpu=shared,
    )
    display.stage(name, config.train.steps)
    status, launch = _wait(config, job, name, display)
    history = read_history(folder, config.parallel.ranks)
    failure = None
    if status != 0 or history.error is not None:
        failure = _reason(history, launch, status)
    elif len(history.steps) != config.train.steps or len(history.end) != config.parallel.ranks:
        failure = f"ended after {len(history.steps)} of {config.train.steps} steps"
    elif first is not None:
        problem = _difference(first.history, history, experts_moved=yardstick)
        failure = None if problem is None else f"not comparable to {first.arm}: {problem}"
        if repeat and failure is None:
            failure = _other_course(first.history, history)
    display.finished(name, failure or "")
    tail = _tail(history, launch) if failure else ()
    return ArmResult(name, history, failure, tail, yardstick=yardstick, repeat=repeat)


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


def _difference(first: History, other: History, experts_moved: bool = False) -> str | None:
    """How two complete runs differ in their step-0 weights or their tokens; None if they do not.

    With `experts_moved`, the weights of experts must differ.
    """
    for rank, (a, b) in enumerate(zip(first.start, other.start, strict=True)):
        names = a["weights"].keys() | b["weights"].keys()
        differing = {n for n in names if a["weights"].get(n) != b["weights"].get(n)}
        moved = {n for n in names if yardsticks.is_expert(n)} if experts_moved else set()
        if not moved <= differing:
            return f"the expert weights did not move on rank {rank}"
        if wrong := sorted(differing - moved):
            return (
                f"{len(wrong)} of {len(names)} weights at step 0 differ on rank {rank}, "
                f"first {wrong[0]}"
            )
    for number, (a, b) in enumerate(zip(first.steps, other.steps, strict=True), start=1):
        if a.tokens != b.tokens:
            return f"other token ids in step {number}"
    return None


def _other_course(first: History, again: History) -> str | None:
    """Where two runs of the same thing stop being bitwise equal; None if they do not."""
    for number, (a, b) in enumerate(zip(first.steps, again.steps, strict=True), start=1):
        for what, before, now in (
            ("losses", a.losses, b.losses),
            ("gradient norm", a.grad_norm, b.grad_norm),
        ):
            if before != now:
                return f"not bitwise repeatable: {what} {now} in step {number}, before {before}"
    if first.evaluations != again.evaluations:
        return "not bitwise repeatable: other losses in an evaluation"
    for rank, (a, b) in enumerate(zip(first.end, again.end, strict=True)):
        if a["weights"] != b["weights"]:
            return f"not bitwise repeatable: other weights after the last step on rank {rank}"
    return None
