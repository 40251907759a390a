# SPDX-License-Identifier: Apache-2.0
"""Ranks for the tests: eight real processes that live for the whole run, and simulated ones."""

from __future__ import annotations

import os
import socket
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")  # no GPU needed; must be set before triton loads

import pytest
import torch

from launchers import environment, start
from worlds import World


class Worlds:
    """Worlds of exactly P ranks, started when first asked for: `attach` makes a group of all."""

    def __init__(self) -> None:
        self.started: dict[int, World] = {}

    def run(self, P: int, fn, *args, **more) -> list:
        if P not in self.started:
            self.started[P] = World(P)
        return self.started[P].run(P, fn, *args, **more)


# those that take longest, so that no core is left alone with them at the end
FIRST = ("test_train_cli.py", "test_launchers.py", "test_examples.py", "test_ddp_idioms.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(FIRST)))


@pytest.fixture(scope="session")
def worlds():
    worlds = Worlds()
    yield worlds
    for world in worlds.started.values():
        world.close()


@pytest.fixture(scope="session")
def world():
    """Eight gloo processes; `world.run(P, fn, *args)` calls fn(group, *args) on the first P."""
    torch.set_num_threads(1)
    world = World(8)
    yield world
    world.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A synthesized corpus of 26 utterances to train on and 7 to test."""
    from oktopk.lab.tasks.speech.synthesis import synthesize_corpus

    folder = tmp_path_factory.mktemp("spoken")
    synthesize_corpus(folder, train=26, test=7, seed=3)
    return str(folder)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


@pytest.fixture
def oktopk(monkeypatch, tmp_path):
    """`oktopk("compare", ...)` runs a command in this process, in a folder of its own, and returns
    its exit code. No launcher has left anything in the environment."""
    from oktopk import cli

    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["oktopk", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code

    return run


@pytest.fixture
def environ(monkeypatch):
    def set_to(**variables: object) -> None:
        new = environment(**{name: str(value) for name, value in variables.items()})
        for name in set(os.environ) - set(new):
            monkeypatch.delenv(name)
        for name, value in new.items():
            monkeypatch.setenv(name, value)

    set_to()
    return set_to


@pytest.fixture
def workers(tmp_path, monkeypatch, environ):
    """Run a script as `python -m oktopk` on every rank; `rank` and `folder` are there."""

    def prepare(script: str) -> None:
        (tmp_path / "oktopk").mkdir()
        (tmp_path / "oktopk" / "__init__.py").touch()
        (tmp_path / "oktopk" / "__main__.py").write_text(
            "import os, pathlib, signal, sys, time\n"
            f"rank, folder = int(os.environ['OKTOPK_RANK']), pathlib.Path({str(tmp_path)!r})\n"
            + script
        )
        start(int).join()  # the fork server must find the real one
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return prepare
