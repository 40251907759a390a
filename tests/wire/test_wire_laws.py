"""Every codec in an exchange of simulated ranks: nothing is lost, all agree, bytes are bounded."""

from __future__ import annotations

import pytest
import torch

import oktopk
from laws import assert_all_agree, assert_nothing_is_lost, simulated
from oktopk.wire.codec import CODECS
from wire_cases import BITS


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("method", oktopk.METHODS)
@pytest.mark.parametrize("P", [1, 2, 3, 8])
def test_nothing_is_lost_and_all_agree(P, method, name):
    ranks = simulated(P, method, 3000, 0.02, "heavy", 36, torch.float32, wire=name)
    assert_nothing_is_lost(ranks, tolerance=1e-4)
    assert_all_agree(ranks)


@pytest.mark.parametrize("name", CODECS)
def test_fewer_bits_send_fewer_bytes(name):
    (step, *_), *_ = simulated(4, "oktopk", 100_000, 0.02, "heavy", 1, torch.float32, wire=name)
    bits = 8 * (step.stats.bytes_sent - step.stats.bytes_header) / step.stats.entries_sent
    assert bits <= BITS[name] * 1.02


def test_an_unknown_codec_is_refused():
    with pytest.raises(ValueError, match="wire must be one of"):
        oktopk.Reducer(10, wire="zip")
