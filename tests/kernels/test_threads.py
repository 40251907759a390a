# SPDX-License-Identifier: Apache-2.0
"""Kernels that run in several threads give the same bits as in one, whatever they find.

The laws with several threads are in tests/methods/test_laws.py, training in test_threads_ddp.py.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oktopk
from laws import assert_all_agree, assert_nothing_is_lost, simulated, trajectory
from oktopk import Reducer, kernels
from oktopk.kernels import reference
from oktopk.methods.base import Candidates
from worlds import threads

LOW = 1.0  # the threshold of the candidates
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


def found_by(num: int, residuals, grads, most: int) -> tuple[Candidates, list]:
    """The candidates of all parts with `num` threads, and the sums of residual and gradient."""
    slots = most + kernels.SPARE_SLOTS
    values = torch.empty(slots, dtype=residuals[0].dtype)
    found = Candidates(LOW, most, (torch.empty(slots, dtype=torch.int32), values))
    sums = [torch.empty_like(x) for x in residuals]
    with threads(num):
        for residual, grad, acc in zip(residuals, grads, sums, strict=True):
            found.add_bucket(residual, grad, acc)
        found.find_in(torch.cat(sums))
    return found, sums


def assert_threads_find_the_same(residuals, grads, most: int) -> Candidates:
    one, sums = found_by(1, residuals, grads, most)
    acc = torch.cat(residuals) + torch.cat(grads)
    whole, count = kernels.select(acc, LOW, most)
    for num in (1, 2, 3, 4):
        mine, my_sums = found_by(num, residuals, grads, most)
        chosen = mine.entries
        assert mine.num_reaching == count and mine.num == min(count, most)
        assert chosen.numel == acc.numel() and chosen.indices.equal(whole.indices)
        assert same_bits(chosen.values, whole.values)
        assert all(map(same_bits, my_sums, sums))
    return one


def same_bits(x, y) -> bool:
    return x.dtype == y.dtype and torch.equal(x.nan_to_num(7e7), y.nan_to_num(7e7))


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    numels=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_candidates_are_the_same_with_any_number_of_threads(data, numels, dtype):
    """Any capacity, from none to more than enough, and candidates in any part of the gradient."""
    total = sum(numels)
    grad = torch.rand(total, generator=torch.Generator().manual_seed(total), dtype=dtype)
    lo, hi = sorted(data.draw(st.integers(0, total)) for _ in range(2))
    grad[lo:hi] += 1
    if total:
        at = data.draw(st.lists(st.integers(0, total - 1), max_size=4))
        grad[at] = data.draw(st.sampled_from(NOT_FINITE))
    most = data.draw(st.sampled_from([0, 1, hi - lo, max(hi - lo - 1, 0), total]))
    residual = torch.linspace(-0.5, 0.5, total, dtype=dtype)
    assert_threads_find_the_same(residual.split(numels), grad.split(numels), most)


# of 4000 entries, which are candidates; the threads' parts are halves or quarters of them
STRETCHES = {
    "none": [],
    "few": [(5, 6), (3999, 4000)],
    "first part": [(0, 1000)],
    "later part": [(3000, 4000)],
    "middle parts": [(1000, 3000)],
    "every part": [(0, 4000)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STRETCHES)
@pytest.mark.parametrize("most", [0, 500, 999, 1000, 2000, 4000])
def test_candidates_beyond_the_capacity_are_only_counted(name, most, dtype):
    grad = torch.full((4000,), 0.25, dtype=dtype)
    for lo, hi in STRETCHES[name]:
        grad[lo:hi] = 2
    residual = torch.zeros_like(grad)
    found = assert_threads_find_the_same([residual], [grad], most)
    assert found.num_reaching == sum(hi - lo for lo, hi in STRETCHES[name])
    # a bucket before it that takes the whole capacity, and an empty one behind it
    full = torch.full((most,), 3.0, dtype=dtype)
    parts = [full, residual, residual[:0]]
    assert_threads_find_the_same(parts, [torch.zeros_like(full), grad, grad[:0]], most)


def test_threads_without_compiled_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "backend_for", lambda device_type: reference)
    grad = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    for most in (0, 300, 2000):
        assert_threads_find_the_same([grad / 2, grad[:7]], [grad.flip(0), grad[7:14]], most)


def test_a_bucket_of_real_size_with_two_threads():
    """At the second sparse step acc is larger, so that far more than k reach the last threshold."""
    numel, before = 2 * kernels.MIN_VALUES + 7, torch.get_num_threads()
    done = {}
    try:
        for num in (1, 2):
            torch.set_num_threads(num)
            assert len(kernels.thread_slices(torch.empty(numel))) == num
            reducer = Reducer(numel, density=0.02)
            for step in range(3):
                grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
                stats = reducer.reduce_(grad)
                assert 0.9 * stats.k <= stats.local <= stats.k
            done[num] = grad, reducer.residual
    finally:
        torch.set_num_threads(before)
    assert all(one.equal(two) for one, two in zip(done[1], done[2], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_with_threads(dtype):
    def run(num):
        def main(comm):
            torch.set_num_threads(num)  # of this simulated rank; `simulate` has set it to 1
            return trajectory(comm, "oktopk", 4000, 0.05, "gaussian", 6, dtype)

        with threads(1):
            return oktopk.simulate(3, main)

    assert_same_steps(run(1), run(2))
    assert_same_steps(run(1), run(4))


def assert_same_steps(ranks, others) -> None:
    for rank, other in zip(ranks, others, strict=True):
        for mine, its in zip(rank, other, strict=True):
            assert mine.total.equal(its.total) and mine.residual.equal(its.residual)


def test_simulated_ranks_share_the_pools_of_threads():
    def main(comm):
        torch.set_num_threads(1 + comm.rank % 4)
        return trajectory(comm, "oktopk", 1000, 0.05, "whole", 34)

    with threads(1):
        ranks = oktopk.simulate(8, main)
        one = simulated(8, "oktopk", 1000, 0.05, "whole", 34)
    assert_nothing_is_lost(ranks, tolerance=0)
    assert_all_agree(ranks)
    assert_same_steps(ranks, one)


def test_callers_on_eight_threads_share_the_pools(monkeypatch):
    """More callers at once than a pool has threads, as with a communication thread per model."""
    monkeypatch.setattr(kernels, "MIN_VALUES", 1)
    grads = [torch.randn(3000, generator=torch.Generator().manual_seed(i)) for i in range(8)]

    def find(i: int):
        torch.set_num_threads(2 + i % 3)
        for _ in range(30):
            buffer = torch.empty(700, dtype=torch.int32), torch.empty(700)
            found = Candidates(LOW, 600, buffer)
            found.add_bucket(torch.zeros(3000), grads[i], torch.empty(3000))
        return found

    before = torch.get_num_threads()
    with ThreadPoolExecutor(8) as pool:
        together = [pool.submit(find, i) for i in range(8)]
        together = [future.result(timeout=60) for future in together]
    torch.set_num_threads(before)  # what new threads begin with was changed
    for grad, found in zip(grads, together, strict=True):
        whole, count = kernels.select(grad, LOW, 600)
        assert found.num_reaching == count > 600
        assert found.entries.indices.equal(whole.indices)
        assert found.entries.values.equal(whole.values)


def test_an_error_in_one_part_waits_for_the_others():
    done = []

    def work(part: slice) -> None:
        if part.start == 0:
            raise MemoryError("of this part")
        time.sleep(0.2)
        done.append(part)

    parts = [slice(i, i + 1) for i in range(3)]
    with pytest.raises(MemoryError, match="of this part"):
        kernels.run_in_threads(work, parts)
    assert sorted(part.start for part in done) == [1, 2]


def _total_in_parts(sending) -> None:
    sending.send(sum(kernels.run_in_threads(lambda part: part.stop, [slice(0, 1), slice(1, 2)])))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    kernels.run_in_threads(lambda part: part, [slice(0, 1), slice(1, 2)])
    context = mp.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_total_in_parts, args=(sending,), daemon=True)
    child.start()
    try:
        assert receiving.poll(20) and receiving.recv() == 3
    finally:
        child.kill()
        child.join(10)
