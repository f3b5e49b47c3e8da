"""Errors of the engines. All derive from `MoKError`."""


class MoKError(RuntimeError):
    """An engine call failed."""


class MoKInvalidArgumentError(MoKError, ValueError):
    """An argument was refused. No rank made the call; the workspace stays usable."""


class MoKTimeoutError(MoKError):
    """A bounded wait ran out, here or on a peer: the text names rank, phase and task."""


class MoKWorkspacePoisonedError(MoKError):
    """An earlier call on this workspace failed midway; ranks no longer agree on where they are."""


class MoKUnsupportedError(MoKError):
    """The engine, or this machine, cannot do what was asked."""
