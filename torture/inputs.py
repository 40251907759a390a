"""Odd inputs of everything that reads something: a row for each reader.

A kind draws an input and returns what is to be called with it; `feeding` calls it within bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk import cli, lifeline
from oktopk.bench import network
from oktopk.bench.shapes import shapes_of
from oktopk.compare.command import sum_up
from oktopk.compare.plan import SWEEP
from oktopk.join import ALONE
from oktopk.meeting import first_host, meeting_point
from oktopk.place import LAUNCHERS, LaunchError, find_place
from oktopk.settings import Settings
from oktopk.simulate import alone
from oktopk.sweep import space
from oktopk.sweep.plan import Plan, remember
from oktopk.train.command import find_and_restore
from oktopk.train.config import FIELDS, Config, load, to_toml
from oktopk.train.data.an4 import convert
from oktopk.train.data.audio import duration, read_audio, read_raw
from oktopk.train.data.features import open_spectra
from oktopk.train.data.manifest import check, find_manifests, read_manifest
from oktopk.train.data.problems import DataError
from oktopk.train.data.repair import repair
from oktopk.train.errors import RunError
from oktopk.train.setup import set_up
from torture import odd
from torture.ranks import digest


class LostError(Exception):
    """What was there before the input is gone."""


@dataclass(slots=True)
class Input:
    """An odd input: what it is, what reads it, and what may come of it."""

    what: str
    call: Callable[[], Any]
    allowed: tuple[type[BaseException], ...]
    names: tuple[str, ...] = field(default=())
    """One of these must be in the message."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Where an input is made: seeded numbers, whole files to spoil, a folder to do it in."""

    rng: Random
    base: Path
    folder: Path

    def spoilt(self, source: str, name: str = "") -> Path:
        """A copy of a file of the base, with damage."""
        path = self.folder / (name or Path(source).name)
        path.write_bytes(odd.spoilt(self.rng, (self.base / source).read_bytes()))
        return path


WRONG = (ValueError, TypeError)


def config_file(desk: Desk) -> Input:
    path = desk.folder / "odd.toml"
    lines = to_toml(Config()).splitlines()
    if desk.rng.random() < 0.5:
        name, new = desk.rng.choice([*FIELDS, "a.b", "x"]), desk.rng.choice(TOML)
        lines = [line for line in lines if not line.startswith(f"{name} =")]
        path.write_bytes("\n".join([*lines, f"{name} = {new}"]).encode("utf-8", "surrogateescape"))
    else:
        path.write_bytes(odd.spoilt(desk.rng, "\n".join(lines).encode()))
    return Input("config.toml", lambda: load(str(path)), (ValueError,), ("odd.toml",))


TOML = (
    *(
        "nan",
        "inf",
        "-inf",
        "1e300",
        "-1",
        "9" * 5000,
        "9" * 400,
        '""',
        '"\\u0000"',
        "true",
        "0x1F",
    ),
    *("[" * 3000 + "]" * 3000, "{a = 1}", "1979-05-27", '"' + "x" * 9999 + '"', '"a\udcff"', "[1]"),
    *("{a=" * 3000 + "1" + "}" * 3000, "'''", "1979-05-27T07:32:00Z", "0", '"quickstart"', "1.5"),
)


def config_value(desk: Desk) -> Input:
    name, new = desk.rng.choice(FIELDS), odd.value(desk.rng)
    return Input(f"Config({name}={new!r})", lambda: Config(**{name: new}), (ValueError,), (name,))


def flags(desk: Desk) -> Input:
    """Any command with odd values of its flags; what it would start is stubbed."""
    whole, words = cli.parser(), []
    while isinstance(commands := _below(whole), dict):
        name = desk.rng.choice(list(commands))
        words, whole = [*words, name], commands[name]
    own = [action for action in whole._actions if action.dest != "help"]
    for action in own:
        if not action.option_strings:
            words.append(odd.text(desk.rng).lstrip("-") or "x")
    for action in desk.rng.choices(own, k=desk.rng.randint(1, 3)) if own else ():
        if action.option_strings:
            new = odd.text(desk.rng)
            words += (
                [action.option_strings[0]]
                if action.nargs == 0
                else [f"{action.option_strings[0]}={new}"]
            )
    words += ["--once"] * (words[0] == "watch")
    words = [word.replace("\x00", "") for word in words]  # no command line has one
    return _command(words)


def _below(parser: argparse.ArgumentParser) -> Any:
    found = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return found[0] if found else None


def _command(words: list[str]) -> Input:
    def call() -> None:
        sys.argv = ["oktopk", *words]
        cli.main()

    return Input(" ".join(["oktopk", *words]), call, ())


VARIABLES = sorted(
    {
        name
        for names in LAUNCHERS.values()
        for some in (names.rank, names.size, names.local_rank, names.local_size)
        for name in some
    }
    | {"MASTER_ADDR", "MASTER_PORT", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}
    | {"SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_NODEFILE", "PBS_VNODENUM", "PBS_NODENUM"}
    | {"PBS_TASKNUM", "PBS_JOBID", "SLURM_LAUNCH_NODE_IPADDR", "PMIX_NAMESPACE"}
)


def environment(desk: Desk) -> Input:
    """What a launcher may leave: the variables of one, some of them odd, and some of others."""
    rng, given = desk.rng, {}
    names = rng.choice(list(LAUNCHERS.values()))
    for some, new in zip(
        (names.rank, names.size, names.local_rank, names.local_size), "1212", strict=True
    ):
        given[rng.choice(some)] = new
    for name in rng.sample(VARIABLES, rng.randint(1, 4)) + rng.choices(list(given), k=1):
        given[name] = (
            odd.text(rng).replace("\x00", "") if rng.random() < 0.8 else str(rng.randint(0, 9))
        )
    if rng.random() < 0.2:
        given["PBS_NODEFILE"] = str(desk.spoilt("hosts"))

    def call() -> None:
        os.environ.update(given)
        place = find_place()
        if place is not None and place.size > 1:
            meeting_point(place)

    return Input(f"environment {given}", call, (LaunchError,), (*VARIABLES, "SLURM"))


def line(desk: Desk) -> Input:
    """OKTOPK_LINE as others may have left it; small numbers would be files of this process."""
    new = desk.rng.choice([text for text in odd.TEXTS if not text.isdecimal() or len(text) > 5])

    def call() -> None:
        os.environ[lifeline.LINE] = new.replace("\x00", "")
        lifeline.hold()

    return Input(f"{lifeline.LINE}={new!r}", call, ())


def of_text(what: str, read: Callable[[str], Any], *allowed: type[BaseException]) -> Any:
    def kind(desk: Desk) -> Input:
        new = odd.text(desk.rng)
        return Input(f"{what} {new!r}", lambda: read(new), allowed)

    return kind


def sweep_range(text: str) -> None:
    for name in space.SEARCHED:
        space.parse(Config(), {name: text})


def journal(desk: Desk) -> Input:
    """A journal with damaged or odd lines, read by report, watch and compare."""
    path, rng = desk.folder / "run" / "metrics.jsonl", desk.rng
    path.parent.mkdir()
    shutil.copy(desk.base / "runs/tiny/config.toml", path.parent)
    lines = (desk.base / "runs/tiny/metrics.jsonl").read_bytes().splitlines()
    if rng.random() < 0.2:
        path.write_bytes(odd.spoilt(rng, b"\n".join(lines)))
        return _reader(desk)
    notes = []
    for at in rng.sample(range(len(lines)), rng.randint(1, 3)):
        new, what = odd.changed(rng, json.loads(lines[at]), odd.plain)
        lines[at], notes = json.dumps(new).encode(), [*notes, f"line {at}: {what}"]
    path.write_bytes(b"\n".join(lines))
    read = _reader(desk)
    read.what = f"{read.what}: {notes}"
    return read


def _reader(desk: Desk) -> Input:
    """One of the commands that read a run's folder."""
    words = desk.rng.choice((["report", "run"], ["watch", "run", "--once"], ["watch", "."], []))
    if words:
        return _command([*words, "--once"] if words == ["watch", "."] else words)
    return Input("compare", lambda: sum_up(desk.folder, "wer"), (ValueError, RunError, OSError))


def run_folder(desk: Desk) -> Input:
    """A run's folder in which something is missing or something else."""
    folder, rng = desk.folder / "run", desk.rng
    shutil.copytree(
        desk.base / "runs/tiny", folder, ignore=shutil.ignore_patterns("*.html", "*.pt")
    )
    path = folder / rng.choice(("config.toml", "metrics.jsonl", "checkpoints", "tensorboard", "."))
    how = rng.choice(("gone", "empty", "folder", "binary", "loop"))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how in ("empty", "binary"):
        path.write_bytes(b"" if how == "empty" else rng.randbytes(999))
    elif how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path)
    read = _reader(desk)
    if rng.random() < 0.3:
        read = _command(["train", "--resume", "--runs", ".", "--name", "run", "--workers", "2"])
    read.what = f"{read.what}: {path.name} {how}"
    return read


def checkpoint_file(desk: Desk) -> Input:
    """The newest checkpoint is damaged: the one before it is taken."""
    rng, folder = desk.rng, desk.folder / "checkpoints"
    shutil.copytree(desk.base / "runs/tiny/checkpoints", folder)
    path = max(folder.iterdir()) / rng.choice(
        ("complete.json", "complete.json", "common.pt", "rank-0.pt")
    )
    what = "spoilt"
    if path.suffix == ".json" and rng.random() < 0.7:
        new, what = odd.changed(rng, json.loads(path.read_text()), odd.plain)
        path.write_text(json.dumps(new))
    else:
        path.write_bytes(odd.spoilt(rng, path.read_bytes()))

    def call() -> None:
        try:
            find_and_restore(_run(desk.base), desk.folder)
        except RunError as error:
            raise LostError(f"the older checkpoint was not taken: {error}") from error
        if _run(desk.base).progress.step not in (3, 6):
            raise LostError(f"it went on from step {_run(desk.base).progress.step}")

    return Input(f"{path.name}: {what}", call, ())


class Canary:
    """What a pickle can do when it is loaded without care."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("../canary",)


def checkpoint_content(desk: Desk) -> Input:
    """The only checkpoint has odd content with a right hash: refused by name, and no code runs."""
    rng, folder = desk.rng, desk.folder / "checkpoints"
    newest = max((desk.base / "runs/tiny/checkpoints").iterdir())
    shutil.copytree(newest, folder / newest.name)
    path = folder / newest.name / rng.choice(("common.pt", "rank-0.pt"))
    new, what = odd.changed(rng, torch.load(path, weights_only=True))
    new, what = (Canary(), "code") if rng.random() < 0.1 else (new, what)
    try:
        torch.save(new, path)
    except Exception:  # noqa: BLE001 - what cannot be saved is replaced by what can
        torch.save([1, 2], path)
    facts = json.loads((path.parent / "complete.json").read_text())
    content = path.read_bytes()
    facts["files"][path.name] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    (path.parent / "complete.json").write_text(json.dumps(facts))
    what = f"{path.name}: {what}"
    call = lambda: find_and_restore(_run(desk.base), desk.folder)  # noqa: E731
    return Input(what, call, (RunError,), (newest.name, path.name))


@cache
def _group() -> None:
    """A process group of this process alone, made once."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@cache
def _run(base: Path) -> Any:
    """A run of this process alone, to be resumed again and again."""
    _group()
    config = load(str(base / "runs/tiny/config.toml"))
    return set_up(config, oktopk.reducer.default_comm(), torch.device("cpu"), ALONE)


class Attached:
    """A model with a handle, and a step of it; made again when an input broke it."""

    made: Any = None

    def __init__(self) -> None:
        _group()
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Linear(40, 30))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.handle = oktopk.attach(
            self.model, density=0.2, warmup_steps=1, optimizer=self.optimizer, ramp_steps=0
        )
        for _ in range(5):
            self.step()
        self.state = self.handle.state_dict()

    def step(self) -> None:
        self.model(torch.ones(3, 40)).square().mean().backward()
        self.optimizer.step()

    @classmethod
    def get(cls) -> Attached:
        cls.made = cls.made or cls()
        return cls.made


def handle_state(desk: Desk) -> Input:
    """A state that is odd is refused and changes nothing, or the next step works with it."""
    one, rng = Attached.get(), desk.rng
    state: Any = dict(one.state)
    if rng.random() < 0.6:
        facts, what = odd.changed(rng, json.loads(state["facts"]), odd.plain)
        state["facts"] = json.dumps(facts)
    else:
        state, what = odd.changed(rng, state)
    return Input(what, lambda: _load(one, state, one.step), WRONG)


def _load(one: Any, state: Any, step: Callable[[], Any]) -> None:
    handle = one.handle
    before = digest(handle.state_dict())
    Attached.made = None  # until all went well
    try:
        handle.load_state_dict(state)
    except WRONG as error:
        if digest(handle.state_dict()) != before:
            raise LostError(f"the handle was changed, though it refused: {error}") from error
        Attached.made = one
        raise
    step()
    handle.load_state_dict(one.state)
    Attached.made = one


def reducer_state(desk: Desk) -> Input:
    reducer = oktopk.Reducer(500, density=0.1, comm=alone())
    for seed in range(3):
        reducer.reduce_(torch.randn(500, generator=torch.Generator().manual_seed(seed)))
    before = digest(reducer.state_dict())
    state, what = odd.changed(desk.rng, reducer.state_dict())

    def call() -> None:
        try:
            reducer.load_state_dict(state)
        except WRONG as error:
            if digest(reducer.state_dict()) != before:
                raise LostError(f"the reducer was changed, though it refused: {error}") from error
            raise
        reducer.reduce_(torch.ones(500))

    return Input(what, call, WRONG)


SETTINGS = tuple(Settings.__slots__)
ATTACH = (
    *(
        "method",
        "density",
        "warmup_steps",
        "ramp_steps",
        "policy",
        "on_step",
        "optimizer",
        "scaler",
    ),
    *("clip_before", "total_steps", "timeout", "check_every", *SETTINGS, "nonsense"),
)


def settings_argument(desk: Desk) -> Input:
    name, new = desk.rng.choice(SETTINGS), odd.value(desk.rng)
    return Input(f"Settings({name}={new!r})", lambda: Settings(**{name: new}), WRONG, (name,))


def attach_argument(desk: Desk) -> Input:
    name, new = desk.rng.choice(ATTACH), odd.value(desk.rng)
    _group()

    def call() -> None:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        handle = oktopk.attach(model, **{name: new})
        handle.close()

    return Input(f"attach({name}={new!r})", call, WRONG, (name, "beta1", "late_moments"))


def reducer_argument(desk: Desk) -> Input:
    """Odd arguments of Reducer, or an odd gradient."""
    rng, new = desk.rng, odd.value(desk.rng)
    names = ("numel", "group", "comm", "nonsense", *SETTINGS)
    name = rng.choice(names)
    if rng.random() < 0.3:
        reducer = oktopk.Reducer(3, comm=alone())
        return Input(f"reduce_({new!r})", lambda: reducer.reduce_(new), WRONG)
    given = {"numel": 100} | {name: new}
    if name == "comm":
        return Input(f"Reducer(comm={new!r})", lambda: oktopk.Reducer(**given), WRONG)
    return Input(f"Reducer({name}={new!r})", lambda: oktopk.Reducer(**given), WRONG, (name,))


def manifest(desk: Desk) -> Input:
    source = find_manifests(desk.base / "corpus")[0]
    path = desk.spoilt(str(source.relative_to(desk.base)))
    text = path.read_bytes()
    # its paths are relative to the base
    path.write_bytes(text.replace(b"train/", f"{desk.base}/corpus/train/".encode()))
    if desk.rng.random() < 0.3:
        call = lambda: repair(path, desk.base / "corpus", desk.folder / "out.csv")  # noqa: E731
    else:
        call = lambda: check(read_manifest(path), [])  # noqa: E731
    return Input("a manifest", call, (DataError,))


def an4_list(desk: Desk) -> Input:
    """AN4 with one odd list or recording."""
    root, rng = desk.folder / "an4", desk.rng
    shutil.copytree(desk.base / "an4", root)
    path = rng.choice(sorted(path for path in root.rglob("*") if path.is_file()))
    if rng.random() < 0.3 and path.suffix in (".fileids", ".transcription"):
        path.write_text(rng.choice(("../../x\n", "/etc/passwd\n", "a" * 5000, "\x00\n", "(x)\n")))
    else:
        path.write_bytes(odd.spoilt(rng, path.read_bytes()))
    return Input(str(path), lambda: convert(root, desk.folder / "out"), (DataError,))


def archive(desk: Desk) -> Input:
    path = desk.spoilt(desk.rng.choice(("an4.tar", "an4.tar.gz", "an4.tar.xz", "an4.tar.bz2")))
    return Input(path.name, lambda: convert(path, desk.folder / "out"), (DataError,), (path.name,))


def audio(desk: Desk) -> Input:
    path = desk.spoilt(desk.rng.choice(("one.wav", "one.flac", "one.sph", "one.raw")))
    reads = (
        (lambda: read_raw(path, "big"),)
        if path.suffix == ".raw"
        else (
            lambda: read_audio(path),
            lambda: duration(path),
        )
    )
    return Input(path.name, desk.rng.choice(reads), (DataError,), (path.name,))


def spectra(desk: Desk) -> Input:
    """A damaged cache of spectrograms."""
    path = find_manifests(desk.base / "corpus")[0]
    listed = read_manifest(path)
    cached = desk.rng.choice(sorted((desk.base / "corpus/cache").glob("*.spectra")))
    spoilt = desk.spoilt(str(cached.relative_to(desk.base)))
    return Input("spectra", lambda: open_spectra(listed, desk.folder), (DataError,), (spoilt.name,))


def sweep_file(desk: Desk) -> Input:
    """The plan that a sweep left."""
    base = Config(runs=str(desk.folder))
    plan = Plan("quickstart", base, space.parse(base, {"lr": "1e-3:1e-2"})[1], "wer")
    remember(plan)
    path = desk.folder / SWEEP
    new, what = odd.changed(desk.rng, json.loads(path.read_text()), odd.plain)
    path.write_text(json.dumps(new))
    if desk.rng.random() < 0.5:
        path.write_bytes(odd.spoilt(desk.rng, path.read_bytes()))
        what = "spoilt"
    return Input(
        f"{SWEEP}: {what}",
        lambda: remember(plan),
        (RunError, ValueError),
        (desk.folder.name, SWEEP),
    )


KINDS: dict[str, Callable[[Desk], Input]] = {
    "config-file": config_file,
    "config-value": config_value,
    "flags": flags,
    "environment": environment,
    "line": line,
    "node-list": of_text("SLURM list", first_host, LaunchError),
    "rate": of_text("rate", network.check_rate, ValueError),
    "model-size": of_text("--model", shapes_of, ValueError),
    "sweep-range": of_text("range", sweep_range, ValueError),
    "sweep-file": sweep_file,
    "journal": journal,
    "run-folder": run_folder,
    "checkpoint-file": checkpoint_file,
    "checkpoint-content": checkpoint_content,
    "handle-state": handle_state,
    "reducer-state": reducer_state,
    "settings-argument": settings_argument,
    "attach-argument": attach_argument,
    "reducer-argument": reducer_argument,
    "manifest": manifest,
    "an4": an4_list,
    "archive": archive,
    "audio": audio,
    "spectra": spectra,
}
