"""Runs a benchmark: for every case, checks the arms and times those that are right."""

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from .arm import Arm
from .check import (
    Reference,
    Verdict,
    check_backward,
    check_forward,
    check_moves,
    compute_reference,
)
from .config import MOVED_DIRECTIONS, BenchConfig, TimingOptions, moved_bytes, routed_flops
from .layer import BenchLayer, LayerInputs, MovesRows, make_inputs
from .presets import Preset
from .timing import DenseProduct, Task, describe, kept_bytes, kernel_span, time_in_blocks

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class RequiredArmError(RuntimeError):
    """An arm that must be there cannot run; the message says which and why."""


@dataclass(frozen=True)
class Row:
    """One arm in one case; None where there is no figure.

    Attributes:
        experts: local experts, all of the routes go to them.
        ms, p10, p90: median and percentiles of the time of a launch, in ms.
        tflops: routed FLOPs / median time; of directions that compute the experts.
        gb_per_s: least bytes to move / median time; of dispatch and combine.
        schedule_ms: of a forward, time from the start of the schedule's first kernel to the end of
            its last, where the arm has such kernels.
        kept_bytes: of a forward on a GPU, memory that it keeps for backward.
        fraction_of_dense: `tflops` / the run's median rate of the dense product.
        error: largest relative error of the results that the direction computes.
        failure: why there are no times.
    """

    preset: str
    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    routing: str
    dtype: str
    direction: str
    arm: str
    ms: float | None = None
    p10: float | None = None
    p90: float | None = None
    tflops: float | None = None
    gb_per_s: float | None = None
    schedule_ms: float | None = None
    kept_bytes: int | None = None
    fraction_of_dense: float | None = None
    error: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class DenseRate:
    """Rate of the dense product over all blocks of the run, in TFLOP/s, and its size."""

    size: int
    tflops: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes:
        device: name of the GPU, or None on the CPU.
        dense: None when nothing was timed.
        unavailable: why an arm cannot run here, for each such arm.
    """

    device: str | None
    dense: DenseRate | None
    rows: tuple[Row, ...]
    unavailable: dict[str, str]

    @property
    def failed(self) -> bool:
        """Whether an arm failed that could run here."""
        return any(row.failure and row.arm not in self.unavailable for row in self.rows)


def run_benchmark(
    config: BenchConfig,
    progress: Callable[[str], None],
    case_done: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Runs every case of `config`.

    Args:
        progress: is told what happens, a line at a time.
        case_done: is given the report so far after each case, so that little is lost of a run that
            is ended.

    Raises:
        RequiredArmError: before anything is timed.
    """
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    unavailable = {}
    for arm in config.arms:
        reason = arm.unavailable(device, TORCH_DTYPES[config.dtype])
        if reason is not None:
            unavailable[arm.name] = reason
            progress(f"{arm.name} cannot run: {reason}")
    for name in config.require:
        if name in unavailable:
            raise RequiredArmError(f"{name} is required and cannot run: {unavailable[name]}")

    run = _Run(config, device, unavailable, progress)
    for preset in config.presets:
        for tokens in config.tokens or (preset.tokens,):
            for routing in config.routings:
                run.case(preset, tokens, routing)
                run.free_memory()
                case_done(run.report())
    return run.report()


@dataclass
class _Checked:
    """An arm's layer and what its checks found."""

    layer: BenchLayer | None
    forward: Verdict
    backward: Verdict
    moves: Verdict

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return self.forward, self.backward, self.moves

    def verdict(self, direction: str) -> Verdict:
        if direction in MOVED_DIRECTIONS:
            return self.moves
        if direction == "forward" or self.forward.problem is not None:
            return self.forward
        errors = [v.error for v in (self.forward, self.backward) if v.error is not None]
        return Verdict(max(errors) if errors else None, self.backward.problem)


class _Run:
    """What the cases of a run share."""

    def __init__(
        self,
        config: BenchConfig,
        device: torch.device,
        unavailable: dict[str, str],
        progress: Callable[[str], None],
    ):
        self._config = config
        self._device, self._dtype = device, TORCH_DTYPES[config.dtype]
        self._device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self._unavailable = unavailable
        self._progress = progress
        self._dense = DenseProduct(device, self._dtype, config.seed)
        self._dense_ms: list[float] = []
        self._rows: list[Row] = []
        self._cases = 0

    def case(self, preset: Preset, tokens: int, routing: str) -> None:
        """All directions and arms of one case."""
        blank = Row(
            preset=preset.name,
            tokens=tokens,
            hidden=preset.hidden,
            ffn=preset.ffn,
            experts=preset.experts,
            topk=preset.topk,
            routing=routing,
            dtype=self._config.dtype,
            direction="",
            arm="",
        )
        self._cases += 1
        seed = self._config.seed + self._cases
        timing = replace(self._config.timing, seed=self._config.timing.seed + self._cases)
        title = f"{preset.name}, {tokens} tokens, {routing}"
        self._progress(f"{title}: reference")
        try:
            inputs = make_inputs(preset, tokens, routing, self._device, self._dtype, seed)
            checked = self._check_arms(inputs, title)
        except Exception as error:  # memory, or a GPU that an arm before has left unusable
            failed = Verdict(None, f"inputs and reference: {describe(error)}")
            self._progress(f"{title}: {failed.problem}")
            arms = [arm for arm in self._config.arms if arm.name not in self._unavailable]
            checked = {arm.name: _Checked(None, failed, failed, failed) for arm in arms}
        for direction in self._config.directions:
            self._progress(f"{title}: {direction}")
            row = replace(blank, direction=direction)
            if direction in MOVED_DIRECTIONS:
                work = moved_bytes(tokens, preset, self._dtype.itemsize)
            else:
                work = routed_flops(direction, tokens, preset)
            self._rows += self._time(row, checked, timing, work)

    def free_memory(self) -> None:
        """Gives back what the last case left behind."""
        # The next case has other shapes: torch.compile gives up on a function after a few.
        torch.compiler.reset()
        gc.collect()
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # of a GPU that is lost: the next case reports it
                torch.cuda.empty_cache()

    def report(self) -> Report:
        """Of the cases so far."""
        dense, rows = self._dense_rate(), self._rows
        if dense is not None:
            rows = [
                replace(row, fraction_of_dense=row.tflops / dense.tflops) if row.tflops else row
                for row in rows
            ]
        return Report(self._device_name, dense, tuple(rows), self._unavailable)

    def _dense_rate(self) -> DenseRate | None:
        if not self._dense_ms:
            return None
        # The fastest 10 % of times are the highest rates.
        slow, median, fast = (float(p) for p in np.percentile(self._dense_ms, (90, 50, 10)))
        rate = self._dense.tflops
        return DenseRate(self._dense.size, rate(median), rate(slow), rate(fast))

    def _check_arms(self, inputs: LayerInputs, title: str) -> dict[str, _Checked]:
        reference = None
        if self._config.needs_layer:
            reference = compute_reference(inputs, self._config.needs_backward)
        checked = {}
        for arm in self._config.arms:
            if arm.name in self._unavailable:
                continue
            checked[arm.name] = result = self._check(arm, inputs, reference)
            errors = [v.error for v in result.verdicts if v.error is not None]
            problems = [v.problem for v in result.verdicts if v.problem is not None]
            found = problems[0] if problems else f"relative error {max(errors, default=0):.1e}"
            self._progress(f"{title}: {arm.name}: {found}")
        return checked

    def _check(self, arm: Arm, inputs: LayerInputs, reference: Reference | None) -> _Checked:
        forward = backward = moves = Verdict(None)
        try:
            layer = arm.build(inputs)
        except Exception as error:  # of whatever library the arm runs
            failed = Verdict(None, describe(error))
            return _Checked(None, failed, failed, failed)
        if set(MOVED_DIRECTIONS) & set(self._config.directions) and isinstance(layer, MovesRows):
            try:
                moves = check_moves(layer)
            except Exception as error:
                moves = Verdict(None, describe(error))
        if reference is None:
            return _Checked(layer, forward, backward, moves)
        try:
            forward = check_forward(layer, reference)
        except Exception as error:
            forward = Verdict(None, describe(error))
        if self._config.needs_backward and forward.problem is None:
            try:
                backward = check_backward(layer, reference)
            except Exception as error:
                backward = Verdict(None, describe(error))
        return _Checked(layer, forward, backward, moves)

    def _time(
        self, blank: Row, checked: dict[str, _Checked], timing: TimingOptions, work: int
    ) -> list[Row]:
        """Rows of one direction; work: FLOPs, or bytes where nothing is computed."""
        moves = blank.direction in MOVED_DIRECTIONS
        if moves:
            checked = {
                name: arm
                for name, arm in checked.items()
                if arm.layer is None or isinstance(arm.layer, MovesRows)
            }
        verdicts = {name: arm.verdict(blank.direction) for name, arm in checked.items()}
        tasks = [
            _task(name, blank.direction, checked[name].layer)
            for name, verdict in verdicts.items()
            if verdict.problem is None
        ]
        samples = {}
        if tasks:
            samples = time_in_blocks([*tasks, self._dense.task()], timing, self._device)
            self._dense_ms += samples[self._dense.name].ms
        rows = []
        for name in (arm.name for arm in self._config.arms):
            row = replace(blank, arm=name)
            if name not in checked and name not in self._unavailable:
                continue  # an arm without this direction
            if name in self._unavailable:
                rows.append(replace(row, failure=f"unavailable: {self._unavailable[name]}"))
                continue
            row = replace(row, error=verdicts[name].error)
            failure = verdicts[name].problem or samples[name].failure
            if failure is not None:
                rows.append(replace(row, failure=failure))
                continue
            p10, median, p90 = (float(p) for p in np.percentile(samples[name].ms, (10, 50, 90)))
            rate = work / (median * 1e-3)
            row = replace(row, ms=median, p10=p10, p90=p90)
            if moves:
                row = replace(row, gb_per_s=rate / 1e9)
            else:
                row = replace(row, tflops=rate / 1e12)
            if row.direction == "forward":
                row = self._look_inside(row, checked[name].layer)
            rows.append(row)
        return rows

    def _look_inside(self, row: Row, layer: BenchLayer) -> Row:
        """Adds what a forward on a GPU does besides taking time."""
        if self._device.type != "cuda":
            return row
        row = replace(row, kept_bytes=kept_bytes(layer.forward, self._device))
        if layer.schedule_kernels is None:
            return row
        return replace(row, schedule_ms=kernel_span(layer.forward, *layer.schedule_kernels))


def _task(name: str, direction: str, layer: BenchLayer) -> Task:
    if direction == "forward":
        return Task(name, lambda _: layer.forward())
    if direction == "dispatch":
        return Task(name, lambda _: layer.dispatch())
    if direction == "combine":
        return Task(name, layer.combine, prepare=layer.dispatch)
    if direction == "backward":
        return Task(name, layer.backward, prepare=layer.forward)
    return Task(name, lambda _: layer.backward(layer.forward()))
