"""Sparse gradient exchange for data-parallel PyTorch: a few percent of the traffic.

reducer = oktopk.Reducer(numel, method="oktopk", density=0.02)
stats = reducer.reduce_(flat_gradient)   # in place: the average; the same bits on all ranks
"""

from oktopk import interrupts

if interrupts.is_command():  # Ctrl-C while torch is imported must not print a traceback
    interrupts.leave_at_once()


from oktopk.comm import ExchangeError
from oktopk.ddp import attach
from oktopk.engine import NonfiniteError
from oktopk.handle import Handle
from oktopk.methods import METHODS
from oktopk.policy import Policy
from oktopk.reducer import Reducer
from oktopk.simulate import simulate
from oktopk.stats import StepStats
from oktopk.version import __version__
from oktopk.weights import ReplicaError

__all__ = [
    "METHODS",
    "ExchangeError",
    "Handle",
    "NonfiniteError",
    "Policy",
    "Reducer",
    "ReplicaError",
    "StepStats",
    "__version__",
    "attach",
    "simulate",
]
