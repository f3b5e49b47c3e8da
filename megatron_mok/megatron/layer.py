"""Megatron's MoELayer with MoK between router and residual add, in both modes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_mok.megatron import cpu_mode, shared_gpu
from megatron_mok.megatron.dispatcher import MoKTokenDispatcher
from megatron_mok.megatron.errors import MoKConfigError
from megatron_mok.megatron.experts import FusedExperts
from megatron_mok.megatron.flags import MoKOptions, read_options
from megatron_mok.megatron.ranges import in_ranges
from megatron_mok.megatron.rules import USE_ALLTOALL
from megatron_mok.megatron.statistics import LayerFacts, statistics
from megatron_mok.megatron.validation import check_config, seen_as_alltoall, workspace_shape
from megatron_mok.ops import routes_from_map
from megatron_mok.runtime import (
    LayerShape,
    MoKUnsupportedError,
    RuntimeOptions,
    Workspace,
    get_workspace,
)

_STAGES = ("route", "expert_compute", "postprocess")


@dataclass(frozen=True)
class _Call:
    """What the stages of one forward hand on besides their arguments."""

    hidden_shape: torch.Size
    ids_TK: torch.Tensor
    shared_output: torch.Tensor | None


class MoKMoELayer(MoELayer):
    """An MoE layer under `--moe-token-dispatcher-type mok`.

    Router, parameters and their names, shared experts, recomputation, and checkpoints are those of
    MoELayer. Makes a FusedMoELayer or a DispatchMoELayer, by `--mok-mode`. With the hooks
    installed, `MoELayer(config, ...)` makes one when the config says `mok`. Takes the arguments of
    MoELayer.

    Construction is collective over the expert-parallel group: it makes the workspace, once for all
    layers of a shape.
    Raises: MoKConfigError for what the mode cannot do.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> MoKMoELayer:
        if cls is MoKMoELayer:
            cls = DispatchMoELayer if read_options()[0].mode == "dispatch" else FusedMoELayer
        return object.__new__(cls)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # Again: fields may have been set after the config was made.
        options = check_config(config, _device())
        with seen_as_alltoall(config):
            super().__init__(config, *args, **kwargs)
        expert_tp = self.token_dispatcher.tp_size
        if expert_tp > 1:
            raise MoKConfigError(
                f"the expert tensor parallel group has {expert_tp} ranks: each expert must be "
                "whole on its rank; set --expert-tensor-parallel-size 1"
            )
        shape = workspace_shape(config, options)
        self._max_tokens = shape.max_tokens
        self._facts = None  # for statistics; None where nobody wants them
        self._use_workspace(_shared_workspace(shape, self.ep_group, options), options)

    @abstractmethod
    def _use_workspace(self, workspace: Workspace, options: MoKOptions) -> None:
        """The end of construction, by mode."""

    def _layer_facts(self, workspace: Workspace, moves: int, saved_rows: int | None) -> LayerFacts:
        """For statistics, of a mode that moves each row so many times in forward and backward."""
        shape = workspace.shape
        route_bytes = moves * shape.hidden * shape.dtype.itemsize
        return LayerFacts(self.ep_group, route_bytes, saved_rows)

    def _index(self) -> int | None:
        """Place of the layer in the model, from 0, as Megatron's logs of MoE layers have it; None
        for a layer that is not part of one."""
        if self.layer_number is None:
            return None
        before = self.config.num_layers if self.is_mtp_layer else 0
        return before + self.layer_number - 1

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As MoELayer.forward, for whole layers.

        Args:
            hidden_states: [s, b, H] tokens of this rank; s * b may differ between ranks.
            intermediate_tensors: must be None (partial CUDA graphs split the layer with it).
            padding_mask: [b, s] bool or None, for the router.
        Returns: ([s, b, H], None).
        """
        if intermediate_tensors is not None or tuple(self.fwd_execution_map) != _STAGES:
            raise MoKConfigError(
                "the layer was asked to run in parts (intermediate_tensors or "
                "fwd_execution_map, as partial CUDA graphs do): MoK's layers run whole; "
                "set --cuda-graph-impl none, or in fused mode full_iteration"
            )
        tokens = hidden_states.shape[0] * hidden_states.shape[1]
        if tokens > self._max_tokens:
            raise MoKConfigError(
                f"an MoE layer got {tokens} tokens on this rank, its workspace holds "
                f"{self._max_tokens}; set --mok-max-tokens-per-rank {tokens} or more"
            )
        return super().forward(hidden_states, padding_mask=padding_mask)

    def route(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As MoELayer.route."""
        probs, routing_map = super().route(*args, **kwargs)
        if self._facts is not None and self.training:
            statistics.count(self._index(), self._facts, routing_map)
        return probs, routing_map


class DispatchMoELayer(MoKMoELayer):
    """Mode `dispatch`: Megatron's experts module, with MoK's dispatch and combine around it."""

    def _use_workspace(self, workspace: Workspace, options: MoKOptions) -> None:
        native = self.token_dispatcher
        groups = ProcessGroupCollection(
            ep=native.ep_group, expt_tp=native.tp_group, tp_ep=native.tp_ep_group
        )
        self.token_dispatcher = MoKTokenDispatcher(self.config, groups, workspace)
        if options.log_statistics:
            # A row, its result, and the gradients of both.
            self._facts = self._layer_facts(workspace, moves=4, saved_rows=None)

    def dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As MoELayer.dispatch."""
        return in_ranges("dispatch", self._index(), super().dispatch, hidden_states, probs)

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """As MoELayer.combine."""
        return in_ranges("combine", self._index(), super().combine, output)


class FusedMoELayer(MoKMoELayer):
    """Mode `fused`: dispatch, experts and combine are one kernel per direction."""

    def _use_workspace(self, workspace: Workspace, options: MoKOptions) -> None:
        shape = workspace.shape
        saved_rows = options.saved_rows(
            shape.max_tokens, shape.topk, self.ep_group.size(), self.num_local_experts
        )
        # After `experts`: parameters are named by the first module that holds them.
        self.fused_experts = FusedExperts(
            self.experts,
            workspace,
            saved_rows=saved_rows,
            accumulate_into_main_grad=self.config.gradient_accumulation_fusion,
        )
        if options.log_statistics:
            # As in mode dispatch, and the row once more in backward, which keeps none.
            self._facts = self._layer_facts(workspace, moves=5, saved_rows=saved_rows)
        self._call: _Call | None = None
        self._shared_output: torch.Tensor | None = None

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[s, b, H] output of the shared experts, or None without them. The kernel adds it."""
        self._shared_output = super().shared_experts_compute(hidden_states)
        return self._shared_output

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes of the tokens from the router's output.

        Args:
            hidden_states: [s, b, H].
            probs: [T, E], T = s * b.
            routing_map: [T, E] bool; it alone says which routes exist.
        Returns: ([T, H] tokens, [T, K] route weights).
        """
        ids_TK, probs_TK = routes_from_map(probs, routing_map, self.config.moe_router_topk)
        self._call = _Call(hidden_states.shape, ids_TK, self._shared_output)
        self._shared_output = None
        return _by_token(hidden_states), probs_TK

    def dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing: the kernel of routed_experts_compute dispatches."""
        return hidden_states, probs

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Dispatch, experts, combine and shared experts' output: [T, H] tokens and [T, K] weights
        to ([T, H], None)."""
        call = self._call
        shared_TH = None if call.shared_output is None else _by_token(call.shared_output)
        inputs = hidden_states, call.ids_TK, probs, shared_TH
        return in_ranges("fused", self._index(), self.fused_experts, *inputs), None

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Nothing: the kernel of routed_experts_compute combines."""
        return output

    def postprocess(
        self, output: torch.Tensor, shared_expert_output: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, H] output of the layer, as [s, b, H]; a shared expert output that the kernel has not
        added yet is added here."""
        call, self._call = self._call, None
        output = output.view(call.hidden_shape)
        if shared_expert_output is not None and shared_expert_output is not call.shared_output:
            output = output + shared_expert_output
        return output

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Delayed weight gradients: of the shared experts only, the kernel has done the others."""
        super().backward_dw(routed_experts=False, shared_experts=shared_experts)


def _by_token(hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()


_LIVE = {
    "fused": "fused MoE layers",
    "dispatch": "dispatch and combine around Megatron's experts",
}
_announced: set[tuple[str, LayerShape]] = set()


def _shared_workspace(shape: LayerShape, ep_group: Any, options: MoKOptions) -> Workspace:
    device = _device()
    runtime_options = RuntimeOptions(
        first_wait_s=options.first_timeout_s,
        inner_wait_s=options.inner_timeout_s,
        workers=options.host_threads if device.type == "cpu" else shared_gpu.max_ctas(),
        peer_memory=options.peer_memory,
    )
    try:
        workspace = get_workspace(shape, ep_group, device, runtime_options)
    except MoKUnsupportedError as error:  # several hosts, or another kind of GPU
        raise MoKConfigError(f"{error}; {USE_ALLTOALL}") from error
    if torch.distributed.get_rank() == 0 and (options.mode, shape) not in _announced:
        _announced.add((options.mode, shape))
        # Printed as Megatron prints what everyone should see; its default log level hides INFO.
        print(
            f"megatron_mok: {_LIVE[options.mode]}, engine {workspace.engine}, expert-parallel "
            f"group of {ep_group.size()}, workspace {workspace.nbytes / 2**20:.1f} MiB per rank "
            f"for {shape.max_tokens} tokens, hidden {shape.hidden}, ffn {shape.ffn}, "
            f"{shape.num_experts} experts, top-{shape.topk}, {shape.dtype}",
            flush=True,
        )
    return workspace


def _device() -> torch.device:
    if cpu_mode.is_enabled() or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
