"""Rank side: whole training steps of a small GPT, with Megatron's DDP, optimizer and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_mok.megatron.replicas import assert_replicas_equal
from tests.megatron import moe_metrics
from tests.megatron.moe_cases import (
    ROUTERS,
    kind_of,
    make_config,
    set_up_parallel,
    use_output_discarding_without_te,
    use_weight_gradient_fusion_without_apex,
)

SEQUENCE, MICRO_BATCH, MICROBATCHES, VOCAB = 16, 2, 2, 64


class Trainer:
    """A GPT of two MoE layers in mcore DDP with the distributed optimizer, everything overlapped.

    Args:
        dispatcher: the config's `moe_token_dispatcher_type`.
        break_aliases: take the Parameters away from the fused experts, as if they had never been
            registered there: DDP then has no module whose pre-hook waits for their all-gather.
        spec: "local", or "te" for Transformer Engine's modules.
        changes: fields of TransformerConfig.
    """

    def __init__(
        self, dispatcher: str, break_aliases: bool = False, spec: str = "local", **changes: Any
    ) -> None:
        moe_metrics.forget()
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        self.config = config = make_config(dispatcher, **changes)
        te = spec == "te"  # with moe_grouped_gemm in `changes`, for its experts
        layers_spec = get_gpt_decoder_block_spec(config, use_transformer_engine=te)
        mtp = None
        if config.mtp_num_layers:
            mtp = get_gpt_mtp_block_spec(config, layers_spec, use_transformer_engine=te)
        model = GPTModel(
            config,
            layers_spec,
            vocab_size=VOCAB,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            mtp_block_spec=mtp,
        ).cuda()
        kind = kind_of(dispatcher)
        layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        assert layers
        assert all(type(layer) is kind for layer in layers)
        if break_aliases:
            for layer in layers:
                layer.fused_experts._parameters.clear()
        if config.bf16:
            model = Float16Module(config, model)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            bucket_size=40_000,
        )
        self.model = DistributedDataParallel(config, ddp_config, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=5e-3,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=True,
                overlap_param_gather=True,
                clip_grad=1.0,
            ),
            [self.model],
        )
        config.grad_scale_func = self.optimizer.scale_loss
        config.no_sync_func = self.model.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        self.steps = 0
        assert_replicas_equal([self.model], "before step 1")
        # As Megatron's loop: the first step uses the initial weights, which nobody gathers.
        self.model.disable_forward_pre_hook(param_sync=False)

    def step(self) -> tuple[list[float], float]:
        """One training step. Returns its losses (on the last stage) and the gradient norm."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._run(self._batches(self.steps), forward_only=False)
        _, grad_norm, _ = self.optimizer.step()
        if self.steps == 0:
            self.model.enable_forward_pre_hook()
        self.steps += 1
        return losses, float(grad_norm)

    def evaluate(self) -> list[float]:
        """Losses of one evaluation batch. The weights are gathered first, as in Megatron's loop."""
        self.model.disable_forward_pre_hook()
        self.model.eval()
        with torch.no_grad():
            losses = self._run(self._batches(1000), forward_only=True)
        self.model.train()
        self.model.enable_forward_pre_hook()
        return losses

    def logits(self) -> torch.Tensor:
        """[b, s, vocab] logits of one evaluation batch of this rank; one pipeline stage."""
        self.model.disable_forward_pre_hook()
        self.model.eval()
        tokens = next(self._batches(2000))[:, :-1].contiguous()
        with torch.no_grad():
            logits = self.model(tokens, *_positions_and_mask(tokens))
        self.model.train()
        self.model.enable_forward_pre_hook()
        return logits

    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's parameters, after the last step's all-gather."""
        self.model.disable_forward_pre_hook()
        assert_replicas_equal([self.model], f"after step {self.steps}")
        copies = self.parameters_now()
        self.model.enable_forward_pre_hook()
        return copies

    def parameters_now(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's parameters as they are."""
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def _batches(self, step: int) -> Iterator[torch.Tensor]:
        rank = parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(1 + rank + 100 * step)
        for _ in range(MICROBATCHES):
            shape = (MICRO_BATCH, SEQUENCE + 1)
            yield torch.randint(0, VOCAB, shape, generator=generator).cuda()

    def _run(self, batches: Iterator[torch.Tensor], forward_only: bool) -> list[float]:
        reports = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=batches,
            model=self.model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=forward_only,
        )
        return [float(report["loss"]) for report in reports]

    def _forward_step(self, batches: Iterator[torch.Tensor], model: Any) -> tuple[Any, Any]:
        text = next(batches)
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        losses = model(
            tokens,
            *_positions_and_mask(tokens),
            labels=labels,
            loss_mask=torch.ones_like(labels).float(),
        )
        return losses, partial(_mean_loss)


def _positions_and_mask(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)
    return torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens), mask


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}


@dataclass(frozen=True)
class Course:
    """What a short training run gave on one rank."""

    losses: list[float]
    grad_norms: list[float]
    router_losses: list[float]
    parameters: dict[str, torch.Tensor]
    expert_biases: list[torch.Tensor]


def train(dispatcher: str, steps: int, **changes: Any) -> Course:
    """`steps` steps with an evaluation after the second one; replicas are checked at both ends."""
    trainer = Trainer(dispatcher, **changes)
    losses, grad_norms = [], []
    for index in range(steps):
        step_losses, grad_norm = trainer.step()
        losses += step_losses
        grad_norms.append(grad_norm)
        if index == 1:
            losses += trainer.evaluate()
    return Course(
        losses,
        grad_norms,
        moe_metrics.router_losses(),
        trainer.parameters(),
        [b.clone() for n, b in trainer.model.named_buffers() if n.endswith("expert_bias")],
    )


def compare(
    ep: int,
    router: str = "softmax",
    pp: int = 1,
    fusion: bool = False,
    mode: str = "fused",
    **changes: Any,
) -> dict[str, float]:
    """Largest relative differences between training with mok and with alltoall."""
    set_up_parallel(ep, pp=pp, mode=mode)
    changes = ROUTERS[router] | changes
    use_output_discarding_without_te()
    if fusion:
        use_weight_gradient_fusion_without_apex()
        changes["gradient_accumulation_fusion"] = True
    native = train("alltoall", 4, **changes)
    fused = train("mok", 4, **changes)
    assert list(native.parameters) == list(fused.parameters)
    assert all(loss > 0 for loss in native.losses)
    assert any(native.router_losses)
    for found, expected in zip(fused.expert_biases, native.expert_biases, strict=True):
        assert torch.equal(found, expected)
        assert expected.any()
    return {
        "losses": _worst(fused.losses, native.losses),
        "router_losses": _worst(fused.router_losses, native.router_losses),
        "grad_norms": _worst(fused.grad_norms, native.grad_norms),
        "parameters": max(
            float((fused.parameters[n] - p).norm() / p.norm()) for n, p in native.parameters.items()
        ),
    }


class Board:
    """Stands for a TensorBoard writer, and for a run of Weights & Biases."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.scalars[name] = float(value)

    def log(self, scalars: dict[str, Any], step: int) -> None:
        for name, value in scalars.items():
            self.add_scalar(name, value, step)


def per_layer_logs() -> list[dict[str, float]]:
    """What --moe-per-layer-logging writes after a step under alltoall and under mok."""
    set_up_parallel(2)
    boards = []
    for dispatcher in ("alltoall", "mok"):
        Trainer(dispatcher, moe_z_loss_coeff=1e-3).step()
        board = Board()
        moe_metrics.write_report(board, MICROBATCHES, num_layers=2)
        boards.append(board.scalars)
    return boards


def _worst(found: list[float], expected: list[float]) -> float:
    return max(
        (abs(f - e) / (abs(e) or 1.0) for f, e in zip(found, expected, strict=True)), default=0.0
    )


def train_without_aliases(ep: int) -> str:
    """What goes wrong when the fused experts do not hold the Parameters: the error, or ''."""
    set_up_parallel(ep)
    native = train("alltoall", 4)
    try:
        fused = train("mok", 4, break_aliases=True)
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "losses differ" if _worst(fused.losses, native.losses) > 1e-5 else ""


def train_twice(ep: int, mode: str = "fused", **changes: Any) -> bool:
    """Whether two training runs give bitwise equal losses, gradient norms and parameters."""
    set_up_parallel(ep, mode=mode)
    first, second = (train("mok", 3, **changes) for _ in range(2))
    return (
        first.losses == second.losses
        and first.grad_norms == second.grad_norms
        and all(torch.equal(p, second.parameters[n]) for n, p in first.parameters.items())
    )
