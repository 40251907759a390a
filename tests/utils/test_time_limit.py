# SPDX-License-Identifier: Apache-2.0
"""A time limit for calls that have none of their own."""

from __future__ import annotations

import threading

import pytest

from oktopk.utils.signals import CallTimeoutError, call_with_timeout


def test_a_late_call_is_abandoned_and_results_and_errors_are_passed_on():
    with pytest.raises(CallTimeoutError, match="no answer after"):
        call_with_timeout(0.05, threading.Event().wait)
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(5, lambda: 1 / 0)
    assert call_with_timeout(5, lambda: 7) == 7
