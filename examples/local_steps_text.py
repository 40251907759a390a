# SPDX-License-Identifier: Apache-2.0
"""Local steps: a small language model learns Python's own source, and ranks meet every 10th step.

    pip install "oktopk[examples]"
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/local_steps_text.py

The model is not wrapped: only the line with `oktopk.local_steps` is new.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import oktopk

STEPS, EVERY, BATCH, CONTEXT, WIDTH, HELD_OUT = 300, 10, 16, 48, 128, 20_000


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.embed(text[:, :-1]))
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    dist.init_process_group("gloo")
    files = sorted((Path(torch.__file__).parent / "optim").glob("*.py"))  # any text will do
    data = torch.tensor(list(b"".join(path.read_bytes() for path in files)))
    train, test = data[:-HELD_OUT], data[-HELD_OUT:].unfold(0, CONTEXT + 1, CONTEXT)

    model = Text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rounds: list[oktopk.StepStats] = []
    outer = oktopk.local_steps(model, optimizer, every=EVERY, density=0.05, on_step=rounds.append)

    torch.manual_seed(1 + dist.get_rank())  # every rank has batches of its own
    for _ in range(STEPS):
        starts = torch.randint(len(train) - CONTEXT - 1, (BATCH, 1))
        optimizer.zero_grad()
        model.loss(train[starts + torch.arange(CONTEXT + 1)]).backward()
        optimizer.step()

    if dist.get_rank() == 0:
        sent, dense = sum(r.bytes_sent for r in rounds), EVERY * sum(r.bytes_dense for r in rounds)
        with torch.no_grad():
            print(f"loss {model.loss(test):.2f} after {STEPS} steps and {outer.step} exchanges")
        print(f"bytes sent {sent:,} of {dense:,} dense")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
