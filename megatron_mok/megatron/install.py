"""Hooks that make an unchanged Megatron-Core know `--moe-token-dispatcher-type mok`."""

from __future__ import annotations

import functools
import importlib
import logging
import typing
from typing import Any

from megatron_mok.megatron.errors import MoKConfigError, MoKInstallError
from megatron_mok.megatron.flags import add_mok_arguments, megatron_args
from megatron_mok.megatron.patching import replace_function

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.17.1", "0.18.2", "0.19.2")  # `make test-matrix` runs these
_FIELD = "moe_token_dispatcher_type"

_installed = False


def install() -> None:
    """Put the hooks into Megatron-Core. Further calls do nothing.

    - `--moe-token-dispatcher-type` allows `mok`, and the `--mok-*` flags exist.
    - A config that says `mok` is checked when it is made (`validation.check_config`).
    - `MoELayer(config, ...)` with such a config makes a `MoKMoELayer`.
    - Megatron's report of its MoE metrics has MoK's statistics, with `--mok-log-statistics`.

    Call it before Megatron parses its arguments and builds its model.
    Raises: MoKInstallError when that moment has passed, or this Megatron lacks what is hooked.
    """
    global _installed
    if _installed:
        return
    if megatron_args() is not None:
        raise MoKInstallError(
            "megatron_mok.megatron.install() came too late: Megatron has already parsed its "
            "arguments, without the --mok-* flags. Call it before pretrain() or "
            "initialize_megatron(), at the top of the script, or start the script with "
            "`python -m megatron_mok.megatron.launcher SCRIPT ARGS...`"
        )
    _check_version()
    config_cls = _find("megatron.core.transformer.transformer_config", "TransformerConfig")
    layer_cls = _find("megatron.core.transformer.moe.moe_layer", "MoELayer")
    dispatcher_field = getattr(config_cls, "__dataclass_fields__", {}).get(_FIELD)
    if dispatcher_field is None or typing.get_origin(dispatcher_field.type) is not typing.Literal:
        raise MoKInstallError(
            f"TransformerConfig.{_FIELD} of this Megatron-Core is not a Literal; tested versions: "
            f"{', '.join(TESTED_VERSIONS)}"
        )
    # The layer subclasses Megatron's. What can fail comes before the first change to Megatron.
    from megatron_mok.megatron.layer import MoKMoELayer
    from megatron_mok.megatron.statistics import hook_reports

    _widen_choices(config_cls, dispatcher_field)
    _hook_post_init(config_cls)
    _hook_layer(layer_cls, MoKMoELayer)
    _hook_arguments()
    hook_reports()
    _installed = True


def _check_version() -> None:
    try:
        version = importlib.import_module("megatron.core").__version__
    except ImportError as error:
        raise MoKInstallError(
            "megatron.core cannot be imported; install megatron-core, or put a Megatron-LM "
            f"checkout on PYTHONPATH ({error})"
        ) from error
    if not is_tested(version):
        logger.warning(
            "megatron_mok is tested with Megatron-Core %s; this is %s. `megatron-mok compare` "
            "shows whether losses agree with those of alltoall.",
            ", ".join(TESTED_VERSIONS),
            version,
        )


def is_tested(version: str) -> bool:
    """Whether the tests have run with this Megatron-Core or another patch of the same release
    (checkouts of a release call themselves by any of its patches or candidates)."""
    releases = {tested.rpartition(".")[0] for tested in TESTED_VERSIONS}
    return ".".join(version.split(".")[:2]) in releases


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MoKInstallError(
            f"{module}.{name} is not in this Megatron-Core ({error}); tested versions: "
            f"{', '.join(TESTED_VERSIONS)}"
        ) from error


def _widen_choices(config_cls: type, dispatcher_field: Any) -> None:
    # The argument parser takes its choices from this type. Subclasses share the Field object.
    widened = typing.Literal[(*typing.get_args(dispatcher_field.type), "mok")]
    dispatcher_field.type = widened
    config_cls.__annotations__[_FIELD] = widened


def _hook_post_init(config_cls: type) -> None:
    from megatron_mok.megatron.validation import check_config, is_mok, seen_as_alltoall

    native = config_cls.__post_init__

    @functools.wraps(native)
    def post_init(self: Any) -> None:
        if not is_mok(self):
            native(self)
            return
        with seen_as_alltoall(self):
            native(self)
        check_config(self)

    config_cls.__post_init__ = post_init


def _hook_layer(layer_cls: type, mok_cls: type) -> None:
    from megatron_mok.megatron.validation import is_mok

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        # No arguments at all: copy and pickle make an empty object.
        config = args[0] if args else kwargs.get("config")
        if is_mok(config) and not issubclass(cls, mok_cls):
            if cls is not layer_cls:
                raise MoKConfigError(
                    f"{cls.__module__}.{cls.__qualname__} is its own kind of MoELayer, which "
                    "MoK's layers cannot stand in for; use "
                    "--moe-token-dispatcher-type alltoall"
                )
            return mok_cls.__new__(mok_cls)
        return object.__new__(cls)

    # Stays for the life of the process: once set, deleting it would leave object.__new__ refusing
    # the arguments of every MoELayer.
    layer_cls.__new__ = staticmethod(new)


def _hook_arguments() -> None:
    try:
        arguments = importlib.import_module("megatron.training.arguments")
    except ImportError as error:
        # Megatron-Core alone: nothing here parses arguments, options come from set_options().
        logger.debug("megatron.training is not importable, no --mok-* flags: %s", error)
        return
    native = arguments.add_megatron_arguments

    @functools.wraps(native)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_mok_arguments(native(parser))

    replace_function(arguments, "add_megatron_arguments", add_megatron_arguments)
