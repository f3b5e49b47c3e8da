"""Errors of the Megatron side."""

from __future__ import annotations

from megatron_mok.runtime.errors import MoKError


class MoKConfigError(MoKError, ValueError):
    """A configuration that the plugin cannot run; the message lists every problem and its way out.

    Attributes:
        problems: one line for each problem.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        head = "--moe-token-dispatcher-type mok cannot run this configuration:"
        super().__init__("\n".join([head, *(f"  - {line}" for line in self.problems)]))

    def __reduce__(self):
        return type(self), self.problems


class MoKInstallError(MoKError, RuntimeError):
    """The hooks cannot be put into this Megatron."""


class DryRunError(MoKError, ValueError):
    """A launch that would not work, found by its dry run; the message says why."""
