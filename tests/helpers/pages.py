# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation as their reader takes them: the blocks of code run, in order."""

from __future__ import annotations

import ast
import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from commands import ROOT, check, command_lines, is_command, script_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
# what a block without context of its own may take for granted
GIVEN = {"README.md": {"numel": 100, "flat_gradient": torch.arange(100.0)}}
SECONDS = 100  # for one command; far more than it takes


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All blocks of a page; it may not have any that are written another way."""
    text, found = page.read_text(), []
    for fence in FENCE.finditer(text):
        language, _, more = fence["info"].partition(" ")
        title = re.fullmatch(r'title="([\w.]+)"', more)
        assert title or not more, f"{page}: what is {more!r}?"
        if not language and is_command(fence["text"].split(maxsplit=1)[0]):
            language = "bash"
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(page, line, language, title[1] if title else "", fence["text"]))
    rest = FENCE.sub("", text)
    assert "```" not in rest, f"{page}: a fence that is indented or left open"
    assert "~~~" not in rest, f"{page}: a fence of tildes"
    assert not re.search(r"\n\n    \S", rest), f"{page}: a block by indentation"
    return found


@dataclass
class Reading:
    """A page that is read from top to bottom, in a folder of its own."""

    page: Path
    folder: Path
    names: dict = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    started: set[str] = field(default_factory=set)
    said: str | None = None
    """What the last block printed, if it ran."""
    printed: str = ""
    """What all of them did."""

    def read(self) -> None:
        """Take every block by its language; an AssertionError says where it is wrong."""
        self.names = {"__name__": "__main__"} | GIVEN.get(self.page.name, {})
        try:
            for block in blocks(self.page):
                assert block.language in TAKERS, f"{block}: nobody runs {block.language or 'this'}"
                self.said = TAKERS[block.language](self, block)
                self.printed += self.said or ""
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        left = self.files - self.started
        assert not left, f"{self.page}: no command starts {left}"

    def python(self, block: Block) -> str | None:
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        if block.title:
            (self.folder / block.title).write_text(block.text)
            self.files.add(block.title)
            return None
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, self.names)
        return out.getvalue() or None

    def bash(self, block: Block) -> str | None:
        printed = ""
        for words in command_lines(block.text):
            printed += self.command(words, str(block))
        return printed or None

    def text(self, block: Block) -> None:
        if self.said is not None:
            assert shape(self.said) == shape(block.text), f"{block}: it printed\n{self.said}"

    def other(self, block: Block) -> None:
        """Neither code nor a claim about code."""

    def diff(self, block: Block) -> None:
        """What it becomes is Python."""
        ast.parse("\n".join(line[1:] for line in block.text.splitlines() if line[0] != "-"))

    def command(self, words: list[str], where: str) -> str:
        """Run it if it starts a file of this page, else look whether it could be run."""
        extra = {}
        while match := re.fullmatch(r"([A-Z_]+)=(.*)", words[0]):
            extra[match[1]], words = match[2], words[1:]
        starter, script, args = script_of(words)
        if script in self.files:
            self.started.add(script)
            if starter:
                return run_ranks(starter, script, args, extra, self.folder)
            return run_alone([script, *args], extra, self.folder)
        try:
            check(words)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"{where}: {shlex.join(words)}: {error}") from error
        return ""


TAKERS = {
    "python": Reading.python,
    "bash": Reading.bash,
    "diff": Reading.diff,
    "text": Reading.text,
    "": Reading.other,  # a block that began with a command has become bash
}


def shape(text: str) -> str:
    """A text without its numbers, which may be others on another machine."""
    return "\n".join(re.sub(r"\d[\d,.]*", "0", text).split())


def run_ranks(num: int, script: str, args: list[str], extra: dict, folder: Path) -> str:
    """What torchrun would do, in processes that need not import torch again: that takes longer
    than all a page does. tests/project/test_examples.py has torchrun itself."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    shared = {"WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num, "MASTER_PORT": port}
    shared |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(num):
        env = {k: str(v) for k, v in (shared | extra | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        out = folder / f"printed-{rank}"
        job = (env, folder, [script, *args], out)
        ranks.append((forks().Process(target=be_rank, args=job, daemon=True), out))
        ranks[-1][0].start()
    wait_for([process for process, _ in ranks])
    codes = [process.exitcode for process, _ in ranks]
    for process, _ in ranks:
        process.kill()
    said = [out.read_text() for _, out in ranks]
    errors = [out.with_suffix(".err").read_text() for _, out in ranks]
    check_ending(codes, errors)
    return "".join(said)


def wait_for(processes: list) -> None:
    """Until all have ended, or one has failed, or the time is over."""
    deadline = time.monotonic() + SECONDS
    while left := [p for p in processes if p.exitcode is None]:
        if time.monotonic() > deadline or any(p.exitcode for p in processes):
            return
        multiprocessing.connection.wait([p.sentinel for p in left], timeout=1)


@cache
def forks() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "accelerate", "oktopk", __name__])
    return context


def be_rank(env: dict[str, str], folder: Path, argv: list[str], out: Path) -> None:
    """One rank of a script, from its start to its end."""
    os.environ.update(env)
    os.chdir(folder)
    for stream, path in ((1, out), (2, out.with_suffix(".err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    torch.set_num_threads(1)
    sys.argv, sys.path[0] = argv, str(folder)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    runpy.run_path(argv[0], run_name="__main__")
    sys.stdout.flush()


def run_alone(argv: list[str], extra: dict, folder: Path) -> str:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env=os.environ | own | extra,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    check_ending([ran.returncode], [ran.stderr])
    return ran.stdout


def check_ending(codes: list[int | None], errors: list[str]) -> None:
    assert codes == [0] * len(codes), (codes, *errors)
    assert not any("Traceback" in error for error in errors), errors


def mentions(page: Path) -> list[list[str]]:
    """Commands of oktopk in the running text; they may be cut short."""
    spans = re.findall(r"`(oktopk [^`]+)`", FENCE.sub("", page.read_text()))
    return [shlex.split(span) for span in spans]


def messages(folder: Path) -> list[str]:
    """All texts in the Python files of a folder, with `...` in place of the values in them."""
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "..." for v in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub("%[dgs]", "...", node.value))
    return found
