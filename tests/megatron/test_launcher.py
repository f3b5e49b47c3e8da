"""Starting an unmodified script, and installing too late."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_mok.megatron import launcher
from megatron_mok.megatron.errors import MoKInstallError

install_module = importlib.import_module("megatron_mok.megatron.install")

SCRIPT = """
import sys
import helper_next_to_the_script
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training.arguments import parse_args

if __name__ == "__main__":
    args = parse_args()
    print(args.moe_token_dispatcher_type, args.mok_saved_rows_factor, args.mok_mode)
    print(sys.argv[1:3], MoELayer.__new__.__module__)
    sys.exit(3)
"""


def test_script_runs_with_the_hooks(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper_next_to_the_script.py").write_text("")
    argv = ["--moe-token-dispatcher-type", "mok", "--mok-saved-rows-factor", "0.5"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_mok.megatron.launcher", "checkout/train.py", *argv],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "mok 0.5 fused",
        "['--moe-token-dispatcher-type', 'mok'] megatron_mok.megatron.install",
    ]


def test_wrong_usage(capsys, tmp_path):
    assert launcher.main([]) == 2
    assert "SCRIPT is missing" in capsys.readouterr().err
    assert launcher.main([str(tmp_path / "nothing.py")]) == 2
    assert "is not a file" in capsys.readouterr().err
    assert launcher.main(["--cpu=1", "script.py"]) == 2
    assert "the launcher's options are --cpu and --dry-run" in capsys.readouterr().err
    assert launcher.main(["--help"]) == 0
    assert "usage: " in capsys.readouterr().out


def test_install_too_late(monkeypatch):
    parsed = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", parsed)
    monkeypatch.setattr(install_module, "_installed", False)
    with pytest.raises(MoKInstallError, match=r"too late.*megatron_mok\.megatron\.launcher"):
        install_module.install()


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.19.2", True),
        ("0.17.0rc0", True),  # what the checkout of the release 0.17.0 says
        ("0.18.9", True),
        ("0.16.1", False),
        ("0.20.0", False),
        ("1.19.2", False),
    ],
)
def test_versions_that_were_tested(version, tested):
    assert install_module.is_tested(version) is tested


def test_untested_version_is_a_warning_that_says_what_was_tested(monkeypatch, caplog):
    other = SimpleNamespace(__version__="0.20.0")
    monkeypatch.setattr(install_module.importlib, "import_module", lambda name: other)
    install_module._check_version()
    assert "tested with Megatron-Core 0.17.1, 0.18.2, 0.19.2; this is 0.20.0" in caplog.text
