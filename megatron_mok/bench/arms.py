"""The implementations that a benchmark can time. Imports no torch, so that `--help` is quick."""

from pathlib import Path

from .arm import Arm


def _mok_arm(name: str, summary: str, library: Path | None = None) -> Arm:
    def unavailable(device, dtype):
        from . import mok_arm

        return mok_arm.unavailable(device, dtype, library)

    def build(inputs):
        from .mok_arm import MokLayer

        return MokLayer(inputs, library)

    return Arm(name, summary, unavailable, build)


def engine_arm(name: str, library: Path) -> Arm:
    """The arm `mok` with another build of its engine."""
    return _mok_arm(name, f"mok with {library}", library)


def _eager_unavailable(device, dtype):
    from . import torch_arms

    return torch_arms.unavailable(device, dtype, compiled=False)


def _build_eager(inputs):
    from .torch_arms import EagerLayer

    return EagerLayer(inputs)


def _compiled_unavailable(device, dtype):
    from . import torch_arms

    return torch_arms.unavailable(device, dtype, compiled=True)


def _build_compiled(inputs):
    from .torch_arms import CompiledLayer

    return CompiledLayer(inputs)


def _megatron_unavailable(device, dtype):
    from . import megatron_arm

    return megatron_arm.unavailable(device, dtype)


def _build_megatron(inputs):
    from .megatron_arm import MegatronLayer

    return MegatronLayer(inputs)


ARMS = {
    arm.name: arm
    for arm in (
        _mok_arm("mok", "this project: schedule and one fused kernel per direction"),
        Arm(
            "torch_eager",
            "PyTorch: sort, gather, grouped_mm, SwiGLU, grouped_mm, combine",
            _eager_unavailable,
            _build_eager,
        ),
        Arm(
            "torch_compiled",
            "the same under torch.compile",
            _compiled_unavailable,
            _build_compiled,
        ),
        Arm(
            "megatron_te_alltoall",
            "Megatron's MoELayer: alltoall dispatcher, Transformer Engine experts",
            _megatron_unavailable,
            _build_megatron,
        ),
    )
}
"""Every arm by name, in the order in which help texts list them."""
