# SPDX-License-Identifier: Apache-2.0
"""`python -m torture`: attack, count, and say what failed. The exit code is 1 when anything did."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from torture import cluster, commands, faults, feeding, input_messages, inputs
from torture.trial import SkippedError, Trial
from torture.verdicts import Finding, Progress, Result, write

FAULTS = faults.KINDS | cluster.KINDS | commands.KINDS
READ = inputs.KINDS | input_messages.KINDS
MILLION = 1_000_000  # seeds of a run: no two trials have the same

NO_DNS = "attempts:0"
"""glibc's RES_OPTIONS for a resolver that asks no server. torch's store looks up the name of the
peer of every connection, in the thread that serves all ranks, and /etc/hosts does not have the
address ::ffff:127.0.0.1. A single lost answer stops the store, and so a start, for 5 s. That is
more than the ranks of a trial wait for each other, and has nothing to do with the fault."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, help="trials with processes (300; 1 with --only)")
    parser.add_argument("--inputs", type=int, help="odd inputs (10000; 1 with --only)")
    parser.add_argument("--messages", type=int, help="damaged messages (20000; 1 with --only)")
    parser.add_argument("--minutes", type=float, default=60.0, help="nothing starts after that")
    parser.add_argument("--jobs", type=int, default=1, help="at a time (%(default)s)")
    groups = {"faults": FAULTS, "inputs": inputs.KINDS, "messages": input_messages.KINDS}
    known = ", ".join([*groups, *FAULTS, *READ])
    parser.add_argument("--only", help=f"kinds, with commas: {known}")
    parser.add_argument("--out", type=Path, help="report and evidence (a new folder in the temp)")
    args = parser.parse_args()
    asked = (args.only or "faults,inputs,messages").split(",")
    args.kinds = [kind for name in asked for kind in groups.get(name, [name])]
    if unknown := set(args.kinds) - {*FAULTS, *READ}:
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    for name, most in (("faults", 300), ("inputs", 10_000), ("messages", 20_000)):
        if getattr(args, name) is None:
            own = [kind for kind in args.kinds if kind in groups[name]]
            setattr(args, name, len(own) if args.only else most)
    return args


def planned(kinds: list[str], number: int, args: argparse.Namespace) -> list[tuple[str, int]]:
    """Which kind with which seed: all in turn, the slow commands one in six where there are others.

    With --only the first seed is the one that was given, so that a trial can be repeated.
    """
    first = args.seed if args.only else args.seed * MILLION
    slow = [kind for kind in kinds if kind in commands.KINDS]
    fast = [kind for kind in kinds if kind not in slow]
    if args.only or not slow or not fast:
        turn: Iterator[str] = itertools.cycle(kinds)
    else:
        fasts, slows = itertools.cycle(fast), itertools.cycle(slow)
        turn = (next(slows if place % 6 == 5 else fasts) for place in itertools.count())
    return [(next(turn), first + place) for place in range(number)] if kinds else []


def attempt(kind: str, seed: int, shared: Trial) -> Result:
    """One fault in a folder of its own; an error of the harness itself is a failed trial too."""
    folder = shared.folder / f"{kind}-{seed}"
    folder.mkdir(parents=True)
    trial = Trial(Random(f"{kind}/{seed}"), folder, "", shared.references, shared.lock)
    began, findings, skipped = time.monotonic(), [], ""
    try:
        findings = FAULTS[kind](trial)
    except SkippedError as error:
        skipped = str(error)
    except Exception:  # noqa: BLE001 - one broken trial must not end the others
        findings = [Finding("unclear", f"the trial itself failed: {traceback.format_exc()}")]
    if not findings:  # evidence is kept of what failed
        shutil.rmtree(folder, ignore_errors=True)
    took = time.monotonic() - began
    return Result(kind, seed, "faults", trial.what, tuple(findings), skipped, took)


def main() -> int:
    args = arguments()
    # a shell starts what runs in its background with Ctrl-C ignored, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["RES_OPTIONS"] = NO_DNS  # before the first lookup, and for all that is started here
    out = args.out or Path(tempfile.mkdtemp(prefix="torture-"))
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    progress, results = Progress(deadline), []
    fed = planned([kind for kind in args.kinds if kind in inputs.KINDS], args.inputs, args)
    fed += planned(
        [kind for kind in args.kinds if kind in input_messages.KINDS], args.messages, args
    )
    tried = planned([kind for kind in args.kinds if kind in FAULTS], args.faults, args)
    print(f"{len(tried)} faults and {len(fed)} inputs, {args.minutes:g} minutes; {out}", flush=True)
    # inputs are quick: they may have a third of the time, faults the rest
    until = time.monotonic() + 60 * args.minutes * (1 if not tried else 1 / 3)
    for result in feeding.feed(fed, out, until, args.jobs):
        results.append(result)
        progress.say("inputs", len(results), len(fed), sum(bool(r.findings) for r in results))
    number = len(results)
    shared = Trial(Random(0), out / "faults")
    shared.lock = threading.Lock()
    write(out, results)

    def one(planned: tuple[str, int]) -> Result | None:
        return attempt(*planned, shared) if time.monotonic() < deadline else None

    with ThreadPoolExecutor(args.jobs) as pool:
        for result in filter(None, pool.map(one, tried)):
            results.append(result)
            failed = sum(bool(r.findings) for r in results[number:])
            if result.findings:
                print(f"failed: {result.repeat}", flush=True)
            progress.say("faults", len(results) - number, len(tried), failed)
            write(out, results)
    print(f"\n{write(out, results)}")
    done = f"{len(results) - number} of {len(tried)} faults and {number} of {len(fed)} inputs"
    print(f"{done} were tried; {out}")
    return int(any(result.findings for result in results))


if __name__ == "__main__":
    sys.exit(main())
