# SPDX-License-Identifier: Apache-2.0
"""Damaged messages: refused by every codec and every method, with the rank that sent them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oktopk
from laws import WAYS
from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.comm.simulated import Scheduler, SimulatedGroup, SimulatedTransport
from oktopk.exchange.engine import Engine
from oktopk.exchange.layout import Bucket
from oktopk.kernels import reference
from oktopk.wire import CODECS, EntryRange, is_possible, max_words
from streams import STREAMS

ROOT = Path(__file__).parents[2]
SPARSE = [way for way in WAYS if way != "dense"]

READ_MANY = """
import json, torch
from torture.input_messages import read_many
torch.set_num_threads(1)
print(json.dumps(read_many(20_000, 0)))
"""


def test_twenty_thousand_damaged_messages_are_refused_or_sound():
    """In a process of its own: if one crashes the interpreter, this test fails and no other."""
    known = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", READ_MANY],
        env=os.environ | {"PYTHONPATH": known},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    for name in CODECS:  # most are refused; a flipped bit of a value, none can see
        assert f'"{name}": 1' in done.stdout, done.stdout


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data(), count=st.integers(0, 2**31 - 1), told=st.integers(0, 2**31 - 1))
@settings(deadline=None, max_examples=60)
def test_sizes_that_no_message_has_are_not_possible(name, data, count, told):
    lo = data.draw(st.sampled_from([0, 9]))
    hi = lo + data.draw(st.sampled_from([0, 1, 1000, 2**30]))
    entries = EntryRange(count, lo, hi, told)
    if not is_possible(entries, name, torch.float32):
        return
    assert count <= hi - lo
    if not CODECS[name].indices.is_sized_by_count and count:
        words = CODECS[name].values.num_words(count, torch.float32) + told
        assert words <= max_words(entries, name, torch.float32) or not told


class DamagingTransport(SimulatedTransport):
    """Rank 1 sends other words in every message that is long enough to be one of entries."""

    words = -1

    def exchange(self, outgoing, incoming):
        if self.rank == 1:
            outgoing = {
                peer: torch.full_like(each, self.words) if each.numel() > 4 else each
                for peer, each in outgoing.items()
            }
        super().exchange(outgoing, incoming)


class ZeroingTransport(DamagingTransport):
    words = 0


def reduce_once(method, wire, comm):
    way = {name: value for name, value in WAYS[method].items() if name != "method"}
    reducer = oktopk.Reducer(
        3000, method=WAYS[method]["method"], density=0.05, comm=comm, wire=wire, **way
    )
    reducer.reduce_(STREAMS["heavy"](3000, comm.rank, 0).float())


@pytest.mark.parametrize("transport", [DamagingTransport, ZeroingTransport])
@pytest.mark.parametrize("wire", CODECS)
@pytest.mark.parametrize("method", SPARSE)
def test_the_rank_that_sent_a_damaged_message_is_named(method, wire, transport):
    run = partial(reduce_once, method, wire)
    with pytest.raises(oktopk.MessageError, match=r"what came from rank 1 is no message"):
        oktopk.simulate(3, run, transport=transport)


def test_a_rank_of_a_part_is_named_by_its_number_in_the_job():
    def run(comm):
        part = comm.split([[0], [1, 2, 3]])
        if comm.rank:
            reduce_once("topka", "bf16", part)

    with pytest.raises(oktopk.MessageError, match=r"^rank [13]: what came from rank 2 is no"):
        oktopk.simulate(4, run, transport=DamagingTransport)


class LyingTransport(SimulatedTransport):
    """Rank 1 tells that it has more entries than there are, of which no word follows."""

    def all_to_all(self, x, out):
        super().all_to_all(x, out)
        if self.rank == 0 and x.dtype == torch.int32:
            out[1, 0] = 2**31 - 1

    def exchange(self, outgoing, incoming):
        assert all(each.numel() < 10_000 for each in incoming.values())
        if self.rank == 0:
            for each in incoming.values():
                assert each.numel() > 1, "a lie was believed"
        super().exchange(outgoing, incoming)


@pytest.mark.parametrize("wire", ["plain", "bf16", "int4"])
@pytest.mark.parametrize("method", ["topka", "topkdsa", "oktopk", "oktopk, long path"])
def test_told_sizes_are_refused_before_memory_is_allocated(method, wire):
    with pytest.raises(oktopk.MessageError, match=r"^rank 0: what came from rank 1 is no message"):
        oktopk.simulate(3, partial(reduce_once, method, wire), transport=LyingTransport)


def one_step(method, wire, comm):
    """Whether this rank would apply the step, or what it raised."""
    way = {name: value for name, value in WAYS[method].items() if name != "method"}
    settings = oktopk.Settings(method=WAYS[method]["method"], density=0.05, wire=wire, **way)
    engine = Engine(settings, comm, [Bucket(3000)])
    grad = STREAMS["heavy"](3000, comm.rank, 0).float()
    step = engine.begin(grad)
    step.add_bucket(0, grad)
    try:
        return step.agree_on_finite()
    except oktopk.MessageError as error:
        return str(error)


@pytest.mark.parametrize("wire", CODECS)
@pytest.mark.parametrize("method", SPARSE)
def test_where_the_host_does_not_wait_for_a_device_the_end_of_the_step_tells(
    monkeypatch, method, wire
):
    """The values become NaN, so no rank applies the step if the message was part of a sum."""
    monkeypatch.setattr(kernels, "backend_for", lambda device_type: reference)  # as on CUDA
    told = oktopk.simulate(3, partial(one_step, method, wire), transport=DamagingTransport)
    assert any("what came from rank 1" in str(each) for each in told), told
    assert True not in (told[0], told[2]), told  # rank 1 may have read whole messages only


def test_nothing_is_left_to_read_of_the_step_before():
    comm = Comm(SimulatedTransport(SimulatedGroup(Scheduler(2), [0, 1]), 0))
    comm._unread.append((torch.tensor(False), 1))
    comm.begin_step()
    comm.raise_unsound()
