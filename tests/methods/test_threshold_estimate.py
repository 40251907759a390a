# SPDX-License-Identifier: Apache-2.0
"""The estimate of a threshold: how it follows counts, and where it stops."""

from __future__ import annotations

import pytest

from oktopk.methods.base import MAX_SLOPE, MIN_SLOPE, ThresholdEstimate, slope_between


def test_an_estimate_knows_the_threshold_of_more_and_of_fewer_entries():
    estimate = ThresholdEstimate(1.0, slope=2.0)
    assert estimate.at(4.0) == 0.5  # four times as many reach half of it
    assert estimate.at(0.25) == 2.0
    assert estimate.at(1.0) == 1.0


def test_a_count_moves_the_estimate_to_where_k_would_reach():
    estimate = ThresholdEstimate(1.0, slope=2.0)
    assert estimate.updated(3.0, 4.0).threshold == 6.0  # four times k reached 3
    assert estimate.updated(3.0, 1.0).threshold == 3.0


def test_a_grid_ascends_around_the_estimate():
    estimate = ThresholdEstimate(2.0, slope=4.0)
    grid = estimate.grid(12, 1.08)
    assert len(grid) == 12 and grid == sorted(grid)
    assert grid[6] == 2.0
    assert grid == [estimate.at(1.08 ** (6 - i)) for i in range(12)]


def test_scaling_moves_the_threshold_alone():
    assert ThresholdEstimate(2.0, 3.0).scaled(0.5) == ThresholdEstimate(1.0, 3.0)


@pytest.mark.parametrize(
    ("points", "slope"),
    [
        ((1.0, 400, 2.0, 100), 2.0),
        ((1.0, 10**6, 1.0001, 1), MAX_SLOPE),
        ((1.0, 101, 2.0, 100), MIN_SLOPE),
        ((2.0, 400, 1.0, 100), None),  # not ascending
        ((1.0, 100, 2.0, 100), None),  # no difference
        ((0.0, 400, 2.0, 100), None),
        ((1.0, 400, 2.0, 0), None),
    ],
)
def test_a_slope_follows_from_two_counts(points, slope):
    found = slope_between(*points)
    assert found is None if slope is None else found == pytest.approx(slope)
