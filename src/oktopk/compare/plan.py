"""Which runs a comparison has, and whether they fit those that are there already."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

from oktopk.errors import RunError
from oktopk.runlog.reader import JOURNAL, SETTINGS
from oktopk.train.config import Config, changes, load_run
from oktopk.train.run_process import NO_MATTER
from oktopk.utils.units import few

COMPARED = ("method", "density", "seed")
REPORT = "compare.html"
SHOWN_RUNS = 5
SWEEP = "sweep.json"
"""What a sweep keeps its plan in: a folder that has it is no place for a comparison."""


def plan(
    base: Config, methods: Iterable[str], densities: Iterable[float], seeds: Iterable[int]
) -> list[Config]:
    """The runs: all combinations, but one dense run for each seed, which has no density."""
    wanted = {}
    for seed, method, density in product(seeds, methods, densities):
        kept = base.density if method == "dense" else density
        name = setting_name(method, kept, seed)
        wanted[name] = replace(base, name=name, method=method, density=kept, seed=seed)
    return list(wanted.values())


def setting_name(method: str, density: float, seed: int) -> str:
    """`dense`, `oktopk-0.02`, `oktopk-0.02-s1`: the same in every call, so the folder is found."""
    name = method if method == "dense" else f"{method}-{density:g}"
    return f"{name}-s{seed}" if seed else name


def refuse_run(folder: Path) -> None:
    """The folder of a run is that run's own: others in it would be taken for parts of it."""
    if (folder / JOURNAL).exists():
        raise RunError(
            f"{folder} is the folder of a training run, and runs cannot stand in it: give another "
            "--name"
        )


def refuse_sweep(folder: Path) -> None:
    """The tables of a sweep have the names that those of a comparison have."""
    if (folder / SWEEP).exists():
        raise RunError(
            f"{folder} is the folder of a sweep ({SWEEP}), whose tables would be lost: give "
            "another --name, or go on with it by oktopk sweep"
        )


def refuse_comparison(folder: Path) -> None:
    """The same for a sweep: a comparison, or any other folder with runs."""
    if (folder / SWEEP).exists():
        return
    runs = sorted(path.parent.name for path in folder.glob(f"*/{SETTINGS}"))
    if (folder / REPORT).exists():
        raise RunError(
            f"{folder} is the folder of a comparison ({REPORT}), whose tables would be lost: give "
            "another --name, or go on with it by oktopk compare"
        )
    if runs:
        raise RunError(
            f"{folder} has runs that are no trials of a sweep ({few(runs, SHOWN_RUNS)}): give "
            "another --name"
        )


def refuse_files(wanted: Iterable[Config]) -> None:
    """A run whose folder cannot be made would train elsewhere, under a name with a number."""
    for run in wanted:
        place = Path(run.runs) / run.name
        if place.exists() and not place.is_dir():
            raise RunError(
                f"{place} is a file, where the folder of that run would be: move it away, or give "
                "another --name"
            )


def refuse_others(folder: Path, base: Config) -> None:
    """Runs in the folder must be of this same training, or the table would compare unlike ones."""
    for path in sorted(folder.glob(f"*/{SETTINGS}")):
        stored = load_run(path)
        same = replace(base, **{name: getattr(stored, name) for name in COMPARED})
        differing = {
            name: pair for name, pair in changes(stored, same).items() if name not in NO_MATTER
        }
        if differing:
            raise RunError(
                f"{path.parent} was trained with {_said(differing, 0)}, and this is "
                f"{_said(differing, 1)}: give another --name, or the flags of then"
            )


def _said(differing: dict[str, tuple], which: int) -> str:
    return ", ".join(f"{name} {pair[which]!r}" for name, pair in differing.items())
