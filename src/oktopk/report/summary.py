"""What became of a run, in a few sentences and large figures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from oktopk.report.curves import phase_changes
from oktopk.report.page import paragraph, tiles
from oktopk.report.times import settled
from oktopk.runlog.reader import PARTS, Record, has_checkpoint
from oktopk.utils.units import clock, few, size

MOST_SHOWN = 8  # step numbers, warnings


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes sent in a phase, and those of a dense run."""

    sent: float
    dense: float

    def __str__(self) -> str:
        if not self.sent:
            return "nothing sent"
        return f"{self.dense / self.sent:.1f}x fewer" if self.sent < self.dense else "as many"


def verdict(record: Record) -> str:
    """The opening of a report."""
    parts = [paragraph(text, "verdict") for text in sentences(record)]
    if record.steps:
        parts.append(tiles(_tiles(record)))
    parts += [paragraph(text, "bad") for text in troubles(record)]
    return "\n".join(parts)


def sentences(record: Record) -> list[str]:
    """How it ended, whether it learned, and when it went sparse."""
    return [text for text in (_ending(record), _learned(record), _phases(record)) if text]


def troubles(record: Record) -> list[str]:
    """What a reader must know before trusting the rest."""
    found = list(record.problems)
    skipped = [entry["step"] for entry in record.steps if entry.get("skipped")]
    if skipped:
        what = "step was" if len(skipped) == 1 else "steps were"
        found.append(
            f"{len(skipped)} {what} skipped by all ranks because a gradient was not finite: "
            f"{few(skipped, MOST_SHOWN)}."
        )
    warned = _warned(record)
    found += [f"Warning: {text}" for text in warned[:MOST_SHOWN]]
    if len(warned) > MOST_SHOWN:
        found.append(f"{len(warned) - MOST_SHOWN} more warnings are in metrics.jsonl.")
    return found


def _warned(record: Record) -> list[str]:
    """Warnings, without those of steps that were skipped: these are counted by themselves."""
    return [entry["text"] for entry in record.of("warning") if "NaN or Inf" not in entry["text"]]


def _ending(record: Record) -> str:
    end, total = record.end, record.opening.get("total_steps")
    if not record.steps:
        return "Nothing was recorded here: the run never finished a step."
    done = record.steps[-1]["step"] + 1
    of = f"step {done} of {total}" if total else f"step {done}"
    if end is None:
        advice = " The same command with --resume goes on from its last checkpoint."
        return f"The journal breaks off at {of}: the run is still going on, or it was killed." + (
            advice if has_checkpoint(record.folder) else ""
        )
    if end["how"] == "finished":
        took = f" in {clock(end['seconds'])}" if end.get("seconds") is not None else ""
        return f"The run finished: {done} steps{took}."
    how = "was stopped" if end["how"] == "stopped" else "failed"
    return f"The run {how} at {of}: {end.get('text') or 'no reason was recorded'}"


def _learned(record: Record) -> str:
    rates = [(entry["epoch"], entry["wer"]) for entry in record.validated]
    if len(rates) > 1 and rates[-1][1] < rates[0][1]:
        (first, before), (last, after) = rates[0], rates[-1]
        best, lowest = min(rates, key=lambda pair: pair[1])
        better = f"; it was lowest after epoch {best}: {lowest:.3f}" if lowest < after else ""
        return (
            f"It learned: WER went from {before:.3f} after epoch {first} to {after:.3f} after "
            f"epoch {last}{better}."
        )
    losses = [entry["loss"] for entry in record.steps if entry.get("loss") is not None]
    if len(losses) < 2:
        return ""
    some = max(1, len(losses) // 10)
    before, after = sum(losses[:some]) / some, sum(losses[-some:]) / some
    # a recogniser says nothing at first, while its loss falls already
    known = f" WER has not fallen: {rates[-1][1]:.3f}." if rates else " It was not validated."
    return f"Training loss went from {before:.3g} to {after:.3g}.{known}"


def _phases(record: Record) -> str:
    changes = phase_changes(record)
    if not changes:
        return ""
    sparse = [start for phase, start, _ in changes if phase == "sparse"]
    if sparse:
        return f"It went sparse at step {sparse[0]}." if sparse[0] else "It was sparse throughout."
    settings = record.opening.get("settings") or {}
    if settings.get("method", record.config.get("method")) == "dense":
        return "The method was dense: nothing was to be saved."
    warmup = settings.get("warmup_steps", record.config.get("warmup_steps"))
    until = f" (warmup_steps is {warmup})" if warmup is not None else ""
    return f"It never reached the sparse phase{until}, so no bytes were saved."


def bytes_by_phase(record: Record) -> tuple[dict[str, Bytes], str]:
    """Bytes by phase and in all; of all ranks when the run finished, else of rank 0."""
    end = record.end or {}
    totals: dict[str, dict[str, Any]] = end.get("totals") or {}
    whose = "all ranks" if totals else "rank 0"
    if not totals:
        for entry in record.steps:
            sums = totals.setdefault(entry["phase"], {"bytes_sent": 0, "bytes_dense": 0})
            sums["bytes_sent"] += entry["bytes_sent"]
            sums["bytes_dense"] += entry["bytes_dense"]
    found = {name: Bytes(part["bytes_sent"], part["bytes_dense"]) for name, part in totals.items()}
    parts = list(found.values())
    found["whole"] = Bytes(sum(p.sent for p in parts), sum(p.dense for p in parts))
    return found, whose


def _tiles(record: Record) -> list[tuple[str, str, str]]:
    sent, whose = bytes_by_phase(record)
    whole = sent["whole"]
    validated = record.validated
    shown = []
    if validated:
        last = validated[-1]
        shown.append(("word error rate", f"{last['wer']:.3f}", f"after epoch {last['epoch']}"))
    if whole.dense:
        remark = f"{size(whole.sent)} instead of {size(whole.dense)}, {whose}"
        shown.append(("bytes, the whole run", str(whole), remark))
        sparse = sent.get("sparse", Bytes(0, 0))
        if sparse.dense:
            remark = f"{size(sparse.sent)} instead of {size(sparse.dense)}"
            shown.append(("bytes, the sparse phase", str(sparse), remark))
    shown.append(_time(record))
    skipped = sum(bool(entry.get("skipped")) for entry in record.steps)
    shown.append(("steps skipped", str(skipped), "for a NaN or Inf"))
    shown.append(("warnings", str(len(_warned(record))), "beside skipped steps"))
    return shown


def _time(record: Record) -> tuple[str, str, str]:
    """A step's median time, and the parts that took most of it."""
    entries = [entry for entry in settled(record) if entry.get("whole") is not None]
    if not entries:
        return ("a step", "-", "no times were recorded")
    whole = sum(entry["whole"] for entry in entries) or 1.0
    shares = {part: sum(e.get(part) or 0.0 for e in entries) / whole for part in PARTS}
    top = sorted(shares, key=lambda part: -shares[part])[:2]
    waits = shares["exposed"]
    text = ", ".join(f"{part} {shares[part]:.0%}" for part in top)
    if "exposed" not in top:
        text += f", waiting for the exchange {waits:.0%}"
    median = statistics.median(entry["whole"] for entry in entries)
    return ("a step of rank 0, median", f"{median * 1e3:.0f} ms", text)
