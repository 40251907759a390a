# SPDX-License-Identifier: Apache-2.0
"""A worker that waits for a second one: `torchrun --nnodes 1:2 grown.py`."""

from __future__ import annotations

import time

import torch

from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.launch.ranks import read_rank_environment
from oktopk.launch.rendezvous import job_process_group

env = read_rank_environment()
with job_process_group(env, timeout=30):
    if env.world_size == 1:
        print("alone", flush=True)
        time.sleep(100)  # torchrun ends this life when the other host comes
    comm = Comm(TorchTransport())
    ranks = comm.all_gather_header(torch.tensor([comm.rank]), stage="test").view(-1).tolist()
    print("ranks", ranks, flush=True)
