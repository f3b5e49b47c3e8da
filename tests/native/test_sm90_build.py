"""What the compiler makes of the Hopper kernels: no spills, no costly warnings, tensor cores.

Needs nvcc, but no GPU.
"""

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCH = "-gencode=arch=compute_90a,code=sm_90a"
# C7508: setmaxnreg ignored. C7510, C7517: wgmma serialised. C7602: registers do not suffice.
COSTLY = re.compile(r"C75\d\d|C7602")

nvcc = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(nvcc is None, reason="no nvcc")


def disassembler():
    """cuobjdump of the toolkit, or the one that Triton brings."""
    import triton

    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return shutil.which("cuobjdump") or (str(bundled) if bundled.exists() else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sm90")


@functools.cache
def compiled(name, folder):
    """(what ptxas reported, object file) of csrc/sm90/<name>.cu."""
    target = folder / f"{name}.o"
    source = ROOT / f"csrc/sm90/{name}.cu"
    flags = ["-std=c++20", "-O3", "-Xptxas=-v", f"-I{ROOT / 'csrc/include'}"]
    done = subprocess.run(
        [nvcc, ARCH, *flags, "-c", str(source), "-o", str(target)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, target


@pytest.fixture(scope="module")
def forward(folder):
    return compiled("forward", folder)


@pytest.mark.parametrize("name", ["schedule", "dispatch", "combine", "forward", "backward"])
def test_no_spills_and_no_costly_warnings(name, folder):
    report, _ = compiled(name, folder)
    assert not COSTLY.findall(report), report
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", report)
    assert spills
    assert all(numbers == ("0", "0", "0") for numbers in spills), report


def test_registers_fit_one_cta_of_384_threads_per_sm(forward):
    report, _ = forward
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert max(registers) == 168  # 65,536 / 384, rounded down to a multiple of 8


def machine_code(name, folder):
    """SASS of <name>_kernel."""
    _, target = compiled(name, folder)
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump")
    sass = subprocess.run(
        [tool, "--dump-sass", str(target)], capture_output=True, text=True, timeout=120
    ).stdout
    (kernel,) = [f for f in sass.split("Function : ")[1:] if f"{name}_kernel" in f.split()[0]]
    return kernel


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_code_fits_the_instruction_cache(name, folder):
    """At 280 KB the ends of tiles spent most of their time fetching instructions."""
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", machine_code(name, folder), re.MULTILINE)
    assert 1000 < len(instructions) < 9000  # of 16 bytes


def test_machine_code_uses_tensor_cores_and_tensor_copies(folder):
    sass = machine_code("forward", folder)
    for instruction in ("HGMMA.64x256x16.F32.BF16", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in sass, instruction
    assert "LDL" not in sass, "local memory is used"
    assert "STL" not in sass, "local memory is used"
