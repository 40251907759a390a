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
from oktopk.runlog.reader import JOURNAL, Record, read
from oktopk.runlog.run_directory import lock
from oktopk.train.config import (
    DEFAULT,
    FIELDS,
    Config,
    load,
    with_flags,
)
from oktopk.train.config import add_flags as add_train_flags
from oktopk.train.console import say
from oktopk.train.run_process import (
    answered,
    leaving_on_sigterm,
    started,
    tail,
)
from oktopk.utils.files import write_whole

NAME = "compare"
# a list, and the train flag with one value that it stands for
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
    """Train what is not trained yet, then sum up all runs of the folder."""

    def act() -> int:
        base, wanted = resolve(args)
        folder = Path(base.runs)
        refuse_run(folder)
        refuse_sweep(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder), leaving_on_sigterm():
            return compare(args.config or DEFAULT, base, wanted, args.metric)

    return answered("oktopk compare", act)


def resolve(args: argparse.Namespace) -> tuple[Config, list[Config]]:
    """The training that all have in common, in its folder, and the runs."""
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
    """Run what is missing and write the tables; 1 when a run failed."""
    folder = Path(base.runs)
    refuse_others(folder, base)
    refuse_files(wanted)
    failed, table = [], ""
    for number, run in enumerate(wanted, 1):
        place = f"{number}/{len(wanted)} {run.name}"
        try:
            if not train(config, run, place):
                failed.append(run.name)
        finally:  # also when it is interrupted: what is there can be looked at
            table = sum_up(folder, metric)
    say(f"\n{table}")
    for name in failed:
        sys.stderr.write(f"oktopk compare: {name} failed, see {folder / name}.log\n")
    if failed:
        sys.stderr.write("the same command tries again what failed, and only that\n")
    return 1 if failed else 0


def train(config: str, run: Config, place: str) -> bool:
    """Train one setting, unless it is trained; whether it finished."""
    folder = Path(run.runs) / run.name
    before = read(folder)
    if before.finished:
        say(f"{place}: {result(before)} (trained before)")
        return True
    say(f"{place}: training; to look: oktopk watch {folder}")
    log = folder.with_name(f"{run.name}.log")
    with started(run, config, log) as process:
        code = process.wait()
    record = read(folder)
    if code == 0 and record.finished:
        say(f"{place}: {result(record)}")
        return True
    say(f"{place}: failed with exit code {code}, in {log}:\n{tail(log)}")
    return False


def result(record: Record) -> str:
    """A run in one line."""
    found = asdict(row(record, "wer", None))
    names = ("wer", "cer", "bytes_sent", "ratio", "ms_per_step")
    return ", ".join(f"{SHOWN[name][0]} {SHOWN[name][1](found[name])}" for name in names)


def sum_up(folder: Path, metric: str) -> str:
    """Write the tables and the report of all runs in the folder; the table, and where they are."""
    records = sorted((read(path.parent) for path in folder.glob(f"*/{JOURNAL}")), key=_order)
    if not records:
        return "no run has begun"
    dense = {run.config.get("seed"): run for run in records if _order(run)[0] == 0}
    rows = [row(record, metric, dense.get(record.config.get("seed"))) for record in records]
    text = markdown(as_table(rows))
    write_whole(folder / "table.md", text)
    write_whole(folder / "table.json", json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    write_report(folder / REPORT, records, rows, metric)
    return f"{text}\n{folder}: table.md, table.json, {REPORT}"


def _order(record: Record) -> tuple[int, str, float, int]:
    """Dense first, then by method, density and seed."""
    method = record.config.get("method", "")
    rest = (record.config.get("density", 0.0), record.config.get("seed", 0))
    return (0 if method == "dense" else 1, method, *rest)
