"""Configuration of a comparison: YAML to frozen dataclasses, checked before anything starts.

Keys that set a Megatron option are named like it (`moe_router_topk` is --moe-router-topk); left
out, Megatron's default holds.
"""

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from .arms import ARMS


class ConfigError(ValueError):
    """A configuration is wrong; the message names the key, the value and what is allowed."""


@dataclass(frozen=True)
class ModelConfig:
    """The GPT model. SwiGLU, RMSNorm, RoPE, no biases, untied embeddings, no dropout."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    num_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    ffn_hidden_size: int  # of the dense layers
    # Attention: either GQA ...
    num_query_groups: int | None = None
    kv_channels: int | None = None
    qk_layernorm: bool = False
    rotary_base: int | None = None
    # ... or multi-latent attention.
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    # Mixture of experts.
    moe_layer_freq: str | None = None  # a list expression such as ([0]*1+[1]*3): 0 is dense
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_grouped_gemm: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_pre_softmax: bool = False
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"  # DeepEP and HybridEP take fp32 only
    moe_router_load_balancing_type: (
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] | None
    ) = None
    moe_aux_loss_coeff: float | None = None
    moe_z_loss_coeff: float | None = None
    # Multi-token prediction.
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float | None = None
    init_method_std: float | None = None

    def check(self) -> None:
        for key in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
            _at_least("model", self, key, 1)
        for key in ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "ffn_hidden_size"):
            _at_least("model", self, key, 1)
        if self.moe_router_topk > self.num_experts:
            raise ConfigError(
                f"model.moe_router_topk: {self.moe_router_topk} is more than model.num_experts "
                f"({self.num_experts})"
            )
        mla = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        given = [key for key in mla if getattr(self, key) is not None]
        if given and not self.multi_latent_attention:
            raise ConfigError(f"model.{given[0]}: needs model.multi_latent_attention: true")
        if self.multi_latent_attention and self.num_query_groups is not None:
            raise ConfigError("model.num_query_groups: not with model.multi_latent_attention")


@dataclass(frozen=True)
class ParallelConfig:
    """How many processes there are on this host and how the model is spread over them."""

    ranks: int
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
                _at_least("parallel", self, f.name, 1)
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
        if device == "cpu":
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
        _at_least("data", self, "max_bytes", 1)
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
            _at_least("train", self, key, 1)
        if self.eval_interval is not None:
            _at_least("train", self, "eval_interval", 1)
        _at_least("train", self, "skip_steps", 0)
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
    megatron_args: tuple[str, ...] = ()  # more of Megatron's flags, for every arm

    def __post_init__(self):
        _at_least("", self, "seed", 1)
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
    ) -> "CompareConfig":
        """A copy with other arms, number of steps or yardstick; None keeps what there is."""
        changes = {"arms": arms, "yardstick": yardstick}
        if steps is not None:
            changes["train"] = dataclasses.replace(self.train, steps=steps)
        given = {key: value for key, value in changes.items() if value is not None}
        return dataclasses.replace(self, **given)


def load(path: Path) -> CompareConfig:
    """Read and check the YAML file at `path`.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid YAML: {error}") from error
    return from_dict(tree, name=path.stem)


def from_dict(tree: object, name: str = "compare") -> CompareConfig:
    """`load` for a tree that is in memory; `name` is used when the tree has none."""
    if isinstance(tree, dict):
        tree = {"name": name, **tree}
    return _build(CompareConfig, tree, "")


def _build(cls, tree, prefix: str):
    where = prefix.rstrip(".") or "the configuration"
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: must be a mapping of keys to values (given: {tree!r})")
    known = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}? " if close else ""
            raise ConfigError(
                f"{prefix}{key}: unknown key; {hint}allowed in {where}: {', '.join(sorted(known))}"
            )
    values = {}
    for key, f in known.items():
        if key in tree:
            values[key] = _convert(hints[key], tree[key], prefix + key)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{key}: missing; it must be {_describe(hints[key])}")
    return cls(**values)


def _convert(hint, value, key: str):
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, key + ".")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if typing.get_origin(hint) is typing.Union:
        options = typing.get_args(hint)
    for option in options:
        converted = _match(option, value)
        if converted is not _NO:
            return converted
    raise ConfigError(f"{key}: must be {_describe(hint)} (given: {value!r})")


_NO = object()


def _match(hint, value):
    """`value` as `hint`, or _NO. YAML reads 1e-4 as a string; it is taken as the number meant."""
    if hint is type(None):
        return None if value is None else _NO
    if typing.get_origin(hint) is Literal:
        return value if value in typing.get_args(hint) else _NO
    if typing.get_origin(hint) is tuple:
        if isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
            return tuple(str(v) for v in value)
        return _NO
    if hint is bool:
        return value if isinstance(value, bool) else _NO
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _NO
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return _NO
        try:
            return float(value)
        except ValueError:
            return _NO
    return value if isinstance(value, hint) else _NO


def _describe(hint) -> str:
    if dataclasses.is_dataclass(hint):
        return "a section"
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return "a list of strings"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    if hint in names:
        return names[hint]
    return " or ".join(_describe(h) for h in typing.get_args(hint) if h is not type(None))


def _at_least(section: str, config, key: str, least: int) -> None:
    value = getattr(config, key)
    if value < least:
        name = f"{section}.{key}" if section else key
        raise ConfigError(f"{name}: must be at least {least} (given: {value})")
