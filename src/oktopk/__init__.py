# SPDX-License-Identifier: Apache-2.0
"""Sparse gradient exchange for data-parallel PyTorch: a few percent of the traffic.

reducer = oktopk.Reducer(numel)
stats = reducer.reduce_(flat_gradient)   # in place: the average; the same bits on all ranks

handle = oktopk.attach(ddp_model, optimizer=optimizer, total_steps=num_steps)  # every step
outer = oktopk.local_steps(model, optimizer)                                   # every 5th step
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from oktopk.utils import signals
from oktopk.version import __version__

if signals.started_as_command():  # Ctrl-C while torch is imported must not print a traceback
    signals.exit_on_signals()

if TYPE_CHECKING:
    from oktopk.adapters.ddp import attach
    from oktopk.adapters.ddp_handle import Handle
    from oktopk.adapters.fsdp import attach_fsdp
    from oktopk.adapters.fsdp_handle import FSDPHandle
    from oktopk.adapters.local_handle import LocalSteps
    from oktopk.adapters.local_steps import local_steps
    from oktopk.adapters.parameters import Policy
    from oktopk.comm.communicator import Comm
    from oktopk.comm.simulated import simulate
    from oktopk.errors import ExchangeError, MessageError, NonfiniteError, ReplicaError
    from oktopk.exchange.reducer import Reducer
    from oktopk.methods import METHODS
    from oktopk.settings import Settings
    from oktopk.stats import StepStats

__all__ = [
    "METHODS",
    "Comm",
    "ExchangeError",
    "FSDPHandle",
    "Handle",
    "LocalSteps",
    "MessageError",
    "NonfiniteError",
    "Policy",
    "Reducer",
    "ReplicaError",
    "Settings",
    "StepStats",
    "__version__",
    "attach",
    "attach_fsdp",
    "local_steps",
    "simulate",
]

_MODULES = {
    "METHODS": "methods",
    "Comm": "comm.communicator",
    "ExchangeError": "errors",
    "FSDPHandle": "adapters.fsdp_handle",
    "Handle": "adapters.ddp_handle",
    "LocalSteps": "adapters.local_handle",
    "MessageError": "errors",
    "NonfiniteError": "errors",
    "Policy": "adapters.parameters",
    "Reducer": "exchange.reducer",
    "ReplicaError": "errors",
    "Settings": "settings",
    "StepStats": "stats",
    "attach": "adapters.ddp",
    "attach_fsdp": "adapters.fsdp",
    "local_steps": "adapters.local_steps",
    "simulate": "comm.simulated",
}
"""Where each name is. It is imported when it is first used, because `oktopk --help` needs no torch,
whose import takes seconds."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'oktopk' has no attribute {name!r}")
    value = getattr(import_module(f"oktopk.{_MODULES[name]}"), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
