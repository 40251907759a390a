# SPDX-License-Identifier: Apache-2.0
"""`oktopk compare`: the same training under several methods, one after the other.

With --until it is a race: every run ends when it reaches the target, and the table says how long it
took. With --networks the runs are timed on several networks, too (`compare.networks`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oktopk.compare.networks import TIMING, check_networks, folder_of, on_network, timing_run
from oktopk.compare.page import Place, write_report
from oktopk.compare.plan import (
    REPORT,
    plan,
    refuse_files,
    refuse_others,
    refuse_run,
    refuse_sweep,
)
from oktopk.compare.progress import RunProgress
from oktopk.compare.results import Row, as_plain, as_table, compared, result_line, row
from oktopk.compare.verdict import REFERENCES, reference_of, verdict
from oktopk.launch import network
from oktopk.report.texttable import markdown, show
from oktopk.runlog.reader import RunLog, read_runlog
from oktopk.runlog.run_directory import METRICS_FILE, lock
from oktopk.train.config import Config
from oktopk.train.console import print_line
from oktopk.train.flags import add_config_flag, load_with_flags
from oktopk.train.flags import add_flags as add_train_flags
from oktopk.train.option import AUTO, number_or_auto
from oktopk.train.preflight import check_before_start
from oktopk.train.run_process import (
    directory_of,
    exit_code_of,
    last_lines,
    log_of,
    train_in_process,
)
from oktopk.train.target import Target, parse_target
from oktopk.train.tasks.registry import find_metric, task_type
from oktopk.utils.files import write_atomically
from oktopk.utils.signals import raise_on_signals

NAME = "compare"
# flags that take a list, and the flag of `oktopk train` that takes one value
LISTS = {"methods": "method", "densities": "density", "seeds": "seed"}


def add_flags(parser: argparse.ArgumentParser, config: Config) -> None:
    """The flags of `oktopk compare`, and all those of `oktopk train`."""
    parser.add_argument(
        "--methods",
        help="comma-separated (default: dense and the config's); local_steps:5@0.1 exchanges every "
        "5 steps, at density 0.1",
    )
    parser.add_argument("--densities", help="comma-separated (default: the config's)")
    parser.add_argument("--seeds", help="comma-separated (default: the config's)")
    parser.add_argument(
        "--networks",
        help="comma-separated rates, as in 1gbit,50mbit: after the training, measure the steps of "
        "every run there, and say when it would have reached the target",
    )
    parser.add_argument("--metric", help="what the figures show (default: the task's first)")
    add_config_flag(parser)
    add_train_flags(parser, config, without=("name",))
    parser.add_argument("--name", default=NAME, help="folder in RUNS, with a folder for each run")


def command(args: argparse.Namespace) -> int:
    """Train the runs that are not finished, then write the tables of all runs in the folder."""

    def act() -> int:
        base, wanted = resolve(args)
        networks = _list("networks", args.networks, str)
        if networks and base.network:
            raise ValueError("--networks and --network: give one of them")
        check_networks(networks)
        metric, target = metric_and_target(base, args.metric)
        folder = Path(base.runs)
        refuse_run(folder)
        refuse_sweep(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder), raise_on_signals():
            return compare(Comparison(args.config or "", base, wanted, networks, metric, target))

    return exit_code_of("oktopk compare", act)


def resolve(args: argparse.Namespace) -> tuple[Config, list[Config]]:
    """The config that all runs have in common, with the folder of the comparison, and the runs."""
    for several, one in LISTS.items():
        if getattr(args, several) is not None and hasattr(args, one):
            raise ValueError(f"--{several} and --{one}: give one of them")
    base = load_with_flags(args)
    base = replace(base, runs=str(Path(base.runs) / base.name))
    methods = _list("methods", args.methods, str) or dict.fromkeys(["dense", base.method])
    densities = _list("densities", args.densities, number_or_auto(float)) or [base.density]
    seeds = _list("seeds", args.seeds, int) or [base.seed]
    return base, plan(base, methods, densities, seeds)


def _list(name: str, text: str | None, kind: Callable[[str], Any]) -> list:
    if text is None:
        return []
    try:
        return list(dict.fromkeys(kind(item.strip()) for item in text.split(",")))
    except ValueError:
        raise ValueError(f"--{name} {text!r}: values with commas between them") from None


def metric_and_target(base: Config, asked: str | None) -> tuple[str, Target | None]:
    """The metric to show, and the target of the race. ValueError if the task has no such metric."""
    check_before_start("oktopk compare", base)
    target = parse_target(base.until, task_type(base.task).metrics) if base.until else None
    if asked is None and target is not None:
        return target.metric.name, target
    return find_metric(base.task, asked).name, target


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `oktopk compare` was asked for."""

    config: str
    base: Config
    wanted: list[Config]
    networks: list[str]
    """Where the steps of every run are timed after the training."""

    metric: str
    target: Target | None


def compare(asked: Comparison) -> int:
    """Train what is missing and write the tables. Returns 1 if a run failed."""
    base, wanted, folder = asked.base, asked.wanted, Path(asked.base.runs)
    refuse_others(folder, base)
    refuse_files(wanted)
    if base.network and not network.is_permitted():
        sys.stderr.write(f"{network.fallback(base.network)}\n")
    timed = [timing_run(run, place) for place in asked.networks for run in wanted]
    runs = [(run, asked.target) for run in wanted] + [(run, None) for run in timed]
    failed, table = [], ""
    for number, (run, target) in enumerate(runs, 1):
        shown = f"{run.name} at {run.network}" if run.network else run.name
        place = f"{number}/{len(runs)} {shown}"
        try:
            progress = RunProgress(place, run, len(runs) - number)
            if not train(asked.config, run, place, target, progress):
                failed.append(run)
        finally:  # also when the comparison is interrupted
            table = write_tables(folder, asked.metric, asked.target, asked.networks)
    print_line("")
    show(table)
    for run in failed:
        sys.stderr.write(f"oktopk compare: {run.name} failed, see {log_of(run)}\n")
    if failed:
        sys.stderr.write("the same command tries the failed runs again, and only those\n")
    return 1 if failed else 0


def train(
    config: str, run: Config, place: str, target: Target | None, progress: RunProgress
) -> bool:
    """Train one run unless it is finished. Returns whether it finished."""
    directory, log = directory_of(run), log_of(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    before = read_runlog(directory)
    if before.finished:
        print_line(f"{place}: {result_line(before, target)} (trained before)")
        return True
    print_line(f"{place}: training; to look: oktopk watch {directory}")
    with progress:
        result = train_in_process(run, config, progress)
    if result.exit_code == 0 and result.runlog.finished:
        print_line(f"{place}: {result_line(result.runlog, target)}")
        return True
    print_line(f"{place}: failed with exit code {result.exit_code}, in {log}:\n{last_lines(log)}")
    return False


def write_tables(
    folder: Path, metric: str, target: Target | None, networks: Sequence[str] = ()
) -> str:
    """Write the tables and the report of all runs in the folder. Returns the tables as text."""
    paths = folder.glob(f"*/{METRICS_FILE}")
    runlogs = sorted((read_runlog(path.parent) for path in paths), key=_order)
    if not runlogs:
        return "no run has begun"
    metrics = next((runlog.metrics for runlog in runlogs if runlog.metrics), [])
    places = [Place("", runlogs, _rows(runlogs, metric, target))]
    places += [_timed(runlogs, name, metric, target) for name in networks]
    texts = []
    for place in places:
        if place.runlogs:
            text = markdown(as_table(place.rows, metrics))
            write_atomically(folder / f"table{place.suffix}.md", text)
            rows = json.dumps(as_plain(place.rows), indent=1) + "\n"
            write_atomically(folder / f"table{place.suffix}.json", rows)
            heading = f"timed at {place.network}:" if place.network else ""
            texts += [heading, text, verdict(place.runlogs, place.rows, target)]
    write_report(folder / REPORT, places, metric, target)
    return "\n".join(filter(None, [*texts, f"{folder}: table.md, table.json, {REPORT}"]))


def _timed(runlogs: list[RunLog], name: str, metric: str, target: Target | None) -> Place:
    """The runs whose steps were timed on a network, as they would have been there."""
    timed = []
    for runlog in runlogs:
        own = runlog.directory.parent
        timing = read_runlog(own / TIMING / folder_of(name) / runlog.directory.name)
        if runlog.finished and timing.finished:
            timed.append(on_network(runlog, timing, name))
    return Place(name, timed, _rows(timed, metric, target))


def _rows(runlogs: list[RunLog], metric: str, target: Target | None) -> list[Row]:
    """The rows of the runs, each beside the reference run with the same seed."""
    rows = [row(runlog, target) for runlog in runlogs]
    found = [reference_of(runlogs, runlog) for runlog in runlogs]
    return [
        compared(own, None if i is None else rows[i], metric)
        for own, i in zip(rows, found, strict=True)
    ]


def _order(runlog: RunLog) -> tuple[int, str, float, int]:
    """The references first, then by method, density and seed."""
    method = runlog.config.get("method", "")
    density = runlog.config.get("density", 0.0)
    rest = (0.0 if density == AUTO else density, runlog.config.get("seed", 0))
    return (REFERENCES.index(method) if method in REFERENCES else len(REFERENCES), method, *rest)
