"""What ends a run with a message for people, not a traceback."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


class OthersError(RunError):
    """Another rank failed; its own message says why."""


class DivergedError(RunError):
    """The loss has not been a number for too long."""


class CheckpointError(RunError):
    """A checkpoint cannot be written or read."""


class StoppedError(RunError):
    """Somebody asked the run to stop; it was saved before."""
