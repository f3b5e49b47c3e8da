"""What MoK's layers refuse, by mode, and what they run differently.

Argparse choices are not enough (YAML configs and programs bypass them), so the rules are applied to
the config itself: at its construction, and again at the construction of every layer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from megatron_mok.megatron.errors import MoKConfigError
from megatron_mok.megatron.flags import MoKOptions, megatron_args, read_options
from megatron_mok.megatron.rules import (
    ARGS_REFUSALS,
    CONFIG_REFUSALS,
    USE_ALLTOALL,
    captures_iteration,
)
from megatron_mok.runtime import LayerShape
from megatron_mok.runtime.engine import engine_problem

logger = logging.getLogger(__name__)

DISPATCHER = "mok"


def is_mok(config: Any) -> bool:
    """Whether the config selects this plugin."""
    return getattr(config, "moe_token_dispatcher_type", None) == DISPATCHER


@contextmanager
def seen_as_alltoall(config: Any) -> Iterator[None]:
    """Let native code take `config` for an alltoall one: it knows no other name for a dispatcher
    of dropless tokens, and would refuse `mok`."""
    previous = config.moe_token_dispatcher_type
    config.moe_token_dispatcher_type = "alltoall"
    try:
        yield
    finally:
        config.moe_token_dispatcher_type = previous


def config_problems(config: Any, args: Any, options: MoKOptions) -> list[str]:
    """Everything in the config, Megatron's arguments (None: there are none) and the options that
    the mode refuses, one line each with the flag that resolves it."""
    problems = [
        rule.problem(owner)
        for owner, rules in ((config, CONFIG_REFUSALS), (args, ARGS_REFUSALS))
        for rule in rules
        if options.mode in rule.modes
    ]
    problems += _shape_problems(config, options.mode)
    problems.append(_placement_problem(config))
    if options.log_statistics and captures_iteration(
        getattr(config, "cuda_graph_impl", "none"), config
    ):
        problems.append(
            "--mok-log-statistics: a graph of the full iteration replays kernels, and counts no "
            "calls; drop it, or set --cuda-graph-impl none"
        )
    return [line for line in problems if line is not None]


# A shape that every engine takes, and for each of its sizes the config's field and flag.
_ANY_SHAPE = LayerShape(
    hidden=64, ffn=64, num_experts=1, topk=1, max_tokens=1, dtype=torch.bfloat16
)
_SHAPE_FIELDS = {
    "hidden": ("hidden_size", "--hidden-size"),
    "ffn": ("moe_ffn_hidden_size", "--moe-ffn-hidden-size"),
    "num_experts": ("num_moe_experts", "--num-experts"),
    "topk": ("moe_router_topk", "--moe-router-topk"),
    "dtype": ("params_dtype", "--bf16"),
}


def _shape_problems(config: Any, mode: str) -> list[str]:
    problems = []
    for size, (name, flag) in _SHAPE_FIELDS.items():
        if size == "dtype" and config.fp16:
            continue  # has a line of its own
        if size == "ffn" and mode == "dispatch":
            continue  # Megatron's experts may have any
        try:
            replace(_ANY_SHAPE, **{size: getattr(config, name)})
        except ValueError as error:
            problems.append(f"{name}: {error}; change {flag}, {USE_ALLTOALL}")
    return problems


def workspace_shape(config: Any, options: MoKOptions) -> LayerShape:
    """The shape of the workspace for layers of this config. `options.max_tokens_per_rank` must be
    known."""
    ffn = config.moe_ffn_hidden_size
    if options.mode == "dispatch":
        ffn += -ffn % 64  # computes nothing; how much memory the engine takes depends on it
    return LayerShape(
        hidden=config.hidden_size,
        ffn=ffn,
        num_experts=config.num_moe_experts,
        topk=config.moe_router_topk,
        max_tokens=options.max_tokens_per_rank,
        dtype=config.params_dtype,
    )


def ranks_per_host() -> int | None:
    """As torchrun says (LOCAL_WORLD_SIZE); None under launchers that do not."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else None


def is_in_one_host(group: int, local: int) -> bool:
    """Whether all groups of `group` consecutive ranks, which start at multiples of it, are within
    hosts of `local` ranks."""
    return local % group == 0


def _placement_problem(config: Any) -> str | None:
    local = ranks_per_host()
    ep = config.expert_model_parallel_size
    # Where it is not known, the ranks find out when they make their workspace.
    if local is None or is_in_one_host(ep, local):
        return None
    return (
        f"expert_model_parallel_size = {ep}: ranks share memory within one host, and a host has "
        f"{local} ranks (LOCAL_WORLD_SIZE); set --expert-model-parallel-size to a divisor of "
        f"{local}"
    )


def layer_problems(config: Any, options: MoKOptions, device: torch.device) -> list[str]:
    """What stands against a layer on this device, besides `config_problems`; one line each."""
    problems = device_problems(config, options, device.type)
    if reason := engine_problem(device.type):
        problems.append(f"no engine for {device.type} tensors: {reason}; {USE_ALLTOALL}")
    return problems


def device_problems(config: Any, options: MoKOptions, device_type: str) -> list[str]:
    """`layer_problems` but for the engine, which may be on another machine."""
    problems = []
    if options.max_tokens_per_rank is None:
        problems.append(
            "the most tokens per rank are not known; set --mok-max-tokens-per-rank, or in a "
            "program megatron_mok.megatron.set_options(MoKOptions(max_tokens_per_rank=...))"
        )
    if device_type == "cuda" and config.params_dtype != torch.bfloat16:
        problems.append(
            f"params_dtype = {config.params_dtype}: the GPU engine computes in BF16; set --bf16"
        )
    return problems


def check_config(config: Any, device: torch.device | None = None) -> MoKOptions:
    """Refuse what the mode cannot do, and switch off what it does without.

    Looks at the config, and at the arguments and options of this process. Does nothing for configs
    of other dispatchers and of models without experts.

    Args:
        config: Megatron's TransformerConfig.
        device: where a layer is about to be built; None while there is only the config.
    Returns: the options that the layer is to use.
    Raises: MoKConfigError with every conflict.
    """
    options, problems = read_options()
    if not is_mok(config) or config.num_moe_experts is None:
        return options
    problems = [*problems, *config_problems(config, megatron_args(), options)]
    if device is not None:
        problems += layer_problems(config, options, device)
    if problems:
        raise MoKConfigError(*problems)
    if config.moe_shared_expert_overlap:
        # Bridge recipes set it. The shared expert itself must be built for serial use, so the
        # config has to say so too.
        _warn_once(
            "moe_shared_expert_overlap has no effect under --moe-token-dispatcher-type mok: the "
            "shared expert runs before the routed experts, with the same result."
        )
        config.moe_shared_expert_overlap = False
    selective = config.recompute_granularity == "selective"
    if options.mode == "fused" and selective and "moe_act" in config.recompute_modules:
        _warn_once(
            "recompute module moe_act has no effect under --moe-token-dispatcher-type mok: the "
            "fused layer always recomputes the activation in backward."
        )
    return options


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message in _warned:
        return
    _warned.add(message)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.warning(message)
