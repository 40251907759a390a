# SPDX-License-Identifier: Apache-2.0
"""A state that is taken at an odd moment is whole, or it is refused; for every adapter."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import oktopk
import sites
from oktopk import simulate
from oktopk.exchange.step import StateLock
from rounds import same_state, start, take_steps


@contextmanager
def interrupted(act: Callable[[], None], every: int) -> Iterator[None]:
    """Call `act` at each so many calls and returns, on this thread, as a signal handler is."""
    count, inside = 0, False

    def profile(frame, event, arg) -> None:
        nonlocal count, inside
        count += 1
        if count % every == 0 and not inside:
            inside = True
            try:
                act()
            finally:
                inside = False

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


# local_steps.


def taken_by_handler(comm, options: dict, every: int) -> tuple[int, int, list[str]]:
    """States taken everywhere in two rounds: how many are one of those between steps, how many are
    none, and why others were refused."""
    net, optimizer, handle = start(comm, **options)
    whole, taken, refused = [], [], set()

    def take() -> None:
        try:
            taken.append(handle.state_dict())
        except RuntimeError as error:
            refused.add(str(error)[:60])

    for step in range(13):
        with interrupted(take, every):
            take_steps(net, optimizer, comm.rank, range(step, step + 1))
        whole += [*taken[:1], handle.state_dict()] if step == 0 else [handle.state_dict()]
    handle.close()
    good = sum(any(same_state(one, other) for other in whole) for one in taken)
    return good, len(taken) - good, sorted(refused)


OPTIONS = [{}, {"fragments": 2}, {"delay": 2}, {"delay": 2, "fragments": 2}, {"method": "dense"}]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_signal_handler_gets_a_whole_state_or_an_error(options):
    for good, torn, refused in simulate(1, lambda comm: taken_by_handler(comm, options, 37)):
        assert torn == 0 and good > 20
        assert refused == ["the state of local_steps was asked for inside optimizer.step"]


def taken_by_thread(comm, options: dict) -> tuple[int, int]:
    net, optimizer, handle = start(comm, **options)
    taken, over = [handle.state_dict()], threading.Event()
    whole = [taken[0]]

    def take() -> None:
        while not over.is_set():
            state = handle.state_dict()
            if not same_state(state, taken[-1]):
                taken.append(state)

    thread = threading.Thread(target=take)
    thread.start()
    for step in range(41):
        take_steps(net, optimizer, comm.rank, range(step, step + 1))
        whole.append(handle.state_dict())
        time.sleep(0.002)
    over.set()
    thread.join()
    handle.close()
    good = sum(any(same_state(one, other) for other in whole) for one in taken)
    return good, len(taken) - good


@pytest.mark.parametrize("options", OPTIONS)
def test_another_thread_gets_whole_states_only(options):
    ((good, torn),) = simulate(1, lambda comm: taken_by_thread(comm, options))
    assert torn == 0 and good > 5


def test_a_step_that_raised_keeps_no_thread_waiting():
    weights = torch.nn.Parameter(torch.ones(4, 1))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    handle = oktopk.local_steps(torch.nn.ParameterList([weights]), optimizer, every=9)

    def fail():
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(fail)
    states = []
    thread = threading.Thread(target=lambda: states.append(handle.state_dict()))
    thread.start()
    thread.join(10)
    assert states and handle.state_dict()
    handle.close()


# attach_fsdp: on a CPU its exchange runs on the thread that trains.


@contextmanager
def at_every_line(act: Callable[[], None], *files: str) -> Iterator[None]:
    """Call `act` on this thread before each line of some files."""

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            sys.settrace(None)
            try:
                act()
            finally:
                sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def plain(handle) -> tuple[str, bytes]:
    """What of a state changes at the end of a step: counters and thresholds, and the residuals."""
    state = handle.state_dict()
    (text,), (residuals,) = state["metadata"].values(), state["residuals"].values()
    flat = torch.cat([x.to_local().flatten() for x in residuals.values()])
    return json.dumps(json.loads(text)["engine"]), flat.numpy().tobytes()


def fsdp_by_handler(group) -> tuple[int, int, list[str]]:
    site = sites.build(2, sites.SPARSE | {"warmup_steps": 0}, preset=True)
    taken, refused = [], set()

    def take() -> None:
        try:
            taken.append(plain(site.handle))
        except RuntimeError as error:
            refused.add(str(error)[:50])

    whole = {plain(site.handle)}
    for step in range(5):
        with at_every_line(take, "exchange/engine.py", "adapters/driver.py"):
            sites.one_step(site, step)
        whole.add(plain(site.handle))
    site.handle.close()
    return len(taken), sum(one not in whole for one in taken), sorted(refused)


def test_a_signal_handler_gets_a_whole_state_of_fsdp_or_an_error(worlds):
    for taken, torn, refused in worlds.run(4, fsdp_by_handler):
        assert taken > 20 and torn == 0
        assert refused == ["the state is being changed by this very thread, as"]


# The lock.


def test_a_change_that_was_broken_off_leaves_no_state():
    lock = StateLock()
    with pytest.raises(KeyboardInterrupt), lock.changing():
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="KeyboardInterrupt came while"), lock.reading():
        pass


def test_others_wait_for_a_change_and_the_same_thread_is_refused():
    lock, seen = StateLock(), []

    def read() -> None:
        with lock.reading():
            seen.append(ended)

    ended = False
    reader = threading.Thread(target=read)
    with lock.changing():
        reader.start()
        with pytest.raises(RuntimeError, match="let the handler set a flag"), lock.reading():
            pass
        time.sleep(0.05)
        ended = True
    reader.join()
    assert seen == [True]
