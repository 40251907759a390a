# SPDX-License-Identifier: Apache-2.0
"""What is known when a run begins: its size and settings, versions and the machine."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from oktopk.launch import network
from oktopk.runlog.schema import MetricInfo, RunRecord, TaskInfo, TensorInfo
from oktopk.train.setup import Run
from oktopk.version import __version__


def run_record(run: Run) -> RunRecord:
    """The first record of `metrics.jsonl`, and the first after each resume."""
    return RunRecord(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        step=run.progress.step,
        size=run.comm.size,
        total_steps=run.total_steps,
        steps_per_epoch=run.steps_per_epoch,
        settings=run.exchange.settings,
        changed={name: list(pair) for name, pair in run.changed.items()},
        task=task_info(run),
        command=shlex.join(["oktopk", *sys.argv[1:]]),
        target=str(run.target) if run.target else None,
        network=network.inside() or None,
        tensors=tensor_info(run.model),
        versions=versions(),
        machine=machine(run.device),
    )


def task_info(run: Run) -> TaskInfo:
    """What is trained, and by which metrics it is judged."""
    task = run.task
    return TaskInfo(
        name=run.config.task,
        metrics=[
            MetricInfo(metric.name, metric.label, metric.higher_is_better, metric.shown)
            for metric in task.metrics
        ],
        unit=task.unit,
        train=task.num_train,
        test=task.num_test,
    )


def tensor_info(model: torch.nn.Module) -> dict[str, TensorInfo]:
    """Size and kind of every parameter, by name."""
    found = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            kind = f"{type(module).__name__} {name.split('_l')[0]}"  # weight_ih_l0_reverse
            found[full_name] = TensorInfo(parameter.numel(), kind)
    return found


def versions() -> dict[str, str]:
    return {
        "oktopk": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """The machine of rank 0, without names that tell whose it is."""
    found = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "device": device.type,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _processor() -> str:
    """The kernel's name for it; `platform.processor()` is empty on most Linux machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
