"""An unmodified training script through the launcher, on one GPU in BF16: Transformer Engine's
modules where it is installed, else Megatron's local ones."""

import importlib.util

import pytest

from tests.megatron.script_runs import STEPS, assert_losses_agree, run

BOUND = 2e-3  # of a relative difference of losses: ten times the largest on CPU ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
]


def train(folder, name, dispatcher, *args):
    # Slower than on the CPU: at the rate there, rounding alone moves losses in BF16 by 1e-2.
    args = ("--lr=2e-3", *args)
    status, losses, log = run(folder, name, dispatcher, *args, device="cuda", ranks=1)
    assert status == 0, log[-3000:]
    assert len(losses) == STEPS
    return losses, log


def test_losses_fall_as_those_of_alltoall(tmp_path):
    losses, log = train(tmp_path, "mok", "mok")
    assert "fused MoE layers, engine sm90, expert-parallel group of 1" in log
    native, _ = train(tmp_path, "alltoall", "alltoall")
    assert_losses_agree(losses, native, BOUND)


def test_deterministic_runs_are_bitwise_equal(tmp_path):
    first, again = (
        train(tmp_path, name, "mok", "--deterministic-mode")[0] for name in ("first", "again")
    )
    assert first == again
