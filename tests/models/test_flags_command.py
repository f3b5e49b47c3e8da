import subprocess
import sys

import pytest

from megatron_mok.cli.main import main
from megatron_mok.models import load_model


def test_flags_of_a_model(capsys):
    assert main(["flags", "deepseek_v3", "--arm", "mok", "--tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(load_model("deepseek_v3").flags())] == load_model("deepseek_v3").flags()
    assert lines[-4:] == [
        "--vocab-size=129280",
        "--make-vocab-size-divisible-by=64640",
        "--moe-token-dispatcher-type",
        "mok",
    ]


def test_no_arm_no_dispatcher(capsys):
    assert main(["flags", "qwen3_30b"]) == 0
    assert "dispatcher" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gpt"], "'gpt' is not known; allowed are deepseek_v3"),
        (["deepseek_v3", "--arm", "x"], "'x' is not known; allowed are alltoall"),
        (["deepseek_v3", "--tp", "0"], "--tp 0: does not divide"),
        (["none.yaml"], "none.yaml: cannot be read"),
    ],
)
def test_errors(argv, message, capsys):
    assert main(["flags", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_it_is_quick_to_start():
    """Launch scripts call it: it must not import PyTorch."""
    code = "import sys; from megatron_mok.cli.main import main; main(['flags', 'kimi_k2']); "
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
