"""A worker that dies in its first life: `torchrun --max-restarts 1 restarted.py`."""

from __future__ import annotations

import os

import torch

from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.launch.local_workers import find_place, joined

with joined(find_place(), timeout=30):
    comm = Comm(TorchTransport())
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and comm.rank == 1:
        os._exit(3)  # after the group was made: its addresses stay in torchrun's store
    ranks = comm.all_gather(torch.tensor([comm.rank]), stage="test").view(-1).tolist()
    if comm.rank == 0:
        print("ranks", ranks, "life", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
