# SPDX-License-Identifier: Apache-2.0
"""A worker that dies in its first life: `torchrun --max-restarts 1 restarted.py`."""

from __future__ import annotations

import os

import torch

from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.launch.ranks import read_rank_environment
from oktopk.launch.rendezvous import job_process_group

with job_process_group(read_rank_environment(), timeout=30):
    comm = Comm(TorchTransport())
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and comm.rank == 1:
        os._exit(3)  # after the group was made: its addresses stay in torchrun's store
    ranks = comm.all_gather_header(torch.tensor([comm.rank]), stage="test").view(-1).tolist()
    if comm.rank == 0:
        print("ranks", ranks, "life", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
