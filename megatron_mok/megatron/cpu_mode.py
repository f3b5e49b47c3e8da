"""Megatron's training loop on CPU ranks: for tests and `compare` where there is no GPU.

Megatron 0.19 assumes CUDA in many small places (device names, streams, tensor type names, RNG
states), none of which matters to what a training step computes. `enable()` answers those places
for this process so that the unmodified loop runs on CPU tensors and gloo groups. It is a mode to
ask for; importing this module changes nothing. There is no way back: the process stays in it.

Call it before any `megatron` module is imported, since Megatron binds some of these names at
import. Use the arguments `MEGATRON_ARGS` with it.
"""

import functools
import os
import sys
import types
from contextlib import contextmanager, nullcontext

import torch

from .local_modules import LOCAL_ARGS, use_sdpa_attention

MEGATRON_ARGS = (
    "--distributed-backend=gloo",
    *LOCAL_ARGS,
    "--no-gradient-accumulation-fusion",  # apex only
    "--no-bias-swiglu-fusion",  # these two: torch.compile'd, slow to start on a CPU
    "--no-bias-dropout-fusion",
    "--num-workers=0",
)
"""Megatron command-line arguments that go with CPU mode."""

# Where they are installed Megatron calls their kernels, in its router and its optimizer too.
_FOR_CUDA_TENSORS = ("transformer_engine", "apex", "amp_C", "fused_weight_gradient_mlp_cuda")
_CPU = torch.device("cpu")
_enabled = False


def is_enabled() -> bool:
    """Whether `enable()` was called in this process."""
    return _enabled


def enable() -> None:
    """Turn CPU mode on in this process. Calling it again does nothing.

    Raises:
        RuntimeError: CUDA is in use already, or Megatron was imported before the call.
    """
    global _enabled
    if _enabled:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError("CPU mode must be enabled before this process uses CUDA")
    if "megatron.core" in sys.modules:
        raise RuntimeError("CPU mode must be enabled before megatron.core is imported")
    _enabled = True
    # torch.compile'd helpers (jit_fuser) would each start a C++ compiler for a few small ops.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for package in _FOR_CUDA_TENSORS:
        sys.modules[package] = None  # importing it raises ImportError, as if it were not installed
    _patch_torch_cuda()
    _patch_devices()
    _patch_tensor_types()
    _patch_megatron()


class _Stream:
    """Stands for torch.cuda.Stream and Event: on a CPU everything is already in order."""

    device = _CPU

    def __init__(self, *args, **kwargs):
        pass

    def _nothing(self, *args, **kwargs):
        return None

    record = synchronize = wait = wait_event = wait_stream = _nothing

    def record_event(self, event=None):
        return event or _Stream()

    def query(self):
        return True

    def elapsed_time(self, end):
        return 0.0

    __enter__ = __exit__ = _nothing


def _patch_torch_cuda() -> None:
    cuda = torch.cuda
    stream = _Stream()
    names = {
        # initialize_megatron refuses to start without CUDA.
        "is_available": lambda: True,
        # 0 devices: Megatron would skip initialize_model_parallel and the seeds.
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        # Megatron allocates on `device=torch.cuda.current_device()`.
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        # Streams and events order work that, here, is in order.
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda s: nullcontext(),
        "set_stream": lambda s: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "is_current_stream_capturing": lambda: False,
        # Capability 0.0 keeps every "Hopper or newer" branch off.
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=0
        ),
        # Megatron logs memory; there is no CUDA memory (compare measures RSS itself).
        "memory_stats": lambda device=None: _ZeroStats(),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        # One generator on a CPU: "the CUDA RNG" is the default one, and never set lazily.
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed) and None,
        "manual_seed_all": lambda seed: None,  # called by torch.manual_seed itself
    }
    for name, value in names.items():
        setattr(cuda, name, value)
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.random.set_rng_state = cuda.set_rng_state


class _ZeroStats(dict):
    def __missing__(self, key):
        return 0


def _is_cuda(device) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _patch_devices() -> None:
    # Megatron writes device="cuda" in tensor factories.
    for name in ("arange", "empty", "eye", "full", "ones", "rand", "randn", "tensor", "zeros"):
        setattr(torch, name, _device_to_cpu(getattr(torch, name)))
    for name in ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"):
        setattr(torch, name, _device_to_cpu(getattr(torch, name)))
    # Moves to CUDA are moves to where the tensor already is.
    torch.Tensor.to = _device_to_cpu(torch.Tensor.to)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.to = _device_to_cpu(torch.nn.Module.to)
    torch.nn.Module.to_empty = _device_to_cpu(torch.nn.Module.to_empty)
    # Pinned memory is CUDA's.
    torch.Tensor.pin_memory = lambda self, device=None: self
    # Optimizers ask the current CUDA stream whether a graph is being captured (name by version).
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(torch.optim.Optimizer, name):
            setattr(torch.optim.Optimizer, name, lambda self: None)


def _device_to_cpu(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if any(_is_cuda(a) for a in args[1:]):
            args = tuple(_CPU if _is_cuda(a) else a for a in args)
        return function(*args, **kwargs)

    return wrapper


def _patch_tensor_types() -> None:
    # Optimizers sort parameters by `param.type() == 'torch.cuda.FloatTensor'` and the like.
    original = torch.Tensor.type

    @functools.wraps(original)
    def tensor_type(self, dtype=None, *args, **kwargs):
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = tensor_type
    # Float16Module compares against the classes.
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor"):
        setattr(torch.cuda, name, getattr(torch, name))


def _patch_megatron() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # The original queues state changes until CUDA starts, which never happens: forks would leave
    # different states behind on different ranks and replicas would start different.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random.CudaRNGStatesTracker = _rng_tracker_class(random)

    use_sdpa_attention()

    # Splits must become numpy even though the tensor is on the CPU already.
    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu

    _patch_optimizer_state(DistributedOptimizer)


def _patch_optimizer_state(optimizer_class) -> None:
    """Saving and loading of the distributed optimizer, which is written for fused Adam, with
    PyTorch's Adam, the one there is without CUDA."""
    native_state_dict, native_load = optimizer_class.state_dict, optimizer_class.load_state_dict
    native_set = optimizer_class._set_main_param_and_optimizer_states

    def state_dict(self):
        # Asked for before the first step too, as the place to load into.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
        return native_state_dict(self)

    @torch.no_grad()  # FP32 main weights are views of leaves
    def load_state_dict(self, state_dict):
        # The original loses it, or gives all parameters one counter, which each would count up.
        step = float(state_dict["optimizer"]["param_groups"][0]["step"])
        native_load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(step)

    def set_states(self, parameter, tensors):
        # Some formats leave the step out; load_state_dict sets it.
        native_set(self, parameter, {"step": torch.tensor(0.0), **tensors})

    optimizer_class.state_dict = state_dict
    optimizer_class.load_state_dict = load_state_dict
    optimizer_class._set_main_param_and_optimizer_states = set_states


def _rng_tracker_class(random):
    class CPURNGStatesTracker(random.CudaRNGStatesTracker):
        """Named states of the one CPU generator.

        The original's `fork` warns when the CPU generator moves inside it; here it must move.
        """

        @contextmanager
        def fork(self, name=random._MODEL_PARALLEL_RNG_TRACKER_NAME):
            if name not in self.states_:
                raise KeyError(f"RNG state {name!r} was not added; known: {sorted(self.states_)}")
            outer, outer_name = torch.get_rng_state(), self._current_state_name
            if outer_name != "default-rng":
                self.states_[outer_name] = outer
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(
                    outer if outer_name == "default-rng" else self.states_[outer_name]
                )
                self._current_state_name = outer_name

    return CPURNGStatesTracker
