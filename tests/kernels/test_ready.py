# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled before the first step, by one process of a machine, and found by the next.

Each test has child processes with an empty cache, in which Numba's own events are counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import oktopk

COUNTING = """
import sys, torch
from numba.core import event

class Counter(event.Listener):
    def __init__(self):
        self.names = []
    def on_start(self, found):
        function = found.data["dispatcher"].py_func
        if function.__module__.startswith("oktopk"):
            self.names.append(f"{function.__module__}.{function.__name__}")
    def on_end(self, found):
        pass
    def take(self):
        names, self.names = self.names, []
        return names

compiled = Counter()
event.register("numba:compile", compiled)
"""
STEPS = """
import tempfile
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
import oktopk

store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("gloo", rank=0, world_size=1, store=store)

def train(model, optimizer):
    for _ in range(6):
        model(torch.randn(4, 60)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

def local_steps():
    model = torch.nn.Linear(60, 40)
    optimizer = AdamW(model.parameters())
    return oktopk.local_steps(model, optimizer, every=2), model, optimizer

def attach():
    model = DistributedDataParallel(torch.nn.Linear(60, 40))
    optimizer = AdamW(model.parameters())
    return oktopk.attach(model, warmup_steps=2, optimizer=optimizer), model, optimizer

begin = {"attach": attach, "local_steps": local_steps}[sys.argv[1]]
handle, model, optimizer = begin()
before = compiled.take()
assert len(before) > 20, before
assert len(set(before)) == len(before), f"compiled for several types: {sorted(before)}"
train(model, optimizer)
handle.close()
print(compiled.take())
"""
EXCHANGES = """
from functools import partial
from typing import get_args
import oktopk
from oktopk.comm.simulated import run_ranks
from oktopk.exchange.layout import Bucket
from oktopk.exchange.engine import Engine
from oktopk.kernels.ready import make_ready
from oktopk.settings import CHOICES, Settings

make_ready([torch.float32, torch.float64])
compiled.take()
found = {}
NUMEL = 2048

def rank(settings, dtype, comm):
    sizes = Bucket(NUMEL, ((0, 64),)), Bucket(NUMEL), Bucket(NUMEL)
    engine = Engine(settings, comm, list(sizes))
    for number in range(7):
        values = torch.arange(1.0, NUMEL + 1) * (1 + comm.rank + number)
        grads = [torch.sin(values).to(dtype) for _ in sizes]
        step = engine.begin(grads[0])
        for bucket, grad in enumerate(grads):
            step.add_bucket(bucket, grad)
        engine.finish(step)

def exchange(dtype=torch.float32, **fields):
    usual = {"density": 0.05, "exact_every": 3, "bounds_every": 2}
    settings = Settings(warmup_steps=0, **usual | fields)
    run_ranks(2, partial(rank, settings, dtype))
    found[f"{dtype} {fields}"] = compiled.take()

for method in oktopk.METHODS:
    for scope in get_args(CHOICES["scope"]):
        for fields in ({}, {"short_bytes": 0, "group_numel": NUMEL}):
            exchange(method=method, scope=scope, **fields)
for wire in get_args(CHOICES["wire"]):
    for average in get_args(CHOICES["average"]):
        exchange(wire=wire, average=average, method="topkdsa")
for dtype in (torch.bfloat16, torch.float16, torch.float64):
    exchange(dtype)
    exchange(dtype, wire="plain", density=0.3)
print(len(found), {name: names for name, names in found.items() if names})
"""


def start(code: str, cache: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """A child that has nothing compiled yet."""
    src = str(Path(oktopk.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", COUNTING + code, *arguments],
        env=os.environ | {"PYTHONPATH": src, "NUMBA_CACHE_DIR": str(cache)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(child: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = child.communicate(timeout=200)
    assert child.returncode == 0, out + err
    return out, err


@pytest.mark.parametrize("call", ["attach", "local_steps"])
def test_nothing_is_compiled_inside_a_step(call, tmp_path):
    out, err = outputs(start(STEPS, tmp_path, call))
    assert out == "[]\n"
    assert "oktopk: compiled the kernels in " in err and f" s (cached in {tmp_path}" in err


def test_nothing_is_left_to_compile_for_any_method_codec_scope_or_dtype(tmp_path):
    out, _ = outputs(start(EXCHANGES, tmp_path))
    number, left = out.split(maxsplit=1)
    assert int(number) > 40 and left == "{}\n", out


READY = """
from oktopk.kernels.ready import make_ready
shown = []
result = make_ready([torch.float32], lambda done, total: shown.append(done))
print(len(compiled.take()), result is None, len(shown), result and result.folder)
assert make_ready([torch.float32]) is None
"""


def test_one_of_the_processes_of_a_machine_compiles(tmp_path):
    children = [start(READY, tmp_path) for _ in range(3)]
    counts = sorted(int(outputs(child)[0].split()[0]) for child in children)
    assert counts[:2] == [0, 0] and counts[2] > 20
    out, _ = outputs(start(READY, tmp_path))
    assert out == "0 True 0 None\n"  # later there is nothing to do, to wait for or to say


def test_without_a_folder_for_the_cache_kernels_are_compiled_and_it_is_said():
    told = "\nprint(result)"
    place = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    out, _ = outputs(start(READY + told, Path("/dev/null/cache"), **place))
    assert "set NUMBA_CACHE_DIR" in out and int(out.split()[0]) > 20


def test_kernels_that_numba_is_told_not_to_compile_have_no_cache(tmp_path):
    code = "from oktopk.kernels.cpu.every_kernel import cache_path; print(cache_path())"
    out, _ = outputs(start(code, tmp_path, NUMBA_DISABLE_JIT="1"))
    assert out == "None\n"
