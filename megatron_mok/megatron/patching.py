"""Replacing functions of Megatron in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType


def replace_function(owner: ModuleType, name: str, replacement: Callable) -> None:
    """Put `replacement` in the place of `owner.name`, and of that function in all modules that
    imported it by name."""
    native = getattr(owner, name)
    for module in [owner, *sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(name) is native:
            setattr(module, name, replacement)
