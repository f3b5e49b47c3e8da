"""The Hopper engine at the limits of what it takes, and under compute-sanitizer."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.layers import gpu_layer, workspaces_for
from tests.in_process import relative_error, run_layer, run_reference

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((65536, 64, 64, 4, 2), [0, 0, 1, 5000, 65536]),
        ((65536, 64, 64, 8, 1), [0, 65535, 65536]),
        ((128, 64, 64, 1024, 32), [0, 100, 101, 128, 128]),
        ((33, 64, 64, 32, 32), [0, 31, 33]),
    ],
    ids=["65536_tokens", "65535_and_1", "k32_e1024", "k32_e32"],
)
def test_forward_and_backward(shape, cuts):
    layer = gpu_layer(*shape, seed=81)
    tokens = shape[0]
    alone = run_layer(layer, workspaces_for(layer, 1), [0, tokens], 1 << 20, "cuda")
    ranks = len(cuts) - 1
    run_layer(layer, workspaces_for(layer, ranks), cuts, 1 << 20, "cuda").assert_bitwise_equal(
        alone
    )
    exact = run_reference(layer, torch.float64)
    assert relative_error(alone.output_TH, exact.output_TH) < 1e-2
    assert relative_error(alone.grad_hidden_TH, exact.grad_hidden_TH) < 1e-2


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool):
    done = subprocess.run(
        [
            *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
            *("--kernel-name", "kns=sm90"),
            *(sys.executable, "-m", "tests.gpu.small_calls"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "every call made" in done.stdout
