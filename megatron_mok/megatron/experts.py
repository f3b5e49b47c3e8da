"""The fused experts: the module that runs the kernel on the native experts' own parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from megatron_mok.megatron.errors import MoKConfigError
from megatron_mok.megatron.rules import USE_DISPATCH
from megatron_mok.ops import fused_moe

# Linear layers whose weight is the plain [out, in] matrix that the kernel reads.
_GROUPED = ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")
_SINGLE = (
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TEColumnParallelLinear",
    "TERowParallelLinear",
)
_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_BYPASSED = f"the fused layer would bypass it; {USE_DISPATCH}"

Slot = tuple[nn.Module, str]  # a module and the name of something it holds


class FusedExperts(nn.Module):
    """Dispatch, experts and combine of one MoE layer, on the weights of its native experts module.

    The Parameters stay with the native module. They are registered here a second time, under other
    names, because DDP waits for its parameter all-gather in a pre-hook of the module that holds a
    parameter, and the native linears are never called. In state dicts this module has nothing.

    Args:
        experts: Megatron's SequentialMLP or TEGroupedMLP, with SwiGLU and no biases.
        workspace: the workspace of the expert-parallel group, for the layer's shape.
        saved_rows: rows of pre-activations kept for backward.
        accumulate_into_main_grad: add weight gradients into `main_grad` where a weight has one, in
            place of returning them.
    Raises: MoKConfigError for experts of another kind.
    """

    def __init__(
        self, experts: nn.Module, workspace: Any, saved_rows: int, accumulate_into_main_grad: bool
    ) -> None:
        super().__init__()
        # In a tuple, so that the native modules do not become children of this one.
        self._native = (experts,)
        self._workspace = workspace
        self._saved_rows = saved_rows
        self._accumulate_into_main_grad = accumulate_into_main_grad
        self._bind()

    def forward(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        probs_TK: torch.Tensor,
        addend_TH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Weighted sum of the routed experts' outputs, per token, plus the addend.

        Args:
            x_TH: [T, H] tokens of this rank, in the dtype of the weights.
            ids_TK: [T, K] int32 expert of each route, -1 for none.
            probs_TK: [T, K] weight of each route.
            addend_TH: [T, H] or None, what the shared experts computed.
        Returns: [T, H], dtype of `x_TH`.
        """
        self._check_bound()
        return fused_moe(
            x_TH,
            ids_TK,
            probs_TK,
            self._w1,
            self._w2,
            self._workspace,
            addend_TH=addend_TH,
            saved_rows=self._saved_rows,
            accumulate_into_main_grad=self._accumulate_into_main_grad,
        )

    def _bind(self) -> None:
        """Register the native Parameters here, and note where each one was found."""
        (experts,) = self._native
        linears = _expert_linears(experts)
        self._linears = tuple((owner, name, owner._modules[name]) for owner, name in linears)
        self._bypassed = tuple(experts.modules())
        self._sources = []
        self._w1, self._w2 = [], []
        for index, (fc1, fc2) in enumerate(_weight_slots(experts)):
            for label, (linear, name), weights in (
                ("fc1", fc1, self._w1),
                ("fc2", fc2, self._w2),
            ):
                weight = linear._parameters[name]
                self.register_parameter(f"{label}_weight{index}", weight)
                self._sources.append((linear, name, weight))
                weights.append(weight)

    def _check_bound(self) -> None:
        """Refuse to compute with weights that the native experts no longer use, or past modules
        and hooks that someone put around them (LoRA, quantizers, debuggers)."""
        for owner, name, linear in self._linears:
            if owner._modules.get(name) is not linear:
                found = type(owner._modules.get(name)).__qualname__
                raise MoKConfigError(f"expert {name} was replaced by {found}: {_BYPASSED}")
        for linear, name, weight in self._sources:
            if linear._parameters.get(name) is not weight:
                raise MoKConfigError(
                    f"parameter {name} of an expert's {type(linear).__qualname__} was "
                    f"replaced after the model was built: {_BYPASSED}"
                )
        for module in self._bypassed:
            for table in _HOOK_TABLES:
                for hook in getattr(module, table).values():
                    _check_hook(hook, module)

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        # Conversions (.cuda(), .bfloat16(), .to_empty()) have just been applied to the native
        # parameters, and may have made new ones. A second conversion here would part the two.
        self._bind()
        return self

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        """Nothing: the native experts module saves the parameters."""
        return {}

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        pass

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        pass


def _check_hook(hook: Any, module: nn.Module) -> None:
    # DDP puts a pre-hook on every module; the one on FusedExperts does its work.
    origin = getattr(hook, "__module__", "") or ""
    if origin.startswith("megatron.core.distributed"):
        return
    raise MoKConfigError(
        f"hook {getattr(hook, '__qualname__', hook)!r} ({origin}) on "
        f"{type(module).__qualname__} of the experts: {_BYPASSED}"
    )


def _is_native(module: Any, names: tuple[str, ...]) -> bool:
    cls = type(module)
    return cls.__module__.startswith("megatron.core.") and cls.__name__ in names


def _expert_linears(experts: nn.Module) -> list[Slot]:
    """(owner, name) of every FC1 and FC2, checked to be of a known native kind."""
    if _is_native(experts, ("TEGroupedMLP",)):
        owners, allowed = [experts], _GROUPED
    elif _is_native(experts, ("SequentialMLP",)):
        owners, allowed = list(experts.local_experts), _SINGLE
    else:
        raise MoKConfigError(
            f"experts module {type(experts).__qualname__}: the fused layer knows SequentialMLP "
            f"and TEGroupedMLP; {USE_DISPATCH}"
        )
    slots = [(owner, name) for owner in owners for name in ("linear_fc1", "linear_fc2")]
    for owner, name in slots:
        linear = owner._modules.get(name)
        if not _is_native(linear, allowed):
            found = type(linear).__qualname__
            raise MoKConfigError(f"expert {name} is a {found}: {_BYPASSED}")
        biases = [value for key, value in linear._parameters.items() if "bias" in key]
        if any(bias is not None and bias.numel() for bias in biases):
            raise MoKConfigError(
                f"expert {name} has a bias; set --disable-bias-linear, {USE_DISPATCH}"
            )
    return slots


def _weight_slots(experts: nn.Module) -> Iterator[tuple[Slot, Slot]]:
    """For each local expert, where its FC1 and its FC2 weight are."""
    if _is_native(experts, ("TEGroupedMLP",)):
        for index in range(experts.num_local_experts):
            name = f"weight{index}"
            yield (experts.linear_fc1, name), (experts.linear_fc2, name)
    else:
        for expert in experts.local_experts:
            yield (expert.linear_fc1, "weight"), (expert.linear_fc2, "weight")
