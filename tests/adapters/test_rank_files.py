# SPDX-License-Identifier: Apache-2.0
"""Which rank reads which file of a checkpoint, and when states are saved by the count of steps."""

from __future__ import annotations

import pytest

from oktopk.adapters.ddp.periodic_checkpoint import PeriodicCheckpoint
from oktopk.adapters.rank_files import has_states, read_states, write_state
from oktopk.utils.files import FileError


def save_all(folder, size: int) -> None:
    for rank in reversed(range(size)):
        write_state(folder, {"rank": rank, "size": size}, rank, size)


def test_a_rank_reads_its_own_file(tmp_path):
    save_all(tmp_path / "new" / "folder", 3)
    assert read_states(tmp_path / "new" / "folder", 2, 3) == {"rank": 2, "size": 3}


def test_with_another_world_size_a_rank_reads_all_files(tmp_path):
    save_all(tmp_path, 3)
    assert [state["rank"] for state in read_states(tmp_path, 1, 2)] == [0, 1, 2]


def test_files_of_another_world_size_are_removed(tmp_path):
    save_all(tmp_path, 3)
    save_all(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["oktopk-0-of-2.pt", "oktopk-1-of-2.pt"]


def test_a_host_of_its_own_needs_only_its_own_file(tmp_path):
    """Without a shared folder, a host has the files of its own ranks."""
    write_state(tmp_path, {"rank": 3}, 3, 4)
    assert read_states(tmp_path, 3, 4) == {"rank": 3}


def test_what_is_missing_is_named(tmp_path):
    assert not has_states(tmp_path) and not has_states(tmp_path / "none")
    with pytest.raises(FileError, match="has no state of any rank; every rank must call save"):
        read_states(tmp_path, 0, 2)
    write_state(tmp_path, {}, 1, 4)
    with pytest.raises(FileError, match=r"oktopk-0-of-4\.pt: does not exist; .*oktopk-1-of-4"):
        read_states(tmp_path, 0, 4)
    with pytest.raises(FileError, match=r"4 ranks saved .* ranks \[0, 2, 3\] are not here"):
        read_states(tmp_path, 0, 2)


@pytest.mark.parametrize(("keep", "left"), [(1, [8]), (2, [6, 8]), (9, [2, 4, 6, 8])])
def test_states_are_saved_once_and_the_last_ones_kept(tmp_path, keep, left):
    checkpoint, asked = PeriodicCheckpoint(tmp_path, every=2, keep=keep), []
    for step in range(1, 10):
        checkpoint.after_exchange(step)
        for _ in range(2):  # in the optimizer's step, and again before the next exchange
            checkpoint.save_if_due(lambda step=step: asked.append(step) or {}, 0, 1)
    assert asked == [2, 4, 6, 8]
    assert checkpoint.saved_steps() == left


def test_a_step_that_was_not_saved_is_named(tmp_path):
    checkpoint = PeriodicCheckpoint(tmp_path, every=2, keep=2)
    with pytest.raises(FileError, match=r"step-5: no rank has saved .* after steps: none"):
        checkpoint.check(5)
