"""Every wait of the Hopper kernels has a text in error messages. Needs nvcc, but no GPU."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_every_wait_has_a_text(tmp_path):
    """The switch over WaitSite has no default, so the compiler finds a site that it lacks."""
    done = subprocess.run(
        [
            *("nvcc", "-std=c++20", "-Xcompiler=-Werror=switch", f"-I{ROOT / 'csrc/include'}"),
            *("-c", ROOT / "csrc/sm90/fault.cu", "-o", tmp_path / "fault.o"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
