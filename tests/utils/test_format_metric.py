# SPDX-License-Identifier: Apache-2.0
"""Metrics as people read them: three decimals, and three digits where decimals would be zeros."""

import pytest

from oktopk.utils.arguments import format_metric


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.9294, "1.929"),
        (0.1, "0.100"),
        (0.0384, "0.0384"),
        (0.05, "0.0500"),
        (0.0999996, "0.100"),
        (-0.00384, "-0.00384"),
        (0.0, "0.000"),
        (-0.0, "0.000"),
        (123.4567, "123.457"),
        (1e30, "1e+30"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_a_metric_has_three_decimals_or_three_digits(value, text):
    assert format_metric(value) == text
