"""PyTorch operators over the engines, with autograd."""

from megatron_mok.ops.dispatch import Dispatched, combine, dispatch
from megatron_mok.ops.fused_moe import fused_moe
from megatron_mok.ops.routes import routes_from_map

__all__ = ["Dispatched", "combine", "dispatch", "fused_moe", "routes_from_map"]
