# SPDX-License-Identifier: Apache-2.0
"""The handlers of SIGINT and SIGTERM: what each does, and that the previous ones come back."""

from __future__ import annotations

import os
import signal

import pytest

from oktopk.utils import signals

BOTH = pytest.mark.parametrize("number", signals.STOP_SIGNALS, ids=["INT", "TERM"])


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in signals.STOP_SIGNALS]


@pytest.fixture(autouse=True)
def unchanged():
    """Every test leaves the handlers as they were."""
    before = handlers()
    yield
    assert handlers() == before


@BOTH
def test_a_signal_raises_in_the_block(number):
    with pytest.raises(signals.InterruptedBySignal) as caught, signals.raise_on_signals():
        os.kill(os.getpid(), number)
    assert caught.value.number == number
    assert str(caught.value) == f"interrupted by {signal.Signals(number).name}"


@BOTH
def test_signals_are_recorded_in_order(number):
    with signals.record_signals() as received:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == [number, signal.SIGTERM]


@BOTH
def test_a_signal_flag_takes_one_signal_and_the_next_does_what_it_did_before(number):
    with pytest.raises(signals.InterruptedBySignal), signals.raise_on_signals():
        flag = signals.SignalFlag()
        assert not flag.received
        os.kill(os.getpid(), number)
        assert flag.received
        os.kill(os.getpid(), number)
    flag.close()  # a second close must not bring back handlers of the block
    assert flag.received


def test_a_signal_flag_that_was_closed_notes_nothing():
    with signals.record_signals() as received:
        flag = signals.SignalFlag()
        flag.close()
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM] and not flag.received


def test_an_ignored_signal_stays_ignored():
    """As shells leave SIGINT to what they start in the background."""
    with signals.signal_handlers({signal.SIGINT: signal.SIG_IGN}):
        for block in (signals.raise_on_signals, signals.default_on_signals):
            with block():
                os.kill(os.getpid(), signal.SIGINT)
                assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_rank_has_the_defaults():
    with signals.raise_on_signals(), signals.default_on_signals():
        assert handlers() == [signal.default_int_handler, signal.SIG_DFL]


@pytest.mark.parametrize(
    ("error", "number"),
    [(KeyboardInterrupt(), signal.SIGINT), (signals.InterruptedBySignal(15), signal.SIGTERM)],
)
def test_an_interrupt_is_one_line_and_128_plus_its_number(monkeypatch, capsys, error, number):
    monkeypatch.delenv("OKTOPK_RANK", raising=False)
    assert signals.report_interrupt(error) == 128 + number
    assert capsys.readouterr().err == f"oktopk: interrupted by {signal.Signals(number).name}\n"
    monkeypatch.setenv("OKTOPK_RANK", "0")
    assert signals.report_interrupt(error) == 128 + number
    assert capsys.readouterr().err == "", "the process that started a rank prints the line"
