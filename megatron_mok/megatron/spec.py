"""Megatron layer specs that name MoK's layer, for programs that build their own."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_mok.megatron.layer import MoKMoELayer


def with_mok(spec: Any) -> Any:
    """A copy of a layer, block or MTP spec with MoKMoELayer in place of every MoELayer.

    Not needed where `install()` was called: then MoELayer itself makes MoKMoELayers. Without it,
    configs take `mok` as well (`TransformerConfig(moe_token_dispatcher_type="mok", ...)`), and are
    checked when the layer is built.

    Megatron-Core 0.17 passes process groups and `is_mtp_layer` only to layers that are MoELayer
    itself: there, layers from such a spec take the global process groups. Use `install()` if that
    is not what you want.

    Args:
        spec: what Megatron's spec helpers return, such as `get_gpt_decoder_block_spec`: nested
            ModuleSpecs, builders, dataclasses and lists. It is not changed.
    """
    if spec is MoELayer:
        return MoKMoELayer
    if isinstance(spec, functools.partial):
        keywords = {name: with_mok(value) for name, value in spec.keywords.items()}
        return functools.partial(with_mok(spec.func), *map(with_mok, spec.args), **keywords)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):  # ModuleSpec is one too
        changes = {f.name: with_mok(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **changes)
    if isinstance(spec, list):
        return [with_mok(item) for item in spec]
    return spec
