# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate: one line after `accelerator.prepare`.

    pip install "oktopk[examples]"
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/accelerate_digits.py

(`accelerate launch --cpu` starts several processes only through MPI.) A small
CNN learns to read digits, and each step keeps 2 % of its gradient.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import oktopk
from oktopk.integrations.accelerate import attach

EPOCHS, WARMUP_STEPS, NUM_TEST = 10, 25, 360


def main() -> None:
    accelerator = Accelerator(cpu=True)  # for gloo; leave it out to use GPUs
    set_seed(0)  # every rank splits and shuffles alike
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    order, labels = torch.randperm(len(images)), torch.tensor(digits.target)
    test, train = order[:NUM_TEST], order[NUM_TEST:]

    layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 64), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps: list[oktopk.StepStats] = []
    how = {"density": 0.02, "warmup_steps": WARMUP_STEPS, "on_step": steps.append}
    attach(accelerator, model, optimizer, **how)

    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()

    with torch.no_grad():
        right = accelerator.unwrap_model(model)(images[test]).argmax(1) == labels[test]
    sent, dense = sum(s.bytes_sent for s in steps), sum(s.bytes_dense for s in steps)
    began = next(s.step for s in steps if s.phase == "sparse")
    accelerator.print(f"accuracy {right.float().mean():.3f} after {len(steps)} steps")
    accelerator.print(f"bytes sent {sent:,} of {dense:,} dense; sparse from step {began}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
