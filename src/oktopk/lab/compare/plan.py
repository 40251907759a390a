# SPDX-License-Identifier: Apache-2.0
"""Which runs a comparison has, and whether they fit those that are in its folder."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

from oktopk.errors import RunError
from oktopk.lab.baselines import BASELINE_NAMES, LOCAL, SPARSE
from oktopk.lab.compare.networks import timing_run
from oktopk.lab.runlog.reader import CONFIG_FILE, METRICS_FILE
from oktopk.lab.tasks.base import AUTO, number_or_auto
from oktopk.lab.train.config import LOCAL_STEPS, USUAL, Config, changes
from oktopk.lab.train.config_files import load_run
from oktopk.lab.train.run_process import IRRELEVANT_SETTINGS, directory_of
from oktopk.utils.arguments import list_some

RACED = (
    "ddp_dense",
    "ddp_fp16",
    "ddp_powersgd_r1",
    "ddp_powersgd_r4",
    "post_local_sgd",
    "diloco",
    "oktopk",
    "local_steps",
)
"""The methods of a race to a target, if none are given."""
STARTS = ("warmup_steps", "ramp_steps")
COMPARED = ("method", "density", "seed", "every")
REPORT = "compare.html"
Density = float | Literal["auto"]
MOST_EVERY = 10**6
"""Most steps between two exchanges."""
SHOWN_RUNS = 5
SWEEP = "sweep.json"
"""The file with the plan of a sweep. A folder that has it cannot be used for a comparison."""


def plan(
    base: Config,
    methods: Iterable[str],
    densities: Iterable[Density],
    seeds: Iterable[int],
    given: Collection[str] = (),
) -> list[Config]:
    """All combinations, but one run for each seed where density has no effect or is given.

    A method that is not the config's has its usual settings, but for those in `given`, the settings
    on the command line.
    """
    runs = {}
    unused = Config().density if base.density == AUTO else base.density
    for seed, asked, density in product(seeds, methods, densities):
        method, every, own_density = parse_method(asked)
        usual = USUAL.get(method, {}) if method != base.method else {}
        usual = {name: value for name, value in usual.items() if name not in given}
        every, own_density = every or usual.get("every"), own_density or usual.get("density")
        kept = (own_density or density) if has_density(method) else unused
        every = every or base.every
        name = setting_name(method, kept, seed, every)
        own = {"method": method, "density": kept, "seed": seed, "every": every}
        runs[name] = replace(base, name=name, **own)
    return list(runs.values())


def parse_method(text: str) -> tuple[str, int | None, Density | None]:
    """The method, steps between exchanges and density of `local_steps:5@0.1`; None: not given."""
    rest, at, density = text.partition("@")
    method, colon, every = rest.partition(":")
    if colon and not has_every(method):
        names = ", ".join((LOCAL_STEPS, *LOCAL))
        raise ValueError(f"--methods {text}: only {names} take the steps between exchanges")
    if colon and not (every.isdecimal() and 0 < int(every) < MOST_EVERY):
        raise ValueError(f"--methods {text}: a method and a number of steps, as in local_steps:5")
    if at and not has_density(method):
        raise ValueError(f"--methods {text}: {method} has no density")
    return method, int(every) if colon else None, _density(density, text) if at else None


def _density(density: str, text: str) -> Density:
    try:
        value = number_or_auto(float)(density)
    except ValueError:
        value = 0.0
    if value != AUTO and not 0 < value <= 1:
        raise ValueError(f"--methods {text}: a density in (0, 1] or auto, as in oktopk@0.02")
    return value


def has_density(method: str) -> bool:
    """Whether a method keeps a part of the gradient."""
    return method in SPARSE or (method != "dense" and method not in BASELINE_NAMES)


def has_every(method: str) -> bool:
    """Whether a method takes steps between two exchanges."""
    return method in (LOCAL_STEPS, *LOCAL)


def setting_name(method: str, density: Density, seed: int, every: int) -> str:
    """`dense`, `oktopk-0.02`, `diloco-every32`, `local_steps-0.1-every5`, `oktopk-0.02-s1`.

    A later call finds the run by this name.
    """
    shown = density if isinstance(density, str) else f"{density:g}"
    name = f"{method}-{shown}" if has_density(method) else method
    name = f"{name}-every{every}" if has_every(method) else name
    return f"{name}-s{seed}" if seed else name


def refuse_run(folder: Path) -> None:
    """Raise if the folder is a run directory, in which other runs cannot be stored."""
    if (folder / METRICS_FILE).exists():
        raise RunError(
            f"{folder} is the folder of a training run, and cannot hold other runs: give "
            "another --name"
        )


def refuse_sweep(folder: Path) -> None:
    """Raise if the folder is that of a sweep: the tables of both have the same names."""
    if (folder / SWEEP).exists():
        raise RunError(
            f"{folder} is the folder of a sweep ({SWEEP}), whose tables would be lost: give "
            "another --name, or continue it with oktopk sweep"
        )


def refuse_comparison(folder: Path) -> None:
    """Raise if a sweep is to use the folder of a comparison, or any other folder with runs."""
    if (folder / SWEEP).exists():
        return
    runs = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_FILE}"))
    if (folder / REPORT).exists():
        raise RunError(
            f"{folder} is the folder of a comparison ({REPORT}), whose tables would be lost: give "
            "another --name, or continue it with oktopk compare"
        )
    if runs:
        raise RunError(
            f"{folder} has runs that are not trials of a sweep ({list_some(runs, SHOWN_RUNS)}): "
            "give another --name"
        )


def refuse_files(wanted: Iterable[Config]) -> None:
    """Raise if a file is where a run directory would be: the run would be stored elsewhere."""
    for run in wanted:
        place = Path(run.runs) / run.name
        if place.exists() and not place.is_dir():
            raise RunError(
                f"{place} is a file, where the folder of that run would be: move it away, or give "
                "another --name"
            )


def refuse_others(
    folder: Path, base: Config, wanted: Iterable[Config] = (), networks: Iterable[str] = ()
) -> None:
    """Raise if a run in the folder was trained with other settings: they cannot be compared.

    The same holds for the short runs on the networks: each must have the settings of its run.
    """
    asked = {run.name: run for run in wanted}
    stored = {path: _stored(path) for path in _runs_in(folder)}
    for path, config in stored.items():
        same = replace(base, **{name: getattr(config, name) for name in COMPARED})
        _refuse_other(path, config, asked.get(path.name, same))
    runs = {path.name: config for path, config in stored.items()} | asked
    for run, network in product(runs.values(), networks):
        timing = timing_run(replace(run, runs=str(folder)), network)
        path = directory_of(timing)
        if (path / METRICS_FILE).exists():
            _refuse_other(path, _stored(path), timing, "remove it to time it again")


def _runs_in(folder: Path) -> list[Path]:
    found = {
        path.parent for file in (CONFIG_FILE, METRICS_FILE) for path in folder.glob(f"*/{file}")
    }
    return sorted(found)


def _stored(run: Path) -> Config:
    """The settings of a run. Nobody knows how a run without them was trained."""
    if not (run / CONFIG_FILE).exists():
        raise RunError(f"{run}: {CONFIG_FILE} is missing: remove the folder or give another --name")
    return load_run(run / CONFIG_FILE)


def _refuse_other(
    run: Path,
    stored: Config,
    same: Config,
    advice: str = "give another --name, or the flags of that run, or remove its folder",
) -> None:
    """Raise if a run was trained with other settings than these.

    A run without a target was trained to its end, so any target can be looked up in it. Where
    `auto` is asked for, a run has the numbers that it became.
    """
    free = {
        *IRRELEVANT_SETTINGS,
        *(() if has_density(stored.method) else ("density",)),
        *(() if has_every(stored.method) else ("every",)),
        *(() if stored.until else ("until",)),
        *(name for name in STARTS if getattr(same, name) == AUTO),
    }
    differing = {name: pair for name, pair in changes(stored, same).items() if name not in free}
    if differing:
        raise RunError(
            f"{run} was trained with {_values(differing, 0)}, and this is "
            f"{_values(differing, 1)}: {advice}"
        )


def _values(differing: dict[str, tuple], which: int) -> str:
    return ", ".join(f"{name} {pair[which]!r}" for name, pair in differing.items())
