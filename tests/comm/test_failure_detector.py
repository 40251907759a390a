# SPDX-License-Identifier: Apache-2.0
"""The failure detector, with ranks as threads at a store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from oktopk.comm.failure import (
    STORE_UNREACHABLE,
    Report,
    StoreFailureDetector,
    detection_seconds,
    diagnose,
    is_network_error,
    job_detector,
    use_for_job,
)
from oktopk.comm.torch_transport import monitored
from oktopk.errors import ExchangeError

SECONDS = 1.0
SILENT = "does not answer: it died, stopped, or ended before the others"


class Connections:
    """Something to close."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def detectors() -> Iterator[list[StoreFailureDetector]]:
    """The detectors of three ranks."""
    store = dist.HashStore()
    made = [StoreFailureDetector(store, rank, range(3), SECONDS) for rank in range(3)]
    yield made
    for detector in made:
        detector.close()


def aborted(detector: StoreFailureDetector, error: BaseException) -> str:
    """The text of the error that `abort` raises; empty if it raises none."""
    connections = Connections()
    try:
        detector.abort(error, connections)
    except ExchangeError as raised:
        assert raised.__cause__ is error
        return str(raised)
    finally:
        assert connections.closed
    return ""


def test_nothing_is_diagnosed_before_a_failure(detectors):
    assert [detector.diagnosis for detector in detectors] == [None] * 3


def test_an_error_of_one_rank_is_named_by_the_others(detectors):
    """Rank 2 only computes: its thread reports without being asked."""
    detectors[1].step = 7
    with ThreadPoolExecutor(2) as pool:
        own = pool.submit(aborted, detectors[1], ValueError("broken\nstack"))
        waiting = pool.submit(aborted, detectors[0], ExchangeError("no message\nstack"))
        assert own.result(30) == "", "the rank's own error is left to the caller"
        cause = "rank 1 failed in step 7: ValueError: broken"
        assert waiting.result(30) == f"rank 0, step 0: {cause} (no message)"
    assert detectors[2].wait_diagnosis() == cause


def test_a_rank_that_does_not_report_is_named():
    store = dist.HashStore()
    detector = StoreFailureDetector(store, 0, range(2), SECONDS)
    assert aborted(detector, ExchangeError("x")) == f"rank 0, step 0: rank 1 {SILENT} (x)"
    detector.close()


def test_an_error_that_names_the_rank_is_not_raised_again(detectors):
    for detector in detectors:
        detector.report(None)
    first, connections = ExchangeError("x"), Connections()
    with pytest.raises(ExchangeError) as raised:
        detectors[0].abort(first, connections)
    detectors[0].abort(raised.value, connections)


def test_a_store_that_fails_is_told_and_ends_nothing_before_a_failure():
    class Gone(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    detector = StoreFailureDetector(Gone(), 0, range(2), 0.1)
    assert detector.wait_diagnosis() == f"{STORE_UNREACHABLE} (connection reset)"
    assert detector.diagnosis is None
    detector.close()


def test_a_shared_detector_stops_with_its_last_user():
    detector = StoreFailureDetector(dist.HashStore(), 0, [0], SECONDS)
    shared = detector.share()
    detector.close()
    assert shared._thread.is_alive()
    shared.close()
    assert not shared._thread.is_alive()


def test_detectors_at_one_store_do_not_see_each_others_failures():
    store = dist.HashStore()
    first, second = (StoreFailureDetector(store, 0, [0], SECONDS) for _ in range(2))
    first.report("ValueError: x")
    assert first.wait_diagnosis() == "rank 0 failed in step 0: ValueError: x"
    second.close()
    assert second.diagnosis is None
    first.close()


def test_errors_of_torch_name_the_rank_inside_of_a_job(detectors):
    assert job_detector() is None
    with use_for_job(detectors[0]):
        assert job_detector() is detectors[0]
        detectors[1].report("ValueError: x")
        with pytest.raises(ExchangeError, match="rank 1 failed in step 0"), monitored():
            raise RuntimeError("Gloo connectFullMesh failed")
        with pytest.raises(ZeroDivisionError), monitored():
            _ = 1 / 0
    assert job_detector() is None
    with pytest.raises(RuntimeError, match="Gloo"), monitored():
        raise RuntimeError("Gloo connectFullMesh failed")


def test_the_diagnosis_names_failed_ranks_then_silent_ones_then_the_last():
    fine, broken = Report(5, None), Report(7, "ValueError: x")
    assert diagnose({0: fine, 1: broken}, range(2)) == "rank 1 failed in step 7: ValueError: x"
    assert diagnose({0: fine, 3: fine}, range(4)) == f"rank 1 {SILENT}; rank 2 {SILENT}"
    assert "the last of them rank 1 in step 4" in diagnose({0: fine, 1: Report(4, None)}, range(2))


@pytest.mark.parametrize(("timeout", "seconds"), [(3.0, 1.0), (15.0, 5.0), (300.0, 5.0)])
def test_a_third_of_a_timeout_is_for_detection_but_not_more_than_5_s(timeout, seconds):
    assert detection_seconds(timeout) == seconds


@pytest.mark.parametrize(
    ("error", "network"),
    [
        (ExchangeError("x"), True),
        (dist.DistNetworkError("x"), True),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] closed"), True),
        (RuntimeError("Expected to have finished reduction"), False),
        (ValueError("[/gloo/gloo/x] "), False),
    ],
)
def test_errors_of_the_network_are_told_from_a_ranks_own(error, network):
    assert is_network_error(error) == network
