"""A finished (or paused) search tree as plain columns: what targets, reports and files read.

Rows: the nodes of the search in their order, then the edges that lead to no node of their own (an action that was
never played, or one that leads to a merged state), so that a parent's children are all its actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from forethought.tree.tree import Kind, Stop, TokenTree

if TYPE_CHECKING:
    from forethought.search.mcts import Search


@dataclass
class SearchTree:
    """One tree, N rows.

    parent (-1 at row 0), slot (place among the parent's edges), depth, visits (of the edge; of the node at the root),
    q (value of the edge for the player who takes it; of the node at the root; NaN without a visit), value (of the node
    for its player to move, NaN: not made), raw (the node's own evaluation), reward (of the edge), prior, player, ended,
    made (a node of its own), success (1 or 0 where the world knows, else NaN), parts (columns of a combined critic),
    text (the action or option; empty at the root), seen (what the world answered; empty in text search).
    tokens: the token tree, and per row where its option ends in it (-1: not made), in text search.
    """

    name: str
    parent: np.ndarray
    slot: np.ndarray
    depth: np.ndarray
    visits: np.ndarray
    q: np.ndarray
    value: np.ndarray
    raw: np.ndarray
    reward: np.ndarray
    prior: np.ndarray
    player: np.ndarray
    ended: np.ndarray
    made: np.ndarray
    success: np.ndarray
    text: list[str]
    seen: list[str]
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: tuple[TokenTree, np.ndarray] | None = None
    task: Any = None
    stopped: str = ""

    def __post_init__(self):
        self._children: list[list[int]] = [[] for _ in self.text]
        for row, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                self._children[parent].append(row)
        for rows in self._children:
            rows.sort(key=lambda r: self.slot[r])

    def __len__(self) -> int:
        return len(self.text)

    def children(self, row: int) -> list[int]:
        """Rows of all edges of a node, in their order."""
        return list(self._children[row])

    def path(self, row: int) -> list[int]:
        """Rows from the root to this one, both included."""
        out = []
        while row >= 0:
            out.append(row)
            row = int(self.parent[row])
        return out[::-1]

    def said(self, row: int, sep: str = "") -> str:
        """The texts of the edges on the way to a row."""
        return sep.join(self.text[r] for r in self.path(row)[1:])

    def leaves(self) -> list[int]:
        """Rows of made nodes below which nothing was made."""
        return [r for r in range(len(self)) if self.made[r] and not any(self.made[c] for c in self._children[r])]

    def finished(self) -> list[int]:
        """Made nodes at which an episode or answer was over."""
        return [r for r in range(1, len(self)) if self.made[r] and self.ended[r]]

    def token_ids(self, row: int, below: int = 0) -> list[int]:
        """Sampled ids from the end of row `below` to the end of `row` (text search).

        Raises:
            ValueError: the search was not over text.
        """
        if self.tokens is None:
            raise ValueError(f"tree {self.name!r} holds no tokens: it is a search over an environment")
        tree, place = self.tokens
        path = tree.path(int(place[row]))
        start = path.index(int(place[below])) + 1
        return [i for n in path[start:] for i in tree.node_ids(n)]

    def to_token_tree(self, encode: Callable[[str], Sequence[int]] | None = None) -> TokenTree:
        """For stores and reports: actions as assistant nodes, the world's answers as observations below them.

        Args:
            encode: text -> ids; without it nodes hold no tokens, and their text stands in their meta. Of a text search
                the token tree itself is returned (`Search.annotate` has written the numbers onto it).
        """
        if self.tokens is not None:
            return self.tokens[0]

        def ids(text: str) -> Sequence[int]:
            return encode(text) if encode else []

        def meta(text: str) -> dict[str, Any]:
            return {} if encode else {"text": text}

        tree = TokenTree(ids(self.seen[0]), kind=Kind.USER, task=self.name, meta=meta(self.seen[0]))
        where = [0] * len(self)
        tree.visits[0], tree.value[0] = int(self.visits[0]), self.q[0]
        for row in range(1, len(self)):
            node = tree.add(where[self.parent[row]], ids(self.text[row]), meta=meta(self.text[row]))
            tree.visits[node], tree.value[node] = int(self.visits[row]), self.q[row]
            tree.prior[node], tree.reward[node] = self.prior[row], self.reward[row] or math.nan
            facts = {"raw": self.raw[row], "success": self.success[row]}
            facts |= {name: column[row] for name, column in self.parts.items()}
            tree.meta[node]["search"] = {k: float(v) for k, v in facts.items() if not math.isnan(v)}
            where[row] = node
            if self.made[row] and self.seen[row]:
                where[row] = tree.add(node, ids(self.seen[row]), kind=Kind.OBSERVATION, meta=meta(self.seen[row]))
                tree.visits[where[row]], tree.value[where[row]] = int(self.visits[row]), self.value[row]
            if self.ended[row]:
                tree.stop[where[row]] = Stop.ENV_DONE
        return tree


def read_tree(search: Search, tree: int) -> SearchTree:
    """The columns of one tree of a search."""
    forest, domain = search.forest, search.domain
    size = int(forest.size[tree])
    rows = forest.rows_of(np.full(size, tree), np.arange(size))
    extra: list[tuple[int, int]] = []
    for node in range(size):
        for slot in range(int(forest.edges[rows[node]])):
            child = int(forest.child[rows[node], slot])
            if child < 0 or (int(forest.parent[rows[child]]), int(forest.slot[rows[child]])) != (node, slot):
                extra.append((node, slot))
    total = size + len(extra)

    def column(made: np.ndarray, fill: Any) -> np.ndarray:
        out = np.full(total, fill, made.dtype)
        out[:size] = made
        return out

    at = [(int(forest.parent[r]), int(forest.slot[r])) for r in rows] + extra
    parents = np.array([p for p, _ in at])
    edge = (forest.rows_of(np.full(total, tree), np.maximum(parents, 0)), np.array([max(s, 0) for _, s in at]))
    value = forest.value_of(rows)
    visits, q = forest.n[edge], np.where(forest.n[edge] > 0, forest.q[edge], math.nan)
    reward, prior = np.where(forest.child[edge] >= 0, forest.reward[edge], 0.0), forest.prior[edge]
    if size:
        visits[0], q[0], reward[0], prior[0] = forest.visits[rows[0]], value[0], 0.0, math.nan
    states = getattr(domain, "states", None)
    texts = getattr(domain, "texts", None)
    named = getattr(domain, "action", None)
    success, seen = np.full(total, math.nan), [""] * total
    if states is not None:
        for node, state in enumerate(states[tree]):
            seen[node] = state.observation
            if "success" in state.step.info:
                success[node] = float(bool(state.step.info["success"]))
    text = [("" if p < 0 else named(tree, p, s) if named else str(s)) for p, s in at]
    tokens = None
    if texts is not None:
        ends = [nodes[-1] for nodes in domain.tokens[tree]]  # type: ignore[attr-defined]
        tokens = (domain.leaves[tree][0], np.array(ends + [-1] * len(extra)))  # type: ignore[attr-defined]
    depth = np.concatenate([forest.depth[rows], [forest.depth[rows[p]] + 1 for p, _ in extra]]).astype(np.int64)
    given = getattr(domain, "tasks", None) or [r.task for r in getattr(domain, "given", [])]
    return SearchTree(
        name=domain.names[tree],
        parent=parents,
        slot=np.array([s for _, s in at]),
        depth=depth,
        visits=visits.astype(np.int64),
        q=q,
        value=column(value, math.nan),
        raw=column(forest.raw[rows], math.nan),
        reward=reward,
        prior=prior,
        player=column(forest.player[rows], 0),
        ended=column(forest.ended[rows], False),
        made=np.arange(total) < size,
        success=success,
        text=text,
        seen=seen,
        parts={name: column(values[rows], math.nan) for name, values in forest.columns.items()},
        tokens=tokens,
        task=given[tree] if given else None,
        stopped=search.stopped[tree],
    )
