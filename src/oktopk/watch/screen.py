"""What `oktopk watch` shows: one panel of a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from oktopk.runlog.reader import OVERLAPPED, PARTS, TIMES
from oktopk.utils.units import clock, size
from oktopk.watch.state import Seen

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 32
SILENT = 120.0
"""Seconds without a word after which it may be dead: validation takes a while too."""
COLOURS = {"finished": "green", "running": "cyan", "stopped": "yellow", "failed": "red"}
SHOWN_WARNINGS = 3


def screen(seen: Seen, name: str, quiet: float, others: str = "") -> RenderableType:
    """The panel; `quiet` is seconds since the journal last grew, `others` the runs there are."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows(seen, quiet):
        grid.add_row(label, Text(text))
    if others:
        grid.add_row("", Text(others))
    return Panel(grid, title=Text(name), border_style=COLOURS.get(status(seen, quiet), "yellow"))


def line(seen: Seen, quiet: float, others: str = "") -> str:
    """The same in a line, for a log."""
    if not seen.steps:
        return "; ".join(filter(None, (_status_line(seen, quiet), others)))
    total = seen.opening.get("total_steps")
    parts = [status(seen, quiet), f"step {seen.steps}" + (f" of {total}" if total else "")]
    parts.append(f"{seen.last['phase']} phase")
    parts += [f"loss {seen.losses[-1]:.3f}"] if seen.losses else []
    parts += [f"WER {seen.validated[-1]['wer']:.3f}"] if seen.validated else []
    parts += [f"about {clock(_seconds_left(seen, total))} left"] if total else []
    return ", ".join(parts)


def rows(seen: Seen, quiet: float) -> list[tuple[str, str]]:
    """Label and text of every line that has something to say."""
    found = [("status", _status_line(seen, quiet))]
    for label, part in LINES.items():
        text = part(seen)
        if text:
            found.append((label, text))
    found += [("warning", text) for text in seen.warnings[-SHOWN_WARNINGS:]]
    more = len(seen.warnings) - SHOWN_WARNINGS
    return [*found, ("", f"and {more} warnings before")] if more > 0 else found


def status(seen: Seen, quiet: float) -> str:
    """One word for the run."""
    if seen.end is not None:
        return seen.end["how"]
    if not seen.opening and not seen.steps:
        return "waiting"
    return "silent" if quiet > SILENT else "running"


def _status_line(seen: Seen, quiet: float) -> str:
    word = status(seen, quiet)
    if word == "waiting":
        return "waiting for the run to begin"
    if word == "silent":
        advice = " `oktopk train --resume` goes on" if seen.resumable else ""
        return f"no news for {clock(quiet)}: is it still there?{advice}"
    if seen.end is not None:
        return ": ".join(filter(None, (word, seen.end.get("text"))))
    settings, workers = seen.opening.get("settings") or {}, seen.opening.get("size")
    kind, density = settings.get("method") or "", settings.get("density")
    kind += f" at density {density:g}" if kind != "dense" and density is not None else ""
    ranks = f"{workers} worker{'s' * (workers != 1)}" if workers else ""
    return ", ".join(filter(None, (word, kind.strip(), ranks)))


def _progress(seen: Seen) -> str:
    if not seen.steps:
        return ""
    total = seen.opening.get("total_steps")
    if not total:
        return f"step {seen.steps}, {seen.last['phase']} phase"
    share = min(1.0, seen.steps / total)
    full = round(share * WIDTH)
    text = f"{'█' * full}{'░' * (WIDTH - full)} {share:.0%}, step {seen.steps} of {total}, "
    text += f"{seen.last['phase']} phase"
    return text if seen.end else f"{text}, about {clock(_seconds_left(seen, total))} left"


def _seconds_left(seen: Seen, total: int) -> float:
    """Of steps; validations come on top."""
    per_step = sum(entry.get("whole") or 0.0 for entry in seen.recent) / len(seen.recent)
    return per_step * max(0, total - seen.steps)


def _loss(seen: Seen) -> str:
    if not seen.losses:
        return ""
    skipped = f", {seen.skipped} steps skipped" if seen.skipped else ""
    return f"{sparkline(seen.losses)} {seen.losses[-1]:.3f}{skipped}"


def _wer(seen: Seen) -> str:
    if not seen.validated:
        return ""
    last = seen.validated[-1]
    shown = {"CER": last.get("cer"), "validation loss": last.get("val_loss")}
    rest = ", ".join(f"{k} {'-' if v is None else f'{v:.3f}'}" for k, v in shown.items())
    return (
        f"{sparkline([entry['wer'] for entry in seen.validated])} {last['wer']:.3f}, "
        f"{rest} after epoch {last['epoch']}"
    )


def _traffic(seen: Seen) -> str:
    sent, dense = sum(seen.sent.values()), sum(seen.as_dense.values())
    if not dense or not sent:
        return ""
    text = f"{size(sent)} by worker 0 for {size(dense)} dense, {1 - sent / dense:.0%} saved"
    if seen.sent["sparse"]:
        text += f"; sparse phase {seen.as_dense['sparse'] / seen.sent['sparse']:.1f}x less"
    return text


def _time(seen: Seen) -> str:
    """Where the last steps' time went."""
    if not seen.recent:
        return ""
    means = {
        part: sum(entry.get(part) or 0.0 for entry in seen.recent) / len(seen.recent)
        for part in TIMES
    }
    if not means["whole"]:
        return ""
    shares = ", ".join(f"{part} {means[part] / means['whole']:.0%}" for part in PARTS)
    hidden = ", ".join(f"{part} {means[part] * 1e3:.0f}" for part in OVERLAPPED)
    return f"{means['whole'] * 1e3:.0f} ms a step: {shares}\nmeanwhile, in ms: {hidden}"


LINES = {"progress": _progress, "loss": _loss, "WER": _wer, "sent": _traffic, "time": _time}


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """The values in so many blocks at most, each the mean of its share of them."""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    low, high = min(values), max(values)
    steps = len(BLOCKS) - 1
    return "".join(
        BLOCKS[round((value - low) / (high - low) * steps) if high > low else 0] for value in values
    )
