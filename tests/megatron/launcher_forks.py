"""Runs the launcher in forks of one process that has Megatron imported: fast, one after another.

forks = LauncherForks()
status, out, err = forks.run(["--dry-run=2x8", ...], {"VARIABLE": "value"})
forks.close()
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

TIMEOUT_S = 120


class LauncherForks:
    """The process to fork from."""

    def __init__(self):
        env = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONWARNINGS": "ignore",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, argv, variables=None):
        """`launcher.main(argv)` with these environment variables: (status, stdout, stderr)."""
        self._process.stdin.write(json.dumps([argv, variables or {}]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process to fork from has ended"
        return tuple(json.loads(answer))

    def close(self):
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)


def serve():
    import megatron.training
    import megatron.training.arguments
    import megatron.training.yaml_arguments  # noqa: F401

    from megatron_mok.megatron import launcher

    for line in sys.stdin:
        argv, variables = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            child = os.fork()
            if child == 0:
                os._exit(in_child(launcher, argv, variables, out, err))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(json.dumps([status, out.read_text(), err.read_text()]), flush=True)


def in_child(launcher, argv, variables, out, err):
    os.environ.update(variables)
    with (
        out.open("w") as stdout,
        err.open("w") as stderr,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            return launcher.main(argv)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
            return 70


if __name__ == "__main__":
    serve()
