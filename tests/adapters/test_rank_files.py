# SPDX-License-Identifier: Apache-2.0
"""Which rank reads which file of a checkpoint, and when states are saved by the count of steps."""

from __future__ import annotations

import errno
import logging
import resource
import signal
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import oktopk
from oktopk import simulate
from oktopk.adapters.ddp_handle import PeriodicCheckpoint
from oktopk.adapters.saved_states import (
    has_states,
    moment_of,
    nothing_to_load,
    offers,
    read_states,
    write_state,
)
from oktopk.comm.consistency import newest_on_all
from oktopk.utils.files import FileError
from rounds import same_state, start, take_steps


def save(folder, rank: int, size: int, step: int = 1, local_steps: int = 0) -> None:
    state = {"rank": rank, "size": size, "step": step}
    write_state(folder, state, rank, size, (step, local_steps))


def save_all(folder, size: int, step: int = 1) -> None:
    for rank in reversed(range(size)):
        save(folder, rank, size, step)


def read(folder, rank: int, size: int):
    """What a rank reads if the others have what it has."""
    if found := offers(folder, rank, size):
        return read_states(folder, rank, size, max(found))
    raise nothing_to_load(folder, rank, size)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_rank_reads_its_own_file(tmp_path):
    save_all(tmp_path / "new" / "folder", 3)
    assert read(tmp_path / "new" / "folder", 2, 3) == {"rank": 2, "size": 3, "step": 1}


def test_with_another_world_size_a_rank_reads_all_files(tmp_path):
    save_all(tmp_path, 3)
    assert [state["rank"] for state in read(tmp_path, 1, 2)] == [0, 1, 2]


def test_files_of_another_world_size_are_removed_when_all_ranks_have_saved(tmp_path):
    save_all(tmp_path, 3)
    save(tmp_path, 0, 2)
    assert len(names(tmp_path)) == 4  # rank 1 may fail to save
    save(tmp_path, 1, 2)
    assert names(tmp_path) == ["oktopk-0-of-2.step-1.pt", "oktopk-1-of-2.step-1.pt"]


def test_files_of_another_world_size_stay_while_one_rank_saves_alone(tmp_path):
    save_all(tmp_path, 2)
    for step in (2, 3):
        save(tmp_path, 0, 3, step)
    assert max(offers(tmp_path, 1, 3)) == max(offers(tmp_path, 2, 3)) == (0, 1, 0, 2)
    assert (0, 1, 0, 2) in offers(tmp_path, 0, 3)
    for rank in (1, 2):
        save(tmp_path, rank, 3, step=3)
    assert {each[3] for each in offers(tmp_path, 0, 3)} == {3}


def test_a_host_of_its_own_needs_only_its_own_file(tmp_path):
    """Without a shared folder, a host has the files of its own ranks."""
    save(tmp_path, 3, 4)
    assert read(tmp_path, 3, 4)["rank"] == 3


def test_the_last_two_are_kept_and_local_steps_count(tmp_path):
    for step, local_steps in ((1, 0), (1, 3), (2, 0), (2, 1)):
        save(tmp_path, 0, 1, step, local_steps)
    assert names(tmp_path) == ["oktopk-0-of-1.step-2-1.pt", "oktopk-0-of-1.step-2.pt"]
    assert max(offers(tmp_path, 0, 1)) == (1, 2, 1, 1)


def test_those_of_a_run_that_was_given_up_are_removed(tmp_path):
    save_all(tmp_path, 1, step=90)
    save_all(tmp_path, 1, step=100)
    save_all(tmp_path, 1, step=10)
    assert names(tmp_path) == ["oktopk-0-of-1.step-10.pt"]


def test_the_newest_that_all_ranks_have_is_kept_however_often_one_of_them_fails(tmp_path):
    save_all(tmp_path, 2, step=1)
    for step in (2, 3, 4):
        save(tmp_path, 0, 2, step)
    assert {each[1] for each in offers(tmp_path, 0, 2)} == {1, 3, 4}
    assert {each[1] for each in offers(tmp_path, 1, 2)} == {1}


def test_files_without_a_step_in_their_names_are_read_and_then_replaced(tmp_path):
    for rank in range(2):
        torch.save({"rank": rank}, tmp_path / f"oktopk-{rank}-of-2.pt")
    assert read(tmp_path, 1, 2) == {"rank": 1}
    assert [state["rank"] for state in read(tmp_path, 0, 3)] == [0, 1]
    for step in (1, 2):
        save_all(tmp_path, 2, step)
    assert names(tmp_path) == [f"oktopk-{r}-of-2.step-{step}.pt" for r in (0, 1) for step in (1, 2)]


def test_what_is_missing_is_named(tmp_path):
    assert not has_states(tmp_path) and not has_states(tmp_path / "none")
    with pytest.raises(FileError, match="has no state of any rank; every rank must call save"):
        read(tmp_path, 0, 2)
    save(tmp_path, 1, 4)
    missing = r"oktopk-0-of-4\.step-\*\.pt: does not exist; .*oktopk-1-of-4"
    with pytest.raises(FileError, match=missing):
        read(tmp_path, 0, 4)
    with pytest.raises(FileError, match=r"4 ranks saved .* ranks \[0, 2, 3\] are not here"):
        read(tmp_path, 0, 2)
    save(tmp_path, 0, 4, step=2)
    with pytest.raises(FileError, match="there is no step whose state all ranks have"):
        raise nothing_to_load(tmp_path, 0, 4)


def test_all_ranks_choose_the_newest_that_they_have_in_common():
    found = {0: [(1, 3), (1, 2)], 1: [(1, 2), (1, 1)], 2: [(2, 0), (1, 2)]}

    def choose(comm):
        device = torch.device("cpu")
        mine = found.get(comm.rank, [])
        return newest_on_all(mine, 2, comm, device), newest_on_all([], 2, comm, device)

    assert simulate(3, choose) == [((1, 2), None)] * 3
    assert simulate(4, choose) == [(None, None)] * 4


@contextmanager
def no_room(most: int):
    """No file may have more bytes: what a full disk is to a process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("most", [0, 2000])
def test_a_file_that_cannot_be_written_is_named_with_what_the_system_says(tmp_path, most):
    save(tmp_path, 0, 1)
    with no_room(most), pytest.raises(OSError, match="File too large") as raised:
        write_state(tmp_path, {"x": torch.zeros(5000)}, 0, 1, (2, 0))
    assert raised.value.errno == errno.EFBIG
    assert raised.value.filename == str(tmp_path / "oktopk-0-of-1.step-2.pt")
    assert names(tmp_path) == ["oktopk-0-of-1.step-1.pt"]


def test_what_a_killed_process_had_begun_to_write_is_removed_by_the_next_of_its_rank(tmp_path):
    left = [".oktopk-0-of-2.step-1.pt.part", ".oktopk-0-of-3.step-4-2.pt.part"]
    others = [".oktopk-1-of-2.step-1.pt.part", ".other.pt.part"]
    for name in left + others:
        (tmp_path / name).write_bytes(b"half")
    save(tmp_path, 0, 2, step=5)
    assert names(tmp_path) == [*others, "oktopk-0-of-2.step-5.pt"]


def full_disk_on_one_rank(group, folder: str, delay: int) -> tuple:
    """Rank 1 cannot write its second file; then all load."""
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group, delay=delay)
    take_steps(net, optimizer, rank, range(9))
    handle.save(folder)
    state = handle.state_dict()
    take_steps(net, optimizer, rank, range(9, 14))
    said = ""
    try:
        with no_room(100 if rank == 1 else 2**30):
            handle.save(folder)
    except OSError as error:
        said = str(error)
    dist.barrier(group)
    handle.close()
    _, _, again = start(group, delay=delay)
    again.load(folder)
    loaded = again.state_dict()
    again.close()
    return said, same_state(state, loaded)


@pytest.mark.parametrize("delay", [0, 2])
def test_after_a_full_disk_on_one_rank_all_load_what_all_have(worlds, tmp_path, delay):
    answers = worlds.run(2, full_disk_on_one_rank, str(tmp_path), delay)
    assert answers[0] == ("", True)
    assert "File too large" in answers[1][0] and "oktopk-1-of-2.step-3-2.pt" in answers[1][0]
    assert answers[1][1]


@contextmanager
def heard():
    """What the logger of oktopk says meanwhile."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("oktopk").addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger("oktopk").removeHandler(handler)


def saved_twice(group, folder: str) -> dict:
    """The state of the first of two times that all save."""
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group)
    take_steps(net, optimizer, rank, range(4))
    handle.save(folder)
    state = handle.state_dict()
    take_steps(net, optimizer, rank, range(4, 8))
    handle.save(folder)
    handle.close()
    dist.barrier(group)
    return state


def load_again(group, folder: str) -> tuple[dict, list[str], str]:
    """What is loaded, with what is said and raised."""
    _, _, handle = start(group)
    said = ""
    with heard() as logged:
        try:
            handle.load(folder)
        except FileError as error:
            said = str(error)
    state = handle.state_dict()
    handle.close()
    return state, logged, said


def damage(path, kept: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])


@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
def test_a_damaged_file_is_passed_over_by_all_ranks(worlds, tmp_path, kept):
    first = worlds.run(2, saved_twice, str(tmp_path))
    damage(tmp_path / "oktopk-0-of-2.step-2.pt", kept)
    answers = worlds.run(2, load_again, str(tmp_path))
    for (state, _, said), expected in zip(answers, first, strict=True):
        assert not said and same_state(state, expected)
    (warning,), others = answers[0][1], answers[1][1]
    assert "rank 0: " in warning and "oktopk-0-of-2.step-2.pt: is damaged" in warning
    assert "the state of step 1 is loaded instead" in warning and not others


def test_where_another_world_size_saved_all_ranks_pass_over_a_damaged_file(worlds, tmp_path):
    worlds.run(2, saved_twice, str(tmp_path))
    damage(tmp_path / "oktopk-1-of-2.step-2.pt", 0.5)
    for state, logged, said in worlds.run(3, load_again, str(tmp_path)):
        assert not said and moment_of(state) == (1, 0)
        assert "oktopk-1-of-2.step-2.pt: is damaged" in logged[0]


def test_a_damaged_file_without_an_older_one_is_named_by_its_rank(worlds, tmp_path):
    worlds.run(2, saved_twice, str(tmp_path))
    (tmp_path / "oktopk-1-of-2.step-1.pt").unlink()
    damage(tmp_path / "oktopk-0-of-2.step-2.pt", 0.5)
    (_, _, damaged), (_, _, other) = worlds.run(2, load_again, str(tmp_path))
    assert "oktopk-0-of-2.step-2.pt: is damaged" in damaged
    assert "a rank cannot read its state of step 2" in other and "must call save" not in other
    assert "their state is of step 1 on rank 0 but of step 2 on rank 1" in other


def without_one_rank(group, folder: str) -> str:
    """Rank 0 loads, and rank 1 does not."""
    rank = dist.get_rank(group)
    _, _, handle = start(group, timeout=2.0)
    handle.save(folder)
    said = ""
    try:
        if rank == 0:
            handle.load(folder)
    except oktopk.ExchangeError as error:
        said = str(error)
    dist.barrier(group)
    handle.close()
    return said


def test_a_rank_that_does_not_load_is_named(worlds, tmp_path):
    said = worlds.run(2, without_one_rank, str(tmp_path))[0]
    assert said.startswith("rank 1 did not call load_state_dict within 2 s of another rank")


@pytest.mark.parametrize(("keep", "left"), [(1, [8]), (2, [6, 8]), (9, [2, 4, 6, 8])])
def test_states_are_saved_once_and_the_last_ones_kept(tmp_path, keep, left):
    checkpoint, asked = PeriodicCheckpoint(tmp_path, every=2, keep=keep), []
    for step in range(1, 10):
        checkpoint.after_exchange(step)
        for _ in range(2):  # in the optimizer's step, and again before the next exchange
            checkpoint.save_if_due(lambda step=step: asked.append(step) or {}, 0, 1)
    assert asked == [2, 4, 6, 8]
    assert checkpoint.saved_steps() == left


def test_the_last_state_stays_until_all_ranks_have_the_next(tmp_path):
    checkpoints = [PeriodicCheckpoint(tmp_path, every=1, keep=1) for _ in range(2)]
    for step, ranks, left in ((1, (0, 1), [1]), (2, (0,), [1, 2]), (2, (1,), [2])):
        for rank in ranks:
            checkpoints[rank].after_exchange(step)
            checkpoints[rank].save_if_due(dict, rank, 2)
        assert checkpoints[0].saved_steps() == left


def test_a_step_that_was_not_saved_is_named(tmp_path):
    checkpoint = PeriodicCheckpoint(tmp_path, every=2, keep=2)
    with pytest.raises(FileError, match=r"step-5: no rank has saved .* after steps: none"):
        checkpoint.check(5)
