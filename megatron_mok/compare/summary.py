"""The numbers of a comparison: one row per arm, measured against the first arm that ran."""

import math
from dataclasses import dataclass

import numpy as np

from .config import CompareConfig
from .runner import ArmResult


@dataclass(frozen=True)
class Row:
    """One arm's figures; None where there is none.

    Attributes:
        step_ms, p10, p90: median and percentiles of the step time, without the first
            `train.skip_steps` steps, slowest rank of each step, in ms.
        tokens_per_s: tokens of a global batch / median step time.
        tflops_per_gpu: Megatron's model FLOPs / median step time / ranks; None on CPU ranks.
        moe_share: median fraction of the step time in MoE layers, forward and backward.
        peak_gib: largest peak of any rank: device memory, or resident memory on CPU ranks.
        max_loss_diff: largest absolute difference of a step's loss to the first arm's.
        max_rel_loss_diff: the largest relative one.
        speedup: first arm's median step time / this arm's; None where times cannot be compared.
        functional: whether the figures of time say nothing about GPUs.
        failure: why the arm has no valid result although it ran.
        unavailable: why the arm cannot run here.
        yardstick: whether this is the first arm again with its experts moved by 1 ulp, whose loss
            differences are those of rounding.
        repeat: whether this is the arm before again, bitwise equal to it if it is ok.
    """

    arm: str
    ep: int
    steps: int
    step_ms: float | None = None
    p10: float | None = None
    p90: float | None = None
    tokens_per_s: float | None = None
    tflops_per_gpu: float | None = None
    moe_share: float | None = None
    peak_gib: float | None = None
    final_loss: float | None = None
    max_loss_diff: float | None = None
    max_rel_loss_diff: float | None = None
    speedup: float | None = None
    functional: bool = False
    failure: str | None = None
    unavailable: str | None = None
    yardstick: bool = False
    repeat: bool = False

    @property
    def ok(self) -> bool:
        """Whether the arm ran, with a valid result."""
        return self.failure is None and self.unavailable is None


def why_functional(config: CompareConfig) -> str | None:
    """Why the run shows that arms work and agree, but nothing about their speed on GPUs; or
    None."""
    if config.device == "cpu":
        return "Times are of CPU ranks: they say nothing about speed on GPUs."
    if config.parallel.ranks_per_gpu > 1:
        return "Ranks share their GPU: times say nothing about speed."
    if config.deterministic:
        return "Times are of deterministic kernels: they say nothing about speed."
    return None


def _comparable(config: CompareConfig) -> bool:
    """Whether times of arms may be compared with each other."""
    return not config.deterministic and config.parallel.ranks_per_gpu == 1


def summarize(config: CompareConfig, results: list[ArmResult]) -> list[Row]:
    """One row per result, in their order."""
    first = next((r for r in results if r.ok), None)
    return [_row(config, result, first) for result in results]


def loss_differences(first: ArmResult, other: ArmResult) -> tuple[list[float], list[float]]:
    """Absolute and relative differences of the loss, per step."""
    reference = [step.loss for step in first.history.steps]
    losses = [step.loss for step in other.history.steps]
    absolute = [abs(b - a) for a, b in zip(reference, losses, strict=True)]
    return absolute, [
        d / abs(a) if a else math.inf for d, a in zip(absolute, reference, strict=True)
    ]


def timed_ms(config: CompareConfig, result: ArmResult) -> np.ndarray:
    """Step times in ms that count: without the first `train.skip_steps`, unless none is left."""
    return 1e3 * np.array(_timed(config, [step.seconds for step in result.history.steps]))


def _timed(config: CompareConfig, values: list[float]) -> list[float]:
    return values[config.train.skip_steps :] or values


def _row(config: CompareConfig, result: ArmResult, first: ArmResult | None) -> Row:
    ep = config.parallel.expert_model_parallel_size
    functional = why_functional(config) is not None
    if not result.ok:
        return Row(
            result.arm,
            ep,
            steps=len(result.history.steps) if result.history else 0,
            functional=functional,
            failure=result.failure,
            unavailable=result.unavailable,
            yardstick=result.yardstick,
            repeat=result.repeat,
        )
    history = result.history
    ms = timed_ms(config, result)
    median = float(np.median(ms))
    absolute, relative = loss_differences(first, result)
    speedup = None
    if _comparable(config):
        speedup = float(np.median(timed_ms(config, first))) / median
    per_gpu = None
    if not functional:
        per_gpu = history.start[0]["flops"] / (median * 1e-3) / config.parallel.ranks / 1e12
    return Row(
        arm=result.arm,
        ep=ep,
        steps=len(history.steps),
        step_ms=median,
        p10=float(np.percentile(ms, 10)),
        p90=float(np.percentile(ms, 90)),
        tokens_per_s=config.tokens_per_step / (median * 1e-3),
        tflops_per_gpu=per_gpu,
        moe_share=float(np.median(_timed(config, [step.moe_share for step in history.steps]))),
        peak_gib=history.peak_bytes / 2**30,
        final_loss=history.steps[-1].loss,
        max_loss_diff=max(absolute),
        max_rel_loss_diff=max(relative),
        speedup=speedup,
        functional=functional,
        yardstick=result.yardstick,
        repeat=result.repeat,
    )
