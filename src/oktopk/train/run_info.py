"""What is known when a run begins: for whoever reads its journal later."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from oktopk.train.setup import Run
from oktopk.version import __version__


def opening_entry(run: Run) -> dict[str, Any]:
    """The journal's first object, and the first after each resume."""
    return {
        "kind": "run",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": run.progress.step,
        "size": run.comm.size,
        "total_steps": run.total_steps,
        "steps_per_epoch": run.steps_per_epoch,
        "settings": asdict(run.handle.settings),
        "changed": run.changed,
        "utterances": {"train": len(run.corpus.train), "test": len(run.corpus.test)},
        "tensors": tensors(run.model),
        "versions": versions(),
        "machine": machine(run.device),
    }


def tensors(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Size and kind of every parameter; the kind is its layer's class and its own name there."""
    found = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            whole = f"{path}.{name}" if path else name
            kind = f"{type(module).__name__} {name.split('_l')[0]}"  # weight_ih_l0_reverse
            found[whole] = {"numel": parameter.numel(), "kind": kind}
    return found


def versions() -> dict[str, str]:
    return {
        "oktopk": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Rank 0's machine, without names that say whose it is."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory": pages,
        "threads": torch.get_num_threads(),
        "device": device.type,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _processor() -> str:
    """The name the kernel gives it; platform.processor() is empty on most Linux machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
