# SPDX-License-Identifier: Apache-2.0
"""How often the host waits for the device in a step: a handful of times, whatever the job's size.

There is no device here. The kernels are those for any device, and whatever would make the host wait
for one is counted: reading a number, and operations whose result has a size that depends on values.
"""

from __future__ import annotations

import ast
import threading
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import oktopk
from oktopk import kernels, simulate
from oktopk.comm.communicator import Comm
from oktopk.exchange.engine import Engine
from oktopk.exchange.layout import Bucket
from oktopk.kernels import reference
from oktopk.settings import Settings
from streams import STREAMS

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,  # item, int, float, bool
    aten.bincount.default,
    aten.equal.default,
    aten.isin.Tensor_Tensor,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_consecutive.default,
}
MASKED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}


class Waits(TorchDispatchMode):
    """Counts them in one thread, by the name of what made the host wait."""

    here = threading.local()

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = args[1] if func in MASKED else ()
        if func in READS or any(m is not None and m.dtype == torch.bool for m in masks):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def any_device(monkeypatch):
    """The kernels for any device, and `tolist`, which no dispatch mode sees, counted."""
    monkeypatch.setattr(kernels, "backend_for", lambda device_type: reference)
    tolist = torch.Tensor.tolist

    def counted(x):
        if (waits := getattr(Waits.here, "now", None)) is not None:
            waits.seen.append("tolist")
        return tolist(x)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)


def waits_of(comm: Comm, num_buckets: int, steps: int, **more) -> list[list[str]]:
    """What the host waited for in each of some steps."""
    numel = 4000 // num_buckets
    buckets = [Bucket(numel, dense=((0, 7), (50, 60))) for _ in range(num_buckets)]
    engine = Engine(Settings(density=0.05, **more), comm, buckets)
    done = []
    for step in range(steps):
        grads = STREAMS["heavy"](4000, comm.rank, step).float().split(numel)
        Waits.here.now = waits = Waits()
        with waits:
            current = engine.begin(grads[0])
            for bucket, grad in enumerate(grads):
                current.add_bucket(bucket, grad.clone())
            engine.finish(current)
        Waits.here.now = None
        done.append(waits.seen)
    return done


PER_STEP, PER_GROUP, PER_EXACT_STEP = 1, 7, 5
PER_SHORT_GROUP = 6


def waits_for_sizes(P: int) -> int:
    """Reads more of a group with a codec whose sizes do not follow from the counts, when shares are
    not evened out: the size of each message of the split and of the own share, then all sizes."""
    return (P - 1) + 1 + 1


@pytest.mark.parametrize(
    ("P", "num_buckets", "wire"),
    [*product([2, 4, 8], [1, 5], ["bf16"]), (4, 5, "plain"), (4, 5, "int8"), (4, 5, "int4")],
)
def test_the_host_waits_a_handful_of_times_whatever_the_ranks_and_buckets(
    any_device, P, num_buckets, wire
):
    """docs/cuda.md has the same numbers: one read more where a group has several buckets."""
    usual = PER_STEP + PER_GROUP + (num_buckets > 1)
    if wire == "int4":
        usual += waits_for_sizes(P)
    for rank in simulate(P, lambda comm: waits_of(comm, num_buckets, 5, wire=wire, short_bytes=0)):
        *_, last = rank
        assert len(last) == usual, last
        assert {len(step) for step in rank} <= {usual, usual + PER_EXACT_STEP}


@pytest.mark.parametrize(
    ("P", "num_buckets", "wire"), [*product([2, 4, 8], [1, 5], ["bf16"]), (4, 5, "int4")]
)
def test_a_short_exchange_waits_less_often(any_device, P, num_buckets, wire):
    """Also on steps with an exact selection: there is no threshold to agree on."""
    usual = PER_STEP + PER_SHORT_GROUP + (num_buckets > 1) + (wire == "int4")
    for rank in simulate(P, lambda comm: waits_of(comm, num_buckets, 5, wire=wire)):
        assert {len(step) for step in rank} == {usual}, rank[-1]


def test_every_group_waits_by_itself(any_device):
    """Five groups of one bucket each: nothing but the number of groups counts."""
    most = PER_STEP + 5 * (PER_GROUP + PER_EXACT_STEP)
    how = {"group_numel": 1, "short_bytes": 0, "wire": "bf16"}
    for rank in simulate(3, lambda comm: waits_of(comm, 5, 8, **how)):
        assert all(len(step) <= most for step in rank), [len(step) for step in rank]


def test_a_dense_step_waits_for_its_sums_once(any_device):
    for rank in simulate(3, lambda comm: waits_of(comm, 5, 3, warmup_steps=3)):
        assert [len(step) for step in rank] == [1, 1, 1]


ON_DEVICE = ["communicator", "torch_transport", "engine", "wire", "methods", "kernels"]


def test_numbers_go_to_the_device_from_pinned_memory_and_come_back_together():
    """`torch.tensor(..., device=)` and `.cpu()` make the host wait."""
    root = Path(oktopk.__file__).parent
    for path in root.rglob("*.py"):
        if not set(path.relative_to(root).with_suffix("").parts) & set(ON_DEVICE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called, where = node.func.attr, f"{path.name}:{node.lineno}"
                assert called not in ("cpu", "new_tensor"), where
                moved = any(keyword.arg == "device" for keyword in node.keywords)
                assert not (called in ("tensor", "as_tensor") and moved), where
