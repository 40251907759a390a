# SPDX-License-Identifier: Apache-2.0
"""The errors that users may want to catch."""

from __future__ import annotations


class ExchangeError(RuntimeError):
    """A message could not be sent or did not come: a rank died, stopped or went another way."""


class ReplicaError(RuntimeError):
    """The ranks no longer hold the same weights."""


class NonfiniteError(FloatingPointError):
    """A gradient had a NaN or Inf on some rank, and the user asked to be told by an error."""


class StateError(ValueError):
    """A state dict cannot be read, or does not fit this run. The message says why."""


class LaunchError(ValueError):
    """The environment does not say where this process stands, or the ranks cannot meet."""


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
