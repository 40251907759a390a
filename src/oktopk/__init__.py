"""Sparse gradient exchange for data-parallel PyTorch: a few percent of the traffic.

reducer = oktopk.Reducer(numel, method="oktopk", density=0.02)
stats = reducer.reduce_(flat_gradient)   # in place: the average; the same bits on all ranks

handle = oktopk.attach(ddp_model, optimizer=optimizer)               # every step
outer = oktopk.local_steps(model, optimizer, every=32, density=0.05) # every 32nd step
"""

from oktopk.utils import signals

if signals.started_as_command():  # Ctrl-C while torch is imported must not print a traceback
    signals.exit_on_signals()


from oktopk.adapters.ddp.attach import attach
from oktopk.adapters.ddp.handle import Handle
from oktopk.adapters.fsdp.attach import attach_fsdp
from oktopk.adapters.fsdp.handle import FSDPHandle
from oktopk.adapters.local_steps.handle import LocalSteps
from oktopk.adapters.local_steps.local_steps import local_steps
from oktopk.adapters.policy import Policy
from oktopk.comm.communicator import Comm
from oktopk.comm.simulated import simulate
from oktopk.errors import ExchangeError, NonfiniteError, ReplicaError
from oktopk.methods import METHODS
from oktopk.reducer import Reducer
from oktopk.settings import Settings
from oktopk.stats import StepStats
from oktopk.version import __version__

__all__ = [
    "METHODS",
    "Comm",
    "ExchangeError",
    "FSDPHandle",
    "Handle",
    "LocalSteps",
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
