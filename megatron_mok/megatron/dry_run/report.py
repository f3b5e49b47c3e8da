"""What a dry run prints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_mok.megatron.dry_run.memory import (
    HOPPER_SMS,
    MemoryEstimate,
    MoKMemory,
    StageMemory,
    optimizer_is_counted,
)
from megatron_mok.megatron.dry_run.parameters import ModelSize, ParameterCounter, not_counted
from megatron_mok.megatron.dry_run.stages import Stage, has_experts, pipeline_stages
from megatron_mok.megatron.flags import get_options
from megatron_mok.megatron.validation import is_in_one_host, is_mok, ranks_per_host

_GIB = 2**30
_GPUS = "an H100 has about 79, an H200 139"


@dataclass(frozen=True)
class Launch:
    """A launch that has passed all checks, and what it would take.

    Attributes:
        device_type: "cuda" or "cpu", of the ranks.
        unknown: settings because of which neither parameters nor memory are known.
        size, memory: None with any of these.
    """

    config: Any
    args: Any
    device_type: str
    vocab: int
    stages: list[Stage]
    microbatches: int
    mok: MoKMemory | None
    unknown: list[str]
    size: ModelSize | None
    memory: list[StageMemory] | None

    @classmethod
    def of(cls, config: Any, args: Any, vocab: int, device_type: str) -> Launch:
        """From Megatron's checked config and arguments."""
        stages = pipeline_stages(config)
        microbatches = max(
            1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        )
        mok = None
        if is_mok(config) and config.num_moe_experts is not None:
            mok = MoKMemory.of(config, args, get_options(), device_type)
        unknown = not_counted(config, args)
        size = memory = None
        if not unknown:
            size = ParameterCounter.model_size(config, args, vocab)
            counter = ParameterCounter(
                config,
                args,
                vocab,
                tp=args.tensor_model_parallel_size,
                ep=args.expert_model_parallel_size,
                etp=args.expert_tensor_parallel_size,
            )
            estimate = MemoryEstimate(config, args, counter, microbatches, mok)
            memory = [estimate.stage(rank, stage) for rank, stage in enumerate(stages)]
        return cls(
            config, args, device_type, vocab, stages, microbatches, mok, unknown, size, memory
        )


def print_report(launch: Launch) -> None:
    """Print the launch to stdout."""
    lines = ["dry run: Megatron and megatron_mok accept these arguments", ""]
    facts = [
        ("model", _model(launch)),
        ("parameters", _parameters(launch)),
        ("ranks", _ranks(launch.args)),
        ("attention", _attention_layout(launch.args)),
        ("experts", _expert_layout(launch.config, launch.args)),
        ("step", _step(launch)),
        ("dispatcher", _dispatcher(launch)),
    ]
    for name, texts in facts:
        for text in texts:
            lines.append(f"{name:<12}{text}")
            name = ""
    lines += ["", *_pipeline(launch)]
    if launch.memory is not None:
        lines += ["", *_memory(launch)]
    if missing := missing_files(launch.args):
        lines += ["", "Not on this machine:", *(f"  {text}" for text in missing)]
    print("\n".join(lines), flush=True)


def _model(launch: Launch) -> list[str]:
    config = launch.config
    kinds = has_experts(config)
    text = f"{config.num_layers} layers ({kinds.count(False)} dense, {kinds.count(True)} MoE)"
    if config.mtp_num_layers:
        text += f", {config.mtp_num_layers} MTP"
    texts = [f"{text}, hidden {config.hidden_size:,}, vocabulary {launch.vocab:,}"]
    if config.num_moe_experts:
        texts.append(
            f"{config.num_moe_experts} experts of {config.moe_ffn_hidden_size:,}, top-"
            f"{config.moe_router_topk}, shared {config.moe_shared_expert_intermediate_size or 0:,}"
        )
    return texts


def _parameters(launch: Launch) -> list[str]:
    if launch.size is None:
        return [f"not counted: {', '.join(launch.unknown)}"]
    size = launch.size
    text = f"{_count(size.total)} total, {_count(size.active)} active per token"
    return [text + (f"; MTP {_count(size.mtp)}" if size.mtp else "")]


def _ranks(args: Any) -> list[str]:
    local = ranks_per_host()
    if local is None:
        return [f"{args.world_size}; ranks of a host unknown (LOCAL_WORLD_SIZE)"]
    hosts = -(-args.world_size // local)
    return [f"{args.world_size}: {hosts} {'host' if hosts == 1 else 'hosts'} of {local}"]


def _attention_layout(args: Any) -> list[str]:
    return [
        f"TP {args.tensor_model_parallel_size} x CP {args.context_parallel_size} x "
        f"DP {args.data_parallel_size} x PP {args.pipeline_model_parallel_size}"
        + (", sequence parallel" if args.sequence_parallel else "")
    ]


def _expert_layout(config: Any, args: Any) -> list[str]:
    if not config.num_moe_experts:
        return ["none"]
    etp, ep = args.expert_tensor_parallel_size, args.expert_model_parallel_size
    pp = args.pipeline_model_parallel_size
    text = f"ETP {etp} x EP {ep} x DP {args.world_size // (etp * ep * pp)} x PP {pp}; "
    text += f"{config.num_moe_experts // ep} experts on a rank"
    return [text, *_expert_group(etp * ep)]


def _expert_group(ranks: int) -> list[str]:
    """Where the ranks of an expert-parallel group are: Megatron counts them up first."""
    local = ranks_per_host()
    if ranks == 1 or local is None:
        return []
    if is_in_one_host(ranks, local):
        return [f"each group of {ranks} consecutive ranks is in one host"]
    return [f"a group of {ranks} consecutive ranks spans {-(-ranks // local)} hosts or more"]


def _step(launch: Launch) -> list[str]:
    args = launch.args
    tokens = args.global_batch_size * args.seq_length
    return [
        f"{args.global_batch_size:,} sequences of {args.seq_length:,} ({tokens:,} tokens), "
        f"{launch.microbatches:,} microbatches of {args.micro_batch_size} on a rank"
    ]


def _dispatcher(launch: Launch) -> list[str]:
    args, mok = launch.args, launch.mok
    name = args.moe_token_dispatcher_type
    if name == "flex":
        name += f", {args.moe_flex_dispatcher_backend}"
    if mok is None:
        return [name]
    rows = f"{mok.saved_rows:,} rows" if mok.saved_rows else "no rows"
    kept = f"backward keeps {rows} ({mok.saved_bytes / _GIB:.2f} GiB with the input)"
    if mok.mode == "dispatch":
        name, kept = f"{name}, mode dispatch", "Megatron's experts keep what backward needs"
    texts = [f"{name}: up to {mok.max_tokens:,} tokens of a rank in a call; {kept}"]
    if mok.missing:
        texts.append(f"the size of the workspace is not known here: {mok.missing}")
    return texts


def _pipeline(launch: Launch) -> list[str]:
    lines = ["pipeline stages"]
    for first, last in _equal_runs(launch.stages):
        chunks = " | ".join(str(chunk) for chunk in launch.stages[first])
        lines.append(f"  {_range(first, last):<8}{chunks}")
    return lines


def _memory(launch: Launch) -> list[str]:
    memory = launch.memory
    mok = launch.mok
    fused = mok is not None and mok.mode == "fused"
    of_mok = (("workspace",) if mok else ()) + (("saved",) if fused else ())
    kinds = ("weights", "grads", "optimizer", *of_mok, "total")
    on_gpus = launch.device_type == "cuda"
    lines = [
        f"GiB on each {'GPU' if on_gpus else 'rank'}",
        "  " + _row(("stage", "params", *kinds)),
    ]
    # Stages that differ in what they keep for backward alone share a line: the first keeps most.
    for first, last in _equal_runs([replace(stage, saved=0) for stage in memory]):
        row = memory[first]
        cells = [f"{getattr(row, kind) / _GIB:.2f}" for kind in kinds]
        lines.append("  " + _row((_range(first, last), _count(row.parameters.total), *cells)))
    largest = max(stage.total for stage in memory) / _GIB
    beside = f"; {_GPUS}" if on_gpus else ""
    lines += ["", f"The largest is {largest:.1f} GiB{beside}. Not counted:"]
    sms = f", on a GPU with {HOPPER_SMS} SMs" if on_gpus else ""
    if fused:
        lines += [
            "activations but those of the experts, temporary buffers, NCCL, the CUDA context,",
            f"fragmentation. workspace: MoK's, one for all layers{sms}. saved: most that the",
            "fused layers keep for backward, in all microbatches in flight.",
        ]
    else:
        lines.append("activations, temporary buffers, NCCL, the CUDA context, fragmentation.")
        if mok is not None:
            lines.append(f"workspace: MoK's, one for all layers{sms}.")
    if fused and (buffers := mok.grad_buffer_bytes):
        lines += [
            f"Fresh weight gradients of a layer pass through {buffers / _GIB:.2f} GiB besides:",
            "none with gradient accumulation fusion and gradients in FP32.",
        ]
    if not optimizer_is_counted(launch.args):
        lines.append(f"States of --optimizer {launch.args.optimizer} are counted like Adam's.")
    return lines


def missing_files(args: Any) -> list[str]:
    """Paths in Megatron's arguments at which this machine has nothing; one line each."""
    lines = []
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in getattr(args, name, None) or ():
            # Weights stand between the prefixes.
            if not _is_number(prefix) and not Path(f"{prefix}.idx").exists():
                lines.append(f"--{name.replace('_', '-')}: {prefix}.idx")
    for name in ("tokenizer_model", "vocab_file", "merge_file", "load", "pretrained_checkpoint"):
        path = getattr(args, name, None)
        # Names of tokenizers on a hub are relative.
        if path and Path(path).is_absolute() and not Path(path).exists():
            lines.append(f"--{name.replace('_', '-')}: {path}")
    return lines


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _row(cells: tuple[str, ...]) -> str:
    first, *others = cells
    return f"{first:<8}" + "".join(f"{cell:>10}" for cell in others)


def _equal_runs(values: list) -> list[tuple[int, int]]:
    """(first, last) indices of runs of equal values."""
    runs: list[tuple[int, int]] = []
    for index, value in enumerate(values):
        if runs and values[runs[-1][0]] == value:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"
