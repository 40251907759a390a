"""Places, meeting points, signing in, and the care for workers; other launchers simulated."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from launchers import environment, openmpi, pbs, rank_main, srun, start, wait_for
from oktopk.launch import local_workers, parent_watchdog
from oktopk.launch.local_workers import (
    LaunchError,
    Place,
    find_place,
    start_workers,
    workers_to_start,
)
from oktopk.launch.master_endpoint import PORTS, first_host, meeting_point
from oktopk.launch.process_group import joined
from oktopk.launch.registration import _quota, device_of, threads
from oktopk.train.config import Config
from oktopk.train.run_process import started


@pytest.fixture
def nodefile(tmp_path):
    path = tmp_path / "nodes"
    path.write_text("gpu1\n" * 4 + "gpu2\n" * 4)
    return path


def test_nobody_started_this(environ):
    assert find_place() is None


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"OKTOPK_RANK": 1, "OKTOPK_SIZE": 3, "RANK": 0}, Place("oktopk", 1, 3, 1, 3)),
        (
            {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4} | srun(1, 2),
            Place("torchrun", 5, 8, 1, 4),
        ),
        ({"RANK": 1, "WORLD_SIZE": 2}, Place("torchrun", 1, 2, 0, 1)),
        (openmpi(6, 8, 2, 4) | srun(0, 1), Place("mpirun", 6, 8, 2, 4)),
        (
            {"PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2},
            Place("mpiexec", 3, 4, 1, 2),
        ),
        ({"PMI_RANK": 1, "PMI_SIZE": 2} | srun(1, 2), Place("mpiexec", 1, 2, 1, 2)),
        (srun(1, 2), Place("srun", 1, 2, 1, 2)),
        (
            srun(9, 11, SLURM_NODEID=2, SLURM_LOCALID=1, SLURM_STEP_TASKS_PER_NODE="4(x2),3"),
            Place("srun", 9, 11, 1, 3),
        ),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 8, "SLURM_LOCALID": 0}, None),
    ],
)
def test_every_launcher_tells_the_place(environ, variables, place):
    environ(**variables)
    assert find_place() == place


def test_pbsdsh_numbers_the_lines_of_the_nodefile(environ, nodefile):
    environ(**pbs(6, nodefile))
    assert find_place() == Place("pbsdsh", 6, 8, 2, 4)
    assert meeting_point(find_place())[0] == "gpu1"
    environ(**pbs(0, nodefile, PBS_TASKNUM=1))
    assert find_place() is None, "the job script itself is no rank"


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"RANK": 1}, "WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": 2}, "RANK='one' is not a number"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2, WORLD_SIZE=2, which cannot be"),
        ({"PMI_RANK": 0, "PMI_SIZE": 2}, "MPI_LOCALRANKID or PMI_LOCAL_RANK or SLURM_LOCALID is"),
        (openmpi(1, 2, 1, 4), "LOCAL_SIZE=4, OMPI_COMM_WORLD_SIZE=2, which cannot be"),
        (srun(0, 4, SLURM_STEP_TASKS_PER_NODE="2(x2", SLURM_NODEID=3), "'2(x2' is not a number"),
        ({"PBS_VNODENUM": 3, "PBS_NODEFILE": "/nowhere"}, "PBS_NODEFILE=/nowhere cannot be read"),
    ],
)
def test_a_wrong_environment_is_named(environ, variables, complaint):
    environ(**variables)
    with pytest.raises(LaunchError) as caught:
        find_place()
    assert complaint in str(caught.value)


def test_pbsdsh_by_host_needs_one_line_per_host(environ, nodefile):
    environ(**pbs(0, nodefile), PBS_NODENUM=1)
    del os.environ["PBS_VNODENUM"]
    with pytest.raises(LaunchError, match="several lines per host"):
        find_place()


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node[01-03,7],other5", "node01"),
        ("login", "login"),
        ("a[7,9]b[3-4]-x,c", "a7b3-x"),
        ("gnode[10,20,25,37]", "gnode10"),
    ],
)
def test_first_host_of_a_slurm_list(nodelist, first):
    assert first_host(nodelist) == first


@pytest.mark.parametrize("nodelist", ["", "node[01-03", "[]", "a]b"])
def test_a_list_that_is_none(nodelist):
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        first_host(nodelist)


def test_meeting_points_follow_from_the_job(environ):
    hosts = {"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_NODELIST": "n[1-4]"}
    places = []
    for rank, job in ((0, 71), (3, 71), (3, 72)):
        step = srun(rank, 4, SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURM_LOCALID=rank % 2)
        environ(**step | {"SLURM_NODEID": rank // 2, "SLURM_JOB_ID": job} | hosts)
        places.append(meeting_point(find_place()))
    assert places[0] == places[1] and places[0][0] == "n3" and places[0][1] in PORTS
    assert places[2][1] != places[0][1], "two jobs on a host must not meet"


def test_what_the_user_set_counts_more(environ):
    environ(**srun(0, 2), MASTER_ADDR="head", MASTER_PORT=1234)
    assert meeting_point(find_place()) == ("head", 1234)
    environ(**srun(0, 2), MASTER_PORT="12e4")
    with pytest.raises(LaunchError, match="MASTER_PORT='12e4' is not a port"):
        meeting_point(find_place())


def test_mpirun_on_several_hosts_needs_an_address(environ):
    environ(**openmpi(0, 4, 0, 2))
    with pytest.raises(LaunchError, match="-x MASTER_ADDR=HOST"):
        meeting_point(find_place())


def word(host: str, cores: range, gpus: tuple[str, ...] = ()) -> dict:
    return {"host": host, "cores": list(cores), "gpus": list(gpus)}


def test_workers_do_not_fight_for_cores(monkeypatch):
    monkeypatch.setattr("oktopk.launch.registration._quota", lambda: float("inf"))
    shared = [word("a", range(16))] * 4 + [word("b", range(6))] * 4
    assert [threads(rank, shared) for rank in (0, 3, 4)] == [4, 4, 1]
    bound = [word("a", range(4)), word("a", range(4, 12))]
    assert [threads(rank, bound) for rank in (0, 1)] == [4, 8]
    monkeypatch.setattr("oktopk.launch.registration._quota", lambda: 6.0)
    assert threads(0, shared) == 1 and threads(1, bound) == 3


@pytest.mark.parametrize(("text", "cores"), [("max 100000", float("inf")), ("250000 100000", 2.5)])
def test_containers_have_a_quota(tmp_path, text, cores):
    (tmp_path / "cpu.max").write_text(text)
    assert _quota(tmp_path / "cpu.max") == cores


def test_all_ranks_use_gpus_or_none_does():
    def devices(*signed: dict) -> list[str]:
        places = [Place("x", rank, len(signed), 0, 1) for rank in range(len(signed))]
        return [str(device_of(place, list(signed))) for place in places]

    core = range(1)
    assert devices(word("a", core), word("a", core)) == ["cpu", "cpu"]
    both, two = ("g0", "g1"), word("a", core, ("g0", "g1"))
    assert devices(two, two, word("b", core, both)) == ["cuda:0", "cuda:1", "cuda:0"]
    own = [word("a", core, (gpu,)) for gpu in both]
    assert devices(*own) == ["cuda:0", "cuda:0"], "a launcher left each rank its own"
    for signed in ([own[0], own[0]], [two, word("b", core)], [two, two, two]):
        with pytest.warns(UserWarning, match="not one each: all run on CPUs"):
            assert set(devices(*signed)) == {"cpu"}


def test_workers_or_launcher():
    assert workers_to_start(None, None, 2) == 2
    assert workers_to_start(None, 1, 2) == 0, "one needs no other process"
    of_two = Place("srun", 0, 2, 0, 2)
    assert workers_to_start(of_two, None, 1) == workers_to_start(of_two, 2, 1) == 0
    assert workers_to_start(Place("srun", 0, 1, 0, 1), 4, 1) == 4
    with pytest.raises(LaunchError, match="--workers 4, but this is rank 0 of 2, started by srun"):
        workers_to_start(of_two, 4, 1)
    with pytest.raises(LaunchError, match="--workers 0: at least 1"):
        workers_to_start(None, 0, 1)


# Other launchers, simulated: their variables, in processes of their own.


def said_by(ranks: list[dict[str, str]], folder: Path, timeout: float = 30.0) -> list[str]:
    processes = [start(rank_main, variables, timeout, folder) for variables in ranks]
    for process in processes:
        process.join(60)
        process.kill()
    return [path.read_text() for path in sorted(folder.iterdir())]


def simulated(launcher: str, folder: Path) -> list[dict[str, str]]:
    nodefile = folder.parent / "one-host"
    nodefile.write_text("here\n" * 3)
    job = f"{os.getpid()}.{folder.parent.name}"
    hydra = {"PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}
    return {
        "srun": [srun(rank, 3, SLURM_JOB_ID=job) for rank in range(3)],
        "pbsdsh": [pbs(rank, nodefile, PBS_JOBID=job) for rank in range(3)],
        "mpiexec": [
            hydra | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)} for rank in range(3)
        ],
    }[launcher]


@pytest.mark.parametrize("launcher", ["srun", "pbsdsh", "mpiexec"])
def test_simulated_launchers_meet(launcher, tmp_path):
    folder = tmp_path / "said"
    folder.mkdir()
    said = said_by(simulated(launcher, folder), folder)
    assert said == [f"{launcher} [0, 1, 2] gloo on cpu"] * 3


def test_ranks_that_do_not_come_are_named(tmp_path):
    folder = tmp_path / "said"
    folder.mkdir()
    said = said_by(simulated("srun", folder)[:2], folder, timeout=2.0)
    assert said == [
        f"rank {rank} of 3, started by srun: ranks [2] did not come within 2 s" for rank in (0, 1)
    ]


def test_without_rank_0_the_place_is_named(tmp_path):
    folder = tmp_path / "said"
    folder.mkdir()
    (said,) = said_by([srun(1, 2, MASTER_PORT=1)], folder, timeout=0.5)
    assert said.startswith("rank 1 of 2, started by srun: nobody listens at 127.0.0.1:1 after 0.5")


def test_an_error_comes_out_and_the_group_is_left(environ):
    with pytest.raises(ZeroDivisionError), joined(None, 10):
        assert dist.get_world_size() == 1
        _ = 1 / 0
    assert not dist.is_initialized()


# Workers, without torch in them: what `python -m oktopk` finds first is a script of the test's.


def test_rank_0_has_the_terminal(workers, capfd):
    workers("print('out', rank, *sys.argv[1:]); print('err', rank, file=sys.stderr)")
    assert start_workers(3, ["train", "--steps", "5"]) == 0
    said = capfd.readouterr()
    assert (said.out, said.err) == ("out 0 train --steps 5\n", "err 0\n")


def test_the_rank_that_failed_is_heard_and_the_others_in_a_line(workers, capfd):
    workers(
        "if rank == 2: raise ValueError('the cause')\n"
        "time.sleep(0.3 * (rank == 0))\n"
        "sys.exit(f'trace\\noktopk.comm.ExchangeError: {rank} misses 2')\n"
    )
    assert start_workers(3, []) == 1
    said = capfd.readouterr().err
    assert said.startswith("trace\noktopk.comm.ExchangeError: 0 misses 2\nrank 2 | Traceback")
    assert said.endswith(
        "rank 2 | ValueError: the cause\n"
        "rank 1 | oktopk.comm.ExchangeError: 1 misses 2\n"
        "oktopk: rank 2 of 3 ended with exit code 1\n"
    )


def test_what_all_ranks_say_is_said_once(workers, capfd):
    workers("sys.exit(f'[rank{rank}]: no such data set\\n[W1 socket.cpp] left')")
    assert start_workers(3, []) == 1
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "[rank0]: no such data set" and len(said) == 3, said


def test_the_others_end_when_one_is_killed(workers, capfd, monkeypatch):
    monkeypatch.setattr(local_workers, "AFTER_DEATH", 0.5)
    workers("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)")
    before = time.monotonic()
    assert start_workers(3, []) == 128 + signal.SIGKILL
    assert time.monotonic() - before < 30, "the others were not ended"
    assert capfd.readouterr().err == ("oktopk: rank 1 of 3 was killed by SIGKILL: out of memory?\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_worker_once_as_sigterm(workers, tmp_path, capfd, number):
    """Python answers SIGINT with a traceback until a handler is there, SIGTERM never."""
    workers(
        "def leave(number, _): (folder / f'{rank}.got').open('a').write(f'{number} ')\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, leave)\n"
        "(folder / f'{rank}.ready').touch()\n"
        "while not (folder / f'{rank}.got').exists(): time.sleep(0.01)\n"
        "time.sleep(0.2)\n"
    )

    def interrupt() -> None:
        for _ in range(1000):
            if len(list(tmp_path.glob("*.ready"))) == 2:
                os.kill(os.getpid(), number)
                return
            time.sleep(0.02)

    threading.Thread(target=interrupt).start()
    assert start_workers(2, []) == 128 + number
    assert [p.read_text() for p in sorted(tmp_path.glob("*.got"))] == ["15 "] * 2
    name = signal.Signals(number).name
    assert capfd.readouterr().err == (
        f"oktopk: interrupted by {name}; the workers were asked to save and leave\n"
    )


def starter_main(folder: Path) -> None:
    os.environ["PYTHONPATH"] = str(folder)
    sys.exit(start_workers(2, []))


def comparing_main(folder: Path) -> None:
    os.environ |= {"PYTHONPATH": str(folder), "OKTOPK_RANK": "0", "OKTOPK_SIZE": "1"}
    with started(Config(), "quickstart", folder / "log") as run:
        run.wait()


@pytest.mark.parametrize(("main", "size"), [(starter_main, 2), (comparing_main, 1)])
def test_what_was_started_learns_that_its_starter_is_gone(workers, tmp_path, main, size):
    workers(
        "(folder / f'{rank}.ready').touch()\n"
        "os.read(int(os.environ['OKTOPK_LINE']), 1)\n"
        "(folder / f'{rank}.gone').touch()\n"
    )
    starter = start(main, tmp_path)
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.ready"))) == size)
        assert not list(tmp_path.glob("*.gone"))
    finally:
        starter.kill()
        starter.join(10)
    wait_for(lambda: len(list(tmp_path.glob("*.gone"))) == size)


@pytest.mark.parametrize("told", ["", "abc", "-1", "77", "0"])
def test_what_is_no_line_is_ignored(monkeypatch, told):
    monkeypatch.setenv("OKTOPK_LINE", told)  # 0 is no pipe: pytest reads from nothing
    before = threading.active_count()
    parent_watchdog.hold()
    assert threading.active_count() == before and "OKTOPK_LINE" not in os.environ


def test_every_command_holds_the_line():
    theirs, ours = os.pipe()
    os.close(ours)
    command = "import time; from oktopk import cli; cli.parser = lambda: time.sleep(20); cli.main()"
    line = environment(OKTOPK_LINE=str(theirs))
    done = subprocess.run(
        [sys.executable, "-c", command], env=line, pass_fds=[theirs], timeout=99, check=False
    )
    os.close(theirs)
    assert done.returncode == -signal.SIGTERM


def worker_main(line) -> None:
    os.environ["OKTOPK_LINE"] = str(line.fileno())
    parent_watchdog.hold()
    time.sleep(60)


def test_a_worker_ends_with_its_starter():
    theirs, ours = mp.get_context("forkserver").Pipe(duplex=False)
    worker = start(worker_main, theirs)
    theirs.close()
    ours.close()
    worker.join(20)
    assert worker.exitcode == -signal.SIGTERM
    worker.kill()
