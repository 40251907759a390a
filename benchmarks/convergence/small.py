"""Train the small tasks with DDP and `oktopk.attach`, in processes of their own."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from record import Key, Record, arguments
from tasks import TASKS, Task, rate_schedule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import oktopk

POINTS = 40  # of a curve


def train_all(keys: list[Key], folder: Path) -> None:
    """Train the runs, which all have the same number of workers, and write their records."""
    with tempfile.TemporaryDirectory() as place:
        rendezvous = f"file://{Path(place) / 'rendezvous'}"
        mp.spawn(_work, args=(keys, folder, rendezvous), nprocs=keys[0].workers)


def attached(
    model: DistributedDataParallel, optimizer: Optimizer, task: Task, setting: str, steps: int
) -> oktopk.Handle:
    """The handle of a setting: `dense`, `plain` error feedback or `auto`, with arguments."""
    base, more = arguments(setting)
    given: dict[str, Any] = {"warmup_steps": task.warmup_steps, "ramp_steps": steps // 2}
    if base == "dense":
        given = {"method": "dense"}
        more = {name: text for name, text in more.items() if name != "max_beta1"}
    elif base == "plain":  # a dense warm-up that sends about as many bytes as the ramp
        given = {"warmup_steps": steps // 10, "ramp_steps": 0}
    given |= {name: _value(text) for name, text in more.items()}
    return oktopk.attach(model, optimizer=None if base == "plain" else optimizer, **given)


def limit_dense_beta1(optimizer: Optimizer, setting: str) -> None:
    """`dense,max_beta1=0.3`: give dense AdamW the first beta that sparse AdamW has."""
    base, more = arguments(setting)
    for group in optimizer.param_groups if base == "dense" and "max_beta1" in more else ():
        group["betas"] = (float(more["max_beta1"]), group["betas"][1])


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _work(rank: int, keys: list[Key], folder: Path, rendezvous: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=keys[0].workers)
    for key in keys:
        record = _train(key, TASKS[key.task]())
        if rank == 0:
            record.write(folder)
            print(f"{key.path(folder).stem}: {record.measure} {record.curve[-1][1]:.4f}", end=" ")
            print(f"with {record.share:.1%} of the bytes, {record.seconds:.0f} s", flush=True)
    dist.barrier()  # no rank may exit while another still sends to it
    dist.destroy_process_group()


def _train(key: Key, task: Task) -> Record:
    torch.manual_seed(key.seed)
    model = DistributedDataParallel(task.network())
    optimizer = task.optimizers[key.optimizer](model.parameters())
    steps = key.steps or task.steps
    handle = attached(model, optimizer, task, key.setting, steps)
    decay = rate_schedule(optimizer, steps)
    generator = torch.Generator().manual_seed(key.seed)
    inputs, truth = task.test()
    points = {round(steps * i / POINTS) for i in range(1, POINTS + 1)}
    sent = dense = 0
    curve, started = [], time.perf_counter()
    for step in range(1, steps + 1):
        if step == task.warmup_steps + 1:
            limit_dense_beta1(optimizer, key.setting)
        x, y = (whole[dist.get_rank() :: key.workers] for whole in task.batch(generator, task.size))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        decay.step()
        assert handle.stats is not None
        sent, dense = sent + handle.stats.bytes_sent, dense + handle.stats.bytes_dense
        if step in points:
            curve.append((step, _metric(model.module, task, inputs, truth), _sum(sent)))
    handle.close()
    return Record(
        key=key,
        measure=task.measure,
        higher_is_better=task.higher_is_better,
        curve=curve,
        dense_bytes=_sum(dense),
        seconds=time.perf_counter() - started,
    )


@torch.no_grad()
def _metric(model: nn.Module, task: Task, inputs: torch.Tensor, truth: torch.Tensor) -> float:
    """The metric on the test set. All ranks have the same weights, so only rank 0 computes it."""
    return task.metric(model(inputs), truth) if dist.get_rank() == 0 else 0.0


def _sum(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)
