"""Which layers each pipeline rank has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers that a pipeline rank computes in one go.

    Attributes:
        experts: for each layer, whether it is an MoE layer.
        mtp: likewise for each layer of multi-token prediction.
        first: whether it is the model's first.
        last_norm: whether it has the norm behind the model's last layer.
        output: whether it has the output layer.
    """

    experts: tuple[bool, ...]
    mtp: tuple[bool, ...]
    first: bool
    last_norm: bool
    output: bool

    @property
    def embedding(self) -> bool:
        """Whether it has the token embedding: the model's own, or a copy for `mtp`."""
        return self.first or bool(self.mtp)

    @property
    def moe_layers(self) -> int:
        """Number of its MoE layers, those of multi-token prediction included."""
        return sum(self.experts) + sum(self.mtp)

    def __str__(self) -> str:
        dense = len(self.experts) - sum(self.experts)
        parts = ["embedding"] * self.first
        parts += [f"{dense} dense"] * bool(dense)
        parts += [f"{sum(self.experts)} MoE"] * any(self.experts)
        parts += [f"{len(self.mtp)} MTP"] * bool(self.mtp)
        parts += ["output"] * self.output
        return " + ".join(parts) or "nothing"


Stage = tuple[Chunk, ...]
"""The chunks of one pipeline rank: one, or one for each virtual stage."""


def pipeline_stages(config: Any) -> list[Stage]:
    """The stage of each pipeline rank of a GPT model.

    Args:
        config: Megatron's TransformerConfig.
    Raises: AssertionError, Megatron's, when the layers cannot be spread over the ranks.
    """
    pp = config.pipeline_model_parallel_size
    vp = config.virtual_pipeline_model_parallel_size or 1
    layout = _layout(config)
    left = has_experts(config)
    stages: list[list[Chunk]] = [[] for _ in range(pp)]
    mtp_experts = (left[-1],) * (config.mtp_num_layers or 0)
    # Layers are numbered along the ranks of the first virtual stage, then of the second.
    for virtual in range(vp):
        for rank in range(pp):
            first = rank == 0 and virtual == 0
            last = rank == pp - 1 and virtual == vp - 1
            if layout is None:
                layers = get_num_layers_to_build(config, virtual if vp > 1 else None, rank)
                has_mtp, output = last, last
            else:
                here = layout[rank][virtual]
                layers = here.count(LayerType.decoder)
                has_mtp, output = LayerType.mtp in here, LayerType.loss in here
            mtp = mtp_experts if has_mtp else ()
            experts, left = left[:layers], left[layers:]
            # Multi-token prediction starts from what the norm gives, so there it is apart from
            # the output layer where the layers are.
            last_norm = bool(experts) and not left if mtp_experts else output
            stages[rank].append(
                Chunk(
                    experts=tuple(experts),
                    mtp=mtp,
                    first=first,
                    last_norm=last_norm,
                    output=output,
                )
            )
    return [tuple(stage) for stage in stages]


def has_experts(config: Any) -> list[bool]:
    """For each layer of the model, whether it is an MoE layer."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(kind) for kind in frequency]


def in_flight(config: Any, rank: int, microbatches: int) -> list[int]:
    """Most microbatches of which a pipeline rank keeps activations at a time, for each chunk.

    That of Megatron's 1F1B schedules: a rank runs ahead by its distance to the last rank; with
    virtual stages by twice that and all its chunks but one.
    """
    pp = config.pipeline_model_parallel_size
    vp = config.virtual_pipeline_model_parallel_size
    if not vp or vp == 1:
        return [min(pp - rank, microbatches)]
    group = config.microbatch_group_size_per_vp_stage or pp
    ahead = min(2 * (pp - rank - 1) + (vp - 1) * group + 1, microbatches * vp)
    counts = [0] * vp
    for forward in range(ahead):
        counts[forward // group % vp] += 1
    return counts


def _layout(config: Any) -> list[list[list[LayerType]]] | None:
    layout = config.pipeline_model_parallel_layout
    return None if layout is None else layout.layout
