"""Megatron's and MoK's checks of a launch, made where there may be no GPU."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from megatron_mok.megatron.errors import DryRunError, MoKConfigError
from megatron_mok.megatron.flags import read_options
from megatron_mok.megatron.patching import replace_function
from megatron_mok.megatron.validation import check_config, device_problems, is_mok

# What Megatron takes from Transformer Engine, None without it, and asks for in its checks.
_FROM_TRANSFORMER_ENGINE = {
    "megatron.core.models.common.embeddings.rope_utils": (
        "fused_apply_rotary_pos_emb",
        "fused_apply_rotary_pos_emb_thd",
    ),
    "megatron.core.transformer.moe.moe_utils": (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    ),
}


class Validated(BaseException):
    """Megatron's arguments have passed its own checks: leaves the script, past its handlers."""

    def __init__(self, args: Any) -> None:
        self.args_namespace = args
        super().__init__()


def stop_after_validation() -> None:
    """From now on in this process, Megatron's `validate_args` ends in `Validated`, and nothing
    starts a process group."""
    from megatron.training import arguments, initialize, yaml_arguments

    def validate_args(native: Callable, args: Any, *more: Any, **named: Any) -> None:
        check_sizes(args)
        with as_on_a_gpu_machine(), explained("Megatron refuses the arguments"):
            native(args, *more, **named)
        raise Validated(args)

    def validate_yaml(native: Callable, *args: Any, **named: Any) -> None:
        raise DryRunError("--yaml-cfg: the dry run knows Megatron's flags only")

    def initialize_megatron(native: Callable, *args: Any, **named: Any) -> None:
        # In 0.17 this is what parses the arguments, after it has asked for CUDA.
        torch.cuda.is_available = lambda: True
        native(*args, **named)

    def init_process_group(native: Callable, *args: Any, **named: Any) -> None:
        raise DryRunError("the script starts its process groups before Megatron checks arguments")

    _replace(arguments, validate_args)
    _replace(yaml_arguments, validate_yaml)
    _replace(initialize, initialize_megatron)
    _replace(torch.distributed, init_process_group)


def _replace(owner: Any, replacement: Callable) -> None:
    """Put `replacement`, which is given the native one first, for the function of its name in the
    module `owner`."""
    name = replacement.__name__
    replace_function(owner, name, functools.partial(replacement, getattr(owner, name)))


@contextmanager
def as_on_a_gpu_machine() -> Iterator[None]:
    """For checks that ask what GPU there is: a Hopper where there is none. And for those that ask
    for Transformer Engine: a new one where none is installed."""
    from megatron.core import utils

    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    if not torch.cuda.device_count():
        hopper = SimpleNamespace(major=9, minor=0)
        replace(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        replace(torch.cuda, "get_device_properties", lambda *_: hopper)
    if not utils.is_te_min_version("0.0.1"):
        replace(utils, "_te_version", Version("999"))
        for module_name, names in _FROM_TRANSFORMER_ENGINE.items():
            module = importlib.import_module(module_name)
            for name in names:
                if getattr(module, name, True) is None:
                    replace(module, name, _elsewhere)
    logging.disable(logging.INFO)
    try:
        with redirect_stdout(StringIO()):  # among it all arguments, in 800 lines
            yield
    finally:
        logging.disable(logging.NOTSET)
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)


def _elsewhere(*_: Any, **__: Any) -> None:
    raise DryRunError("the dry run computes nothing")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns what Megatron raises, much of it bare assertions, into a DryRunError that says what
    was refused."""
    try:
        yield
    except (MoKConfigError, DryRunError):
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file = os.path.basename(frame.filename)
        reason = str(error) or frame.line
        raise DryRunError(f"{what}: {reason} ({file}, line {frame.lineno})") from error


def check_sizes(args: Any) -> None:
    """What Megatron checks only when its process groups and models are made.

    Raises: DryRunError with every problem.
    """
    problems = []
    world = args.world_size
    etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    sizes = {
        "tensor x pipeline x context parallel size": (
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.context_parallel_size,
        ),
        "expert tensor x expert x pipeline parallel size": (
            etp,
            args.expert_model_parallel_size,
            args.pipeline_model_parallel_size,
        ),
    }
    for name, factors in sizes.items():
        product = functools.reduce(int.__mul__, factors)
        if world % product:
            shown = " x ".join(map(str, factors))
            problems.append(f"{world} ranks are not a multiple of the {name} ({shown} = {product})")
    if args.num_experts and args.num_experts % args.expert_model_parallel_size:
        problems.append(
            f"--num-experts {args.num_experts} is not a multiple of --expert-model-parallel-size "
            f"{args.expert_model_parallel_size}"
        )
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    replicas = world // (model * args.context_parallel_size)
    if not problems and args.micro_batch_size and args.global_batch_size:
        unit = args.micro_batch_size * replicas
        if args.global_batch_size % unit:
            problems.append(
                f"--global-batch-size {args.global_batch_size} is not a multiple of "
                f"--micro-batch-size x data-parallel size ({args.micro_batch_size} x {replicas})"
            )
    if args.moe_token_dispatcher_type == "flex":
        if args.moe_router_dtype != "fp32":
            problems.append("--moe-token-dispatcher-type flex: needs --moe-router-dtype fp32")
        if args.tensor_model_parallel_size * args.expert_model_parallel_size == 1:
            problems.append("--moe-token-dispatcher-type flex: needs tensor x expert parallel > 1")
    if problems:
        raise DryRunError("\n".join(["the launch would fail:", *(f"  - {p}" for p in problems)]))


def model_config(args: Any, device_type: str) -> Any:
    """The TransformerConfig of Megatron's checked arguments, itself checked by Megatron and MoK.

    Raises: DryRunError, MoKConfigError.
    """
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.global_vars import set_args

    set_args(args)  # where MoK's checks look for arguments and options
    with as_on_a_gpu_machine(), explained("Megatron refuses the model"):
        config = core_transformer_config_from_args(args)
    if is_mok(config) and config.num_moe_experts is not None:
        check_config(config)
        options, _ = read_options()
        if problems := device_problems(config, options, device_type):
            raise MoKConfigError(*problems)
    return config


def padded_vocabulary(args: Any) -> int:
    """Rows of the embedding: what Megatron makes of --vocab-size, or of the tokenizer's.

    Raises: DryRunError when neither is there.
    """
    if args.padded_vocab_size is not None:
        return args.padded_vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    size = args.vocab_size or _quietly(_tokenizer_size, args)
    return -(-size // multiple) * multiple


def _tokenizer_size(args: Any) -> int:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    with explained("the size of the vocabulary is not known; set --vocab-size, or a tokenizer"):
        return build_tokenizer(args).vocab_size


def _quietly(function: Callable, *args: Any) -> Any:
    with redirect_stdout(StringIO()):
        return function(*args)
