"""The schedule of a call as data, for tests and tools."""

from dataclasses import dataclass

import numpy as np
import torch

from megatron_mok.runtime import abi
from megatron_mok.runtime.workspace import Workspace

ROW_DTYPE = np.dtype(
    [("token", "i4"), ("rank", "i2"), ("k", "i2"), ("prob", "f4"), ("expert", "i4")]
)
SEGMENT_DTYPE = np.dtype([(name, "i4") for name, _ in abi.MokSegment._fields_])


@dataclass(frozen=True)
class Schedule:
    """What one rank works on in one call.

    Attributes:
        counts_RE: [ep_size, E] int32, routes from each rank to each expert.
        block_offsets: [L + 1] int32, first row block of each local expert; last: number of blocks.
        rows: [blocks * 128] of `ROW_DTYPE`, ordered by expert, then (source rank, token, k);
            `rank` is -1 in padding rows.
        segments: of `SEGMENT_DTYPE`, runs of tasks in ticket order (`MokSegment` in mok.h). Each
            engine cuts its own; those of the CUDA engine are the matrix tiles alone.
        num_tickets: number of tasks.
    """

    counts_RE: np.ndarray
    block_offsets: np.ndarray
    rows: np.ndarray
    segments: np.ndarray
    num_tickets: int


def make_schedule(
    workspace: Workspace,
    expert_ids_TK: torch.Tensor,
    probs_TK: torch.Tensor,
    direction: abi.Direction = abi.Direction.FORWARD,
) -> Schedule:
    """Builds the schedule of these routes. Collective, like a forward or backward call.

    On a GPU this waits for the current stream, and cannot be captured in a CUDA graph.

    Args:
        expert_ids_TK: [T, K] int32, contiguous; -1 is no route.
        probs_TK: [T, K] float32, contiguous.
    """
    experts = workspace.shape.num_experts
    counts_RE = np.zeros((workspace.ep_size, experts), np.int32)
    block_offsets = np.zeros(workspace.num_local_experts + 1, np.int32)
    rows = np.zeros(workspace.max_rows, ROW_DTYPE)
    # With one block a group and a cut; see csrc/schedule/segments.h and csrc/sm90/order.cuh.
    blocks = workspace.max_rows // abi.BLOCK_ROWS
    segments = np.zeros(5 * blocks + 2 * workspace.num_local_experts + 1, SEGMENT_DTYPE)
    args = abi.MokScheduleArgs(
        routes=abi.MokRoutes.of(expert_ids_TK, probs_TK),
        direction=direction,
        counts=counts_RE.ctypes.data,
        block_offsets=block_offsets.ctypes.data,
        rows=rows.ctypes.data,
        row_capacity=len(rows),
        segments=segments.ctypes.data,
        segment_capacity=len(segments),
        stream=workspace.current_stream(),
    )
    workspace.call("mok_schedule", args)
    return Schedule(
        counts_RE=counts_RE,
        block_offsets=block_offsets,
        rows=rows[: int(block_offsets[-1]) * abi.BLOCK_ROWS],
        segments=segments[: args.num_segments],
        num_tickets=args.num_tickets,
    )
