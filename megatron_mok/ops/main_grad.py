"""Gradients of expert weights that are added into Megatron's `main_grad`."""

from collections.abc import Sequence

import torch

from megatron_mok.ops.library import FreshWeightGrads


class WeightGradTargets:
    """Where the gradients of one weight of all experts go.

    Into `main_grad` where a weight has one: the engine adds to a contiguous FP32 one itself, others
    (`--grad-reduce-in-bf16`) get the sum from an FP32 buffer, which rounds it once. Other weights
    get fresh gradients.

    Args:
        parameters: the Parameter objects, as `main_grad` is an attribute of theirs.
        weights: their values, of the same shape, one for each expert.
        wanted: for each, whether it has a gradient.
    Attributes:
        in_place: whether the engine adds to some `main_grad` itself.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ):
        self._parameters = parameters
        self._main_grads = [
            getattr(parameter, "main_grad", None) if want else None
            for parameter, want in zip(parameters, wanted, strict=True)
        ]
        self._direct = [main is not None and _is_added_to(main) for main in self._main_grads]
        self.in_place = any(self._direct)
        self._has_fresh = any(
            want and main is None for want, main in zip(wanted, self._main_grads, strict=True)
        )
        self._fresh = FreshWeightGrads(
            weights,
            [want and not direct for want, direct in zip(wanted, self._direct, strict=True)],
        )

    def for_engine(self, accumulate: bool) -> list[torch.Tensor]:
        """FP32 tensors, empty where no gradient is wanted.

        Args:
            accumulate: the engine adds to all of them; else it overwrites all.
        """
        if accumulate:
            for buffer in self._fresh.buffers:
                buffer.zero_()
        return [
            main if direct else buffer
            for main, direct, buffer in zip(
                self._main_grads, self._direct, self._fresh.buffers, strict=True
            )
        ]

    def collect(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """After the engine: gradients as autograd returns them, fresh ones in `dtype`.

        Those of weights with a `main_grad` are dummies that only fire hooks; their parameters'
        `grad_added_to_main_grad` is set.
        """
        added = [
            (main, buffer)
            for main, direct, buffer in zip(
                self._main_grads, self._direct, self._fresh.buffers, strict=True
            )
            if main is not None and not direct
        ]
        if added:
            torch._foreach_add_(*map(list, zip(*added, strict=True)))
        fresh = [None] * len(self._parameters)
        if self._has_fresh:
            fresh = self._fresh.to(dtype)
        grads = []
        for parameter, main, grad in zip(self._parameters, self._main_grads, fresh, strict=True):
            if main is not None:
                parameter.grad_added_to_main_grad = True
                grad = _dummy_grad(parameter)
            grads.append(grad)
        return grads


def _is_added_to(main_grad: torch.Tensor) -> bool:
    return main_grad.dtype == torch.float32 and main_grad.is_contiguous()


_dummies: dict[tuple, torch.Tensor] = {}


def _dummy_grad(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient that is only there so that autograd hooks fire.

    One zero tensor serves all weights of a shape. `detach` gives each its own tensor object, so
    that autograd takes it instead of cloning it.
    """
    key = (tuple(parameter.shape), parameter.dtype, parameter.device)
    if key not in _dummies:
        _dummies[key] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return _dummies[key].detach()
