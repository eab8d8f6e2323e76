"""Compiled rounds of search (numba, optional: the extra `fast`): the same numbers as `forest`'s, bit for bit.

They carry what array models need most: one leaf a round, mean backup, rules that look at one node alone, all edges
listed at once. Everything else takes the NumPy path. Worth having because a round of array operations over 64 short
rows is all overhead: the compiled one is about five times faster, and the first call costs some seconds of compiling.
"""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING

import numpy as np

from forethought.search.rules import PUCT, UCT, MeanBackup, _log

if TYPE_CHECKING:
    from forethought.search.forest import Forest

_NORMALISE = {"none": 0, "siblings": 1}


def available() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def carries(forest: Forest) -> bool:
    """Whether the compiled rounds cover the rules of this forest."""
    rule = forest.select_rule
    plain = type(rule) in (UCT, PUCT) and rule.normalise in _NORMALISE
    return plain and isinstance(forest.backup_rule, MeanBackup) and forest.width_rule is None


class Rounds:
    """Compiled descent and settlement for one forest.

    Args:
        forest: whose rules `carries` accepts.
    """

    def __init__(self, forest: Forest):
        rule = forest.select_rule
        from forethought.search import _compiled

        self._code = _compiled
        self.forest = forest
        self._table = np.zeros(0)
        puct = isinstance(rule, PUCT)
        unvisited = rule.unvisited if puct else math.inf
        self._rule = (
            puct,
            float(rule.c),
            float(getattr(rule, "factor", 1.0)),
            rule.count == "edges",
            _NORMALISE[rule.normalise],
            {"parent": 1, "lowest": 2}.get(unvisited, 0) if isinstance(unvisited, str) else 0,
            math.nan if isinstance(unvisited, str) else float(unvisited),
        )

    def _lookup(self, most: int) -> np.ndarray:
        """c(N) * sqrt(N) for PUCT, ln N for UCT."""
        if most >= len(self._table):
            counts = np.arange(max(most + 1, 2 * len(self._table)))
            rule = self.forest.select_rule
            self._table = _log(counts) if isinstance(rule, UCT) else rule.weight(counts)
        return self._table

    def descend(self, trees: np.ndarray) -> np.ndarray:
        """Rows [R] in which the descents end."""
        forest = self.forest
        return self._code.descend(trees * forest.capacity + forest.root[trees], forest.next)

    def grow(
        self,
        trees: np.ndarray,
        last: np.ndarray,
        new: np.ndarray,
        reward: np.ndarray,
        value: np.ndarray,
        ended: np.ndarray,
        player: np.ndarray,
        prior: np.ndarray,
    ) -> np.ndarray:
        """Make the nodes that these descents lead to (where `new`), back everything up; rows of the leaves [R].

        prior [R, A]: all edges of the new nodes; the arrays are those of `mcts.Answers`, with anything where not new.
        """
        f = self.forest
        f.widen(prior.shape[1])
        table = self._lookup(int(f.visits.max()) + 2)
        leaves = np.empty(len(trees), np.int64)
        self._code.settle(
            (trees, last, new, reward, value, ended, player, prior, leaves),
            (f.capacity, f.gamma, f.size, f.root),
            (f.parent, f.slot, f.depth, f.visits, f.own, f.total, f.raw, f.player, f.ended, f.edges, f.allowed),
            (f.child, f.n, f.w, f.q, f.prior, f.reward, f.discount, f.open),
            (f.best, f.next),
            (*self._rule, table),
        )
        return leaves
