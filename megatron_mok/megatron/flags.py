"""The plugin's own options: their command-line flags, defaults and derived sizes.

Only fields of Megatron's config classes travel from arguments to configs, so the plugin keeps its
options here. They come from Megatron's parsed arguments, or from `set_options` where there are none
(Megatron-Core without `megatron.training`).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_mok.megatron.errors import MoKConfigError
from megatron_mok.runtime import PEER_MEMORY

MODES = ("fused", "dispatch")


def _flag(default: Any, kind: type, help_text: str, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field that is also a command-line flag, `--mok-<field name>`."""
    meta = {"type": kind, "help": help_text, "choices": choices}
    return field(default=default, metadata={"flag": meta})


@dataclass(frozen=True)
class MoKOptions:
    """Options of the plugin. Raises MoKConfigError, listing every value that is not allowed."""

    mode: str = _flag(
        "fused",
        str,
        "fused: dispatch, experts and combine in one kernel per direction. dispatch: MoK's "
        "dispatch and combine around Megatron's own experts, for what the kernels cannot compute.",
        MODES,
    )
    max_tokens_per_rank: int | None = _flag(
        None,
        int,
        "Most tokens that one rank ever passes to an MoE layer in one call; fixes the size of the "
        "workspace. Default: sequence length x the larger of the training and evaluation micro "
        "batch sizes, divided by context parallelism, and by tensor parallelism when sequence "
        "parallelism is on.",
    )
    saved_rows_factor: float = _flag(
        1.25,
        float,
        "Rows of expert pre-activations kept for backward, as a multiple of the rows that a rank "
        "gets under balanced routing (max tokens x top-k). Rows beyond it are recomputed in "
        "backward, so every value is safe; 0 recomputes all. Of mode fused.",
    )
    inner_timeout_s: float = _flag(
        60.0,
        float,
        "Seconds to wait for a peer once all ranks of the expert-parallel group are inside the "
        "layer. The wait for peers to arrive follows --distributed-timeout-minutes.",
    )
    host_threads: int = _flag(
        0, int, "Threads per rank of the CPU engine; 0 takes the engine's default."
    )
    peer_memory: str = _flag(
        "ipc",
        str,
        "How expert-parallel ranks map each other's memory. ipc: handles exchanged between the "
        "processes of one host (CUDA IPC on GPUs). symm_mem: PyTorch's symmetric memory.",
        PEER_MEMORY,
    )
    first_timeout_s: float = 600.0
    """Seconds to wait for peers to arrive; from --distributed-timeout-minutes, so no flag."""
    log_statistics: bool = _flag(
        False,
        bool,
        "Log how the router loads MoK, every --log-interval steps: tokens per expert, padding, "
        "bytes between ranks, rows recomputed in backward. In the log line, TensorBoard and W&B; "
        "with --moe-per-layer-logging for each layer.",
    )

    def __post_init__(self) -> None:
        problems = []
        if self.mode not in MODES:
            problems.append(f"--mok-mode {self.mode!r}: allowed are {', '.join(MODES)}")
        if self.max_tokens_per_rank is not None and not _is_int(self.max_tokens_per_rank, 1):
            problems.append(
                f"--mok-max-tokens-per-rank {self.max_tokens_per_rank!r}: must be an integer >= 1"
            )
        if not _is_number(self.saved_rows_factor) or self.saved_rows_factor < 0:
            problems.append(
                f"--mok-saved-rows-factor {self.saved_rows_factor!r}: must be a finite number >= 0"
            )
        if not _is_number(self.inner_timeout_s) or self.inner_timeout_s <= 0:
            problems.append(
                f"--mok-inner-timeout-s {self.inner_timeout_s!r}: must be a number of seconds > 0"
            )
        if not _is_int(self.host_threads, 0):
            problems.append(f"--mok-host-threads {self.host_threads!r}: must be an integer >= 0")
        if self.peer_memory not in PEER_MEMORY:
            problems.append(
                f"--mok-peer-memory {self.peer_memory!r}: allowed are {', '.join(PEER_MEMORY)}"
            )
        if not _is_number(self.first_timeout_s) or self.first_timeout_s <= 0:
            problems.append(
                f"first_timeout_s {self.first_timeout_s!r} (--distributed-timeout-minutes): "
                "must be > 0"
            )
        if not isinstance(self.log_statistics, bool):
            problems.append(f"--mok-log-statistics {self.log_statistics!r}: must be true or false")
        if problems:
            raise MoKConfigError(*problems)

    @classmethod
    def from_args(cls, args: Any) -> MoKOptions:
        """The options in Megatron's parsed (or YAML) arguments; absent flags keep defaults."""
        return cls(**_given(args))

    def saved_rows(self, max_tokens: int, topk: int, ep_size: int, local_experts: int) -> int:
        """Rows of pre-activations to keep for backward on one rank.

        Args:
            max_tokens: most tokens of one rank.
            topk: routes of a token.
            ep_size: ranks in the expert-parallel group.
            local_experts: experts on this rank.
        Returns: the factor times the balanced number of rows, at most the worst case (every rank
            routes every token here).
        """
        worst = max_tokens * ep_size * min(topk, local_experts)
        return min(math.ceil(self.saved_rows_factor * max_tokens * topk), worst)


def _given(args: Any) -> dict[str, Any]:
    """Values of options that are in Megatron's arguments or follow from them, unchecked."""
    values = {}
    for item in fields(MoKOptions):
        dest = f"mok_{item.name}"
        if "flag" in item.metadata and hasattr(args, dest):
            values[item.name] = getattr(args, dest)
    minutes = getattr(args, "distributed_timeout_minutes", None)
    if minutes is not None:
        values["first_timeout_s"] = minutes * 60.0
    if values.get("max_tokens_per_rank") is None:
        values["max_tokens_per_rank"] = tokens_per_rank(args)
    return values


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def tokens_per_rank(args: Any) -> int | None:
    """Most tokens that one rank passes to an MoE layer, from Megatron's arguments.

    Returns None where the arguments do not fix it (no sequence length or micro batch size, or
    hybrid context parallelism, whose ranks hold sequences of different lengths).
    """
    seq_length = getattr(args, "seq_length", None)
    micro_batch = getattr(args, "micro_batch_size", None)
    if seq_length is None or micro_batch is None:
        return None
    if getattr(args, "hybrid_context_parallel", False):
        return None
    micro_batch = max(micro_batch, getattr(args, "eval_micro_batch_size", None) or 0)
    model_parallel = getattr(args, "model_parallel", args)  # YAML nests these
    tokens = seq_length * micro_batch
    ranks = getattr(model_parallel, "context_parallel_size", 1)
    if getattr(model_parallel, "sequence_parallel", False):
        ranks *= getattr(model_parallel, "tensor_model_parallel_size", 1)
    return -(-tokens // ranks)


def add_mok_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--mok-*` flags to Megatron's parser; returns it, as Megatron's helpers do."""
    group = parser.add_argument_group(
        title="mok", description="Options of --moe-token-dispatcher-type mok (megatron_mok)."
    )
    for item in fields(MoKOptions):
        flag = item.metadata.get("flag")
        if flag is None:
            continue
        if flag["type"] is bool:
            how = {"action": "store_true"}
        else:
            how = {key: flag[key] for key in ("type", "choices")} | {"default": item.default}
        group.add_argument(
            "--mok-" + item.name.replace("_", "-"),
            dest=f"mok_{item.name}",
            help=flag["help"],
            **how,
        )
    return parser


_explicit: MoKOptions | None = None


def set_options(options: MoKOptions | None) -> None:
    """Set the options of models built from now on; None goes back to those of the command line."""
    global _explicit
    if options is not None and not isinstance(options, MoKOptions):
        raise TypeError(f"set_options takes a MoKOptions or None, not {type(options).__name__}")
    _explicit = options


def get_options() -> MoKOptions:
    """The options in force: those of `set_options`, else those of Megatron's arguments."""
    if _explicit is not None:
        return _explicit
    args = megatron_args()
    return MoKOptions() if args is None else MoKOptions.from_args(args)


def read_options() -> tuple[MoKOptions, tuple[str, ...]]:
    """`get_options`, and what is wrong with the values given; those are left out."""
    try:
        return get_options(), ()
    except MoKConfigError as error:
        given = _given(megatron_args())
        return MoKOptions(**{k: v for k, v in given.items() if _is_valid(k, v)}), error.problems


def _is_valid(name: str, value: Any) -> bool:
    try:
        MoKOptions(**{name: value})
    except MoKConfigError:
        return False
    return True


def megatron_args() -> Any | None:
    """Megatron's parsed arguments, or None when there are none in this process (yet)."""
    import sys

    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)
