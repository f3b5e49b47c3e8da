"""Finding, loading and calling the compiled engines."""

import ctypes
import functools
from pathlib import Path

import torch

from megatron_mok.runtime import abi
from megatron_mok.runtime.errors import (
    MoKError,
    MoKInvalidArgumentError,
    MoKTimeoutError,
    MoKUnsupportedError,
    MoKWorkspacePoisonedError,
)

LIBRARY_DIR = Path(__file__).resolve().parent.parent / "lib"
_LIBRARIES = {"cpu": "libmok_host.so", "cuda": "libmok_cuda.so"}

_ERRORS = {
    abi.Status.INVALID_ARGUMENT: MoKInvalidArgumentError,
    abi.Status.TIMEOUT: MoKTimeoutError,
    abi.Status.POISONED: MoKWorkspacePoisonedError,
    abi.Status.UNSUPPORTED: MoKUnsupportedError,
    abi.Status.SYSTEM: MoKError,
}


class Engine:
    """A loaded engine library.

    Attributes:
        device_type: of the tensors that it computes on.
        name: what the library calls itself, e.g. "host".
    """

    def __init__(self, path: Path, device_type: str):
        self.device_type = device_type
        self.lib = ctypes.CDLL(str(path))
        abi.declare(self.lib)
        version = self.lib.mok_abi_version()
        if version != abi.ABI_VERSION:
            raise MoKUnsupportedError(
                f"{path} has ABI version {version}, this package needs {abi.ABI_VERSION}; "
                "rebuild it: pip install -e ."
            )
        self.name: str = self.lib.mok_engine().decode()

    def call(self, function: str, *args) -> None:
        """Calls `function` of the ABI without the GIL; a bad status becomes its exception."""
        status = getattr(self.lib, function)(*args)
        if status != abi.Status.OK:
            text = self.lib.mok_last_error().decode(errors="replace")
            raise _ERRORS.get(status, MoKError)(f"{function}: {text}")


@functools.cache
def load_engine(device_type: str, library: Path | None = None) -> Engine:
    """The engine for tensors on `device_type` ("cpu" or "cuda").

    Args:
        library: another build of it, in place of the one in `LIBRARY_DIR`.

    Raises:
        MoKUnsupportedError: no engine for such devices, or it was not built.
    """
    if device_type not in _LIBRARIES:
        raise MoKUnsupportedError(
            f"no engine for device type {device_type!r}; there are engines for "
            f"{', '.join(sorted(_LIBRARIES))}"
        )
    path = library or LIBRARY_DIR / _LIBRARIES[device_type]
    if not path.exists():
        hint = " where nvcc is installed (MOK_CUDA=1)" if device_type == "cuda" else ""
        raise MoKUnsupportedError(f"{path} is not there: build it with `pip install -e .`{hint}")
    return Engine(path, device_type)


def engine_problem(device_type: str, library: Path | None = None) -> str | None:
    """Why there is no engine for tensors on `device_type`, or None where there is one."""
    try:
        load_engine(device_type, library)
    except (MoKError, OSError) as error:
        return str(error)
    return None


def dtype_code(dtype: torch.dtype) -> abi.Dtype:
    codes = {torch.float32: abi.Dtype.F32, torch.bfloat16: abi.Dtype.BF16}
    if dtype not in codes:
        raise ValueError(f"dtype is {dtype}; allowed are torch.float32 and torch.bfloat16")
    return codes[dtype]
