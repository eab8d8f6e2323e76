"""The rules of a search, each a small setting: which child to follow, how wide a node may grow, how values go up.

Selection: UCT (Kocsis and Szepesvari 2006; AlphaLLM, arXiv 2404.12253) and PUCT (AlphaZero, arXiv 1712.01815; MuZero,
arXiv 1911.08265; R-MCTS, arXiv 2410.02052). Width: fixed, progressive, and AlphaLLM's importance in the paper's form and
in that of its code. Backup: mean, max, softmax. All work on many nodes at once: rows of a `Forest`.

Departure: a count that a formula takes the logarithm of is looked up in a table made by `math.log`, so that results are
the same number on every machine and equal those of a scalar implementation.

Shapes: P nodes, A edges a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from forethought.errors import ConfigError

if TYPE_CHECKING:
    from forethought.search.forest import Forest

Count = Literal["node", "edges"]
Normalise = Literal["none", "siblings", "tree"]
TINY = 1e-8


class Table:
    """f(0), f(1), ... for whole numbers, computed once by a scalar function."""

    def __init__(self, function: Callable[[int], float]):
        self._function = function
        self._values = np.array([function(n) for n in range(64)])

    def __call__(self, counts: np.ndarray) -> np.ndarray:
        where = counts.astype(np.int64)
        most = int(where.max(initial=0))
        if most >= len(self._values):
            more = range(len(self._values), max(most + 1, 2 * len(self._values)))
            self._values = np.concatenate([self._values, [self._function(n) for n in more]])
        return self._values.take(where)


_log = Table(lambda n: math.log(n) if n else 0.0)


def check_number(name: str, value: float, *, least: float = -math.inf, above: float = -math.inf) -> None:
    """A setting that must be a finite number of at least `least` and more than `above`.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, int | float) or not math.isfinite(value) or value < least or not value > above:
        bound = f" above {above:g}" if above > -math.inf else f" of at least {least:g}" if least > -math.inf else ""
        raise ConfigError(f"{name}={value!r}: give a finite number{bound}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: give one of {', '.join(map(repr, choices))}")


@dataclass(frozen=True, kw_only=True)
class UCT:
    """Q + c * sqrt(factor * ln N / n); a child without a visit comes first, in order.

    factor: 2 in the paper of AlphaLLM, 1 in its code and in many libraries. count: N is the node's visits, or the sum
    of its edges' (they differ where a node's own evaluation counts as a visit). normalise: see `PUCT`.
    """

    c: float = 1.0
    factor: float = 2.0
    count: Count = "node"
    normalise: Normalise = "none"

    def __post_init__(self):
        check_number("c", self.c, least=0)
        check_number("factor", self.factor, above=0)
        _check_choice("count", self.count, ("node", "edges"))
        _check_choice("normalise", self.normalise, ("none", "siblings", "tree"))

    @property
    def local(self) -> bool:
        return self.normalise != "tree"

    def scores(self, forest: Forest, rows: np.ndarray) -> np.ndarray:
        """[P, A]"""
        n = forest.counted(rows)
        q = normalised(forest, rows, self.normalise, math.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            bonus = np.sqrt((self.factor * _log(forest.total_visits(rows, self.count)))[:, None] / n)
        bonus *= self.c
        bonus[n == 0] = 0.0  # inf or NaN: q is infinite there
        return q + bonus


@dataclass(frozen=True, kw_only=True)
class PUCT:
    """Q + c(N) * prior * sqrt(N) / (1 + n), with sqrt(N) read as 1 at N = 0, so that the prior decides the first visit.

    c_base: None keeps c constant (R-MCTS); else c(N) = c + ln((N + c_base + 1) / c_base) (MuZero). count: see `UCT`.
    unvisited: Q of an edge without a visit: a number, "parent" (the node's value) or "lowest" (the least of the node's
    value and its visited children). normalise: Q is mapped to [0, 1] by the node's value and its visited children
    ("siblings") or by all values seen in the tree so far ("tree"); a number given as `unvisited` is not mapped.
    """

    c: float = 1.0
    c_base: float | None = None
    count: Count = "edges"
    unvisited: float | Literal["parent", "lowest"] = 0.0
    normalise: Normalise = "none"

    def __post_init__(self):
        check_number("c", self.c, least=0)
        if self.c_base is not None:
            check_number("c_base", self.c_base, above=0)
        _check_choice("count", self.count, ("node", "edges"))
        _check_choice("normalise", self.normalise, ("none", "siblings", "tree"))
        if isinstance(self.unvisited, str):
            _check_choice("unvisited", self.unvisited, ("parent", "lowest"))
        else:
            check_number("unvisited", self.unvisited)
        object.__setattr__(self, "_weight", Table(self._exploration))

    def weight(self, counts: np.ndarray) -> np.ndarray:
        """c(N) * sqrt(N) of node counts."""
        return self._weight(counts)  # type: ignore[attr-defined]

    def _exploration(self, n: int) -> float:
        c = self.c if self.c_base is None else self.c + math.log((n + self.c_base + 1) / self.c_base)
        return c * math.sqrt(max(n, 1))

    @property
    def local(self) -> bool:
        return self.normalise != "tree"

    def scores(self, forest: Forest, rows: np.ndarray) -> np.ndarray:
        """[P, A]"""
        bonus = self.weight(forest.total_visits(rows, self.count))[:, None] * forest.prior[rows]
        bonus /= 1.0 + forest.counted(rows)
        bonus += normalised(forest, rows, self.normalise, self.unvisited)
        return bonus


def normalised(
    forest: Forest, rows: np.ndarray, how: Normalise, unvisited: float | Literal["parent", "lowest"]
) -> np.ndarray:
    """Q [P, A] of all edges, those without a visit by `unvisited`, on the scale that `how` says."""
    q, seen = forest.q_and_seen(rows)
    if how == "none" and not isinstance(unvisited, str):
        return np.where(seen, q, unvisited)
    value = forest.value_of(rows)[:, None]
    low = np.minimum(value, np.where(seen, q, np.inf).min(1, keepdims=True))
    if how == "siblings":
        high = np.maximum(value, np.where(seen, q, -np.inf).max(1, keepdims=True))
        scale = np.maximum(high - low, TINY)
        offset = low
    elif how == "tree":
        tree = rows // forest.capacity
        lowest, highest = forest.lowest[tree], forest.highest[tree]
        wide = highest > lowest
        offset = np.where(wide, lowest, 0.0)[:, None]
        scale = np.where(wide, highest - lowest, 1.0)[:, None]
    else:
        offset, scale = 0.0, 1.0
    rest = {"parent": value, "lowest": low}.get(unvisited) if isinstance(unvisited, str) else None
    if rest is None:
        return np.where(seen, (q - offset) / scale, unvisited)
    return (np.where(seen, q, rest) - offset) / scale


# -- width: how many edges a node may have now -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FixedWidth:
    """k edges a node; `root` of them at the root (None: also k)."""

    k: int = 5
    root: int | None = None

    def __post_init__(self):
        check_number("width", self.k, least=1)
        if self.root is not None:
            check_number("root width", self.root, least=1)

    def __call__(self, forest: Forest, rows: np.ndarray) -> np.ndarray:
        return np.where(forest.depth[rows] == 0, self.root or self.k, self.k)


@dataclass(frozen=True, kw_only=True)
class ProgressiveWidth:
    """max(least, ceil(factor * N^power)) edges, at most `most`: wider as the node is visited more (Coulom 2007)."""

    factor: float = 1.0
    power: float = 0.5
    least: int = 1
    most: int = 64

    def __post_init__(self):
        check_number("factor", self.factor, above=0)
        check_number("power", self.power, above=0)
        check_number("least", self.least, least=1)
        check_number("most", self.most, least=self.least)
        object.__setattr__(self, "_width", Table(lambda n: math.ceil(self.factor * n**self.power)))

    def __call__(self, forest: Forest, rows: np.ndarray) -> np.ndarray:
        return np.clip(self._width(forest.visits[rows]), self.least, self.most)  # type: ignore[attr-defined]


def importance_width(importance: np.ndarray, alpha: float, least: np.ndarray | int, most: np.ndarray | int):
    """max(least, min(floor(alpha * importance) + 1, most)): AlphaLLM's n(s)."""
    return np.maximum(least, np.minimum(np.floor(alpha * importance) + 1, most))


@dataclass(frozen=True, kw_only=True)
class ImportanceWidth:
    """AlphaLLM's adaptive branching, as in the paper: importance is the largest |v(child) - v(node)|.

    `column` names what v is: a critic's part such as "value" where several are combined, or "raw", the whole
    evaluation. A missing v counts as no difference.
    """

    alpha: float = 1.0
    least: int = 2
    most: int = 10
    root_least: int = 10
    root_most: int = 60
    column: str = "raw"

    def __post_init__(self):
        check_number("alpha", self.alpha, least=0)
        for name in ("least", "root_least"):
            check_number(f"{name} width", getattr(self, name), least=1)
        check_number("most width", self.most, least=self.least)
        check_number("root_most width", self.root_most, least=self.root_least)

    def importance(self, forest: Forest, rows: np.ndarray) -> np.ndarray:
        """[P], 0 without children."""
        own = forest.node_column(self.column)
        child = forest.child[rows]
        there = child >= 0
        below = np.where(there, own[(rows // forest.capacity * forest.capacity)[:, None] + np.maximum(child, 0)], 0.0)
        gap = np.abs(below - own[rows][:, None])
        return np.where(there & np.isfinite(gap), gap, 0.0).max(1, initial=0.0)

    def __call__(self, forest: Forest, rows: np.ndarray) -> np.ndarray:
        root = forest.depth[rows] == 0
        least, most = np.where(root, self.root_least, self.least), np.where(root, self.root_most, self.most)
        return importance_width(self.importance(forest, rows), self.alpha, least, most).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class SpreadWidth:
    """AlphaLLM's adaptive branching as in its code: D is the largest |Q_i - mean Q| over the children's mean returns;
    min(int(factor * D), most), never less than before. Starts with `root` edges at the root, `first` elsewhere, 1
    below depth `deep`."""

    factor: float = 2.0
    most: int = 10
    root: int = 40
    first: int = 3
    deep: int = 10

    def __post_init__(self):
        check_number("factor", self.factor, least=0)
        for name in ("most", "root", "first"):
            check_number(f"{name} width", getattr(self, name), least=1)
        check_number("deep", self.deep, least=0)

    def __call__(self, forest: Forest, rows: np.ndarray) -> np.ndarray:
        depth = forest.depth[rows]
        start = np.where(depth == 0, self.root, np.where(depth > self.deep, 1, self.first))
        seen = forest.n[rows] > 0
        count = np.maximum(seen.sum(1), 1)
        mean = np.where(seen, forest.q[rows], 0.0).sum(1) / count
        spread = np.where(seen, np.abs(forest.q[rows] - mean[:, None]), 0.0).max(1, initial=0.0)
        grown = np.minimum((self.factor * spread).astype(np.int64), self.most)
        return np.maximum(np.maximum(start, forest.allowed[rows]), grown)


# -- backup: the value of a node from its edges ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MeanBackup:
    """Q is the mean of all returns that went up the edge."""


@dataclass(frozen=True, kw_only=True)
class MaxBackup:
    """A node is worth its best visited edge (its own evaluation until it has one)."""

    def value(self, q: np.ndarray, seen: np.ndarray, prior: np.ndarray) -> np.ndarray:
        """[P] from Q [P, A]; -inf where no edge was visited."""
        return np.where(seen, q, -np.inf).max(1, initial=-np.inf)


@dataclass(frozen=True, kw_only=True)
class SoftBackup:
    """temperature * ln sum of prior * exp(Q / temperature) over the visited edges, priors made to sum to 1 over them.

    Between the prior-weighted mean (hot) and the best edge (cold); the value of maximum-entropy search (Xiao et al.
    2019) without the reward for having many edges.
    """

    temperature: float = 0.1

    def __post_init__(self):
        check_number("temperature", self.temperature, above=0)

    def value(self, q: np.ndarray, seen: np.ndarray, prior: np.ndarray) -> np.ndarray:
        """[P] from Q and prior [P, A]; -inf where no edge was visited."""
        top = np.where(seen, q, -np.inf).max(1, initial=-np.inf)
        weight = np.where(seen, np.maximum(prior, 0.0), 0.0)
        blank = seen & (weight.sum(1) == 0)[:, None]
        weight = np.where(blank, 1.0, weight)
        safe = np.where(np.isfinite(top), top, 0.0)[:, None]
        powers = np.where(seen, weight * np.exp(np.minimum(q - safe, 0.0) / self.temperature), 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return top + self.temperature * np.log(powers.sum(1) / weight.sum(1))


Selection = UCT | PUCT
Width = FixedWidth | ProgressiveWidth | ImportanceWidth | SpreadWidth
Backup = MeanBackup | MaxBackup | SoftBackup


# -- the decision at the root ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Dirichlet noise on the root's priors: (1 - share) * prior + share * Dirichlet(alpha)."""

    alpha: float = 0.3
    share: float = 0.25

    def __post_init__(self):
        check_number("alpha", self.alpha, above=0)
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share={self.share!r}: give a number from 0 to 1")

    def mix(self, prior: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return (1 - self.share) * prior + self.share * rng.dirichlet(np.full(len(prior), self.alpha))


Decision = Literal["visits", "robust", "value", "sample"]


def decide(
    visits: np.ndarray,
    q: np.ndarray,
    rule: Decision = "robust",
    *,
    temperature: float = 1.0,
    rng: np.random.Generator | None = None,
) -> int:
    """The edge to take after a search, [A] visits and values -> its index.

    Args:
        rule: "visits" the most visited (ties: the first), "robust" the most visited, then the higher value, "value"
            the highest value among the visited (ties: more visits), "sample" by visits^(1 / temperature).

    Raises:
        ConfigError: an unknown rule, no visited edge, temperature not positive, "sample" without an rng.
    """
    _check_choice("decision", rule, ("visits", "robust", "value", "sample"))
    visits = np.asarray(visits, np.float64)
    if not visits.sum():
        raise ConfigError("decide: no edge was visited; give the search a budget of at least 1")
    if rule == "sample":
        check_number("temperature", temperature, above=0)
        if rng is None:
            raise ConfigError("decide: 'sample' needs rng, a numpy Generator")
        weights = np.zeros(len(visits))
        seen = visits > 0
        logs = np.log(visits[seen]) / temperature
        weights[seen] = np.exp(logs - logs.max())
        return int(rng.choice(len(visits), p=weights / weights.sum()))
    q = np.where(visits > 0, q, -np.inf)
    first, second = {"visits": (visits, None), "robust": (visits, q), "value": (q, visits)}[rule]
    best = np.flatnonzero(first == first.max())
    return int(best[0] if second is None else best[np.argmax(second[best])])
