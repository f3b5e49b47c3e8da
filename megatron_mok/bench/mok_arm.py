"""The arm `mok`: the fused layer."""

from pathlib import Path

import torch

from megatron_mok.ops import combine, dispatch, fused_moe, routes_from_map
from megatron_mok.runtime import LayerShape, Workspace
from megatron_mok.runtime.engine import engine_problem

from .layer import LayerInputs, MainGradLayer, MovesRows


def unavailable(device: torch.device, dtype: torch.dtype, library: Path | None) -> str | None:
    return engine_problem(device.type, library)


class MokLayer(MainGradLayer, MovesRows):
    """Routes from the map, then the fused layer; weight gradients are added into FP32 `main_grad`,
    and the pre-activations of all rows are kept for backward.

    `library`: another build of the engine. Routes are made by the installed one.
    """

    schedule_kernels = ("count_kernel", "route_kernel")

    def __init__(self, inputs: LayerInputs, library: Path | None = None):
        fc1, fc2 = (
            [w.detach().requires_grad_() for w in stacked.unbind(0)]
            for stacked in (inputs.fc1_E2FH, inputs.fc2_EHF)
        )
        super().__init__(inputs, fc1, fc2)
        shape = LayerShape(
            hidden=inputs.hidden,
            ffn=inputs.ffn,
            num_experts=inputs.experts,
            topk=inputs.topk,
            max_tokens=inputs.tokens,
            dtype=inputs.dtype,
        )
        self._workspace = Workspace.create(shape, None, inputs.device, library=library)

    def forward(self) -> torch.Tensor:
        ids_TK, probs_TK = routes_from_map(
            self.probs_TE, self.inputs.routing_map_TE, self.inputs.topk
        )
        return fused_moe(
            self.hidden_TH,
            ids_TK,
            probs_TK,
            self.fc1,
            self.fc2,
            self._workspace,
            saved_rows=self._workspace.max_rows,
            accumulate_into_main_grad=True,
        )

    @torch.no_grad()
    def dispatch(self):
        ids_TK, probs_TK = routes_from_map(
            self.probs_TE, self.inputs.routing_map_TE, self.inputs.topk
        )
        return dispatch(self.hidden_TH, ids_TK, probs_TK, self._workspace).rows_RH, ids_TK

    @torch.no_grad()
    def combine(self, dispatched) -> torch.Tensor:
        return combine(*dispatched, self._workspace)
