# SPDX-License-Identifier: Apache-2.0
"""The stop protocol: a signal sets a flag, ranks share it, and all of them stop."""

from __future__ import annotations

import os
import signal

import pytest

from oktopk.errors import StoppedError
from oktopk.lab.train.recorder import StopRequest, steps_between_checks
from oktopk.utils.signals import STOP_SIGNALS


@pytest.fixture
def raising():
    """Signals raise KeyboardInterrupt, as they do outside of a run."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    yield interrupt
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_a_request_and_the_second_ends_the_process(raising, number):
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested and not stop.agreed
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_the_handlers_are_restored_after_the_block(raising):
    with StopRequest():
        assert all(signal.getsignal(number) is not raising for number in STOP_SIGNALS)
    assert all(signal.getsignal(number) is raising for number in STOP_SIGNALS)


def test_a_rank_stops_only_once_all_ranks_know(raising):
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        stop.raise_if_agreed(3, saved=False)  # the others would wait for this rank in the next step
        stop.share(any_rank=True)
        with pytest.raises(StoppedError, match="stopped and saved at step 4"):
            stop.raise_if_agreed(4, saved=True)


def test_a_rank_without_a_signal_stops_with_the_others():
    stop = StopRequest()
    stop.share(any_rank=False)
    stop.raise_if_agreed(1, saved=True)
    stop.share(any_rank=True)
    stop.share(any_rank=False)  # a later exchange does not take it back
    assert stop.agreed and not stop.requested


@pytest.mark.parametrize(
    ("seconds_per_step", "most", "steps"),
    [(0.01, 10, 10), (0.01, 900, 500), (2.0, 10, 2), (60, 10, 1)],
)
def test_flags_are_shared_every_few_seconds(seconds_per_step, most, steps):
    assert steps_between_checks(seconds_per_step, most) == steps
