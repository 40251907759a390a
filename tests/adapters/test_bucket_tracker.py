# SPDX-License-Identifier: Apache-2.0
"""In which layout each step is exchanged: the same for a run and for its resumed twin."""

from __future__ import annotations

import pytest

from oktopk.adapters.ddp_driver import FINAL as FINAL_STATES
from oktopk.adapters.ddp_driver import SETTLED, TRANSITIONS, BucketTracker, Seen

FIRST, FINAL, OTHER = [["b"], ["a"]], [["a"], ["b"]], [["a", "b"]]
# which backward pass of a process first has DDP's final buckets; never with unused parameters
PASSES = 3  # backward passes of a process, of which the last has the final buckets in every mode
REBUILDS = {"plain": 1, "static graph": 2, "never": 10**6}


def ddp_layout(rebuild: int, process_step: int):
    return FINAL if process_step >= rebuild else FIRST


def layouts(rebuild: int, steps: int, start: int = 0, saved: tuple = ([], [])) -> list:
    """(layout, settled) after every step of a process that starts at step `start`."""
    tracker, (current, settled) = BucketTracker(), saved
    tracker.restart(settled)
    seen = []
    for step in range(start, steps):
        current = tracker.observe(step, current, ddp_layout(rebuild, step - start))
        seen.append((current, tracker.settled))
    return seen


@pytest.mark.parametrize("rebuild", REBUILDS.values(), ids=REBUILDS)
def test_a_run_resumed_at_any_step_has_the_layouts_of_one_that_never_stopped(rebuild):
    straight = layouts(rebuild, 16)
    for stop in range(16):
        saved = straight[stop - 1] if stop else ([], [])
        resumed = layouts(rebuild, 16, stop, saved)
        assert [one for one, _ in resumed] == [one for one, _ in straight[stop:]], stop
        for again in range(stop + 1, 16):  # and one that is resumed twice
            if stop < PASSES <= again < stop + PASSES:
                continue  # no process may have seen the final buckets
            twice = layouts(rebuild, 16, again, resumed[again - stop - 1])
            assert [one for one, _ in twice] == [one for one, _ in straight[again:]], (stop, again)


@pytest.mark.parametrize("rebuild", REBUILDS.values(), ids=REBUILDS)
def test_the_first_layout_is_kept_and_then_that_of_ddp(rebuild):
    seen = [layout for layout, _ in layouts(rebuild, 10)]
    assert seen[:SETTLED] == [FIRST] * SETTLED
    assert seen[SETTLED:] == [ddp_layout(rebuild, 9)] * (10 - SETTLED)


def test_another_layout_than_the_saved_one_is_taken_once_ddp_stays_with_it():
    tracker = BucketTracker()
    tracker.restart(FINAL)
    seen = [tracker.observe(step, FINAL, OTHER) for step in range(8, 8 + PASSES + 2)]
    assert seen[0] == FINAL and seen[-1] == OTHER


def test_steady_means_equal_steps():
    tracker = BucketTracker()
    steady = []
    for step, layout in enumerate([FIRST, FIRST, FINAL, FINAL, FINAL]):
        tracker.observe(step, [], layout)
        steady.append(tracker.is_steady)
    assert steady == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ([FIRST], Seen.ONCE),
        ([FIRST, FIRST], Seen.TWICE),
        ([FIRST, FIRST, FIRST], Seen.STEADY),
        ([FIRST, FINAL], Seen.REBUILT),
        ([FIRST, FIRST, FINAL], Seen.REBUILT),
        ([FIRST, FINAL, FINAL], Seen.REBUILT_TWICE),
        ([FIRST, FINAL, FINAL, FINAL], Seen.STEADY),
        ([FIRST, FINAL, OTHER], Seen.REBUILT),
        ([FIRST, FINAL, FINAL, OTHER], Seen.REBUILT),
        ([FIRST, FIRST, FIRST, FIRST], Seen.STEADY),
        ([FIRST, FIRST, FIRST, OTHER], Seen.REBUILT),
    ],
)
def test_every_transition(passes, expected):
    tracker = BucketTracker()
    for step, layout in enumerate(passes):
        tracker.observe(step, [], layout)
    assert tracker.seen is expected
    assert bool(tracker.settled) == (expected in FINAL_STATES)


def test_every_state_can_be_reached_and_left_by_the_table():
    assert set(TRANSITIONS) == set(Seen)
    assert {after for pair in TRANSITIONS.values() for after in pair} == set(Seen) - {Seen.NOTHING}
