"""CPU mode changes a process for good, so each test has processes of its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command) -> str:
    """What `python COMMAND` prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_changes_nothing():
    out = run(
        "-c",
        "import torch\n"
        "before = torch.zeros, torch.cuda.is_available, torch.Tensor.to, torch.Tensor.type\n"
        "from megatron_mok.megatron import cpu_mode\n"
        "after = torch.zeros, torch.cuda.is_available, torch.Tensor.to, torch.Tensor.type\n"
        "print(before == after, cpu_mode.is_enabled())\n",
    )
    assert out.split() == ["True", "False"]


def test_refuses_to_come_after_megatron():
    out = run(
        "-c",
        "import megatron.core\n"
        "from megatron_mok.megatron import cpu_mode\n"
        "try:\n"
        "    cpu_mode.enable()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n",
    )
    assert "before megatron.core is imported" in out


def test_packages_for_cuda_tensors_are_as_if_not_installed(tmp_path):
    """Without this Megatron calls Transformer Engine's CUDA kernels with CPU tensors."""
    for name in ("transformer_engine", "apex", "amp_C", "fused_weight_gradient_mlp_cuda"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('no CUDA tensors here')\n")
    out = run(
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from megatron_mok.megatron import cpu_mode, install\n"
        "cpu_mode.enable(); install()\n"
        "import megatron.training.training\n"
        "from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER\n"
        "from megatron.core.tensor_parallel import layers, random\n"
        "print(random.HAVE_TE, layers._grad_accum_fusion_available, USING_PYTORCH_OPTIMIZER)\n",
    )
    assert out.split() == ["False", "False", "True"]


def test_cuda_devices_are_the_cpu():
    out = run(
        "-c",
        "import torch\n"
        "from megatron_mok.megatron import cpu_mode\n"
        "cpu_mode.enable(); cpu_mode.enable()\n"
        "made = [torch.zeros(2, device='cuda'), torch.rand(2, device=torch.device('cuda', 0)),\n"
        "    torch.ones(2, device=torch.cuda.current_device()), torch.ones(2).to('cuda'),\n"
        "    torch.ones(2).to(device='cuda:0', dtype=torch.bfloat16), torch.ones(2).cuda(),\n"
        "    torch.nn.Linear(2, 2).cuda().weight, torch.zeros_like(torch.ones(2), device='cuda')]\n"
        "print(all(x.device.type == 'cpu' for x in made), made[4].dtype, made[4].type())\n",
    )
    assert out.split() == ["True", "torch.bfloat16", "torch.cuda.BFloat16Tensor"]


def test_rng_tracker_forks_at_once_and_restores():
    out = run(
        "-c",
        "import torch\n"
        "from megatron_mok.megatron import cpu_mode\n"
        "cpu_mode.enable()\n"
        "from megatron.core.tensor_parallel import random\n"
        "tracker = random.CudaRNGStatesTracker()\n"
        "torch.manual_seed(1)\n"
        "tracker.add('a', 2); tracker.add('b', 3)\n"
        "with tracker.fork('a'):\n"
        "    one = torch.rand(3)\n"
        "    with tracker.fork('b'):\n"
        "        torch.rand(5)\n"
        "    two = torch.rand(3)\n"
        "outside = torch.rand(3)\n"
        "with tracker.fork('a'):\n"
        "    three = torch.rand(3)\n"
        "seeded = torch.manual_seed(2) and torch.rand(9)\n"
        "torch.manual_seed(1)\n"
        "print(torch.equal(torch.cat([one, two, three]), seeded),\n"
        "    torch.equal(outside, torch.rand(3)))\n",
    )
    assert out.split() == ["True", "True"]


def test_replicas_are_compared_bit_by_bit(tmp_path):
    # By occurrence, not by line: two ranks write at once.
    out = run("-m", "tests.compare.replica_ranks", tmp_path / "store")
    for text in (
        "dense: data-parallel replicas differ now: 1 of 1",
        "first '0.dense.weight'",
        "expert: expert data-parallel replicas differ",
        "none: equal",
        "other experts: equal",
    ):
        assert out.count(text) == 2, text
