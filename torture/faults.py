# SPDX-License-Identifier: Apache-2.0
"""Faults of single ranks in a small run: a row for each kind."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from torture import world
from torture.processes import Child
from torture.ranks import Plant
from torture.trial import EVERY, STEPS, WARMUP, Kind, Trial
from torture.verdicts import Finding

PLAIN = Plant("none")


def signalled(number: signal.Signals) -> Kind:
    """A rank gets a signal that ends it: the others name it, and the run can be resumed."""

    def kind(trial: Trial) -> list[Finding]:
        anytime = trial.rng.random() < 0.3
        jobs = trial.jobs(extra={"pause": 0.02} if anytime else {})
        reference, victim = trial.reference(jobs), trial.victim(jobs)
        if anytime:
            plant = Plant("signal", after=trial.rng.uniform(0.01, 0.5), number=number)
            trial.what += f": {number.name} after {plant.after:.3f} s"
        else:
            every = ("join", "attach", "forward", "backward", "on_step", "optimizer", "save")
            plant = trial.plant("signal", *every, "leave", number=number)
            trial.what += f" ({number.name})"
        planted = world.with_plant(jobs, victim, plant)
        ends = world.run(planted)
        found = judged(ends, victim, plant, reference)
        return found or world.resumed(jobs, reference)

    return kind


def judged(
    ends: list[world.Ended], victim: int, plant: Plant, reference: list[world.Ended]
) -> list[Finding]:
    """After the last step nobody needs the victim any more; before it all must name it."""
    planted = ends[victim].notes["planted"]
    reached = planted[0]["step"] if planted else STEPS
    others = [rank for rank in range(len(ends)) if rank != victim]
    is_over = plant.place == "leave" or reached >= STEPS - 1
    if is_over and all(ends[rank].code == 0 for rank in others):
        kept = [ends[rank] for rank in others]
        return world.finished_alike(kept, [reference[rank] for rank in others])
    return world.failed_clearly(ends, victim)


def stopped(trial: Trial, late: bool) -> list[Finding]:
    """A rank stops for good: the others name it. Late: it goes on when they are gone."""
    jobs = trial.jobs()
    reference, victim = trial.reference(jobs), trial.victim(jobs)
    places = ("join", "attach", "forward", "backward", "on_step", "optimizer", "save")
    plant = trial.plant("signal", *places, number=signal.SIGSTOP)

    def outlast(processes: list[Child], deadline: float) -> None:
        for rank, process in enumerate(processes):
            if rank != victim:
                process.join(max(0.0, deadline - time.monotonic()))
        os.kill(processes[victim].pid, signal.SIGCONT if late else signal.SIGKILL)

    ends = world.run(world.with_plant(jobs, victim, plant), outlast, world.BOUND + 30 * late)
    found = world.failed_clearly(ends, victim)
    if late and ends[victim].code in (None, 0):
        how = "hang" if ends[victim].code is None else "difference"
        found.append(Finding(how, f"rank {victim} went on alone: {ends[victim].said[-400:]}"))
    return found or world.resumed(jobs, reference)


def continued(trial: Trial) -> list[Finding]:
    """A rank stops for less than the time-out: nothing may come of it."""
    jobs = trial.jobs()
    reference, victim = trial.reference(jobs), trial.victim(jobs)
    places = ("join", "attach", "forward", "backward", "on_step", "optimizer", "save", "leave")
    plant = trial.plant("signal", *places, number=signal.SIGSTOP)
    pause = trial.rng.uniform(0.1, 2.0)

    def wake(processes: list[Child], deadline: float) -> None:
        if world.when_stopped(processes[victim], deadline):
            time.sleep(pause)
            os.kill(processes[victim].pid, signal.SIGCONT)

    return world.finished_alike(world.run(world.with_plant(jobs, victim, plant), wake), reference)


def raising(act: str, *places: str) -> Kind:
    """A rank fails by itself: the others name it, and the run can be resumed."""

    def kind(trial: Trial) -> list[Finding]:
        jobs = trial.jobs()
        reference, victim = trial.reference(jobs), trial.victim(jobs)
        plant = trial.plant(act, *places)
        ends = world.run(world.with_plant(jobs, victim, plant))
        found = world.failed_clearly(ends, victim)
        return found or world.resumed(jobs, reference)

    return kind


def failing_callback(trial: Trial) -> list[Finding]:
    """An error in on_step is logged, and the training goes on."""
    jobs = trial.jobs()
    reference, victim = trial.reference(jobs), trial.victim(jobs)
    ends = world.run(world.with_plant(jobs, victim, trial.plant("raise", "on_step")))
    found = world.finished_alike(ends, reference)
    if "on_step failed" not in ends[victim].said:
        found.append(Finding("unclear", f"rank {victim} does not say that on_step failed"))
    return found


def late(trial: Trial) -> list[Finding]:
    """A rank is slow for less than the time-out: nothing may come of it."""
    jobs = trial.jobs()
    reference, victim = trial.reference(jobs), trial.victim(jobs)
    places = ("join", "attach", "forward", "backward", "on_step", "optimizer", "save")
    plant = trial.plant("late", *places)
    return world.finished_alike(world.run(world.with_plant(jobs, victim, plant)), reference)


def nonfinite(act: str) -> Kind:
    """A NaN on one rank is skipped by all: the bits are those without that step.

    Methods whose thresholds last for several steps count the skipped one; there it must not
    matter which rank had the NaN, and the weights before and after must be the same.
    """

    def kind(trial: Trial) -> list[Finding]:
        jobs = trial.jobs()
        victim, step = trial.victim(jobs), trial.rng.randrange(1, STEPS - 1)
        trial.what += f": {act} in step {step}"
        ends = world.run(world.with_plant(jobs, victim, Plant(act, step=step)))
        if jobs[0].attached["method"] in ("dense", "topka") and step >= WARMUP:
            without = world.jobs_of(trial.folder, len(jobs), jobs[0].attached, without=step)
            return world.finished_alike(ends, trial.reference(without))
        next_rank = (victim + 1) % len(jobs)
        other = world.run(world.with_plant(jobs, next_rank, Plant(act, step=step)))
        found = world.finished_alike(ends, other)
        for rank, one in enumerate(ends if not found else ()):
            steps = one.notes["steps"]
            if steps[step]["weights"] != steps[step - 1]["weights"] or steps[-1]["skipped"] != 1:
                found.append(Finding("difference", f"rank {rank} did not skip step {step}"))
        return found

    return kind


def changed_weights(trial: Trial) -> list[Finding]:
    """Weights that differ on one rank are found by the next comparison of replicas."""
    jobs = trial.jobs()
    victim = trial.victim(jobs)
    plant = Plant("weights", "forward", trial.rng.randrange(1, 8), number=trial.rng.randrange(99))
    trial.what += f": changed in step {plant.step}"
    ends = world.run(world.with_plant(jobs, victim, plant))
    names = ("differ between rank",)
    return world.failed_clearly(ends, -1, names)


DIFFERING: dict[str, Any] = {
    "density": 0.3,
    "warmup_steps": 5,
    "wire": "fp16",
    "exact_every": 7,
    "bounds_every": 9,
    "scope": "bucket",
    "on_nonfinite": "raise",
    "check_every": 5,
    "group_numel": 1,
    "method": "gtopk",
    "overshoot": 0.5,
    "schedule": ((2, 0.5),),
}
"""Another value of every setting that all ranks must have alike."""


def other_settings(trial: Trial) -> list[Finding]:
    """One rank has another value of a setting: all are told which."""
    jobs = trial.jobs(("oktopk", "topka"))
    victim, name = trial.victim(jobs), trial.rng.choice(list(DIFFERING))
    trial.what += f": {name} = {DIFFERING[name]}"
    attached = jobs[victim].attached | {name: DIFFERING[name]}
    ends = world.run(world.with_plant(jobs, victim, PLAIN, attached=attached))
    return world.failed_clearly(ends, -1, (name,))


def other_model(name: str, value: Any, *said: str) -> Kind:
    """One rank has another model: all end with a message about it."""

    def kind(trial: Trial) -> list[Finding]:
        jobs = trial.jobs(init_sync=False)  # else DDP itself may find it, in its own words
        victim = trial.victim(jobs)
        ends = world.run(world.with_plant(jobs, victim, PLAIN, **{name: value}))
        return world.failed_clearly(ends, -1, (*said, f"ank {victim}"))

    return kind


def not_attached(trial: Trial) -> list[Finding]:
    """One rank did not call attach: the others name it."""
    jobs = trial.jobs()
    victim = trial.victim(jobs)
    ends = world.run(world.with_plant(jobs, victim, PLAIN, attaches=False))
    return world.failed_clearly(ends, victim)


def odd_states(act: str) -> Kind:
    """States taken at odd moments are refused, or are those between two steps; nothing changes."""

    def kind(trial: Trial) -> list[Finding]:
        jobs = trial.jobs(extra={"states": True})
        reference, victim = trial.reference(jobs), trial.victim(jobs)
        plant = trial.plant(act, *("backward", "on_step")) if act == "state" else Plant(act)
        ends = world.run(world.with_plant(jobs, victim, plant))
        found = world.finished_alike(ends, reference)
        known = {step["at"]: step["state"] for step in reference[victim].notes["steps"]}
        for odd in ends[victim].notes["odd"]:
            is_known = odd.get("at", 0) == 0 or odd["state"] == known[odd["at"]]
            if not is_known or odd.get("torn"):
                text = f"a state of rank {victim} after {odd['at']} exchanges is none of the run's"
                return [*found, Finding("lost", text)]
        return found

    return kind


def shrunk(trial: Trial) -> list[Finding]:
    """Three ranks' states go on with two: nothing that was held back is lost."""
    attached = {"method": "oktopk", "density": 0.1, "warmup_steps": WARMUP}
    folder = trial.folder
    before = world.run(world.jobs_of(folder, 3, attached, steps=6))
    if found := world.finished_alike(before, [before[0]] * 3):
        return found
    saved = [torch.load(folder / f"step-6-rank-{rank}.pt") for rank in range(3)]
    for path in folder.glob("rank-*"):
        path.rename(folder / f"first-{path.name}")
    jobs = world.jobs_of(folder, 2, attached, steps=STEPS, resume_from=6, loads=3)
    ends = world.run(jobs)
    found = world.finished_alike(ends, [ends[0]] * 2)
    taken = [torch.load(folder / f"taken-over-{rank}.pt") for rank in range(2)] if not found else []
    for name in taken[0] if taken else ():
        had = sum(each["handle"]["residuals"][name].double() for each in saved)
        has = sum(each[name].double() for each in taken)
        if not torch.allclose(torch.as_tensor(had), torch.as_tensor(has), atol=1e-6):
            found.append(Finding("lost", f"the residuals of {name} do not add up any more"))
    return found


def full_disk(trial: Trial) -> list[Finding]:
    """A checkpoint finds no room: that rank fails, the others name it, and the last one holds."""
    jobs = trial.jobs()
    reference, victim = trial.reference(jobs), trial.victim(jobs)
    plant = Plant("disk", "optimizer", trial.rng.choice((1, 4, 7)), number=20_000)
    ends = world.run(world.with_plant(jobs, victim, plant))
    return world.failed_clearly(ends, victim) or world.resumed(jobs, reference)


def damaged_message(trial: Trial) -> list[Finding]:
    """A rank sends damaged messages: all ranks end, and name it."""
    jobs = trial.jobs(("oktopk", "topka", "topkdsa", "gtopk", "gaussiank"))
    reference, victim = trial.reference(jobs), trial.victim(jobs)
    step = trial.rng.randrange(STEPS - EVERY if trial.is_local else STEPS - 1)
    trial.what += f": damage from step {step} on"
    ends = world.run(world.with_plant(jobs, victim, Plant("damage", "forward", step)))
    names = (f"what came from rank {victim} is no message",)
    return world.failed_clearly(ends, -1, names) or world.resumed(jobs, reference)


def loaded_late(trial: Trial) -> list[Finding]:
    """Weights that all ranks load in the middle of the training are where it goes on from."""
    jobs = trial.jobs()
    step, seed = trial.rng.randrange(STEPS - EVERY), trial.rng.randrange(99)
    trial.what += f": loaded in step {step}"
    for rank in range(len(jobs)):
        jobs = world.with_plant(jobs, rank, Plant("load", "forward", step, number=seed))
    ends = world.run(jobs)
    found = world.finished_alike(ends, [ends[0]] * len(ends))
    due = step // EVERY * EVERY + EVERY - 1  # the step that ends with an exchange
    for rank, one in enumerate(ends if not found else ()):
        far = {each["step"]: each["far"] for each in one.notes["steps"] if "far" in each}
        before = far.get(due - 1, 0.0)
        if far[due] > 3 * max(before, 0.1):  # a step of the optimizer moves them by 0.03
            text = f"rank {rank} was {far[due]:.3g} from the weights after their first exchange"
            found.append(Finding("lost", f"{text}, {before:.3g} before"))
    return found


def loaded_by_one(trial: Trial) -> list[Finding]:
    """Weights that only one rank loads are refused on all ranks."""
    jobs = trial.jobs()
    victim, step = trial.victim(jobs), trial.rng.randrange(STEPS - EVERY)
    trial.what += f": loaded in step {step}"
    ends = world.run(world.with_plant(jobs, victim, Plant("load", "forward", step, number=3)))
    return world.failed_clearly(ends, -1, (f"rank {victim}", f"ranks [{victim}"))


def uneven(trial: Trial) -> list[Finding]:
    """A rank takes more or fewer steps than the others: all finish, with the same weights."""
    jobs = trial.jobs(extra={"finishes": True})
    victim = trial.victim(jobs)
    more = trial.rng.choice((-STEPS, -EVERY - 1, -EVERY, -1, 1, 2, EVERY, 2 * EVERY + 1))
    trial.what += f": {more:+} steps"
    extra = {"finishes": True, "more": more}
    ends = world.run(world.with_plant(jobs, victim, PLAIN, extra=extra))
    return world.finished_alike(ends, [ends[0]] * len(ends))


def by_local_steps(kind: Kind) -> Kind:
    """The same fault in a run that trains by `local_steps`."""

    def local(trial: Trial) -> list[Finding]:
        trial.is_local = True
        return kind(trial)

    return local


ATTACHED: dict[str, Kind] = {
    "kill": signalled(signal.SIGKILL),
    "terminate": signalled(signal.SIGTERM),
    "interrupt": signalled(signal.SIGINT),
    "stop": lambda trial: stopped(trial, late=False),
    "stop-late": lambda trial: stopped(trial, late=True),
    "stop-continue": continued,
    "late": late,
    "raise": raising("raise", "attach", "forward", "backward", "optimizer", "save"),
    "exit": raising("exit", "attach", "forward", "optimizer", "save"),
    "exit-on-step": raising("exit", "on_step"),
    "raise-on-step": failing_callback,
    "nan": nonfinite("nan"),
    "inf": nonfinite("inf"),
    "weights": changed_weights,
    "settings": other_settings,
    "dtype": other_model("dtype", "float64", "dtype"),
    "parameters": other_model("layers", 4, "parameters", "params"),
    "not-attached": not_attached,
    "state-in-backward": odd_states("state"),
    "state-from-thread": odd_states("states from a thread"),
    "shrink": shrunk,
    "full-disk": full_disk,
    "damaged-message": damaged_message,
}

LOCAL = ("kill", "terminate", "interrupt", "stop", "stop-continue", "late", "raise", "exit")
LOCAL = (*LOCAL, "raise-on-step", "state-in-backward", "state-from-thread", "full-disk")
LOCAL = (*LOCAL, "damaged-message")

ONLY_LOCAL: dict[str, Kind] = {
    "loaded-late": loaded_late,
    "loaded-by-one": loaded_by_one,
    "uneven": uneven,
}

KINDS = ATTACHED | {f"local-{name}": by_local_steps(ATTACHED[name]) for name in LOCAL}
KINDS |= {f"local-{name}": by_local_steps(kind) for name, kind in ONLY_LOCAL.items()}
