# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch: a small CNN learns to read digits, and each step keeps 2 % of its gradient.

    pip install "oktopk[examples]"
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/torchrun_digits.py

Only the line with `oktopk.attach` is new; everything else is a DDP script as always.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import oktopk

EPOCHS, WARMUP_STEPS, NUM_TEST = 10, 25, 360


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # every rank splits the data alike
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    order, labels = torch.randperm(len(images)), torch.tensor(digits.target)
    test, train = order[:NUM_TEST], order[NUM_TEST:]

    dataset = TensorDataset(images[train], labels[train])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 64), nn.ReLU()
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps: list[oktopk.StepStats] = []
    how = {"density": 0.02, "warmup_steps": WARMUP_STEPS, "on_step": steps.append}
    oktopk.attach(model, optimizer=optimizer, **how)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    if dist.get_rank() == 0:
        with torch.no_grad():
            right = model.module(images[test]).argmax(1) == labels[test]
        sent, dense = sum(s.bytes_sent for s in steps), sum(s.bytes_dense for s in steps)
        began = next(s.step for s in steps if s.phase == "sparse")
        print(f"accuracy {right.float().mean():.3f} after {len(steps)} steps")
        print(f"bytes sent {sent:,} of {dense:,} dense; sparse from step {began}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
