# SPDX-License-Identifier: Apache-2.0
"""What holds on a GPU, as far as fakes of the device and of NCCL can show it."""

from __future__ import annotations

import time
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.adapters import ddp_validation
from oktopk.adapters import thread as background_module
from oktopk.adapters import thread as exchanger_module
from oktopk.adapters import thread as side_stream_module
from oktopk.adapters.ddp_driver import SETTLED
from oktopk.adapters.thread import CommunicationThread, ReadyBucket
from oktopk.comm import torch_transport
from oktopk.comm.torch_transport import TorchTransport
from oktopk.errors import ExchangeError
from oktopk.exchange.step import Step
from oktopk.utils.device import wait_until


class FakeWork:
    """An operation that NCCL has queued: `wait` returns at once, done or not."""

    def __init__(self, looks: float, error: Exception | None = None) -> None:
        self.looks, self.error, self.waited = looks, error, False

    def is_completed(self) -> bool:
        self.looks -= 1
        if self.error is not None:
            raise self.error
        return self.looks < 0

    def wait(self) -> None:
        assert self.looks < 0, "the stream was made to wait for what may never come"
        self.waited = True


@pytest.fixture
def transport(monkeypatch):
    """Rank 1 of 3 over a fake NCCL: `transport.works` is what the next operation returns."""
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2])
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, *_: SimpleNamespace(tensor=tensor))
    transport: TorchTransport = TorchTransport(timeout=0.05, owned=True)
    works: list[FakeWork] = []
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: works)
    monkeypatch.setattr(dist, "all_reduce", lambda x, **_: works[0])
    return transport, works


def on_device() -> torch.Tensor:
    return torch.empty(4, device="meta")  # any device but a CPU


def exchange(transport: TorchTransport) -> None:
    messages = {peer: on_device() for peer in (0, 2)}
    transport.exchange(messages, messages)


@pytest.mark.parametrize("looks", [0, 1, 9])
def test_a_queued_exchange_is_waited_for(transport, looks):
    transport, works = transport
    works.append(FakeWork(looks))
    exchange(transport)
    transport.all_reduce_(on_device())
    assert works[0].waited


def test_an_exchange_that_never_ends_is_an_error_that_names_the_peers(transport):
    transport, works = transport
    works.append(FakeWork(float("inf")))
    with pytest.raises(ExchangeError, match=r"with ranks \[0, 2\]: not finished .* after 0.05 s"):
        exchange(transport)
    with pytest.raises(ExchangeError, match="dense allreduce failed: not finished"):
        transport.all_reduce_(on_device())
    assert not works[0].waited


def test_an_error_of_the_device_is_an_exchange_error(transport):
    transport, works = transport
    works.append(FakeWork(0, RuntimeError("NCCL communicator was aborted")))
    with pytest.raises(ExchangeError, match=r"no exchange with ranks .*communicator was aborted"):
        exchange(transport)


def test_a_cpu_waits_in_gloo_which_has_the_limit(transport):
    transport, _ = transport
    work = FakeWork(float("inf"))
    work.wait = lambda: None
    transport.group = SimpleNamespace(send=lambda *_: work, recv=lambda *_: work)
    messages = {peer: torch.empty(4) for peer in (0, 2)}
    transport.exchange(messages, messages)
    assert work.looks == float("inf"), "nobody looked"


@pytest.mark.parametrize("fails", [False, True])
def test_closing_does_not_wait_for_nccl_and_aborts_after_a_failure(transport, monkeypatch, fails):
    transport, works = transport
    ended = []
    monkeypatch.setattr(torch_transport, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: ended.append("destroyed"))

    def abort(group: object) -> None:
        ended.append("aborted")
        time.sleep(0.5)

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    works.append(FakeWork(float("inf") if fails else 0))
    if fails:
        with pytest.raises(ExchangeError):
            exchange(transport)
    else:
        exchange(transport)
    transport.close()
    transport.close()
    assert ended == ["aborted" if fails else "destroyed"]


def test_a_wait_ends_with_its_cause_or_its_limit():
    looks = []
    wait_until(lambda: len(looks) > 3 or looks.append(0), 60)
    with pytest.raises(TimeoutError, match=r"after 0.01 s"):
        wait_until(lambda: False, 0.01)


def order_of_events(group, syncs: bool) -> list[str]:
    """Buckets as they arrive and as they are exchanged, in the last of some steps."""
    norm = nn.BatchNorm1d(600).eval()
    module = nn.Sequential(nn.Linear(600, 600), norm, nn.Linear(600, 600))
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1)
    norm.__class__ = nn.SyncBatchNorm if syncs else nn.BatchNorm1d  # DDP takes it on a GPU only
    known = ddp_validation.is_on_cuda
    ddp_validation.is_on_cuda = lambda model: True
    try:
        handle = oktopk.attach(model, warmup_steps=0, density=0.1, check_every=0)
    finally:
        ddp_validation.is_on_cuda = known
    events: list[str] = []
    add_bucket, take = Step.add_bucket, handle.driver.take
    Step.add_bucket = lambda *args: (events.append("exchanged"), add_bucket(*args))
    handle.driver.take = lambda arrived: (events.append("arrived"), take(arrived))
    for _ in range(SETTLED + 2):
        events.clear()
        model(torch.randn(2, 600)).sum().backward()
    Step.add_bucket = add_bucket
    handle.close()
    return events


@pytest.mark.parametrize("syncs", [False, True])
def test_with_nccl_and_sync_batch_norm_nothing_is_sent_before_the_last_bucket(worlds, syncs):
    for events in worlds.run(2, order_of_events, syncs):
        num = len(events) // 2
        assert num >= 2
        waits = ["arrived"] * num + ["exchanged"] * num
        assert events == (waits if syncs else ["arrived", "exchanged"] * num)


def refusal(group, static_graph: bool) -> str:
    known = ddp_validation.is_on_cuda
    ddp_validation.is_on_cuda = lambda model: True
    model = DistributedDataParallel(
        nn.Linear(3, 3),
        process_group=group,
        find_unused_parameters=True,
        static_graph=static_graph,
    )
    try:
        oktopk.attach(model).close()
    except ValueError as error:
        return str(error)
    finally:
        ddp_validation.is_on_cuda = known
    return "no error"


@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters")
def test_with_nccl_unused_parameters_are_refused_unless_the_graph_is_static(worlds):
    for message in worlds.run(2, refusal, False):
        assert message.startswith("find_unused_parameters=True does not work with attach on CUDA")
        assert "static_graph=True" in message
    assert worlds.run(2, refusal, True) == ["no error"] * 2


class FakeCuda:
    """Streams and events that only note what is asked of them."""

    def __init__(self, monkeypatch) -> None:
        self.notes: list[str] = []
        note = self.notes.append
        side = SimpleNamespace(wait_event=lambda event: note("side waits for the bucket"))
        event = SimpleNamespace(record=lambda stream: note("event"), query=self._query)
        self.busy = 0

        @contextmanager
        def stream(_):
            note("on side")
            yield
            note("off side")

        for module in (exchanger_module, side_stream_module, background_module):
            monkeypatch.setattr(module, "side_stream", lambda device: side)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: note("synchronize"))
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)

    def _query(self) -> bool:
        self.busy -= 1
        if self.busy < 0:
            self.notes.append("drained")
        return self.busy < 0

    def bucket(self) -> ReadyBucket:
        note = self.notes.append
        buffer = SimpleNamespace(
            device=torch.device("cpu"), is_cuda=True, record_stream=lambda _: note("recorded")
        )
        return ReadyBucket(0, buffer, [], True, SimpleNamespace())


class Taker:
    def __init__(self, notes: list[str]) -> None:
        self.notes, self.error = notes, None

    def take(self, arrived: ReadyBucket) -> None:
        self.notes.append("taken")
        if self.error is not None:
            raise self.error


def outcome(exchanger: CommunicationThread, cuda: FakeCuda) -> list[str]:
    """What happened for one bucket, until its future was done."""
    exchanger.call(lambda: None)  # the thread has ended all that was before
    cuda.notes.clear()
    answer = exchanger.submit(cuda.bucket())
    try:
        answer.wait()
        cuda.notes.append("answered")
    except RuntimeError as error:
        cuda.notes.append(str(error))
    return list(cuda.notes)


def test_a_bucket_is_taken_on_the_side_stream_and_an_error_waits_for_it(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    taker = Taker(cuda.notes)
    exchanger = CommunicationThread(weakref.WeakMethod(taker.take))
    before = ["side waits for the bucket", "recorded", "on side", "taken"]
    first = outcome(exchanger, cuda)
    assert first[:5] == ["synchronize", *before] and "drained" not in first
    assert outcome(exchanger, cuda)[:4] == before, "the device is synchronised once"
    taker.error, cuda.busy = RuntimeError("gone"), 2
    failed = outcome(exchanger, cuda)
    assert failed[:6] == [*before, "event", "drained"]
    assert "gone" in failed[-1] and failed.index("drained") < len(failed) - 1
    exchanger.close()


def test_an_error_is_raised_though_the_side_stream_never_ends(monkeypatch, caplog):
    monkeypatch.setattr(side_stream_module, "DRAIN_SECONDS", 0.01)
    cuda = FakeCuda(monkeypatch)
    taker = Taker(cuda.notes)
    taker.error, cuda.busy = RuntimeError("gone"), float("inf")
    exchanger = CommunicationThread(weakref.WeakMethod(taker.take))
    assert "gone" in outcome(exchanger, cuda)[-1]
    assert "its stream is still busy" in caplog.text
    exchanger.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_delayed_exchange_runs_on_the_side_stream_between_two_events(monkeypatch, fails):
    cuda = FakeCuda(monkeypatch)
    note = cuda.notes.append
    here = SimpleNamespace(wait_event=lambda event: note("here waits for the exchange"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def exchange() -> str:
        note("exchanged")
        if fails:
            raise RuntimeError("gone")
        return "landed"

    thread = background_module.BackgroundThread()
    job = thread.submit(exchange, cuda.bucket().buffer)
    thread.close()
    try:
        note(job.result())
    except RuntimeError as error:
        note(str(error))
    launch = ["recorded", "event", "side waits for the bucket", "on side", "exchanged", "event"]
    assert cuda.notes[:6] == launch
    ends = ["drained", "gone"] if fails else ["off side", "here waits for the exchange", "landed"]
    assert cuda.notes[6:] == ends
