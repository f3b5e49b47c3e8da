"""Run an unmodified Megatron training script with megatron_mok installed.

torchrun ... -m megatron_mok.megatron.launcher pretrain_gpt.py --moe-token-dispatcher-type mok ...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_mok.megatron.install import install

USAGE = "usage: python -m megatron_mok.megatron.launcher SCRIPT [ARGUMENT ...]"


def main(argv: list[str]) -> int:
    """Run `argv[0]` as `__main__` with the rest as its arguments. Returns 2 on wrong usage."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{__doc__.strip()}")
        return 0
    if not argv:
        print(f"{USAGE}\nSCRIPT is missing", file=sys.stderr)
        return 2
    script = Path(argv[0])
    if not script.is_file():
        print(f"{USAGE}\nSCRIPT {argv[0]!r} is not a file", file=sys.stderr)
        return 2
    # As `python SCRIPT` would: the script's folder first, so that its own Megatron checkout and
    # helper modules are found. Before install(), which imports Megatron.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = list(argv)
    install()
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
