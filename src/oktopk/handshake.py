"""The handshake: before the first exchange all ranks compare what they are about to do.

A rank with another size or dtype would otherwise send messages nobody expects, and the job would
hang. Here every rank learns what every rank has, so every rank raises the same error.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import torch

from oktopk.comm import Comm

ROOM = 1024  # bytes for a rank's facts as JSON


def _short(value: Any) -> Any:
    """Long values by their digest: it is enough to know whether they differ."""
    text = json.dumps(value)
    return value if len(text) <= 40 else f"{text[:20]}... {sha256(text.encode()).hexdigest()[:8]}"


def agree(comm: Comm, device: torch.device, facts: dict[str, Any]) -> None:
    """Raise ValueError on every rank if any fact differs on any. One header of 1024 bytes."""
    text = json.dumps({name: _short(value) for name, value in facts.items()}).encode()
    assert len(text) <= ROOM, text
    mine = torch.tensor(list(text.ljust(ROOM)), dtype=torch.uint8, device=device)
    rows = comm.all_gather(mine, stage="handshake")
    everyone = [json.loads(bytes(row)) for row in rows.tolist()]
    lines = []
    for name, first in everyone[0].items():
        others = [(rank, its[name]) for rank, its in enumerate(everyone) if its[name] != first]
        if others:
            seen = ", ".join(f"{value} on rank {rank}" for rank, value in others[:8])
            lines.append(f"{name} is {first} on rank 0 but {seen}")
    if lines:
        raise ValueError("the ranks disagree: " + "; ".join(lines))
