"""What sparse gradients cost in accuracy: settings compared with dense, at equal steps and seeds.

    pip install "oktopk[examples,train,plots]"
    python benchmarks/convergence
    python benchmarks/convergence --tasks chars --settings dense plain auto "auto,density=0.01"
    python benchmarks/convergence --tasks an4 --an4 data/an4 --optimizers adamw --seeds 0

A setting is `dense`, `plain` (error feedback alone, after a dense warm-up) or `auto` (the
optimizer's preset, after a ramp), followed by arguments of `oktopk.attach` after commas (for
speech, fields of a training config). `dense,max_beta1=0.3` gives dense AdamW the first beta that
`auto,max_beta1=0.3` has in its sparse phase. A run that has a record in the folder is not repeated,
and a failed run does not affect the others. At the end a table and figures of all records are
written to the folder. Records do not depend on the code: after a change of the library, use another
folder.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import recognition
import small
import summary
from record import WORKERS, Key, arguments, read
from tasks import TASKS
from torch.multiprocessing.spawn import ProcessException

from oktopk.errors import RunError


def main() -> int:
    args = _arguments()
    known = [*TASKS, *recognition.CONFIGS]
    wrong = [task for task in args.tasks if task not in known]
    if wrong or ("an4" in args.tasks and args.an4 is None):
        print(f"tasks are {', '.join(known)}; an4 needs --an4 FOLDER", file=sys.stderr)
        return 2
    for setting in args.settings:
        try:
            arguments(setting)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    keys = [
        Key(task=t, optimizer=o, setting=s, seed=seed, workers=args.workers, steps=args.steps)
        for t, o, seed, s in product(args.tasks, args.optimizers, args.seeds, args.settings)
    ]
    failed = _run([key for key in keys if not key.path(args.folder).exists()], args)
    records = [read(path) for path in sorted(args.folder.glob("*.json"))]
    if not records:
        return 1
    groups = summary.grouped(records)
    text = summary.table(groups)
    (args.folder / "table.md").write_text(text + "\n")
    print(f"\n{text}\n")
    for path in summary.plot(groups, args.folder):
        print(f"wrote {path}")
    for key in failed:
        print(f"failed: {key}", file=sys.stderr)
    return 1 if failed else 0


def _run(missing: list[Key], args: argparse.Namespace) -> list[Key]:
    """Train the missing runs. Returns the keys of those that failed."""
    failed = []
    quick = [key for key in missing if key.task in TASKS]
    while quick:
        try:
            small.train_all(quick, args.folder)
        except ProcessException as error:
            print(error, file=sys.stderr)
            failed += [key for key in quick if not key.path(args.folder).exists()][:1]
        quick = [key for key in quick if not key.path(args.folder).exists() and key not in failed]
    for key in missing:
        if key.task in TASKS:
            continue
        try:
            recognition.train(key, args.folder, args.an4).write(args.folder)
        except RunError as error:
            print(error, file=sys.stderr)
            failed.append(key)
    return failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Accuracy with a compressed exchange, compared with dense."
    )
    parser.add_argument("--tasks", nargs="+", default=["digits", "chars"])
    parser.add_argument(
        "--optimizers", nargs="+", default=["sgd", "adamw"], choices=["sgd", "adamw"]
    )
    parser.add_argument("--settings", nargs="+", default=["dense", "plain", "auto"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the task asks for")
    parser.add_argument("--folder", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--an4", type=Path, help="what `oktopk data an4` wrote")
    args = parser.parse_args()
    if args.workers < 1 or args.steps < 0:
        given = f"got {args.workers} and {args.steps}"
        parser.error(f"--workers must be 1 or more and --steps 0 or more, {given}")
    return args


if __name__ == "__main__":
    sys.exit(main())
