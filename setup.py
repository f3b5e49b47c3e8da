"""Builds the engines: always the host engine (g++), the CUDA engine where nvcc is found.

Both are plain C-ABI libraries loaded with ctypes, so building needs no torch and one build serves
every Python and torch version. Environment:

    MOK_CUDA=auto|0|1   build the CUDA engine: where nvcc is found (default), never, or always
    CXX, NVCC           compilers to use
"""

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
CUDA_ARCH = "-gencode=arch=compute_90a,code=sm_90a"


def run(command: list[str]) -> None:
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True, cwd=ROOT)


def find_nvcc() -> str | None:
    """The nvcc to use, or None where the CUDA engine is not to be built."""
    wanted = os.environ.get("MOK_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"MOK_CUDA is {wanted!r}; allowed are auto, 0 and 1")
    if wanted == "0":
        return None
    cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or shutil.which(f"{cuda_home}/bin/nvcc")
    if nvcc is None and wanted == "1":
        raise SystemExit(
            "MOK_CUDA=1 but no nvcc: put it on PATH or set NVCC or CUDA_HOME, "
            "or build the host engine alone with MOK_CUDA=0"
        )
    return nvcc


def is_current(target: Path, sources: list[Path]) -> bool:
    newest = max(p.stat().st_mtime for p in [*sources, ROOT / "setup.py"])
    return target.exists() and target.stat().st_mtime > newest


def build_host(lib: Path) -> None:
    target = lib / "libmok_host.so"
    sources = sorted((CSRC / "host").glob("*.cpp"))
    headers = [p for d in ("host", "schedule", "include") for p in (CSRC / d).glob("*.h")]
    if is_current(target, sources + headers):
        return
    cxx = os.environ.get("CXX", "g++")
    if shutil.which(cxx) is None:
        raise SystemExit(f"no C++ compiler: {cxx!r} not found; install g++ or set CXX")
    flags = ["-std=c++20", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread"]
    warnings = ["-Wall", "-Wextra", "-Wno-psabi"]
    include = f"-I{CSRC / 'include'}"
    run([cxx, *flags, *warnings, include, *map(str, sources), "-o", str(target)])


def build_cuda(lib: Path, nvcc: str) -> None:
    target = lib / "libmok_cuda.so"
    folders = ("sm90", "schedule", "include")
    sources = sorted((CSRC / "sm90").glob("*.cu"))
    headers = [p for d in folders for p in (CSRC / d).iterdir() if p.suffix in (".h", ".cuh")]
    if not sources or is_current(target, sources + headers):
        return
    flags = ["-std=c++20", "-O3", "-Xcompiler=-fPIC", "-shared", "-cudart=static", "-lineinfo"]
    include = f"-I{CSRC / 'include'}"
    run([nvcc, CUDA_ARCH, *flags, include, *map(str, sources), "-o", str(target)])


class BuildEngines(build_py):
    def run(self) -> None:
        super().run()
        package = ROOT if self.editable_mode else Path(self.build_lib)
        lib = package / "megatron_mok" / "lib"
        lib.mkdir(parents=True, exist_ok=True)
        build_host(lib)
        nvcc = find_nvcc()
        if nvcc:
            build_cuda(lib, nvcc)
        else:
            print("CUDA engine not built (no nvcc, or MOK_CUDA=0); CPU tensors only", flush=True)


class PlatformWheel(bdist_wheel):
    """Native code, but no Python ABI: one py3-none wheel per platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildEngines, "bdist_wheel": PlatformWheel},
    distclass=BinaryDistribution,
)
