# SPDX-License-Identifier: Apache-2.0
"""`StepStats`: what one finished step did, the same fields in the dense and the sparse phase."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from oktopk.comm.communicator import Traffic

Phase = Literal["dense", "sparse"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """One finished step of this rank. Never half-filled: it exists only after the step does."""

    step: int
    """0-based count of finished exchanges before this one, warm-up included."""

    phase: Phase
    """`dense` in the warm-up (and always for the method `dense`), then `sparse`."""

    numel: int
    """n, the elements of the gradient."""

    k: int
    """Entries the density asks for, and those that travel dense; n in the dense phase."""

    local: int
    """Entries this rank selected."""

    result: int
    """Entries of the global result, the same on every rank."""

    local_threshold: float
    """Smallest magnitude this rank selected; 0 in the dense phase and when nothing was."""

    global_threshold: float
    """Smallest magnitude of the summed result; 0 in the dense phase and when it is empty."""

    imbalance: float
    """Largest share of the result that one rank gathered, over the mean share; 1 is even."""

    bytes_sent: int
    """Bytes this rank sent in this step, headers included."""

    bytes_header: int
    """The part of `bytes_sent` that is not gradient data: sizes, counts, bounds, checksums."""

    bytes_received: int
    """Bytes this rank received in this step, headers included."""

    bytes_dense: int
    """Bytes a dense allreduce of this gradient, in its own dtype, sends: 2n(P-1)/P elements."""

    entries_sent: int
    """Entries this rank sent in this step, each as often as it was and those that travel dense
    among them; 0 in the dense phase."""

    messages: int
    """Messages this rank sent in this step."""

    skipped: bool
    """A rank had a NaN or Inf, so no rank applied anything."""

    select: float
    """Seconds of accumulating and selecting."""

    exchange: float
    """Seconds of the collective, waiting for the other ranks included."""

    scatter: float
    """Seconds of writing the result and settling the residual."""

    exposed: float
    """Seconds the caller waited for all of it."""

    stages: dict[str, Traffic] = field(default_factory=dict)
    """The traffic of this step by stage of the exchange."""

    def as_dict(self) -> dict[str, Any]:
        """All fields and the two ratios, for a line of JSON."""
        ratios = {"sparsity": self.sparsity, "compression_ratio": self.compression_ratio}
        return asdict(self) | ratios

    @property
    def sparsity(self) -> float:
        """Fraction of entries the step left out: 1 - result/n; 0 for an empty gradient."""
        return 1.0 - self.result / self.numel if self.numel else 0.0

    @property
    def compression_ratio(self) -> float:
        """Dense bytes over bytes really sent, headers included; 1 when nothing had to be sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0
