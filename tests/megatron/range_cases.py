"""Rank side: what profilers see of MoK's calls."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import utils
from torch.profiler import ProfilerActivity, profile

from megatron_mok.megatron import ranges
from tests.megatron.moe_cases import (
    make_config,
    make_layer,
    set_up_parallel,
    use_weight_gradient_fusion_without_apex,
)


def _layer(ep: int, mode: str, fusion: bool = False, **changes: Any) -> torch.nn.Module:
    set_up_parallel(ep, mode=mode)
    if fusion:
        use_weight_gradient_fusion_without_apex()
    layer = make_layer(make_config("mok", gradient_accumulation_fusion=fusion, **changes))
    if fusion:
        for parameter in layer.experts.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    layer.set_layer_number(2)
    return layer


def _step(layer: torch.nn.Module) -> None:
    config = layer.config
    hidden = torch.randn(8, 2, config.hidden_size, dtype=config.params_dtype).cuda()
    layer(hidden.requires_grad_())[0].sum().backward()


def traced(ep: int, mode: str, fusion: bool = False, **changes: Any) -> dict[str, list[str]]:
    """The operators of MoK inside each of MoK's ranges in a trace of torch.profiler."""
    layer = _layer(ep, mode, fusion, **changes)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _step(layer)
    events = profiler.events()
    found = {}
    for event in events:
        if event.name.startswith("mok."):
            assert event.name not in found
            span = event.time_range
            found[event.name] = sorted(
                inner.name
                for inner in events
                if inner.name.startswith("mok::")
                and span.start <= inner.time_range.start
                and inner.time_range.end <= span.end
            )
    return found


def nvtx(ep: int, mode: str) -> list[str]:
    """MoK's NVTX ranges: "+ name" for each that opens, "- name" where it closes."""
    layer = _layer(ep, mode)
    opened: list[str] = []
    calls: list[str] = []

    def push(name):
        opened.append(name)
        calls.append(f"+ {name}")

    native = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    torch.cuda.nvtx.range_push = push
    torch.cuda.nvtx.range_pop = lambda: calls.append(f"- {opened.pop()}")
    utils.configure_nvtx_profiling(True)
    try:
        _step(layer)
    finally:
        utils.configure_nvtx_profiling(False)
        torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = native
    assert not opened
    return [call for call in calls if call[2:].startswith("mok.")]


def unwatched(ep: int, mode: str) -> int:
    """How many ranges a step makes when nobody looks."""
    layer = _layer(ep, mode)
    made = []
    native = ranges._Range
    ranges._Range = lambda name: made.append(name) or native(name)
    try:
        _step(layer)
    finally:
        ranges._Range = native
    return len(made)
