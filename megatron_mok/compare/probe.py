"""What this machine has: GPUs, engines, and the dispatchers that Megatron can import.

Functions named `no_...` give None for what is there, and otherwise say what is missing.
"""

import functools
import importlib
import importlib.util
import json
import subprocess
import sys
import types
import typing

_TIMEOUT_SECONDS = 300


def no_gpu() -> str | None:
    """Why PyTorch has no CUDA device."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} was built without CUDA"
    return "PyTorch sees no CUDA device"


def no_transformer_engine() -> str | None:
    """Why models on GPUs are made of Megatron's local modules here."""
    if importlib.util.find_spec("transformer_engine") is None:
        return (
            "Transformer Engine is not installed: pip install 'megatron-mok[te]', or use an image "
            "that has it"
        )
    return None


def no_apex_weight_gradients() -> str | None:
    """Why Megatron's own linear layers cannot add weight gradients to `main_grad` here."""
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        return "APEX is not installed with its CUDA extensions (fused_weight_gradient_mlp_cuda)"
    return None


def no_engine(device: str) -> str | None:
    """Why no engine of this package can compute on `device` ("cpu" or "cuda")."""
    import torch

    from megatron_mok.runtime.engine import engine_problem

    if reason := engine_problem(device):
        return reason
    if device == "cpu":
        return None
    if reason := no_gpu():
        return reason
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) == (9, 0):
        return None
    return (
        f"the GPU engine is for Hopper (compute capability 9.0); {torch.cuda.get_device_name()} "
        f"has {major}.{minor}"
    )


def no_megatron() -> str | None:
    """Why Megatron-Core cannot be imported."""
    return _megatron()["problem"]


def megatron_version() -> str | None:
    """Version of the Megatron-Core that is imported here, or None without one."""
    return _megatron()["version"]


def no_flex_backend(backend: str) -> str | None:
    """Why Megatron's flex dispatcher cannot use `backend`: deepep, hybridep or ncclep."""
    return no_megatron() or _megatron()["flex"][backend]


@functools.cache
def _megatron() -> dict:
    """What `_look_at_megatron` finds, in a process of its own: importing Megatron is slow, changes
    the process, and some backends start CUDA."""
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"version": None, "problem": f"Megatron-Core: no import in {_TIMEOUT_SECONDS} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    reason = (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1]
    return {"version": None, "problem": f"Megatron-Core cannot be imported: {reason}"}


# What Megatron's fused_a2a imports for each backend, and where to get it.
_IMPORTS = {
    "deepep": (
        ("deep_ep", "Buffer"),
        ("deep_ep.utils", "EventHandle"),
        ("deep_ep.utils", "EventOverlap"),
    ),
    "hybridep": (("deep_ep", "HybridEPBuffer"),),
    "ncclep": (("transformer_engine.pytorch", "ep"),),
}
_SOURCES = {
    "deepep": "Megatron wants DeepEP's branch hybrid-ep",
    "hybridep": "Megatron wants DeepEP's branch hybrid-ep",
    "ncclep": "it comes with Transformer Engine built with NVTE_BUILD_WITH_NCCL_EP=1",
}


def _look_at_megatron() -> dict:
    import megatron.core
    from megatron.core.transformer.transformer_config import TransformerConfig

    version = megatron.core.__version__
    field = TransformerConfig.__dataclass_fields__["moe_flex_dispatcher_backend"]
    known = typing.get_args(field.type)
    flex = {
        backend: _import_problem(backend)
        if backend in known
        else f"Megatron-Core {version} has no flex backend {backend}"
        for backend in _IMPORTS
    }
    return {"version": version, "problem": None, "flex": flex}


def _import_problem(backend: str) -> str | None:
    for module, name in _IMPORTS[backend]:
        try:
            found = importlib.import_module(module)
            if not hasattr(found, name) and not _is_submodule(found, name):
                return f"{module} has no {name}; {_SOURCES[backend]}"
        except Exception as error:  # whatever a broken installation raises on import
            return f"{module} cannot be imported ({error}); {_SOURCES[backend]}"
    return None


def _is_submodule(package: types.ModuleType, name: str) -> bool:
    full_name = f"{package.__name__}.{name}"
    return hasattr(package, "__path__") and importlib.util.find_spec(full_name) is not None


if __name__ == "__main__":
    print(json.dumps(_look_at_megatron()))
