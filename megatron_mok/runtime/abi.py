"""The C ABI of `csrc/include/mok.h` as ctypes structures. Names and order follow the header."""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int16, c_int32, c_int64, c_void_p
from enum import IntEnum

ABI_VERSION = 2
MAX_RANKS = 72
MAX_EXPERTS = 1024
MAX_TOPK = 32
BLOCK_ROWS = 128
HANDLE_BYTES = 64


class Status(IntEnum):
    OK = 0
    INVALID_ARGUMENT = 1
    TIMEOUT = 2
    POISONED = 3
    UNSUPPORTED = 4
    SYSTEM = 5


class Dtype(IntEnum):
    F32 = 0
    BF16 = 1


class Direction(IntEnum):
    FORWARD = 0
    BACKWARD = 1


class Phase(IntEnum):
    DISPATCH = 0
    FC1 = 1
    FC2 = 2
    WGRAD = 3
    REDUCE = 4


def pointer(tensor) -> int | None:
    """Where a tensor's data is; None, which is NULL, for no tensor and for an empty one."""
    return None if tensor is None else tensor.data_ptr() or None


class MokShape(Structure):
    _fields_ = [
        ("ep_size", c_int32),
        ("ep_rank", c_int32),
        ("num_experts", c_int32),
        ("topk", c_int32),
        ("hidden", c_int32),
        ("ffn", c_int32),
        ("max_tokens", c_int32),
        ("dtype", c_int32),
    ]


class MokOptions(Structure):
    _fields_ = [("workers", c_int32), ("first_wait_ms", c_int32), ("inner_wait_ms", c_int32)]


class MokLayout(Structure):
    _fields_ = [("peer_bytes", c_int64), ("local_bytes", c_int64), ("max_rows", c_int64)]


class MokWorkspaceDesc(Structure):
    _fields_ = [("shape", MokShape), ("options", MokOptions), ("peers", c_void_p * MAX_RANKS)]


class MokRoutes(Structure):
    _fields_ = [("tokens", c_int32), ("expert_ids", c_void_p), ("probs", c_void_p)]

    @classmethod
    def of(cls, expert_ids_TK, probs_TK=None) -> "MokRoutes":
        """Of contiguous tensors [T, K]: int32 ids, and float32 probs where the call uses them."""
        return cls(len(expert_ids_TK), pointer(expert_ids_TK), pointer(probs_TK))


class MokRow(Structure):
    _fields_ = [
        ("token", c_int32),
        ("rank", c_int16),
        ("k", c_int16),
        ("prob", c_float),
        ("expert", c_int32),
    ]


class ProbsDtype(IntEnum):
    F32 = 0
    BF16 = 1
    F64 = 2


class MokRouteMapArgs(Structure):
    _fields_ = [
        ("tokens", c_int32),
        ("experts", c_int32),
        ("topk", c_int32),
        ("routing_map", c_void_p),
        ("probs", c_void_p),
        ("probs_dtype", c_int32),
        ("expert_ids", c_void_p),
        ("route_probs", c_void_p),
        ("stream", c_void_p),
    ]


class MokWeights(Structure):
    _fields_ = [("fc1", POINTER(c_void_p)), ("fc2", POINTER(c_void_p))]


class MokWeightGrads(Structure):
    _fields_ = [("fc1", POINTER(c_void_p)), ("fc2", POINTER(c_void_p)), ("accumulate", c_int32)]


class MokSaved(Structure):
    _fields_ = [("preact", c_void_p), ("rows", c_int64)]


class MokForwardArgs(Structure):
    _fields_ = [
        ("routes", MokRoutes),
        ("hidden", c_void_p),
        ("weights", MokWeights),
        ("addend", c_void_p),
        ("output", c_void_p),
        ("saved", MokSaved),
        ("stream", c_void_p),
    ]


class MokBackwardArgs(Structure):
    _fields_ = [
        ("routes", MokRoutes),
        ("grad_output", c_void_p),
        ("hidden", c_void_p),
        ("weights", MokWeights),
        ("saved", MokSaved),
        ("grad_hidden", c_void_p),
        ("grad_probs", c_void_p),
        ("weight_grads", MokWeightGrads),
        ("stream", c_void_p),
    ]


class MokDispatchArgs(Structure):
    _fields_ = [
        ("routes", MokRoutes),
        ("hidden", c_void_p),
        ("rows", c_void_p),
        ("row_probs", c_void_p),
        ("expert_rows", c_void_p),
        ("capacity", c_int64),
        ("stream", c_void_p),
    ]


class MokCombineArgs(Structure):
    _fields_ = [
        ("routes", MokRoutes),
        ("rows", c_void_p),
        ("capacity", c_int64),
        ("addend", c_void_p),
        ("output", c_void_p),
        ("row_probs", c_void_p),
        ("route_probs", c_void_p),
        ("stream", c_void_p),
    ]


class MokSegment(Structure):
    _fields_ = [
        ("phase", c_int32),
        ("first_ticket", c_int32),
        ("first_block", c_int32),
        ("num_blocks", c_int32),
        ("first_tile", c_int32),
        ("num_tiles", c_int32),
        ("expert", c_int32),
        ("cut", c_int32),
    ]


class MokScheduleArgs(Structure):
    _fields_ = [
        ("routes", MokRoutes),
        ("direction", c_int32),
        ("counts", c_void_p),
        ("block_offsets", c_void_p),
        ("rows", c_void_p),
        ("row_capacity", c_int64),
        ("segments", c_void_p),
        ("segment_capacity", c_int32),
        ("num_segments", c_int32),
        ("num_tickets", c_int32),
        ("stream", c_void_p),
    ]


def declare(lib: ctypes.CDLL) -> None:
    """Declares argument and result types of every function of the ABI."""
    workspace = c_void_p
    functions = {
        "mok_abi_version": ([], c_int32),
        "mok_engine": ([], c_char_p),
        "mok_last_error": ([], c_char_p),
        "mok_segment_alloc": ([c_int64, POINTER(c_void_p)], c_int32),
        "mok_segment_export": ([c_void_p, c_char_p], c_int32),
        "mok_segment_open": ([c_char_p, POINTER(c_void_p)], c_int32),
        "mok_segment_close": ([c_void_p], c_int32),
        "mok_segment_free": ([c_void_p], c_int32),
        "mok_layout": (
            [POINTER(MokShape), POINTER(MokOptions), POINTER(MokLayout)],
            c_int32,
        ),
        "mok_workspace_create": ([POINTER(MokWorkspaceDesc), POINTER(workspace)], c_int32),
        "mok_workspace_destroy": ([workspace], None),
        "mok_routes_from_map": ([POINTER(MokRouteMapArgs)], c_int32),
        "mok_check": ([workspace], c_int32),
        "mok_schedule": ([workspace, POINTER(MokScheduleArgs)], c_int32),
        "mok_dispatch": ([workspace, POINTER(MokDispatchArgs)], c_int32),
        "mok_combine": ([workspace, POINTER(MokCombineArgs)], c_int32),
        "mok_forward": ([workspace, POINTER(MokForwardArgs)], c_int32),
        "mok_backward": ([workspace, POINTER(MokBackwardArgs)], c_int32),
    }
    for name, (argtypes, restype) in functions.items():
        function = getattr(lib, name)
        function.argtypes = argtypes
        function.restype = restype
