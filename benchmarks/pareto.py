# SPDX-License-Identifier: Apache-2.0
"""Held-out loss against bytes sent: what each way of exchanging learns with its bytes.

    python benchmarks/pareto.py text
    python benchmarks/pareto.py text --only 'local_steps.*-every10'
    python benchmarks/pareto.py text --front --seeds 1 2

Every point is a training run of `oktopk train`, in a folder of its own. A run that is finished is
not repeated, so the same command continues where it was stopped. `--front` trains further seeds of
those points only that no other point beats in bytes and in loss, and of dense. In the end it writes
`table.md`, `table.json` and `pareto.png` of all runs in the folder.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oktopk.lab.report.page import markdown
from oktopk.lab.runlog.reader import read_runlog
from oktopk.lab.runlog.writer import estimated_totals
from oktopk.lab.train.config import Config, with_settings
from oktopk.lab.train.config_files import load
from oktopk.lab.train.run_process import directory_of, last_lines, log_of, train_in_process
from oktopk.utils.arguments import format_bytes

REFERENCE = "ddp_dense"
SPARSELOCO_DENSITY = 64 / 4096  # of the paper: 64 of every 4,096

# 480 steps are a multiple of every `every`: a run ends with an exchange, whose bytes are counted
TEXT = {
    "max_steps": 480, "lr_steps": 480, "batch": 8, "layers": 3, "heads": 4, "width": 96,
    "lr": 3e-3, "lr_warmup": 48, "lr_final": 0.1, "beta2": 0.95, "weight_decay": 0.1,
    "clip_after": 1.0, "warmup_steps": 24, "ramp_steps": 48, "validate_steps": 0,
    "checkpoint_every": 0, "validation_crops": 1000, "validate_batch": 64, "samples": 0,
    "log_every": 60,
}  # fmt: skip
IMAGES = {
    "epochs": 100, "max_steps": 480, "lr_steps": 480, "batch": 16, "optimizer": "adamw",
    "lr": 3e-3, "lr_warmup": 48, "lr_final": 0.1, "beta2": 0.999, "weight_decay": 0.01,
    "clip_after": 1.0, "warmup_steps": 24, "ramp_steps": 48, "validate_every": 100,
    "samples": 0, "log_every": 60,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {"text": TEXT, "images": IMAGES}

LOCAL_STEPS = {
    1: {0.1: ("int4",)},
    2: {0.1: ("int4",)},
    5: {0.2: ("int4",), 0.1: ("bf16", "int4", "int2"), 0.05: ("int4",)},
    10: {0.1: ("int4", "int2"), 0.05: ("int4", "int2"), 0.02: ("int4", "int2")},
    30: {0.1: ("int2",), 0.05: ("int4", "int2"), 0.02: ("int2",)},
    120: {0.1: ("int2",)},
}
"""Codecs by density by `every`."""

LOW_BITS = ("int8", "int4", "int2")
ATTACH_CODECS = {0.1: ("int4",), 0.05: ("int4",), 0.02: LOW_BITS, 0.01: LOW_BITS}
"""Codecs by density of sparse gradients, beside the 16 bits of the configs."""

OTHERS: tuple[dict[str, Any], ...] = (
    *({"method": "diloco", "every": every} for every in (8, 32, 120)),
    {"method": "sparseloco", "every": 5, "density": 0.1},
    {"method": "sparseloco", "every": 10, "density": 0.05},
    {"method": "sparseloco", "every": 10, "density": SPARSELOCO_DENSITY},
    {"method": "sparseloco", "every": 30, "density": SPARSELOCO_DENSITY},
    *({"method": f"ddp_powersgd_r{rank}"} for rank in (4, 2, 1)),
    {"method": "ddp_fp16"},
)

HALF_RAMP = {"warmup_steps": 12, "ramp_steps": 240}
"""Half of the dense steps that `attach` takes with `total_steps=480`, and about its ramp. The other
sparse runs have 24 dense steps, and the density falls in 48."""


def points() -> Iterator[dict[str, Any]]:
    """The settings of every point of the front."""
    yield {"method": REFERENCE}
    for every, densities in LOCAL_STEPS.items():
        for density, codecs in densities.items():
            for wire in codecs:
                yield {"method": "local_steps", "every": every, "density": density, "wire": wire}
    for density, codecs in ATTACH_CODECS.items():
        yield {"method": "oktopk", "density": density}
        for wire in codecs:
            yield {"method": "oktopk", "density": density, "wire": wire}
    for density in (0.2, *ATTACH_CODECS):
        yield {"method": "oktopk", "density": density, "wire": "int4", **HALF_RAMP}
    yield from OTHERS


def name_of(settings: dict[str, Any]) -> str:
    """`local_steps-every5-0.1-int4`: the point without its seed."""
    parts = [settings["method"]]
    parts += [f"every{settings['every']}"] if "every" in settings else []
    parts += [f"{settings['density']:g}"] if "density" in settings else []
    parts += [settings["wire"]] if "wire" in settings else []
    parts += [f"ramp{settings['ramp_steps']}"] if "ramp_steps" in settings else []
    return "-".join(parts)


def configs(family: str, runs: Path, chosen: Iterable[str], seeds: list[int]) -> Iterator[Config]:
    """The runs of the chosen points, one seed after the other."""
    base, names = load(task=family), set(chosen)
    for seed in seeds:
        for settings in points():
            if (name := name_of(settings)) in names:
                own = {"runs": str(runs), "name": f"{name}-s{seed}", "seed": seed}
                yield with_settings(base, **FAMILIES[family] | settings | own)


@dataclass(frozen=True, slots=True)
class Point:
    """The runs of one setting, over seeds. Bytes are the mean of what a rank sent."""

    name: str
    losses: dict[int, float]
    """By seed."""

    bytes_sent: float
    share: float
    """Of the bytes of dense fp32 gradients at every step."""

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses.values())

    @property
    def spread(self) -> str:
        """The lowest and the highest loss of several seeds."""
        found = self.losses.values()
        return f"{min(found):.3f} to {max(found):.3f}" if len(found) > 1 else "-"

    def behind(self, dense: Point) -> str:
        """How much higher the loss is than that of dense training with the same seeds."""
        both = self.losses.keys() & dense.losses.keys()
        if not both:
            return "-"
        theirs = sum(dense.losses[seed] for seed in both)
        return f"{sum(self.losses[seed] for seed in both) / theirs - 1:+.1%}"


def read_points(runs: Path) -> list[Point]:
    """Every setting with a finished run, in order of its bytes."""
    found: dict[str, dict[int, tuple[float, float, float]]] = {}
    for folder in sorted(path for path in runs.iterdir() if path.is_dir()):
        runlog = read_runlog(folder)
        if runlog.finished:
            totals = estimated_totals(runlog).whole
            loss = runlog.validations[-1].metrics["val_loss"]
            assert loss is not None, folder
            workers = runlog.config["workers"]
            row = loss, totals.bytes_sent / workers, totals.bytes_dense / workers
            name, _, seed = folder.name.rpartition("-s")
            found.setdefault(name, {})[int(seed)] = row
    made = [
        Point(
            name,
            {seed: loss for seed, (loss, _, _) in rows.items()},
            statistics.mean(sent for _, sent, _ in rows.values()),
            sum(sent for _, sent, _ in rows.values()) / sum(row[2] for row in rows.values()),
        )
        for name, rows in found.items()
    ]
    return sorted(made, key=lambda point: point.bytes_sent)


def front(found: list[Point]) -> list[str]:
    """The points that no other one beats both in bytes and in loss, fewest bytes first."""
    names, lowest = [], float("inf")
    for point in sorted(found, key=lambda point: (point.bytes_sent, point.loss)):
        if point.loss < lowest:
            names.append(point.name)
            lowest = point.loss
    return names


def as_table(found: list[Point]) -> list[list[str]]:
    """Headings and cells; points of the front in bold."""
    best = front(found)
    dense = next((point for point in found if point.name == REFERENCE), None)
    heading = ["exchange", "sent by a rank", "of dense", "held-out loss", "to dense"]
    rows = [[*heading, "seeds", "from, to"]]
    for point in found:
        name = f"**{point.name}**" if point.name in best else point.name
        behind = "-" if dense is None else point.behind(dense)
        sent = format_bytes(round(point.bytes_sent))
        loss = f"{point.loss:.4f}"
        seeds = str(len(point.losses))
        rows.append([name, sent, f"{point.share:.2%}", loss, behind, seeds, point.spread])
    return rows


def plot(found: list[Point], family: str, path: Path) -> None:
    """Draw loss over bytes, one colour for each method, and the front as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    methods = list(dict.fromkeys(point.name.split("-")[0] for point in found))
    for method in methods:
        own = [point for point in found if point.name.split("-")[0] == method]
        axes.scatter([p.share for p in own], [p.loss for p in own], label=method, zorder=2)
    best = [point for name in front(found) for point in found if point.name == name]
    axes.plot(
        [p.share for p in best], [p.loss for p in best], color="black", alpha=0.5, label="front"
    )
    labeled = 0.0
    for point in best:
        if point.share < 1.35 * labeled:  # its label would lie on the one before
            continue
        labeled = point.share
        label = point.name.replace("local_steps-", "")
        axes.annotate(label, (point.share, point.loss), (4, 4), textcoords="offset points", size=7)
    axes.set_xscale("log")
    axes.set_xlabel("bytes sent, as a share of dense fp32 gradients at every step")
    axes.set_ylabel("held-out loss (less is better)")
    axes.set_title(f"{family}: what each exchange learns with its bytes", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(runs: Path, family: str) -> str:
    """Write the table and the figure of the runs that are finished."""
    found = read_points(runs)
    text = markdown(as_table(found))
    (runs / "table.md").write_text(text)
    (runs / "table.json").write_text(json.dumps([asdict(point) for point in found], indent=1))
    if found:
        plot(found, family, runs / "pareto.png")
    return text


def train(config: Config) -> bool:
    """Train a run unless it is finished. Returns whether it is."""
    if read_runlog(directory_of(config)).finished:
        return True
    result = train_in_process(config, "")
    if result.exit_code == 0 and result.runlog.finished:
        return True
    print(f"{config.name} failed with exit code {result.exit_code}:\n{last_lines(log_of(config))}")
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--runs", type=Path, help="where the runs are (runs/pareto-FAMILY)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", default="", help="points whose name has this regular expression")
    parser.add_argument(
        "--front", action="store_true", help="points on the front so far, and dense"
    )
    args = parser.parse_args()
    runs = args.runs or Path("runs") / f"pareto-{args.family}"
    runs.mkdir(parents=True, exist_ok=True)
    known = [name_of(settings) for settings in points()]
    chosen = [REFERENCE, *front(read_points(runs))] if args.front else known
    chosen = [name for name in chosen if re.search(args.only, name)]
    failed = [
        config.name
        for config in configs(args.family, runs, chosen, args.seeds)
        if not train(config)
    ]
    print(write(runs, args.family), end="", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
