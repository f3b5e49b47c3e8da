from pathlib import Path

import pytest

from megatron_mok.cli.main import main

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def small_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRON_MOK_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(CONFIGS.parent), prepend=":")


def test_proxy_of_a_gpu_without_a_gpu(capfd):
    assert main(["compare", str(CONFIGS / "qwen3_30b_1gpu.yaml"), "--dry-run"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("arm alltoall: accepted\narm mok: accepted\n")
    assert "4 layers (0 dense, 4 MoE)" in out
    assert "GiB on each GPU" in out


def test_cpu_ranks(capfd):
    assert main(["compare", str(CONFIGS / "tiny_glm.yaml"), "--dry-run", "--arms", "mok"]) == 0
    assert "GiB on each rank" in capfd.readouterr().out


def test_refusal(capfd, tmp_path):
    text = (CONFIGS / "tiny_glm.yaml").read_text()
    refused = tmp_path / "refused.yaml"
    refused.write_text(f"{text}\nmegatron_args: [--moe-expert-capacity-factor=1.0]\n")
    assert main(["compare", str(refused), "--dry-run"]) == 1
    captured = capfd.readouterr()
    assert captured.out == "arm alltoall: accepted\n"
    assert captured.err.startswith("arm mok: dry run: --moe-token-dispatcher-type mok cannot run")
    assert "drop --moe-expert-capacity-factor" in captured.err
