"""`oktopk compare`: train under several methods and densities, one after the other."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from oktopk.compare.page import write_report
from oktopk.compare.plan import (
    REPORT,
    plan,
    refuse_files,
    refuse_others,
    refuse_run,
    refuse_sweep,
)
from oktopk.compare.results import (
    METRICS,
    SHOWN,
    as_table,
    row,
)
from oktopk.report.texttable import markdown
from oktopk.runlog.reader import RunLog, read_runlog
from oktopk.runlog.run_directory import METRICS_FILE, lock
from oktopk.train.config import DEFAULT, FIELDS, Config, load
from oktopk.train.console import print_line
from oktopk.train.flags import add_flags as add_train_flags
from oktopk.train.flags import with_flags
from oktopk.train.run_process import (
    directory_of,
    exit_code_of,
    last_lines,
    log_of,
    train_in_process,
)
from oktopk.utils.files import write_atomically
from oktopk.utils.signals import raise_on_signals

NAME = "compare"
# flags that take a list, and the flag of `oktopk train` that takes one value
LISTS = {"methods": "method", "densities": "density", "seeds": "seed"}
KNOWN = [f"--{name.replace('_', '-')}" for name in (*FIELDS, *LISTS, "metric", "config")]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `oktopk compare`, and all those of `oktopk train`."""
    parser.add_argument("--methods", help="comma-separated (default: dense and the config's)")
    parser.add_argument("--densities", help="comma-separated (default: the config's)")
    parser.add_argument("--seeds", help="comma-separated (default: the config's)")
    parser.add_argument("--metric", default="wer", choices=list(METRICS), help="(%(default)s)")
    parser.add_argument("--config", help=f"as for oktopk train (default: {DEFAULT})")
    add_train_flags(parser, without=("name",))
    parser.add_argument("--name", default=NAME, help="folder in RUNS, with a folder for each run")


def command(args: argparse.Namespace) -> int:
    """Train the runs that are not finished, then write the tables of all runs in the folder."""

    def act() -> int:
        base, wanted = resolve(args)
        folder = Path(base.runs)
        refuse_run(folder)
        refuse_sweep(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder), raise_on_signals():
            return compare(args.config or DEFAULT, base, wanted, args.metric)

    return exit_code_of("oktopk compare", act)


def resolve(args: argparse.Namespace) -> tuple[Config, list[Config]]:
    """The config that all runs have in common, with the folder of the comparison, and the runs."""
    for several, one in LISTS.items():
        if getattr(args, several) is not None and hasattr(args, one):
            raise ValueError(f"--{several} and --{one}: give one of them")
    base = with_flags(load(args.config or DEFAULT), args)
    base = replace(base, runs=str(Path(base.runs) / base.name))
    methods = _list("methods", args.methods, str) or dict.fromkeys(["dense", base.method])
    densities = _list("densities", args.densities, float) or [base.density]
    seeds = _list("seeds", args.seeds, int) or [base.seed]
    return base, plan(base, methods, densities, seeds)


def _list(name: str, text: str | None, kind: type) -> list:
    if text is None:
        return []
    try:
        return list(dict.fromkeys(kind(item.strip()) for item in text.split(",")))
    except ValueError:
        raise ValueError(f"--{name} {text!r}: values with commas between them") from None


def compare(config: str, base: Config, wanted: list[Config], metric: str) -> int:
    """Train what is missing and write the tables. Returns 1 if a run failed."""
    folder = Path(base.runs)
    refuse_others(folder, base)
    refuse_files(wanted)
    failed, table = [], ""
    for number, run in enumerate(wanted, 1):
        place = f"{number}/{len(wanted)} {run.name}"
        try:
            if not train(config, run, place):
                failed.append(run.name)
        finally:  # also when the comparison is interrupted
            table = write_tables(folder, metric)
    print_line(f"\n{table}")
    for name in failed:
        sys.stderr.write(f"oktopk compare: {name} failed, see {folder / name}.log\n")
    if failed:
        sys.stderr.write("the same command tries the failed runs again, and only those\n")
    return 1 if failed else 0


def train(config: str, run: Config, place: str) -> bool:
    """Train one run unless it is finished. Returns whether it finished."""
    directory, log = directory_of(run), log_of(run)
    before = read_runlog(directory)
    if before.finished:
        print_line(f"{place}: {result_line(before)} (trained before)")
        return True
    print_line(f"{place}: training; to look: oktopk watch {directory}")
    result = train_in_process(run, config)
    if result.exit_code == 0 and result.runlog.finished:
        print_line(f"{place}: {result_line(result.runlog)}")
        return True
    print_line(f"{place}: failed with exit code {result.exit_code}, in {log}:\n{last_lines(log)}")
    return False


def result_line(runlog: RunLog) -> str:
    """The result of a run in one line."""
    values = asdict(row(runlog, "wer", None))
    names = ("wer", "cer", "bytes_sent", "ratio", "ms_per_step")
    return ", ".join(f"{SHOWN[name][0]} {SHOWN[name][1](values[name])}" for name in names)


def write_tables(folder: Path, metric: str) -> str:
    """Write the tables and the report of all runs in the folder. Returns the table as text."""
    paths = folder.glob(f"*/{METRICS_FILE}")
    runlogs = sorted((read_runlog(path.parent) for path in paths), key=_order)
    if not runlogs:
        return "no run has begun"
    dense = {run.config.get("seed"): run for run in runlogs if _order(run)[0] == 0}
    rows = [row(runlog, metric, dense.get(runlog.config.get("seed"))) for runlog in runlogs]
    text = markdown(as_table(rows))
    write_atomically(folder / "table.md", text)
    write_atomically(
        folder / "table.json", json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    )
    write_report(folder / REPORT, runlogs, rows, metric)
    return f"{text}\n{folder}: table.md, table.json, {REPORT}"


def _order(runlog: RunLog) -> tuple[int, str, float, int]:
    """Dense first, then by method, density and seed."""
    method = runlog.config.get("method", "")
    rest = (runlog.config.get("density", 0.0), runlog.config.get("seed", 0))
    return (0 if method == "dense" else 1, method, *rest)
