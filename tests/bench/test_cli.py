"""Arguments of `megatron-mok bench`: what is allowed, and what wrong ones are told."""

import subprocess
import sys

import pytest
import torch

from megatron_mok.bench.arms import ARMS
from megatron_mok.bench.presets import PRESETS
from megatron_mok.cli.main import build_parser, main


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--preset", "deepseek_v4"],
            "argument --preset: 'deepseek_v4' is not known; did you mean deepseek_v3? allowed are "
            "deepseek_v3, glm_4_5, qwen3_30b, qwen3_235b, kimi_k2, tiny",
        ),
        (["--preset", "tiny", "--preset", "tiny"], "--preset: tiny is named twice"),
        (
            ["--arms", "mok,eager"],
            "'eager' is not known; did you mean torch_eager? allowed are mok,",
        ),
        (["--arms", "mok,mok"], "argument --arms: mok is named twice in 'mok,mok'"),
        (["--routing", "zipff"], "did you mean zipf? allowed are uniform, zipf"),
        (["--direction", "back"], "allowed are forward, backward, both"),
        (["--tokens", "512,x"], "argument --tokens: 'x' is not an integer of at least 1"),
        (["--tokens", "0"], "'0' is not an integer of at least 1"),
        (["--tokens", "64,64"], "64 is named twice in '64,64'"),
        (["--repeats", "0"], "argument --repeats: '0' is not an integer of at least 1"),
        (["--seed", "-1"], "argument --seed: '-1' is not an integer of at least 0"),
        (["--warmup-s", "-1"], "argument --warmup-s: '-1' is not a number of seconds from 0"),
        (["--time-s", "0"], "argument --time-s: '0' is not a number of seconds from 0.001"),
        (["--time-s", "nan"], "'nan' is not a number of seconds"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["--json", "/nowhere/at/all.json"], "the folder '/nowhere/at' does not exist"),
        (["--json", "/"], "'/' is a folder; a file is needed"),
        (["--plot", "chart.pdf"], "'chart.pdf' must end in .png"),
        (
            ["--arms", "mok", "--require", "torch_eager"],
            "--require: torch_eager is not among the arms to run (mok); add it to --arms",
        ),
        (["--engine", "libmok_cuda.so"], "'libmok_cuda.so' is not NAME=FILE with a NAME that no"),
        (["--engine", "mok=/dev/null"], "'mok=/dev/null' is not NAME=FILE with a NAME that no arm"),
        (["--engine", "a=/nowhere.so"], "argument --engine: there is no file '/nowhere.so'"),
    ],
)
def test_wrong_arguments(args, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--device", "cpu", *args])
    assert exit_.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench"])
    assert exit_.value.code == 2
    assert "PyTorch sees no CUDA device; --device cpu" in capsys.readouterr().err


def test_lists():
    line = "bench --preset tiny,glm_4_5 --preset kimi_k2 --tokens 1,2 --require mok"
    args = build_parser().parse_args(line.split())
    assert args.preset == ["tiny", "glm_4_5", "kimi_k2"]
    assert args.tokens == [1, 2]
    assert args.require == ["mok"]
    assert args.arms == list(ARMS)
    again = build_parser().parse_args(["bench"])
    assert (again.preset, again.require) == (None, [])


def test_help_names_everything_without_importing_torch():
    program = (
        "import sys\n"
        "from megatron_mok.cli.main import build_parser\n"
        "print(build_parser()._subparsers._group_actions[0].choices['bench'].format_help())\n"
        "assert not {'torch', 'megatron', 'rich', 'matplotlib'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in (*PRESETS, *ARMS, "uniform", "zipf", "forward", "backward", "both"):
        assert f"  {name} " in done.stdout


def test_run_imports_neither_megatron_nor_transformer_engine():
    program = (
        "import sys\n"
        "from megatron_mok.cli.main import main\n"
        "args = '--device cpu --arms mok,torch_eager --tokens 8 --repeats 1 --time-s 0.001'\n"
        "status = main(['bench', *args.split()])\n"
        "assert not {'megatron.core', 'transformer_engine'} & sys.modules.keys()\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
