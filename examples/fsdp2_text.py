# SPDX-License-Identifier: Apache-2.0
"""FSDP2 inside a site, sparse between sites: a transformer learns Python's own source.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/fsdp2_text.py

Four processes are two sites of two ranks. FSDP2 shards the model over the ranks of a site; only the
line with `oktopk.attach_fsdp` is new, and it is what connects the sites.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import oktopk

SITES, STEPS, WARMUP, BATCH, CONTEXT, WIDTH, HELD_OUT = 2, 120, 20, 8, 48, 96, 20_000


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text[:, :-1]) + self.place.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    dist.init_process_group("gloo")
    files = sorted((Path(torch.__file__).parent / "optim").glob("*.py"))  # any text will do
    source = b"".join(path.read_bytes() for path in files)
    data = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    train, test = data[:-HELD_OUT], data[-HELD_OUT:].unfold(0, CONTEXT + 1, CONTEXT)

    shape = (SITES, dist.get_world_size() // SITES)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the replicas must start from the same weights
    model = Text()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    options = {"density": 0.02, "warmup_steps": WARMUP, "ramp_steps": WARMUP}
    handle = oktopk.attach_fsdp(model, mesh["replicate"], optimizer=optimizer, **options)
    handle.on_step = (steps := []).append

    torch.manual_seed(1 + dist.get_rank())  # every rank has batches of its own
    for _ in range(STEPS):
        starts = torch.randint(len(train) - CONTEXT - 1, (BATCH, 1))
        optimizer.zero_grad()
        model(train[starts + torch.arange(CONTEXT + 1)]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with torch.no_grad():
        loss = model(test)  # all ranks of a site: FSDP gathers the weights
    if dist.get_rank() == 0:
        sent, dense = sum(s.bytes_sent for s in steps), sum(s.bytes_dense for s in steps)
        print(f"loss {loss:.2f} after {handle.step} steps")
        print(f"bytes sent between sites {sent:,} of {dense:,} dense")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
