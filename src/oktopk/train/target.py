# SPDX-License-Identifier: Apache-2.0
"""The target of a run, as in `--until "wer<0.3"`: the run ends when a metric has reached it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oktopk.train.tasks.base import Metric
from oktopk.utils.flags import did_you_mean

ALIASES = {"loss": "val_loss"}


@dataclass(frozen=True, slots=True)
class Target:
    """A value of a metric that is good enough."""

    metric: Metric
    value: float

    def __str__(self) -> str:
        sign = ">=" if self.metric.higher_is_better else "<="
        return f"{self.metric.label} {sign} {self.value:g}"

    def is_reached(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether these metrics of a validation are as good as the target."""
        found = metrics.get(self.metric.name)
        if found is None or math.isnan(found):
            return False
        return found >= self.value if self.metric.higher_is_better else found <= self.value


def parse_target(text: str, metrics: Sequence[Metric]) -> Target:
    """The target of a text such as `wer<0.3`, `accuracy>0.9` or `loss=1.88`. ValueError if wrong.

    Which side of the value is better depends on the metric; `=` leaves that to it.
    """
    found = re.fullmatch(r"\s*(\w+)\s*(<=|>=|==|<|>|=)\s*(\S+)\s*", text)
    if found is None:
        sign = ">" if metrics[0].higher_is_better else "<"
        example = f"{metrics[0].name}{sign}0.3"
        raise ValueError(f"until must be a metric and a value, as in '{example}', got {text!r}")
    name, sign, number = found.groups()
    names = {metric.name: metric for metric in metrics}
    metric = names.get(name) or names.get(ALIASES.get(name, ""))
    if metric is None:
        aliases = [alias for alias, real in ALIASES.items() if real in names]
        hint = did_you_mean(name, [*names, *aliases])
        raise ValueError(
            f"until: this task has no metric {name!r}; it has {', '.join(names)}{hint}"
        )
    wrong = "<" if metric.higher_is_better else ">"
    if sign.startswith(wrong):
        better, right = ("higher", ">") if metric.higher_is_better else ("lower", "<")
        raise ValueError(
            f"until: {name} is better when it is {better}: write '{name}{right}{number}'"
        )
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"until: {number!r} is not a finite number, in {text!r}")
    _refuse_unreachable(metric, value, f"{name}{sign}{number}")
    return Target(metric, value)


def _refuse_unreachable(metric: Metric, value: float, text: str) -> None:
    if metric.best is None:
        return
    beyond = value - metric.best if metric.higher_is_better else metric.best - value
    excluded = beyond == 0 and re.search("[<>](?!=)", text) is not None
    if beyond > 0 or excluded:
        hint = f": write '{metric.name}={metric.best:g}' for the best there is" if excluded else ""
        raise ValueError(
            f"until: {metric.name} cannot be better than {metric.best:g}, got {text!r}{hint}"
        )
