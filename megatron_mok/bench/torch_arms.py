"""The arms `torch_eager` and `torch_compiled`: the layer composed of PyTorch's grouped products.

Written to be fast: nothing waits for the device, every gather's gradient is a gather, and no sum
uses atomics.
"""

import torch
import torch.nn.functional as F

from megatron_mok.ops import routes_from_map

from .layer import BenchLayer, Gradients, LayerInputs, MovesRows

_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def unavailable(device: torch.device, dtype: torch.dtype, *, compiled: bool) -> str | None:
    if _grouped_mm is None:
        return f"torch {torch.__version__} has no grouped_mm (torch.nn.functional has it from 2.10)"
    # Tracing calls the operator on meta tensors, which can be stricter than the operator.
    for where in (device, torch.device("meta")) if compiled else (device,):
        rows = torch.zeros(32, 16, device=where, dtype=dtype)
        weights = torch.zeros(2, 16, 16, device=where, dtype=dtype)
        ends = torch.tensor([16, 32], device=where, dtype=torch.int32)
        try:
            _grouped_mm(rows, weights.transpose(1, 2), offs=ends)
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            return f"grouped_mm of torch {torch.__version__} on {where.type}: {reason}"
    return None


def sort_routes(ids_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows r go expert by expert, in each by token: route[r] = t * K + k, and row[t, k] = r."""
    route_R = ids_TK.flatten().argsort(stable=True)
    row_TK = torch.empty_like(route_R).scatter_(
        0, route_R, torch.arange(route_R.numel(), device=route_R.device)
    )
    return route_R, row_TK.view_as(ids_TK)


def composed_moe(
    hidden_TH: torch.Tensor,
    probs_TE: torch.Tensor,
    routing_map_TE: torch.Tensor,
    fc1_E2FH: torch.Tensor,
    fc2_EHF: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """[T, H] output of the routed experts. Every token must have exactly `topk` routes."""
    ids_TK, probs_TK = routes_from_map(probs_TE, routing_map_TE, topk)
    route_R, row_TK = sort_routes(ids_TK)
    token_R = route_R // topk
    ends_E = routing_map_TE.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    x_RH = _Gather.apply(hidden_TH, token_R, row_TK)
    prob_R1 = _Gather.apply(probs_TK.reshape(-1, 1), route_R, row_TK.reshape(-1, 1))
    gate_RF, up_RF = _grouped_mm(x_RH, fc1_E2FH.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    act_RF = (F.silu(gate_RF) * up_RF * prob_R1).to(hidden_TH.dtype)
    y_RH = _grouped_mm(act_RF, fc2_EHF.transpose(1, 2), offs=ends_E)
    return _Combine.apply(y_RH, token_R, row_TK)


class _Gather(torch.autograd.Function):
    """x[source_R] of x [N, C]; `row_NK` are the rows that each of x went to."""

    @staticmethod
    def forward(ctx, x_NC, source_R, row_NK):
        ctx.save_for_backward(row_NK)
        return x_NC[source_R]

    @staticmethod
    def backward(ctx, grad_RC):
        (row_NK,) = ctx.saved_tensors
        return grad_RC[row_NK].sum(1), None, None


class _Combine(torch.autograd.Function):
    """The sum over each token's rows: the transpose of `_Gather`."""

    @staticmethod
    def forward(ctx, y_RH, token_R, row_TK):
        ctx.save_for_backward(token_R)
        return y_RH[row_TK].sum(1)

    @staticmethod
    def backward(ctx, grad_TH):
        (token_R,) = ctx.saved_tensors
        return grad_TH[token_R], None, None


class ComposedLayer(BenchLayer):
    """`composed_moe`. Weight gradients come in the dtype of the weights: unlike the other arms,
    it does not add them into FP32 buffers."""

    def __init__(self, inputs: LayerInputs):
        super().__init__(inputs)
        self._fc1_E2FH = inputs.fc1_E2FH.detach().requires_grad_()
        self._fc2_EHF = inputs.fc2_EHF.detach().requires_grad_()
        self._moe = composed_moe

    def forward(self) -> torch.Tensor:
        return self._moe(
            self.hidden_TH,
            self.probs_TE,
            self.inputs.routing_map_TE,
            self._fc1_E2FH,
            self._fc2_EHF,
            self.inputs.topk,
        )

    def backward(self, output_TH: torch.Tensor) -> Gradients:
        hidden, probs, fc1, fc2 = self._grads(output_TH, (self._fc1_E2FH, self._fc2_EHF))
        return Gradients(hidden, probs, fc1, fc2)


class EagerLayer(ComposedLayer, MovesRows):
    """As it stands."""

    @torch.no_grad()
    def dispatch(self):
        topk = self.inputs.topk
        ids_TK, probs_TK = routes_from_map(self.probs_TE, self.inputs.routing_map_TE, topk)
        route_R, row_TK = sort_routes(ids_TK)
        return self.hidden_TH[route_R // topk], probs_TK.reshape(-1)[route_R], row_TK

    @torch.no_grad()
    def combine(self, dispatched) -> torch.Tensor:
        rows_RH, _, row_TK = dispatched
        return rows_RH[row_TK].sum(1)


class CompiledLayer(ComposedLayer):
    """Under torch.compile, which makes its gathers parts of larger kernels."""

    def __init__(self, inputs: LayerInputs):
        super().__init__(inputs)
        self._moe = torch.compile(composed_moe, dynamic=False, fullgraph=True)
