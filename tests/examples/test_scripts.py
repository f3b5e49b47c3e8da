"""The launch scripts of examples/, and the configurations that stand for whole runs on GPUs."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mok.compare.args import megatron_args
from megatron_mok.compare.arms import ARMS
from megatron_mok.compare.config import load
from megatron_mok.compare.data import Dataset
from tests.megatron.launcher_forks import LauncherForks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("pretrain_*.sh"))
MODELS = [  # the models that a script has defaults for
    ("pretrain_deepseek_v3.sh", "deepseek_v3"),
    ("pretrain_glm4_5.sh", "glm_4_5"),
    ("pretrain_glm4_5.sh", "glm_4_5_air"),
    ("pretrain_kimi_k2.sh", "kimi_k2"),
    ("pretrain_qwen3_moe.sh", "qwen3_30b"),
    ("pretrain_qwen3_moe.sh", "qwen3_235b"),
]
PROXIES = sorted((ROOT / "configs").glob("*gpu.yaml"))


@pytest.fixture(scope="module")
def forks():
    forks = LauncherForks()
    yield forks
    forks.close()


def run(script, *args, **variables):
    env = {
        "HOME": os.environ.get("HOME", "/"),
        "PATH": os.environ["PATH"],
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(sys.path),
        **variables,
    }
    return subprocess.run(
        [EXAMPLES / script, *args], env=env, capture_output=True, text=True, timeout=120
    )


def launched(script, *args, **variables):
    """(hosts, GPUs of a host, Megatron's arguments) of what the script would run."""
    done = run(script, "--print", *args, MEGATRON_LM="/megatron", **variables)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    at = words.index("/megatron/pretrain_gpt.py")
    assert words[at - 2 : at] == ["-m", "megatron_mok.megatron.launcher"]
    hosts, gpus = (words[words.index(flag) + 1] for flag in ("--nnodes", "--nproc-per-node"))
    return int(hosts), int(gpus), words[at + 1 :]


def dry_run(forks, hosts, gpus, args):
    return forks.run([f"--dry-run={hosts}x{gpus}", *args], {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_syntax(path):
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("nvl72", ["0", "1"], ids=["host of 8", "NVL72"])
@pytest.mark.parametrize(("script", "model"), MODELS)
def test_dry_run(script, model, nvl72, forks):
    hosts, gpus, args = launched(script, MODEL=model, NVL72=nvl72)
    status, out, err = dry_run(forks, hosts, gpus, args)
    assert status == 0, err
    if nvl72 == "1":
        assert gpus == 4
        assert "dispatcher  flex, hybridep" in out
    else:
        assert "each group of 8 consecutive ranks is in one host" in out
        assert "dispatcher  mok: " in out


def test_scripts_are_all_tried():
    assert {path.name for path in SCRIPTS} == {script for script, _ in MODELS}


def test_dry_run_of_the_script_itself():
    done = run("pretrain_qwen3_moe.sh", "--dry-run", "--seq-length", "2048", TP="2", NODES="1")
    assert done.returncode == 0, done.stderr
    assert "ranks       8: 1 host of 8\n" in done.stdout
    assert "TP 2 x CP 1 x DP 4 x PP 1, sequence parallel" in done.stdout
    assert "sequences of 2,048" in done.stdout
    assert "mok: up to 1,024 tokens" in done.stdout


@pytest.mark.parametrize("arm", ["alltoall", "allgather", "deepep", "hybridep", "mok"])
def test_dispatchers(arm, forks):
    hosts, gpus, args = launched("pretrain_glm4_5.sh", DISPATCHER=arm)
    status, out, err = dry_run(forks, hosts, gpus, args)
    assert status == 0, err
    expected = {"deepep": "flex, deepep", "hybridep": "flex, hybridep"}.get(arm, arm)
    assert f"dispatcher  {expected}" in out
    assert ("--moe-permute-fusion" in args) == (arm != "mok")


def test_all_dispatchers_have_the_same_flags_but_their_own():
    own = {flag for arm in ARMS.values() for flag in arm.flags} | {"--moe-permute-fusion"}
    rest = [
        [word for word in launched("pretrain_kimi_k2.sh", DISPATCHER=arm)[2] if word not in own]
        for arm in ("alltoall", "deepep", "mok")
    ]
    assert rest[0] == rest[1] == rest[2]


def test_variables_and_flags(forks, tmp_path):
    prefix = tmp_path / "text"
    hosts, gpus, args = launched(
        "pretrain_deepseek_v3.sh",
        *("--lr", "1e-4"),
        DATA_PATH=f"0.5 {prefix} 0.5 {prefix}",
        TOKENIZER="/tokenizer",
        CHECKPOINTS=str(tmp_path),
        PP="8",
        NODES="16",
        RECOMPUTE="full",
    )
    assert args[-2:] == ["--lr", "1e-4"]
    status, out, err = dry_run(forks, hosts, gpus, args)
    assert status == 0, err
    assert "ranks       128: 16 hosts of 8" in out
    assert f"--data-path: {prefix}.idx" in out
    assert "--tokenizer-model: /tokenizer" in out


@pytest.mark.parametrize("path", PROXIES, ids=lambda path: path.stem)
def test_proxies(path, forks):
    config = load(path)
    dataset = Dataset(Path("/data/text"), Path("/data/index"))
    args = [*megatron_args(config, dataset), *ARMS["mok"].flags]
    status, out, err = dry_run(forks, 1, config.parallel.ranks, args)
    assert status == 0, err
    (total,) = [line for line in out.splitlines() if line.startswith("parameters")]
    assert float(total.split()[1]) >= 1  # billions
    (largest,) = [line for line in out.splitlines() if line.startswith("The largest is")]
    assert float(largest.split()[3]) < 100  # GiB, of 139


def test_proxy_in_a_script(forks):
    config = str(ROOT / "configs" / "deepseek_v3_8gpu.yaml")
    sizes = {"NODES": "1", "PP": "1", "GLOBAL_BATCH": "64"}
    hosts, gpus, args = launched("pretrain_deepseek_v3.sh", MODEL=config, **sizes)
    status, out, err = dry_run(forks, hosts, gpus, args)
    assert status == 0, err
    assert "3 layers (1 dense, 2 MoE), 1 MTP" in out


def test_mok_in_an_nvl72_is_refused_so_far(forks):
    hosts, gpus, args = launched("pretrain_deepseek_v3.sh", NVL72="1", DISPATCHER="mok")
    status, _, err = dry_run(forks, hosts, gpus, args)
    assert status == 1
    assert "ranks share memory within one host, and a host has 4 ranks" in err


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"DISPATCHER": "x"}, "--arm: 'x' is not known; allowed are alltoall, "),
        ({"MODEL": "kimi"}, "'kimi' is not known; allowed are deepseek_v3, "),
        ({"MODEL": "none.yaml"}, "none.yaml: cannot be read"),
        ({"PP": "5"}, "no pipeline layout for PP=5: there are layouts for"),
        ({"TP": "3"}, "--tp 3: does not divide the model's vocabulary of 163840 rows"),
        ({"DATA_PATH": "/data"}, "DATA_PATH is set, so TOKENIZER must be too"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_variables(variables, message):
    done = run("pretrain_kimi_k2.sh", "--dry-run", **variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_megatron_must_be_known():
    done = run("pretrain_kimi_k2.sh", "--print")
    assert done.returncode == 2
    assert "MEGATRON_LM is not set" in done.stderr


def test_help():
    done = run("pretrain_kimi_k2.sh", "--help", EP="16")
    assert done.returncode == 0
    assert "TP PP EP CP    1 16 16 1" in done.stdout
