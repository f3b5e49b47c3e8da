"""The dry run of a launch, from the script to the report."""

from __future__ import annotations

import os
import re
import runpy
import sys

from megatron_mok.megatron import cpu_mode
from megatron_mok.megatron.dry_run.checks import (
    Validated,
    explained,
    model_config,
    padded_vocabulary,
    stop_after_validation,
)
from megatron_mok.megatron.dry_run.report import Launch, print_report
from megatron_mok.megatron.errors import DryRunError, MoKConfigError

_RANKS = re.compile(r"(\d+)x(\d+)")


def parse_ranks(text: str) -> tuple[int, int]:
    """(hosts, ranks of a host) of HOSTSxRANKS. Raises: DryRunError."""
    match = _RANKS.fullmatch(text)
    if match is None or 0 in (hosts_ranks := tuple(map(int, match.groups()))):
        raise DryRunError(f"--dry-run={text}: give hosts and GPUs of a host, such as 16x8")
    return hosts_ranks


def dry_run(script: str | None, ranks: tuple[int, int] | None) -> int:
    """Check and describe the launch whose arguments are in `sys.argv`.

    Runs the script to where Megatron has checked its arguments, and no further. Call it with the
    hooks installed.

    Args:
        script: path of the training script; None for Megatron's own arguments and no others.
        ranks: (hosts, ranks of a host); None takes them from WORLD_SIZE and LOCAL_WORLD_SIZE.
    Returns: 0, or 1 when the launch would not work; why is printed to stderr.
    """
    if ranks is not None:
        hosts, local = ranks
        os.environ.update(WORLD_SIZE=str(hosts * local), LOCAL_WORLD_SIZE=str(local), RANK="0")
    try:
        launch = _launch(script)
    except (DryRunError, MoKConfigError) as error:
        print(f"dry run: {error}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":
        print_report(launch)
    return 0


def _launch(script: str | None) -> Launch:
    args = _validated_args(script)
    device_type = "cpu" if cpu_mode.is_enabled() else "cuda"
    config = model_config(args, device_type)
    with explained("Megatron cannot spread the layers over the pipeline"):
        return Launch.of(config, args, padded_vocabulary(args), device_type)


def _validated_args(script: str | None):
    stop_after_validation()
    try:
        if script is None:
            from megatron.training import arguments

            arguments.validate_args(arguments.parse_args())
        else:
            runpy.run_path(script, run_name="__main__")
    except Validated as validated:
        return validated.args_namespace
    raise DryRunError(f"{script} ended before Megatron checked any arguments")
