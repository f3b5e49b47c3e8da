"""Bytes that training takes on the ranks of one pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_mok.megatron.dry_run.parameters import ParameterCounter, Parameters
from megatron_mok.megatron.dry_run.stages import Stage, in_flight
from megatron_mok.megatron.flags import MoKOptions
from megatron_mok.megatron.validation import workspace_shape
from megatron_mok.runtime import MoKUnsupportedError, workspace_nbytes

HOPPER_SMS = 132
"""Streaming multiprocessors of an H100 or H200 SXM, which the size of the workspace depends on."""

# Tensors that an optimizer keeps for each parameter.
_STATES = {"adam": 2, "sgd": 1, "lion": 1}


@dataclass(frozen=True)
class MoKMemory:
    """What MoK's layers take on a rank that has any.

    In mode dispatch only the workspace: what backward needs is kept by Megatron's experts, and is
    not counted.

    Attributes:
        mode: of `--mok-mode`.
        max_tokens: most tokens of a rank in one call.
        saved_rows: rows of pre-activations that one call keeps for backward.
        saved_bytes: what one call keeps for backward: these rows, and the layer's input.
        workspace_bytes: one workspace for all layers; None where `missing`.
        grad_buffer_bytes: FP32 buffers that fresh weight gradients of a layer pass through for a
            while; 0 where the kernel adds to `main_grad`.
        missing: why the engine, which knows the size of the workspace, is not here; or None.
    """

    mode: str
    max_tokens: int
    saved_rows: int
    saved_bytes: int
    workspace_bytes: int | None
    grad_buffer_bytes: int
    missing: str | None

    @classmethod
    def of(cls, config: Any, args: Any, options: MoKOptions, device_type: str) -> MoKMemory:
        """For layers of this config. `options.max_tokens_per_rank` must be known."""
        shape = workspace_shape(config, options)
        ep = config.expert_model_parallel_size
        workers = HOPPER_SMS if device_type == "cuda" else options.host_threads
        try:
            workspace, missing = workspace_nbytes(shape, ep, device_type, workers), None
        except (MoKUnsupportedError, OSError) as error:
            workspace, missing = None, str(error)
        rows = saved = buffers = 0
        if options.mode == "fused":
            local = shape.num_experts // ep
            rows = options.saved_rows(shape.max_tokens, shape.topk, ep, local)
            saved = rows * 2 * shape.ffn + shape.max_tokens * shape.hidden
            into_main_grad = config.gradient_accumulation_fusion and grad_bytes(args) == 4
            buffers = 0 if into_main_grad else 4 * local * 3 * shape.hidden * shape.ffn
        return cls(
            mode=options.mode,
            max_tokens=shape.max_tokens,
            saved_rows=rows,
            saved_bytes=saved * config.params_dtype.itemsize,
            workspace_bytes=workspace,
            grad_buffer_bytes=buffers,
            missing=missing,
        )


def grad_bytes(args: Any) -> int:
    """Bytes of a gradient in DDP's buffers."""
    return 4 if args.accumulate_allreduce_grads_in_fp32 else args.params_dtype.itemsize


@dataclass(frozen=True)
class StageMemory:
    """Parameters and bytes of one rank of a pipeline stage. `saved` is of the MoE layers alone."""

    parameters: Parameters
    weights: int
    grads: int
    optimizer: int
    workspace: int
    saved: int

    @property
    def total(self) -> int:
        return self.weights + self.grads + self.optimizer + self.workspace + self.saved


class MemoryEstimate:
    """Bytes of each pipeline stage.

    Args:
        config: Megatron's TransformerConfig.
        args: Megatron's arguments.
        counter: of the parameters of one rank.
        microbatches: of one step.
        mok: of MoK's layers; None with another dispatcher, whose activations are not counted.
    """

    def __init__(
        self,
        config: Any,
        args: Any,
        counter: ParameterCounter,
        microbatches: int,
        mok: MoKMemory | None,
    ) -> None:
        self._config = config
        self._args = args
        self._counter = counter
        self._microbatches = microbatches
        self._mok = mok

    def stage(self, rank: int, stage: Stage) -> StageMemory:
        """Of pipeline rank `rank`."""
        parameters = Parameters()
        for chunk in stage:
            parameters = parameters + self._counter.chunk(chunk)
        args = self._args
        pipeline = args.pipeline_model_parallel_size
        dense_ranks = args.world_size // (args.tensor_model_parallel_size * pipeline)
        expert_ranks = args.world_size // (
            args.expert_tensor_parallel_size * args.expert_model_parallel_size * pipeline
        )
        moe_layers = sum(chunk.moe_layers for chunk in stage)
        workspace = (self._mok.workspace_bytes or 0) if self._mok and moe_layers else 0
        return StageMemory(
            parameters=parameters,
            weights=parameters.total * args.params_dtype.itemsize,
            grads=parameters.total * grad_bytes(self._args),
            optimizer=int(
                parameters.dense * self._optimizer_bytes(dense_ranks)
                + parameters.experts * self._optimizer_bytes(expert_ranks)
            ),
            workspace=workspace,
            saved=self._saved(rank, stage) if self._mok else 0,
        )

    def _optimizer_bytes(self, ranks: int) -> float:
        """For each parameter, on one of `ranks` data-parallel ranks."""
        args = self._args
        states = _STATES.get(args.optimizer, 2)
        count = 4.0 * states
        if args.use_precision_aware_optimizer and states == 2:
            count = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
        if args.params_dtype != torch.float32:
            precise = args.use_precision_aware_optimizer
            count += args.main_params_dtype.itemsize if precise else 4
            if grad_bytes(self._args) != 4 and not precise:
                count += 4  # gradients in FP32 for the step
        if getattr(args, "optimizer_cpu_offload", False):
            count *= 1 - args.optimizer_offload_fraction
        instances = getattr(args, "num_distributed_optimizer_instances", 1)
        return count / max(ranks // instances, 1) if args.use_distributed_optimizer else count

    def _saved(self, rank: int, stage: Stage) -> int:
        config = self._config
        each = self._mok.saved_bytes
        if config.recompute_granularity == "full":
            # Only while some layers are computed again.
            layers = min(config.recompute_num_layers or 1, max(c.moe_layers for c in stage))
            return layers * each
        if config.recompute_granularity == "selective" and "moe" in config.recompute_modules:
            return each if any(chunk.moe_layers for chunk in stage) else 0
        counts = in_flight(config, rank, self._microbatches)
        return sum(n * c.moe_layers * each for n, c in zip(counts, stage, strict=True))


def optimizer_is_counted(args: Any) -> bool:
    """Whether the states of this optimizer are known; others count like Adam's."""
    return args.optimizer in _STATES
