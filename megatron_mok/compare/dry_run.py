"""`compare --dry-run`: the launcher's dry run of a comparison's arms."""

import subprocess
import sys

from .args import megatron_args
from .arms import ARMS
from .config import CompareConfig
from .data import prepare


def dry_run(config: CompareConfig) -> int:
    """Check every arm of `config` with Megatron, and print what the last one would take.

    Trains nothing and needs no GPU. Writes the data, if it is not there yet.

    Returns: 0, or 1 when Megatron or MoK refuses an arm; why is printed to stderr.
    Raises: DataError when there is no data.
    """
    common = megatron_args(config, prepare(config.data.source, config.data.max_bytes))
    command = [sys.executable, "-m", "megatron_mok.megatron.launcher"]
    command.append(f"--dry-run=1x{config.parallel.ranks}")
    if config.device == "cpu":
        command.append("--cpu")
    for name in config.arms:
        done = subprocess.run(
            [*command, *common, *ARMS[name].flags], capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"arm {name}: {_reason(done.stderr)}", file=sys.stderr)
            return 1
        print(f"arm {name}: accepted", flush=True)
    print(f"\n{done.stdout}", end="")
    return 0


def _reason(errors: str) -> str:
    """What the dry run says, without the warnings of the libraries that it imports."""
    return errors[errors.find("dry run: ") :] if "dry run: " in errors else errors
