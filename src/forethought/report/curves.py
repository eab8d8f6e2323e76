"""Metric lines -> curves: mean over seeds with an interval, thinned to what a page can show.

The interval is Student's t, 95%, of the mean over seeds at each step; there is none with one seed. Student's quantile
beyond 10 degrees of freedom is Fisher's expansion (Abramowitz and Stegun 26.7.5), which is right to 3 digits there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forethought.report.text import number

RESERVED = ("step", "arm", "seed", "nonfinite")
"""Keys of a metrics line that are no metric."""

_T975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_FIRST = (
    "eval/accuracy",
    "accuracy",
    "reward/mean",
    "reward/std",
    "frac_reward_zero_std",
    "entropy",
    "kl",
    "completions/mean_length",
    "completions/clipped_ratio",
    "logprob_gap/mean",
    "logprob_gap/max",
    "loss",
    "grad_norm",
)


@dataclass(frozen=True)
class Curve:
    """One metric of one arm. [S] each; lo and hi are None where fewer than two seeds have a value."""

    steps: list[int]
    mean: list[float]
    lo: list[float | None]
    hi: list[float | None]
    seeds: int

    def take(self, places: Sequence[int]) -> Curve:
        def pick(column: list) -> list:
            return [column[i] for i in places]

        return Curve(pick(self.steps), pick(self.mean), pick(self.lo), pick(self.hi), self.seeds)


def t975(df: int) -> float:
    """97.5% quantile of Student's t."""
    if df <= len(_T975):
        return _T975[df - 1]
    z = 1.959964
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2) + third


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """95% t interval of the mean; (None, None) for fewer than two values."""
    n = len(values)
    if n < 2:
        return None, None
    mean = _mean(values)
    half = t975(n - 1) * math.sqrt(sum((v - mean) * (v - mean) for v in values) / (n - 1) / n)
    return (mean - half, mean + half) if math.isfinite(half) else (None, None)


def _mean(values: Sequence[float]) -> float:
    return sum(v / len(values) for v in values)  # divided first: a sum of huge values would overflow


def curves(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Curve]]:
    """{metric: {arm: Curve}}, the metrics that people look at first in front.

    A step that stands twice for the same arm and seed (written again by a resumed run) counts once, as it stands last.
    """
    found: dict[str, dict[str, dict[int, dict[Any, float]]]] = {}
    arms: dict[str, None] = {}
    for line in lines:
        step, arm, seed = line["step"], str(line.get("arm") or ""), line.get("seed", 0)
        arms.setdefault(arm)
        for name, value in line.items():
            value = number(value)
            if name not in RESERVED and value is not None:
                found.setdefault(name, {}).setdefault(arm, {}).setdefault(step, {})[str(seed)] = value
    out: dict[str, dict[str, Curve]] = {}
    for name in sorted(found, key=_order):
        out[name] = {arm: _curve(found[name][arm]) for arm in arms if arm in found[name]}
    return out


def _order(name: str) -> tuple[int, int, str]:
    if name in _FIRST:
        return 0, _FIRST.index(name), name
    group = 3 if name.startswith("time/") else 1 if name.startswith(("eval", "reward", "heldout", "train")) else 2
    return group, 0, name


def _curve(at: dict[int, dict[Any, float]]) -> Curve:
    steps = sorted(at)
    values = [list(at[s].values()) for s in steps]
    bands = [interval(v) for v in values]
    return Curve(
        steps,
        [_mean(v) for v in values],
        [lo for lo, _ in bands],
        [hi for _, hi in bands],
        max(len(v) for v in values),
    )


def thin(values: Sequence[float], limit: int) -> list[int]:
    """At most `limit` (at least 4) places of a curve that keep its look: first, last, and each stretch's extremes."""
    n, limit = len(values), max(4, limit)
    if n <= limit:
        return list(range(n))
    stretches = (limit - 2) // 2
    keep = {0, n - 1}
    for k in range(stretches):
        part = range(k * n // stretches, (k + 1) * n // stretches)
        keep |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(keep)


def thin_all(found: dict[str, dict[str, Curve]], budget: int = 24_000, most: int = 160) -> dict[str, dict[str, Curve]]:
    """All curves with about `budget` points together, at most `most` each, none below 24."""
    count = sum(len(arms) for arms in found.values())
    limit = max(24, min(most, budget // max(1, count)))
    return {
        name: {arm: curve.take(thin(curve.mean, limit)) for arm, curve in arms.items()} for name, arms in found.items()
    }


def from_results(value: Any) -> dict[str, dict[str, Curve]]:
    """Curves in results.json: {metric: {arm: {"step": [...], "mean": [...], "lo": [...], "hi": [...]}}}.

    lo and hi may be left out. Entries of another shape are left out.
    """
    out: dict[str, dict[str, Curve]] = {}
    for name, arms in value.items() if isinstance(value, dict) else ():
        for arm, columns in arms.items() if isinstance(arms, dict) else ():
            if not isinstance(columns, dict) or not isinstance(columns.get("step"), list):
                continue
            width = len(columns["step"])
            blank = [None] * width
            lists = [columns["step"], *(columns.get(k) or blank for k in ("mean", "lo", "hi"))]
            if any(not isinstance(c, list) or len(c) != width for c in lists):
                continue
            rows = [tuple(map(number, row)) for row in zip(*lists, strict=True)]
            rows = sorted((r for r in rows if r[0] is not None and r[1] is not None), key=lambda r: r[0] or 0)
            if rows:
                steps, mean, lo, hi = map(list, zip(*rows, strict=True))
                out.setdefault(name, {})[arm] = Curve(steps, mean, lo, hi, 1)  # type: ignore[arg-type]
    return out
