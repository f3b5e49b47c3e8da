"""Run an unmodified Megatron training script with megatron_mok installed.

torchrun ... -m megatron_mok.megatron.launcher [--cpu] SCRIPT [ARGUMENT ...]
python -m megatron_mok.megatron.launcher --dry-run[=HOSTSxGPUS] [--cpu] [SCRIPT] [ARGUMENT ...]

SCRIPT runs as `python SCRIPT ARGUMENT ...` would, and knows --moe-token-dispatcher-type mok and
the --mok-* flags. With --cpu it trains on CPU ranks, to try a script where there is no GPU: gloo
groups, Megatron's local modules in place of Transformer Engine's, whatever its arguments say.

With --dry-run SCRIPT runs until Megatron has checked its arguments, and no further. It needs no
GPU and starts no ranks: it prints the model's parameters, the memory of a GPU and the parallel
layout, or why the launch would not work. --dry-run=16x8 stands for 16 hosts of 8 GPUs; without it
WORLD_SIZE and LOCAL_WORLD_SIZE count. Without SCRIPT the arguments are Megatron's and no others.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

from megatron_mok.megatron import cpu_mode
from megatron_mok.megatron.dataset_helpers import use_built_helpers
from megatron_mok.megatron.errors import DryRunError
from megatron_mok.megatron.install import install

USAGE = (
    "usage: python -m megatron_mok.megatron.launcher [--dry-run[=HOSTSxGPUS]] [--cpu] "
    "SCRIPT [ARGUMENT ...]"
)

_OPTION = re.compile(r"--cpu|--dry-run(=(?P<ranks>.*))?")


def main(argv: list[str]) -> int:
    """Run the script in `argv` as `__main__` with its arguments. Returns 2 on wrong usage, and
    what `dry_run` returns for a dry run."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{__doc__.strip()}")
        return 0
    script_argv = list(argv)
    cpu = is_dry = False
    ranks = ""
    while script_argv and (option := _OPTION.fullmatch(script_argv[0])):
        script_argv.pop(0)
        if option[0] == "--cpu":
            cpu = True
        else:
            is_dry, ranks = True, option["ranks"] or ""
    script = script_argv[0] if script_argv else ""
    if is_dry and (not script or script.startswith("--")):
        script, script_argv = None, ["launcher", *script_argv]
    elif not script:
        return _wrong_usage("SCRIPT is missing")
    elif not Path(script).is_file():
        hint = ": the launcher's options are --cpu and --dry-run" if script[:1] == "-" else ""
        return _wrong_usage(f"SCRIPT {script!r} is not a file{hint}")
    else:
        # As `python SCRIPT` would: the script's folder first, so that its own Megatron checkout
        # and helper modules are found. Before anything imports Megatron.
        sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = script_argv
    if cpu:
        cpu_mode.enable()
        sys.argv += cpu_mode.MEGATRON_ARGS  # the last of equal arguments wins
    install()
    if is_dry:
        return _dry_run(script, ranks)
    use_built_helpers()
    runpy.run_path(script, run_name="__main__")
    return 0


def _dry_run(script: str | None, ranks: str) -> int:
    from megatron_mok.megatron.dry_run import dry_run, parse_ranks

    try:
        hosts = parse_ranks(ranks) if ranks else None
    except DryRunError as error:
        return _wrong_usage(str(error))
    return dry_run(script, hosts)


def _wrong_usage(problem: str) -> int:
    print(f"{USAGE}\n{problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
