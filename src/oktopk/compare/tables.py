# SPDX-License-Identifier: Apache-2.0
"""The files of a comparison: a table for every network, and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size

from oktopk.compare.networks import TIMING, folder_of, on_network
from oktopk.compare.outcome import conclusion
from oktopk.compare.page import Place, judged, write_report
from oktopk.compare.plan import REPORT
from oktopk.compare.results import Row, as_plain, as_table, compared, fitting, row
from oktopk.compare.seeds import averaged, seeds_table, setting_of
from oktopk.compare.verdict import REFERENCES, reference_of
from oktopk.errors import RunError
from oktopk.report.texttable import aligned, markdown
from oktopk.runlog.reader import RunLog, read_runlog
from oktopk.runlog.run_directory import METRICS_FILE
from oktopk.runlog.schema import MetricInfo
from oktopk.train.option import AUTO
from oktopk.train.target import Target
from oktopk.utils.files import write_atomically


def write_tables(
    folder: Path, metric: str, target: Target | None, networks: Sequence[str] = ()
) -> str:
    """Write the tables and the report of all runs in the folder. Returns the tables as text."""
    paths = folder.glob(f"*/{METRICS_FILE}")
    runlogs = sorted((read_runlog(path.parent) for path in paths), key=_order)
    if not runlogs:
        return "no run has begun"
    metrics = next((runlog.metrics for runlog in runlogs if runlog.metrics), [])
    shown = next((info for info in metrics if info.name == metric), MetricInfo(metric, metric))
    places = [Place("", runlogs, _rows(runlogs, metric, target))]
    places += [_timed(runlogs, name, metric, target) for name in networks]
    texts = []
    for place in places:
        if place.runlogs:
            cells = as_table(place.rows, metrics)
            write_atomically(folder / f"table{place.suffix}.md", markdown(cells))
            rows = json.dumps(as_plain(place.rows), indent=1) + "\n"
            write_atomically(folder / f"table{place.suffix}.json", rows)
            heading = f"timed at {place.network}:" if place.network else ""
            width = get_terminal_size().columns
            texts += [heading, aligned(fitting(cells, shown.label, width))]
            settings = averaged(place.runlogs, place.rows, metric)
            if by_seeds := seeds_table(settings, shown, is_race=target is not None):
                write_atomically(folder / f"seeds{place.suffix}.md", markdown(by_seeds))
                texts += ["means of all seeds:", aligned(fitting(by_seeds, shown.label, width))]
            if any(place is one for one in judged(places)):
                texts.append(conclusion(place.runlogs, place.rows, shown, target))
        texts += place.problems
    write_report(folder / REPORT, places, metric, target)
    names = ", ".join(path.name for path in sorted(folder.glob("*.md")))
    return "\n".join(filter(None, [*texts, f"{folder}: {names}, table.json, {REPORT}"]))


def _timed(runlogs: list[RunLog], name: str, metric: str, target: Target | None) -> Place:
    """The runs whose steps were timed on a network, as they would have been there."""
    timed, problems, untimed = [], [], {}
    for runlog in runlogs:
        folder, setting = runlog.directory.parent, setting_of(runlog)
        timing = read_runlog(folder / TIMING / folder_of(name) / setting)
        if runlog.finished and timing.finished:
            try:
                timed.append(on_network(runlog, timing, name))
            except RunError as error:  # said below the table, which has the others
                problems.append(str(error))
        elif runlog.finished:
            untimed[setting] = f"{setting} was not timed at {name}"
    problems += untimed.values() if timed else ()
    return Place(name, timed, _rows(timed, metric, target), tuple(problems))


def _rows(runlogs: list[RunLog], metric: str, target: Target | None) -> list[Row]:
    """The rows of the runs, each beside the reference run with the same seed."""
    rows = [row(runlog, target) for runlog in runlogs]
    found = [reference_of(runlogs, runlog) for runlog in runlogs]
    return [
        compared(own, None if i is None else rows[i], metric)
        for own, i in zip(rows, found, strict=True)
    ]


def _order(runlog: RunLog) -> tuple[int, str, float, int, int]:
    """The references first, then by method, density, interval and seed."""
    method = runlog.config.get("method", "")
    density = runlog.config.get("density", 0.0)
    numbers = (runlog.config.get(name, 0) for name in ("every", "seed"))
    rest = (0.0 if density == AUTO else density, *numbers)
    return (REFERENCES.index(method) if method in REFERENCES else len(REFERENCES), method, *rest)
