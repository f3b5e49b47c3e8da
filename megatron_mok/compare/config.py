"""Configuration of a comparison: YAML to frozen dataclasses, checked before anything starts.

Keys that set a Megatron option are named like it (`moe_router_topk` is --moe-router-topk); left
out, Megatron's default holds. `model: {base: deepseek_v3, num_layers: 3, ...}` takes the other keys
from a model of `megatron_mok.models`.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_mok.models import ConfigError, ModelConfig, resolve_base
from megatron_mok.models.schema import at_least, build, read_yaml

from .arms import ARMS


@dataclass(frozen=True)
class ParallelConfig:
    """How many processes there are on this host and how the model is spread over them."""

    ranks: int
    ranks_per_gpu: int = 1  # more: they share it under MPS, with gloo; functional, not timed
    expert_model_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    timeout_minutes: int = 10  # of collectives; also how long a silent arm may be

    def check(self, device: str) -> None:
        for f in dataclasses.fields(self):
            if f.type is int or f.type == "int":
                at_least("parallel", self, f.name, 1)
        model_parallel = (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )
        if self.ranks % model_parallel:
            raise ConfigError(
                f"parallel.ranks: {self.ranks} is not a multiple of tensor x pipeline x context "
                f"parallel size ({model_parallel})"
            )
        expert_parallel = self.expert_model_parallel_size * self.pipeline_model_parallel_size
        if self.ranks % expert_parallel:
            raise ConfigError(
                f"parallel.expert_model_parallel_size: {self.expert_model_parallel_size} x "
                f"pipeline size ({self.pipeline_model_parallel_size}) does not divide "
                f"parallel.ranks ({self.ranks})"
            )
        if self.overlap_param_gather and not (
            self.distributed_optimizer and self.overlap_grad_reduce
        ):
            raise ConfigError(
                "parallel.overlap_param_gather: needs distributed_optimizer: true and "
                "overlap_grad_reduce: true"
            )
        if self.ranks % self.ranks_per_gpu:
            raise ConfigError(
                f"parallel.ranks_per_gpu: {self.ranks_per_gpu} does not divide parallel.ranks "
                f"({self.ranks})"
            )
        if self.ranks_per_gpu > 1 and self.pipeline_model_parallel_size > 1:
            raise ConfigError(
                "parallel.ranks_per_gpu: must be 1 with pipeline parallelism (gloo does not send "
                "CUDA tensors)"
            )
        if device == "cpu":
            if self.ranks_per_gpu != 1:
                raise ConfigError(
                    "parallel.ranks_per_gpu: must be 1 with device: cpu (given: "
                    f"{self.ranks_per_gpu})"
                )
            if self.context_parallel_size != 1:
                raise ConfigError(
                    "parallel.context_parallel_size: must be 1 with device: cpu (given: "
                    f"{self.context_parallel_size})"
                )
            if self.sequence_parallel:
                raise ConfigError(
                    "parallel.sequence_parallel: needs device: cuda (RMSNorm with sequence "
                    "parallelism is Transformer Engine's)"
                )

    @property
    def gpus(self) -> int:
        """How many GPUs there are to be."""
        return self.ranks // self.ranks_per_gpu

    @property
    def data_parallel_size(self) -> int:
        return self.ranks // (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )


@dataclass(frozen=True)
class DataConfig:
    """The training text."""

    source: str = "stdlib"  # stdlib | a folder of text files | prefix of a Megatron dataset
    max_bytes: int = 16_000_000  # how much text to take
    split: str = "98,1,1"  # train, validation, test; only with train.eval_interval
    vocab_size: int | None = None  # of a Megatron dataset; text is bytes (256)

    def check(self) -> None:
        at_least("data", self, "max_bytes", 1)
        try:
            parts = [float(p) for p in self.split.split(",")]
            ok = len(parts) == 3 and min(parts) >= 0 and parts[0] > 0
        except ValueError:
            ok = False
        if not ok:
            raise ConfigError(
                f"data.split: {self.split!r} is not three numbers, such as '98,1,1' (train, "
                "validation, test)"
            )


@dataclass(frozen=True)
class TrainConfig:
    """Optimizer steps and their batches."""

    steps: int
    micro_batch_size: int
    global_batch_size: int
    lr: float
    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    skip_steps: int = 3  # first steps that the timing leaves out
    eval_interval: int | None = None
    eval_iters: int = 1
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_modules: tuple[str, ...] = ()

    def check(self, data_parallel_size: int) -> None:
        for key in ("steps", "micro_batch_size", "global_batch_size", "eval_iters"):
            at_least("train", self, key, 1)
        if self.eval_interval is not None:
            at_least("train", self, "eval_interval", 1)
        at_least("train", self, "skip_steps", 0)
        if self.lr <= 0:
            raise ConfigError(f"train.lr: must be above 0 (given: {self.lr})")
        if not 0 <= self.lr_warmup_steps < self.steps:
            raise ConfigError(
                f"train.lr_warmup_steps: must be from 0 to train.steps - 1 = {self.steps - 1} "
                f"(given: {self.lr_warmup_steps})"
            )
        unit = self.micro_batch_size * data_parallel_size
        if self.global_batch_size % unit:
            raise ConfigError(
                f"train.global_batch_size: {self.global_batch_size} is not a multiple of "
                f"micro_batch_size x data-parallel size = {unit}"
            )
        if self.recompute_modules and self.recompute_granularity != "selective":
            raise ConfigError(
                "train.recompute_modules: needs train.recompute_granularity: selective"
            )


@dataclass(frozen=True)
class CompareConfig:
    """A whole comparison."""

    name: str
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16"]
    seed: int
    arms: tuple[str, ...]
    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    data: DataConfig = field(default_factory=DataConfig)
    yardstick: bool = True  # train the first arm again with its experts moved by 1 ulp
    deterministic: bool = False  # --deterministic-mode, and every arm twice; its times say nothing
    megatron_args: tuple[str, ...] = ()  # more of Megatron's flags, for every arm

    def __post_init__(self):
        at_least("", self, "seed", 1)
        if not self.arms:
            raise ConfigError(f"arms: empty; allowed are {', '.join(ARMS)}")
        for arm in self.arms:
            if arm not in ARMS:
                raise ConfigError(f"arms: {arm!r} is not known; allowed are {', '.join(ARMS)}")
        if len(set(self.arms)) != len(self.arms):
            raise ConfigError(f"arms: an arm is named twice in {list(self.arms)}")
        self.model.check()
        self.parallel.check(self.device)
        self.data.check()
        self.train.check(self.parallel.data_parallel_size)
        if self.model.num_experts % self.parallel.expert_model_parallel_size:
            raise ConfigError(
                f"parallel.expert_model_parallel_size: {self.parallel.expert_model_parallel_size} "
                f"does not divide model.num_experts ({self.model.num_experts})"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.model.seq_length

    def replace(
        self,
        arms: tuple[str, ...] | None = None,
        steps: int | None = None,
        yardstick: bool | None = None,
        deterministic: bool | None = None,
    ) -> "CompareConfig":
        """A copy with other values of these keys; None keeps what there is."""
        changes = {"arms": arms, "yardstick": yardstick, "deterministic": deterministic}
        if steps is not None:
            changes["train"] = dataclasses.replace(self.train, steps=steps)
        given = {key: value for key, value in changes.items() if value is not None}
        return dataclasses.replace(self, **given)


def load(path: Path) -> CompareConfig:
    """Read and check the YAML file at `path`.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    return from_dict(read_yaml(path), name=path.stem)


def from_dict(tree: object, name: str = "compare") -> CompareConfig:
    """`load` for a tree that is in memory; `name` is used when the tree has none."""
    if isinstance(tree, dict):
        tree = {"name": name, **tree}
        if "model" in tree:
            tree["model"] = resolve_base(tree["model"], "model.")
    return build(CompareConfig, tree)
