"""Runs of pretrain_script.py through the launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mok.compare.args import cuda_args

SCRIPT = Path(__file__).with_name("pretrain_script.py")
STEPS, SAVE_EVERY = 8, 3
ARGS = [
    *("--num-layers=2", "--hidden-size=64", "--ffn-hidden-size=128", "--num-attention-heads=2"),
    *("--seq-length=32", "--max-position-embeddings=32", "--swiglu", "--disable-bias-linear"),
    *("--normalization=RMSNorm", "--position-embedding-type=rope"),
    *("--untie-embeddings-and-output-weights", "--attention-dropout=0", "--hidden-dropout=0"),
    *("--num-experts=4", "--moe-router-topk=2", "--moe-ffn-hidden-size=64"),
    *("--moe-router-dtype=fp32", "--moe-router-load-balancing-type=aux_loss"),
    "--moe-aux-loss-coeff=1e-2",
    # The end of document is 255 or 256, by version.
    *("--mock-data", "--tokenizer-type=NullTokenizer", "--vocab-size=256"),
    "--make-vocab-size-divisible-by=512",
    *("--micro-batch-size=2", "--global-batch-size=8", f"--train-iters={STEPS}", "--lr=1e-2"),
    *("--lr-decay-style=constant", "--log-interval=1", "--eval-iters=0", "--eval-interval=1000"),
    *("--use-distributed-optimizer", "--ckpt-format=torch_dist", f"--save-interval={SAVE_EVERY}"),
]


def run(folder, name, dispatcher, *args, die_at=None, device="cpu", ranks=2):
    """Train through the launcher, at an expert parallel size of `ranks`.

    Args:
        folder: gets the logs and what Megatron makes of its data.
        args: more of the launch's arguments.
        die_at: iteration in which every rank kills itself.
        device: "cpu", or "cuda" for a GPU per rank, in BF16.
    Returns: (exit status, losses as hex by rank, step and microbatch, the log).
    """
    losses = folder / f"{name}.losses"
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONWARNINGS": "ignore",
        "SCRIPT_LOSSES": str(losses),
    }
    if die_at is not None:
        env["SCRIPT_DIE_AT"] = str(die_at)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "megatron_mok.megatron.launcher"]
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        command += ["--cpu", str(SCRIPT)]
    else:
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        command += [str(SCRIPT), "--bf16", "--moe-grouped-gemm", *cuda_args()]
    command += [*ARGS, f"--data-cache-path={folder / 'cache'}", *args]
    command.append(f"--expert-model-parallel-size={ranks}")
    command.append(f"--moe-token-dispatcher-type={dispatcher}")
    log = folder / f"{name}.log"
    with log.open("w") as output:
        done = subprocess.run(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, timeout=200, check=False
        )
    lines = losses.read_text().splitlines() if losses.exists() else []
    found = {}
    for rank, step, loss in map(str.split, lines):
        found.setdefault((int(rank), int(step)), []).append(loss)
    return done.returncode, found, log.read_text(errors="replace")


def assert_losses_agree(found, expected, bound):
    """Losses of two runs agree to a relative `bound`, and those of the second fall."""
    assert found.keys() == expected.keys()
    for key, losses in expected.items():
        numbers, wanted = ([float.fromhex(x) for x in texts] for texts in (found[key], losses))
        assert numbers == pytest.approx(wanted, rel=bound), key
    first, last = ([float.fromhex(x) for x in expected[0, step]] for step in (1, STEPS))
    assert sum(last) < sum(first)
