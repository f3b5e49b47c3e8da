"""Named ranges around MoK's calls, for Nsight Systems and torch.profiler.

Ranges are called `mok.<call>.<direction>.layer_<i>`, layers counted from 0 as in the names that
--moe-per-layer-logging gives to scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import utils


def in_ranges(name: str, layer: int | None, function: Callable, *args: Any) -> Any:
    """`function(*args)`, it and its backward each in a range of its own.

    Only where someone looks: under torch.profiler (`--profile --use-pytorch-profiler`), under
    `emit_nvtx` (`--profile` alone), which makes NVTX ranges of the profiler's, or with Megatron's
    own NVTX ranges on (`--nvtx-ranges`). Otherwise this is the call and nothing else.

    Args:
        name: of the call.
        layer: index of the layer in the model, from 0, or None.
        function: returns a tensor, or a tuple of results of one operator, a tensor first.
    Returns: what the function returns.
    """
    if not _is_watched():
        return function(*args)
    place = "" if layer is None else f".layer_{layer}"
    with _Range(f"mok.{name}.forward{place}"):
        result = function(*args)
    node = (result[0] if isinstance(result, tuple) else result).grad_fn
    if node is not None:
        backward = _Range(f"mok.{name}.backward{place}")
        node.register_prehook(lambda *_: backward.open())
        node.register_hook(lambda *_: backward.close())
    return result


def _is_watched() -> bool:
    return torch.autograd.profiler._is_profiler_enabled or utils._nvtx_enabled


class _Range:
    """A range that may be opened and closed in different callbacks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._recorded: Any = None

    def open(self) -> None:
        # One or the other: `emit_nvtx` would show both.
        if torch.autograd.profiler._is_profiler_enabled:
            self._recorded = torch.profiler.record_function(self._name)
            self._recorded.__enter__()
        else:
            utils.nvtx_range_push(self._name)

    def close(self) -> None:
        if self._recorded is not None:
            self._recorded.__exit__(None, None, None)
            self._recorded = None
        else:
            utils.nvtx_range_pop(self._name)

    def __enter__(self) -> _Range:
        self.open()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
