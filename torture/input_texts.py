# SPDX-License-Identifier: Apache-2.0
"""Odd texts: configs, flags, what launchers leave in the environment."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from oktopk import cli
from oktopk.errors import LaunchError, RunError
from oktopk.lab.bench.measure import shapes_of
from oktopk.lab.compare.plan import SWEEP
from oktopk.lab.sweep import results
from oktopk.lab.sweep.sweep import Plan, store_or_compare
from oktopk.lab.tasks.base import Metric
from oktopk.lab.train.config import Config, as_dict, make_config
from oktopk.lab.train.config_files import load, to_toml
from oktopk.launch import child_process, network
from oktopk.launch.ranks import LAUNCHERS, first_host, master_endpoint, read_rank_environment
from torture import odd
from torture.desk import Desk, Input, command

FIELDS = list(as_dict(Config()))


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
    return Input(
        f"Config({name}={new!r})", lambda: make_config(**{name: new}), (ValueError,), (name,)
    )


def flags(desk: Desk) -> Input:
    """Any command with odd values of its flags; what it would start is stubbed."""
    whole, words = cli.parser([]), []
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
    return command(words)


def _below(parser: argparse.ArgumentParser) -> Any:
    found = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return found[0] if found else None


VARIABLES = sorted(
    {
        name
        for names in LAUNCHERS.values()
        for some in (names.rank, names.world_size, names.local_rank, names.local_world_size)
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
    variables = (names.rank, names.world_size, names.local_rank, names.local_world_size)
    for some, new in zip(variables, "1212", strict=True):
        given[rng.choice(some)] = new
    for name in rng.sample(VARIABLES, rng.randint(1, 4)) + rng.choices(list(given), k=1):
        given[name] = (
            odd.text(rng).replace("\x00", "") if rng.random() < 0.8 else str(rng.randint(0, 9))
        )
    if rng.random() < 0.2:
        given["PBS_NODEFILE"] = str(desk.spoilt("hosts"))

    def call() -> None:
        os.environ.update(given)
        env = read_rank_environment()
        if env is not None and env.world_size > 1:
            master_endpoint(env)

    return Input(f"environment {given}", call, (LaunchError,), (*VARIABLES, "SLURM"))


def line(desk: Desk) -> Input:
    """OKTOPK_PARENT_PIPE as others may have set it; small numbers are files of this process."""
    new = desk.rng.choice([text for text in odd.TEXTS if not text.isdecimal() or len(text) > 5])

    def call() -> None:
        os.environ[child_process.PIPE_VARIABLE] = new.replace("\x00", "")
        child_process.watch_parent()

    return Input(f"{child_process.PIPE_VARIABLE}={new!r}", call, ())


def of_text(what: str, read: Callable[[str], Any], *allowed: type[BaseException]) -> Any:
    def kind(desk: Desk) -> Input:
        new = odd.text(desk.rng)
        return Input(f"{what} {new!r}", lambda: read(new), allowed)

    return kind


def sweep_range(text: str) -> None:
    for name in results.SEARCHED:
        results.parse(Config(), {name: text})


def sweep_file(desk: Desk) -> Input:
    """The plan that a sweep left."""
    base = Config(runs=str(desk.folder))
    plan = Plan("quickstart", base, results.parse(base, {"lr": "1e-3:1e-2"})[1], Metric("wer"))
    store_or_compare(plan)
    path = desk.folder / SWEEP
    new, what = odd.changed(desk.rng, json.loads(path.read_text()), odd.plain)
    path.write_text(json.dumps(new))
    if desk.rng.random() < 0.5:
        path.write_bytes(odd.spoilt(desk.rng, path.read_bytes()))
        what = "spoilt"
    return Input(
        f"{SWEEP}: {what}",
        lambda: store_or_compare(plan),
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
    "network": of_text("network", network.check_network, ValueError),
    "model-size": of_text("--model", shapes_of, ValueError),
    "sweep-range": of_text("range", sweep_range, ValueError),
    "sweep-file": sweep_file,
}
