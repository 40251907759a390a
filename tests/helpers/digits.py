# SPDX-License-Identifier: Apache-2.0
"""A small network that learns scikit-learn's digits, data-parallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk

STEPS = 150
BATCH = 64
"""Images of all ranks together."""
NUM_TEST = 597


def split() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train on, then 597 images and labels to test, the same every time."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return images[train], labels[train], images[test], labels[test]


def accuracy(
    group, method: str, density: float, seed: int, steps: int = STEPS
) -> tuple[float, float]:
    """Train, and return the share of test images that are recognized, and bytes over dense."""
    images, labels, test_images, test_labels = split()
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(network, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    handle = oktopk.attach(
        model, optimizer=optimizer, method=method, density=density, warmup_steps=10
    )
    generator = torch.Generator().manual_seed(seed)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = dense = 0
    for _ in range(steps):
        batch = torch.randint(len(labels), (BATCH,), generator=generator)[rank::size]
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()
        sent, dense = sent + handle.stats.bytes_sent, dense + handle.stats.bytes_dense
    handle.close()
    with torch.no_grad():
        right = network(test_images).argmax(1) == test_labels
    return right.float().mean().item(), sent / dense
