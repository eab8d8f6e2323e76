"""Numbers with their uncertainty: intervals, paired comparisons, pass@k, pass^k, votes. Needs NumPy only.

Sources: Wilson (1927) score interval; Student's t (finite sums of Abramowitz & Stegun 26.7.3-4, exact for whole degrees
of freedom); percentile bootstrap (Efron); pass@k: Chen et al., arXiv 2107.03374; pass^k: Yao et al. (tau-bench), arXiv
2406.12045.

A trial that could not be run (an error) is never dropped silently: `pass_rates` gives both numbers, with coverage.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np

from forethought.errors import ConfigError, DataError

Numbers = Sequence[float] | np.ndarray
A = TypeVar("A", bound=Hashable)


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval; low and high are None where the data cannot say (one value)."""

    mean: float
    low: float | None
    high: float | None
    n: int
    conf: float = 0.95
    per_seed: tuple[float, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The form of results.json: mean, ci95: [low, high], n, and per_seed where there are seeds."""
        out: dict[str, Any] = {"mean": self.mean, f"ci{100 * self.conf:g}": [self.low, self.high], "n": self.n}
        return out if self.per_seed is None else out | {"per_seed": list(self.per_seed)}

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.4g} (n={self.n}, no interval)"
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}] (n={self.n})"


@dataclass(frozen=True)
class Difference:
    """Mean of a - b over pairs, its interval, and how often resampling gives the other sign (a tie counts half)."""

    mean: float
    low: float | None
    high: float | None
    n: int
    share_reversed: float | None
    conf: float = 0.95

    @property
    def clear(self) -> bool:
        """The interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


# -- intervals --
def wilson(k: int, n: int, conf: float = 0.95) -> Estimate:
    """Share k / n with the Wilson score interval.

    Raises:
        DataError: n < 1, or k not a whole number in [0, n]. ConfigError: conf outside (0, 1).
    """
    _check_conf(conf)
    if n < 1 or not 0 <= k <= n or k != int(k):
        raise DataError(f"k={k}, n={n}: give n of at least 1 and a whole number of successes in [0, n]")
    z = NormalDist().inv_cdf((1 + conf) / 2)
    p, shrink = k / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # The ends 0 and 1 are exact; do not let rounding move them.
    low = 0.0 if k == 0 else centre - half
    return Estimate(p, low, 1.0 if k == n else centre + half, n, conf)


def mean_ci(per_seed: Numbers, conf: float = 0.95) -> Estimate:
    """Mean over seeds with Student's t interval (no bounds for one seed).

    Raises:
        DataError: no seeds, or one is not finite. ConfigError: conf outside (0, 1).
    """
    _check_conf(conf)
    x = _finite(per_seed, "per_seed")
    mean, n = float(x.mean()), len(x)
    if n == 1:
        return Estimate(mean, None, None, n, conf, tuple(x.tolist()))
    half = t_quantile((1 + conf) / 2, n - 1) * float(x.std(ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n, conf, tuple(x.tolist()))


def t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t with `df` >= 1 (whole) degrees of freedom at probability p in [0.5, 1)."""
    if df < 1 or not 0.5 <= p < 1:
        raise ConfigError(f"p={p}, df={df}: give p in [0.5, 1) and at least one degree of freedom")
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, df) < 2 * p - 1 else (low, middle)
    return math.sqrt(df) * math.tan(low)


def _t_within(theta: float, df: int) -> float:
    """P(|T| < sqrt(df) * tan(theta))."""
    sin, cos = math.sin(theta), math.cos(theta)
    if df % 2 == 0:
        term = total = 1.0
        for i in range(1, df // 2):
            term *= (2 * i - 1) / (2 * i) * cos * cos
            total += term
        return sin * total
    if df == 1:
        return 2 * theta / math.pi
    term = total = cos
    for i in range(1, (df - 1) // 2):
        term *= (2 * i) / (2 * i + 1) * cos * cos
        total += term
    return 2 / math.pi * (theta + sin * total)


def bootstrap_ci(
    values: Numbers,
    *,
    statistic: Callable[[np.ndarray], float] | None = None,
    conf: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """Percentile bootstrap interval of the mean, or of `statistic` (sample [n] -> number).

    Resample what is independent: problems (give their means), not the samples of one problem.

    Raises:
        DataError: no values, or one is not finite. ConfigError: conf or resamples outside their range.
    """
    _check_conf(conf, resamples)
    x = _finite(values, "values")
    centre = float(x.mean()) if statistic is None else float(statistic(x))
    if len(x) == 1:
        return Estimate(centre, None, None, 1, conf)
    drawn = _resample(x, resamples, seed, statistic)
    low, high = np.quantile(drawn, [(1 - conf) / 2, (1 + conf) / 2])
    return Estimate(centre, float(low), float(high), len(x), conf)


def paired_bootstrap(
    a: Numbers, b: Numbers, *, conf: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Difference:
    """a - b on the same problems, position by position; pairs are resampled together.

    Raises:
        DataError: lengths differ, no pairs, or something is not finite. ConfigError: conf or resamples.
    """
    _check_conf(conf, resamples)
    x, y = _finite(a, "a"), _finite(b, "b")
    if len(x) != len(y):
        raise DataError(f"a has {len(x)} values, b has {len(y)}: pairs need one of each per problem")
    d = x - y
    mean = float(d.mean())
    if len(d) == 1:
        return Difference(mean, None, None, 1, None, conf)
    drawn = _resample(d, resamples, seed, None)
    low, high = np.quantile(drawn, [(1 - conf) / 2, (1 + conf) / 2])
    other = (drawn < 0) if mean >= 0 else (drawn > 0)
    share = float(other.mean() + (drawn == 0).mean() / 2)
    return Difference(mean, float(low), float(high), len(d), share, conf)


def _resample(x: np.ndarray, resamples: int, seed: int, statistic: Callable[[np.ndarray], float] | None) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = np.empty(resamples)
    block = max(1, 2_000_000 // len(x))  # bounds the memory of the index table
    for start in range(0, resamples, block):
        rows = x[rng.integers(len(x), size=(min(block, resamples - start), len(x)))]
        out[start : start + len(rows)] = rows.mean(1) if statistic is None else [statistic(row) for row in rows]
    return out


# -- several samples of one problem --
def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that at least one of k samples is right, from c right ones among n: 1 - C(n-c, k) / C(n, k).

    Raises:
        DataError: k > n, or c outside [0, n].
    """
    _check_counts(n, c, k)
    return float(1 - Fraction(math.comb(n - c, k), math.comb(n, k)))


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that all k samples are right (pass^k), from c right ones among n: C(c, k) / C(n, k).

    Raises:
        DataError: k > n, or c outside [0, n].
    """
    _check_counts(n, c, k)
    return float(Fraction(math.comb(c, k), math.comb(n, k)))


@dataclass(frozen=True)
class PassRates:
    """A pass rate over tasks, twice: with errors as failures, and with errors left out (None where nothing is left).

    The second stands for `tasks_evaluated` of `tasks` and `trials_evaluated` of `trials` only; `not_evaluated` names
    the tasks that have fewer than k trials without an error.
    """

    k: int
    errors_as_failures: float
    errors_left_out: float | None
    tasks: int
    tasks_evaluated: int
    trials: int
    trials_evaluated: int
    not_evaluated: tuple[str, ...]

    def __str__(self) -> str:
        if self.errors_left_out is None:
            return f"{self.errors_as_failures:.4g}; nothing evaluated ({self.trials} trials, all errors or too few)"
        return (
            f"{self.errors_as_failures:.4g} with errors as failures; {self.errors_left_out:.4g} without them over "
            f"{self.tasks_evaluated} of {self.tasks} tasks and {self.trials_evaluated} of {self.trials} trials"
        )


def pass_rates(
    trials: Mapping[str, Sequence[bool | None]], k: int, measure: Callable[[int, int, int], float] = pass_hat_k
) -> PassRates:
    """`pass_hat_k` or `pass_at_k` per task, averaged over tasks; a trial is True, False, or None for an error.

    Raises:
        DataError: no tasks, or a task with fewer than k trials.
    """
    if not trials:
        raise DataError("no tasks: a pass rate needs at least one")
    for task, results in trials.items():
        if len(results) < k:
            raise DataError(f"task {task!r} has {len(results)} trials: pass rates at k={k} need at least {k} each")
    strict = [measure(len(r), sum(x is True for x in r), k) for r in trials.values()]
    valid = {task: [x for x in results if x is not None] for task, results in trials.items()}
    enough = {task: results for task, results in valid.items() if len(results) >= k}
    loose = [measure(len(r), sum(r), k) for r in enough.values()]
    return PassRates(
        k=k,
        errors_as_failures=sum(strict) / len(strict),
        errors_left_out=sum(loose) / len(loose) if loose else None,
        tasks=len(trials),
        tasks_evaluated=len(enough),
        trials=sum(map(len, trials.values())),
        trials_evaluated=sum(map(len, valid.values())),
        not_evaluated=tuple(task for task in trials if task not in enough),
    )


def avg_at_k(scores: Mapping[str, Sequence[float]], k: int) -> float:
    """Mean over problems of the mean score of their k samples.

    Raises:
        DataError: no problems, a problem without exactly k samples, a score that is not finite.
    """
    if not scores:
        raise DataError("no problems: avg@k needs at least one")
    for task, values in scores.items():
        if len(values) != k:
            raise DataError(f"problem {task!r} has {len(values)} samples: avg@{k} needs exactly {k} of each problem")
    return float(np.mean([_finite(values, f"scores of {task!r}").mean() for task, values in scores.items()]))


def majority_vote(answers: Sequence[A | None], *, seed: int | None = None) -> A | None:
    """The most frequent answer; None (no answer found) does not vote, and is returned where nobody votes.

    Ties go to the answer that was seen first, or with `seed` to one of the tied answers by lot.
    """
    votes = Counter(a for a in answers if a is not None)  # keeps the order of first sight
    if not votes:
        return None
    most = max(votes.values())
    tied = [a for a, count in votes.items() if count == most]
    return tied[0] if seed is None else random.Random(seed).choice(tied)


# -- checks --
def _check_conf(conf: float, resamples: int = 1) -> None:
    if not 0 < conf < 1:
        raise ConfigError(f"conf={conf}: give a number between 0 and 1, such as 0.95")
    if resamples < 1:
        raise ConfigError(f"resamples={resamples}: give at least 1")


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise DataError(f"c={c} right of n={n}: give 0 <= c <= n")
    if not 1 <= k <= n:
        raise DataError(f"k={k} with n={n} samples: k must lie in [1, n]; draw more samples or lower k")


def _finite(values: Numbers, name: str) -> np.ndarray:
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or not len(x):
        raise DataError(f"{name} has shape {x.shape}: give at least one number, in one dimension")
    bad = np.flatnonzero(~np.isfinite(x))
    if len(bad):
        raise DataError(f"{name}[{bad[0]}] is {x[bad[0]]}: give finite numbers; count what failed apart")
    return x
