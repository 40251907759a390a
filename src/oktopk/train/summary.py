"""The end of a run in a few lines."""

from __future__ import annotations

from pathlib import Path

from oktopk.runlog.totals import Totals
from oktopk.train.validate import Validation
from oktopk.utils.units import clock, size


def summary(
    result: Validation | None, totals: Totals, seconds: float, folder: Path, workers: int
) -> str:
    """Error rates, bytes by phase against dense, time, and where everything is."""
    lines = [f"finished in {clock(seconds)}"]
    if result is None:
        lines.append("nothing was left to do: raise --epochs or --max-steps to go on")
    else:
        lines.append(
            f"WER {result.wer:.3f}, CER {result.cer:.3f}, validation loss {result.val_loss:.3f} "
            f"on {result.utterances} utterances"
        )
    lines.append(f"{'':12} {'steps':>6} {'ms/step':>8} {'sent':>10} {'as dense':>10} {'ratio':>7}")
    rows = {f"{phase} phase": sums for phase, sums in totals.items()}
    for name, sums in rows.items():
        lines.append(_row(name, sums.steps, sums.microseconds, sums.bytes_sent, sums.bytes_dense))
    whole = [
        sum(getattr(sums, name) for sums in totals.values())
        for name in ("steps", "microseconds", "bytes_sent", "bytes_dense")
    ]
    lines.append(_row("whole run", *whole))
    of = f"all {workers} workers" if workers > 1 else "the one worker"
    lines.append(f"bytes are those of {of}, headers included")
    skipped = sum(sums.skipped for sums in totals.values())
    if skipped:
        lines.append(f"{skipped} steps were skipped: a gradient was not finite")
    lines.append(f"run folder: {folder} (metrics.jsonl, tensorboard, checkpoints, config.toml)")
    lines.append(f"to look at it: {folder / 'report.html'}")
    return "\n".join(lines)


def _row(name: str, steps: int, microseconds: int, sent: int, dense: int) -> str:
    each = f"{microseconds / steps / 1e3:.0f}" if steps else "-"
    ratio = f"{dense / sent:.1f}x" if sent else "-"
    return f"{name:12} {steps:6} {each:>8} {size(sent):>10} {size(dense):>10} {ratio:>7}"
