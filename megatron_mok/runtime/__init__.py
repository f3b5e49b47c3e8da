"""Engines and workspaces: loading the compiled libraries and sharing memory between EP ranks."""

from megatron_mok.runtime import abi
from megatron_mok.runtime.errors import (
    MoKError,
    MoKInvalidArgumentError,
    MoKTimeoutError,
    MoKUnsupportedError,
    MoKWorkspacePoisonedError,
)
from megatron_mok.runtime.segments import PEER_MEMORY
from megatron_mok.runtime.workspace import (
    LayerShape,
    RuntimeOptions,
    Workspace,
    get_workspace,
    release_workspaces,
    workspace_nbytes,
    workspace_of,
)

__all__ = [
    "PEER_MEMORY",
    "LayerShape",
    "MoKError",
    "MoKInvalidArgumentError",
    "MoKTimeoutError",
    "MoKUnsupportedError",
    "MoKWorkspacePoisonedError",
    "RuntimeOptions",
    "Workspace",
    "abi",
    "get_workspace",
    "release_workspaces",
    "workspace_nbytes",
    "workspace_of",
]
