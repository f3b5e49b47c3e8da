"""Run an unmodified Megatron training script with megatron_mok installed.

torchrun ... -m megatron_mok.megatron.launcher [--cpu] SCRIPT [ARGUMENT ...]

SCRIPT runs as `python SCRIPT ARGUMENT ...` would, and knows --moe-token-dispatcher-type mok and
the --mok-* flags. With --cpu it trains on CPU ranks, to try a script where there is no GPU: gloo
groups, Megatron's local modules in place of Transformer Engine's, whatever its arguments say.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_mok.megatron import cpu_mode
from megatron_mok.megatron.dataset_helpers import use_built_helpers
from megatron_mok.megatron.install import install

USAGE = "usage: python -m megatron_mok.megatron.launcher [--cpu] SCRIPT [ARGUMENT ...]"


def main(argv: list[str]) -> int:
    """Run the script in `argv` as `__main__` with its arguments. Returns 2 on wrong usage."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{__doc__.strip()}")
        return 0
    cpu = argv[:1] == ["--cpu"]
    script_argv = argv[1:] if cpu else argv
    if not script_argv:
        return _wrong_usage("SCRIPT is missing")
    script = Path(script_argv[0])
    if not script.is_file():
        hint = (
            ": options come before SCRIPT, and --cpu is all there is" if argv[0][:1] == "-" else ""
        )
        return _wrong_usage(f"SCRIPT {script_argv[0]!r} is not a file{hint}")
    # As `python SCRIPT` would: the script's folder first, so that its own Megatron checkout and
    # helper modules are found. Before anything imports Megatron.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = list(script_argv)
    if cpu:
        cpu_mode.enable()
        sys.argv += cpu_mode.MEGATRON_ARGS  # the last of equal arguments wins
    install()
    use_built_helpers()
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _wrong_usage(problem: str) -> int:
    print(f"{USAGE}\n{problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
