# SPDX-License-Identifier: Apache-2.0
"""Low-bit values: every backend writes the words of the reference and reads the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import check
from oktopk.kernels import reference
from oktopk.kernels.bits import QUANTIZE_BLOCK, QUANTIZERS
from wire_cases import EXTREME, NOT_FINITE, values

COUNTS = [0, 1, 2, 33, QUANTIZE_BLOCK - 1, QUANTIZE_BLOCK, QUANTIZE_BLOCK + 1, 700]
over_bits = pytest.mark.parametrize("num_bits", QUANTIZERS)


def new_words(count, num_bits):
    """Memory for the parameters and the codes, with something in it."""
    parameters = -(-count // QUANTIZE_BLOCK) * QUANTIZERS[num_bits].num_parameters
    sizes = -(-parameters // 2), -(-count * num_bits // 32)
    return [torch.full((num,), -1, dtype=torch.int32) for num in sizes]


def check_both_ways(backend, x, num_bits):
    check(backend, "quantize", x, num_bits, *new_words(x.numel(), num_bits))
    words = new_words(x.numel(), num_bits)
    reference.quantize(x, num_bits, *words)
    check(backend, "dequantize", *words, num_bits, torch.full_like(x, 7))


def read(x, num_bits):
    words = new_words(x.numel(), num_bits)
    reference.quantize(x, num_bits, *words)
    out = torch.empty_like(x)
    reference.dequantize(*words, num_bits, out)
    return out


@over_bits
@given(data=st.data(), count=st.sampled_from(COUNTS))
@settings(deadline=None, max_examples=40)
def test_any_values_are_coded_as_by_the_reference_and_read_back(backend, num_bits, data, count):
    check_both_ways(backend, data.draw(values(count, torch.float32)), num_bits)


@over_bits
def test_values_that_are_not_finite_spoil_their_own_block_only(backend, num_bits):
    x = torch.randn(4 * QUANTIZE_BLOCK, generator=torch.Generator().manual_seed(0))
    for block, special in enumerate(NOT_FINITE):
        x[block * QUANTIZE_BLOCK + 5] = special
    check_both_ways(backend, x, num_bits)
    spoiled = read(x, num_bits).isfinite().logical_not().view(4, -1)
    assert spoiled[:3].all() and not spoiled[3].any()


@over_bits
def test_finite_values_stay_finite(num_bits):
    largest = torch.finfo(torch.float32).max
    for x in (torch.tensor(EXTREME), torch.tensor([largest, -largest, 1.0]).repeat(50)):
        assert read(x, num_bits).isfinite().all()


@over_bits
def test_equal_magnitudes_arrive_with_their_signs(num_bits):
    """Ties: 3.0 has few bits, so bfloat16 holds it."""
    x = 3.0 * torch.randn(300, generator=torch.Generator().manual_seed(0)).sign()
    assert read(x, num_bits).equal(x)


@over_bits
def test_the_residual_of_a_block_is_smaller_than_the_block(num_bits):
    """The rounding of a block takes off less than all: error feedback needs that to converge."""
    generator = torch.Generator().manual_seed(0)
    for power in (0, 1, 3, 9):  # the larger, the heavier the tail
        x = torch.randn(40, QUANTIZE_BLOCK, generator=generator)
        x = x.sign() * x.abs() ** power
        lost = (x - read(x.view(-1), num_bits).view_as(x)).square().sum(1)
        assert (lost < x.square().sum(1)).all()


@pytest.mark.parametrize(("num_bits", "most"), [(1, 0.08), (2, 0.028), (4, 0.003)])
def test_little_energy_is_lost_above_a_threshold(num_bits, most):
    """The tail of a Laplace distribution, from the threshold that 2 % reach."""
    generator = torch.Generator().manual_seed(0)
    tail = torch.rand(50_000, generator=generator).clamp(1e-6).log().neg() + 3.9
    x = tail * torch.randn(50_000, generator=generator).sign()
    lost = (x - read(x, num_bits)).square().sum() / x.square().sum()
    assert lost < most
