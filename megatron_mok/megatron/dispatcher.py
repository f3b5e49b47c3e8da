"""MoKTokenDispatcher: MoK's dispatch and combine around Megatron's own experts module."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megatron_mok.ops import combine, dispatch, routes_from_map
from megatron_mok.runtime import Workspace
from megatron_mok.runtime.abi import BLOCK_ROWS


class MoKTokenDispatcher(MoETokenDispatcher):
    """Moves tokens as `alltoall` does, with MoK's kernels.

    Each expert gets its rows in the order (source rank, token), so results do not depend on the
    expert-parallel size, and zeros up to a multiple of 128 rows. Zeros weigh nothing: their
    probabilities are 0, what experts make of them is never combined, and the gradients that experts
    get for them are 0, biases included.

    Experts modules want the numbers of rows on the CPU. So does this class, to take memory for the
    rows that there are and not for the worst case. They come from one all-reduce of a number per
    expert, and the CPU waits for them once in every forward, as it does under `alltoall`.

    Args:
        config: Megatron's TransformerConfig.
        pg_collection: process groups: `ep`, `expt_tp` (of one rank), `tp_ep`.
        workspace: of the expert-parallel group.
    """

    def __init__(self, config: Any, pg_collection: Any, workspace: Workspace) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._workspace = workspace
        first = workspace.ep_rank * workspace.num_local_experts
        self._local_experts = slice(first, first + workspace.num_local_experts)

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes of the tokens, and the sum over all ranks of how many each expert gets.

        Args:
            hidden_states: [s, b, H].
            routing_map: [T, E] bool, T = s * b; it alone says which routes exist.
            probs: [T, E].
        Returns: ([T, H] tokens, [T, K] float32 weights of the routes).
        """
        self.hidden_shape = hidden_states.shape
        self._probs_dtype = probs.dtype
        topk = self._workspace.shape.topk
        self._ids_TK, probs_TK = routes_from_map(probs, routing_map, topk)
        self._rows_E = _rows_per_expert(self._ids_TK, self._workspace.shape.num_experts)
        if self.ep_size > 1:
            torch.distributed.all_reduce(self._rows_E, group=self.ep_group)
        return hidden_states.reshape(-1, self.hidden_shape[-1]).contiguous(), probs_TK

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] tokens and [T, K] weights to ([R, H] rows of this rank's experts, [R] weights).

        Collective; the CPU waits for the device.
        """
        rows_L = self._rows_E[self._local_experts].cpu()
        self._padded_rows_L = (rows_L + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
        capacity = int(self._padded_rows_L.sum())
        sent = dispatch(hidden_states, self._ids_TK, probs, self._workspace, capacity=capacity)
        return sent.rows_RH, sent.probs_R

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the experts module takes: [R, H] rows, [L] int64 rows of each local expert on the
        CPU, zeros included, and [R] weights in the router's dtype."""
        return hidden_states, self._padded_rows_L, probs.to(self._probs_dtype)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, H] results of the experts, as they are."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, H] results to [T, H] sums of each token's, in FP32 and ascending expert id.
        Collective."""
        return combine(hidden_states.contiguous(), self._ids_TK, self._workspace)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, H] to [s, b, H]."""
        return hidden_states.view(self.hidden_shape)


def _rows_per_expert(ids_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    # From the routes that dispatch will see. Missing ones, -1, are counted in front.
    places = (ids_TK.flatten() + 1).long()
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=ids_TK.device)
    return counts.scatter_add_(0, places, torch.ones_like(places))[1:].contiguous()
