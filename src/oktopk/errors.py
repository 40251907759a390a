# SPDX-License-Identifier: Apache-2.0
"""The errors that users may want to catch."""

from __future__ import annotations


class ExchangeError(RuntimeError):
    """A message could not be sent or did not arrive; the message names the rank at fault if it can.

    A rank died, stopped, was later than `timeout`, or called other collectives. The exchange cannot
    continue: close the handle and start again from a checkpoint.
    """


class MessageError(ExchangeError):
    """What another rank sent is no message of the exchange; the message names that rank.

    It was damaged on the way or in memory, or the rank sent something else. Nothing of it was
    applied. The exchange cannot continue: start again from a checkpoint.
    """


class ReplicaError(RuntimeError):
    """The ranks no longer hold the same weights; the message names the tensor and the ranks.

    The comparison runs every `check_every` steps. Something changed the weights on some ranks only.
    """


class NonfiniteError(FloatingPointError):
    """A rank had a NaN or Inf, and `on_nonfinite` is `raise`. All ranks raise it.

    The step was undone on all ranks, so training may continue with the next one.
    """


class StateError(ValueError):
    """A state dict cannot be read, or does not fit this run. The message says why."""


class LaunchError(ValueError):
    """The environment does not say where this process stands, or the ranks cannot meet."""


class RunError(RuntimeError):
    """The run cannot continue; the message says why and what to do."""


class OthersError(RunError):
    """Another rank failed; its own message says why."""


class DivergedError(RunError):
    """The loss has not been a number for too long."""


class CheckpointError(RunError):
    """A checkpoint cannot be written or read."""


class StoppedError(RunError):
    """Somebody asked the run to stop; it was saved before."""
