"""What every results file says about the run: command, machine, versions, date, commit."""

import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path


def command_line() -> str:
    """This process's `megatron-mok` command, as a shell would take it.

    Absolute paths are cut to file names: folders of one machine say nothing to readers elsewhere.
    """
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["megatron-mok", *words])


def installed_versions() -> dict[str, str | None]:
    """Versions of `torch`, `megatron` (core) and `te`; None for what is not installed.

    Does not import Megatron or Transformer Engine.
    """
    import torch

    core = sys.modules.get("megatron.core")
    return {
        "torch": torch.__version__,
        "megatron": getattr(core, "__version__", None) or _installed("megatron-core"),
        "te": _installed("transformer_engine"),
    }


def header(
    command: str,
    *,
    gpu: str | None,
    n_gpus: int,
    ranks: int,
    versions: dict[str, str | None],
    dense_tflops: float | None,
) -> dict:
    """The first keys of a results file; `rows` and more follow.

    Args:
        command: what was run.
        gpu: name of the GPU, None where the run was on CPUs.
        versions: of `installed_versions`; what is missing there is None.
        dense_tflops: rate of a dense matrix product, measured in the same run, or None.
    """
    return {
        "command": command,
        "gpu": gpu,
        "n_gpus": n_gpus,
        "ranks": ranks,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        **{name: versions.get(name) for name in ("torch", "megatron", "te")},
        "dense_tflops": dense_tflops,
    }


def write(path: Path, tree: dict) -> None:
    """Write a results file."""
    path.write_text(json.dumps(tree, indent=1) + "\n")


def commit() -> str | None:
    """The source's commit, "-dirty" appended where files differ from it.

    The environment variable MOK_COMMIT says it where the source has no history of its own beside
    it (a wheel, a container image, a copy); else git does; None where neither knows.
    """
    given = os.environ.get("MOK_COMMIT")
    if given:
        return given
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() or None if git.returncode == 0 else None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
