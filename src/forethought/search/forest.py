"""A forest of search trees as a struct of arrays: the bookkeeping of MCTS for many trees at once, with no model in it.

Every simulation is one descent of all trees, one round of outside work (environments, critics, engines), one backup of
all trees. The score of a node's edges changes only when a backup or a mark passes through it, so the best edge of every
node is kept up to date there (`refresh`) and a descent only follows pointers. Statistics stand on edges, so that an
action may exist before its state does (lazy expansion) and several edges may lead to one node (merged states).

Conventions:
- Values are those of the player to move in a node. Q of an edge is its return seen by the player who moves along it:
  reward + gamma * value of the child, with the sign turned where the child's player is another one.
- visits of a node = own evaluations that ended in it + visits of its edges.
- Marks in flight ("virtual visits", as in WU-UCT, Liu et al., arXiv 1810.11755) count in N and n, not in means.

Layout after mctx (Apache-2.0): row of node k of tree t is t * capacity + k; node 0 is the root of the tree.
Shapes: R paths (one a tree), D levels, A edges a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forethought.search.rules import Backup, MeanBackup, Selection, Width

NONE, NEW = -1, -2  # in the place of a slot: nothing to follow (the node's value goes up again); a new edge is wanted
_NODE: dict[str, tuple[type, float]] = {
    "parent": (np.int32, -1),
    "slot": (np.int32, -1),
    "depth": (np.int32, 0),
    "visits": (np.float64, 0),
    "own": (np.float64, 0),
    "total": (np.float64, 0),
    "raw": (np.float64, math.nan),
    "player": (np.int8, 0),
    "ended": (np.bool_, False),
    "edges": (np.int32, 0),
    "allowed": (np.int32, 0),
    "grows": (np.bool_, False),
    "pending": (np.int32, 0),
    "node_flight": (np.float64, 0),
    "best": (np.int32, NONE),
    "next": (np.int64, 0),
}
_EDGE: dict[str, tuple[type, float]] = {
    "child": (np.int32, -1),
    "n": (np.float64, 0),
    "w": (np.float64, 0),
    "q": (np.float64, 0),
    "flight": (np.float64, 0),
    "prior": (np.float64, math.nan),
    "reward": (np.float64, 0),
    "discount": (np.float64, 0),
    "open": (np.bool_, False),
}
_DERIVED = ("next", "best", "pending", "node_flight", "flight")  # not stored: rebuilt, or zero between rounds


@dataclass
class Paths:
    """One descent of R trees. rows, slots: [D, R] from the root on; a path that ended early repeats its last row.

    kind [R]: the last slot: an edge whose child is to be made, NEW, or NONE. leaf [R]: row of the node that the path
    leads to, -1 until it is made.
    """

    trees: np.ndarray
    rows: np.ndarray
    slots: np.ndarray
    kind: np.ndarray
    leaf: np.ndarray

    @property
    def last(self) -> np.ndarray:
        return self.rows[-1]

    def take(self, index: np.ndarray) -> Paths:
        return Paths(self.trees[index], self.rows[:, index], self.slots[:, index], self.kind[index], self.leaf[index])

    def __len__(self) -> int:
        return len(self.trees)


class Forest:
    """Arrays of T trees. Nodes [T * capacity] and edges [T * capacity, A] are attributes by the names below.

    Nodes: parent (number of the node in its tree), slot (edge of the parent), depth, visits, own (its own evaluations),
    total (sum of returns seen from it), raw (its evaluation, NaN: none), player, ended (the episode is over, or was
    cut), edges (how many it has), allowed (how many it may have), grows (new edges are proposed one by one).
    Edges: child (number of the node, -1: not made), n, w (sum of returns), q (value by the backup rule), prior, reward,
    discount (gamma with the sign of the change of player), open (may be followed).

    Args:
        trees: T. nodes, width: first sizes; both grow.
        select, backup, width_rule, gamma, virtual: see `SearchConfig`.
        columns: further float64 node columns, NaN at first (parts of a combined critic).
    """

    # Attributes made from _NODE and _EDGE.
    parent: np.ndarray
    slot: np.ndarray
    depth: np.ndarray
    visits: np.ndarray
    own: np.ndarray
    total: np.ndarray
    raw: np.ndarray
    player: np.ndarray
    ended: np.ndarray
    edges: np.ndarray
    allowed: np.ndarray
    grows: np.ndarray
    pending: np.ndarray
    node_flight: np.ndarray
    best: np.ndarray
    next: np.ndarray
    child: np.ndarray
    n: np.ndarray
    w: np.ndarray
    q: np.ndarray
    flight: np.ndarray
    prior: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    open: np.ndarray

    def __init__(
        self,
        trees: int,
        *,
        select: Selection,
        backup: Backup | None = None,
        width_rule: Width | None = None,
        gamma: float = 1.0,
        virtual: Literal["visits", "loss"] = "visits",
        nodes: int = 64,
        width: int = 4,
        columns: tuple[str, ...] = (),
    ):
        self.trees, self.capacity, self.width = trees, nodes, width
        self.select_rule, self.backup_rule, self.width_rule = select, backup or MeanBackup(), width_rule
        self.gamma, self.virtual = gamma, virtual
        rows = trees * nodes
        for name, (dtype, fill) in _NODE.items():
            setattr(self, name, np.full(rows, fill, dtype))
        for name, (dtype, fill) in _EDGE.items():
            setattr(self, name, np.full((rows, width), fill, dtype))
        self.next[:] = np.arange(rows)
        self.columns = {name: np.full(rows, math.nan) for name in columns}
        self.size = np.zeros(trees, np.int64)
        self.root = np.zeros(trees, np.int64)
        self.lowest, self.highest = np.full(trees, np.inf), np.full(trees, -np.inf)
        self._marked = False

    # -- sizes --
    def reserve(self, more: int) -> None:
        """Room for `more` further nodes a tree. Rows of earlier `Paths` are void afterwards."""
        need = int(self.size.max(initial=0)) + more
        if need <= self.capacity:
            return
        old, new = self.capacity, max(need, 2 * self.capacity)

        def grown(array: np.ndarray, fill: float) -> np.ndarray:
            out = np.full((self.trees, new, *array.shape[1:]), fill, array.dtype)
            out[:, :old] = array.reshape(self.trees, old, *array.shape[1:])
            return out.reshape(self.trees * new, *array.shape[1:])

        moved = self.next // old * new + self.next % old
        for name, (_, fill) in [*_NODE.items(), *_EDGE.items()]:
            setattr(self, name, grown(getattr(self, name), fill))
        self.columns = {name: grown(array, math.nan) for name, array in self.columns.items()}
        self.capacity = new
        self.next = np.arange(self.trees * new)
        self.next.reshape(self.trees, new)[:, :old] = moved.reshape(self.trees, old)

    def widen(self, need: int) -> None:
        """Room for `need` edges a node."""
        if need <= self.width:
            return
        new = max(need, min(2 * self.width, self.width + 16))
        for name, (dtype, fill) in _EDGE.items():
            array = np.full((len(self.parent), new), fill, dtype)
            array[:, : self.width] = getattr(self, name)
            setattr(self, name, array)
        self.width = new

    def rows_of(self, trees: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        return trees * self.capacity + nodes

    def node_column(self, name: str) -> np.ndarray:
        """A float node column by name: "raw" or one of `columns`."""
        return self.raw if name == "raw" else self.columns[name]

    # -- what rules read --
    def counted(self, rows: np.ndarray) -> np.ndarray:
        """n of the edges, marks in flight included, [P, A]."""
        n = self.n[rows]
        return n + self.flight[rows] if self._marked else n

    def total_visits(self, rows: np.ndarray, count: Literal["node", "edges"]) -> np.ndarray:
        """N of the nodes, marks in flight included, [P]."""
        total = self.visits[rows]
        if count == "edges":
            total = total - self.own[rows]
        return total + self.node_flight[rows] if self._marked else total

    def q_and_seen(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Q of the edges and which of them have one, [P, A]."""
        n = self.n[rows]
        if self._marked and self.virtual == "loss":
            flight = self.flight[rows]
            lowest = self.lowest[rows // self.capacity]
            lost = np.where(np.isfinite(lowest), lowest, 0.0)[:, None] * flight
            return (self.q[rows] * n + lost) / np.maximum(n + flight, 1), n + flight > 0
        return self.q[rows], n > 0

    def value_of(self, rows: np.ndarray) -> np.ndarray:
        """Values of nodes by the backup rule, seen by their player to move, [P]; 0 for one that has none yet."""
        raw = self.raw[rows]
        start = np.where(np.isnan(raw), 0.0, raw)
        if isinstance(self.backup_rule, MeanBackup):
            visits = self.visits[rows]
            return np.where(visits > 0, self.total[rows] / np.maximum(visits, 1), start)
        value = self.backup_rule.value(self.q[rows], self.n[rows] > 0, self.prior[rows])
        return np.where(np.isfinite(value), value, start)

    # -- choosing --
    def refresh(self, rows: np.ndarray) -> None:
        """Bring width and best edge of these nodes up to date."""
        if self.width_rule is not None:
            self.allowed[rows] = self.width_rule(self, rows)
        scores = self.select_rule.scores(self, rows)
        usable = self.open[rows]
        child = self.child[rows]
        if self._marked:
            usable &= (child >= 0) | (self.flight[rows] == 0)
        if self.width_rule is not None:
            allowed = self.allowed[rows]
            usable &= self.grows[rows][:, None] | (np.arange(self.width) < allowed[:, None])
        scores[~usable] = -np.inf
        best = scores.argmax(1)
        at = np.arange(len(rows))
        target = child[at, best]
        best = np.where(usable[at, best], best, NONE)
        if self.width_rule is not None:
            wants = self.grows[rows] & (self.edges[rows] + self.pending[rows] < allowed)
            best = np.where(wants, NEW, best)
        self.best[rows] = best
        self.next[rows] = np.where((best >= 0) & (target >= 0), rows - rows % self.capacity + target, rows)

    def descend(self, trees: np.ndarray, *, mark: bool = False) -> Paths:
        """Follow the best edges from the roots of these trees (each at most once).

        mark: mark the paths in flight, for further descents before their backup.
        """
        rows = self.rows_of(trees, self.root[trees])
        levels = [rows]
        while True:
            if not self.select_rule.local:
                self.refresh(rows)
            below = self.next.take(rows)
            if (below == rows).all():
                break
            rows = below
            levels.append(rows)
        path = np.array(levels)
        slots = self.best[path]
        paths = Paths(trees, path, slots, slots[-1].copy(), np.full(len(trees), -1, np.int64))
        if mark:
            self._mark(paths, 1)
        return paths

    def _mark(self, paths: Paths, sign: int) -> None:
        """Put marks on (1) or take them off (-1); the choice of the nodes is brought up to date."""
        self._marked = True
        steps = np.ones(paths.rows.shape, bool)
        steps[:-1] = paths.rows[:-1] != paths.rows[1:]
        self.node_flight[paths.rows[steps]] += sign
        steps[-1] &= paths.kind >= 0
        self.flight[paths.rows[steps], paths.slots[steps]] += sign
        self.pending[paths.last[paths.kind == NEW]] += sign
        self.refresh(np.unique(paths.rows))

    def release(self, paths: Paths) -> None:
        """Take the marks of these paths off again (before their backup, or because their work failed)."""
        self._mark(paths, -1)

    def all_released(self) -> None:
        """No path is in flight: selection reads plain counts again."""
        self._marked = False

    # -- growing --
    def add(
        self,
        paths: Paths,
        *,
        reward: np.ndarray,
        raw: np.ndarray,
        player: np.ndarray,
        ended: np.ndarray,
        grows: bool = False,
        edge_prior: np.ndarray | None = None,
    ) -> np.ndarray:
        """Make the nodes that these paths lead to (kind >= 0, or NEW: the edge is made too); returns their rows [R]."""
        parent = paths.last
        new = paths.kind == NEW
        if new.any():
            slots = self.edges[parent[new]]
            self.widen(int(slots.max()) + 1)
            paths.slots[-1, new] = slots
            self.edges[parent[new]] += 1
            self.open[parent[new], slots] = True
            if edge_prior is not None:
                self.prior[parent[new], slots] = edge_prior[new]
        node = self.size[paths.trees]
        rows = self.rows_of(paths.trees, node)
        self.size[paths.trees] += 1
        slots = paths.slots[-1]
        self.child[parent, slots] = node
        self.parent[rows] = parent % self.capacity
        self.slot[rows] = slots
        self.depth[rows] = self.depth[parent] + 1
        self.raw[rows] = raw
        self.ended[rows] = ended
        self.grows[rows] = grows & ~ended
        self._join(paths, rows, reward, player)
        self.player[rows] = player
        return rows

    def _join(self, paths: Paths, rows: np.ndarray, reward: np.ndarray, player: np.ndarray) -> None:
        """Edge numbers of a new connection."""
        parent, slots = paths.last, paths.slots[-1]
        self.reward[parent, slots] = reward
        self.discount[parent, slots] = np.where(self.player[parent] == player, self.gamma, -self.gamma)
        paths.leaf[:] = rows

    def link(self, paths: Paths, nodes: np.ndarray, reward: np.ndarray) -> None:
        """Let the last edges of these paths lead to nodes that exist (merged states); [R] numbers in their trees."""
        rows = self.rows_of(paths.trees, nodes)
        self.child[paths.last, paths.slots[-1]] = nodes
        self._join(paths, rows, reward, self.player[rows])

    def give_edges(self, rows: np.ndarray, prior: np.ndarray, count: np.ndarray) -> None:
        """All edges of new nodes at once: prior [P, A'], the first count [P] of each row exist."""
        self.widen(prior.shape[1])
        there = np.arange(prior.shape[1]) < count[:, None]
        self.prior[rows, : prior.shape[1]] = np.where(there, prior, math.nan)
        self.open[rows, : prior.shape[1]] = there
        self.edges[rows] = count
        self.allowed[rows] = count

    def shut(self, rows: np.ndarray) -> None:
        """Growing nodes that get no further edges."""
        self.grows[rows] = False
        self.refresh(rows)

    def close(self, tree: int, node: int, slot: int, *, up: bool) -> bool:
        """Never follow this edge again. Statistics stay.

        Args:
            up: a node that is left without an edge is not visited again either: the edge to it is closed too.

        Returns:
            True if the root is left without one.
        """
        while True:
            row = tree * self.capacity + node
            self.open[row, slot] = False
            self.refresh(np.array([row]))
            if self.open[row].any() or self.grows[row] or self.pending[row]:
                return False
            if node == self.root[tree]:
                return True
            if not up:
                return False
            node, slot = int(self.parent[row]), int(self.slot[row])

    # -- backing up --
    def back_up(self, paths: Paths, value: np.ndarray) -> None:
        """Count one visit of every node and edge on these paths; value [R] is that of the leaf, for its player to move.

        A path of kind NONE ends in its last node; the others in `paths.leaf`.
        """
        leaf = np.where(paths.kind == NONE, paths.last, paths.leaf)
        rows, slots = paths.rows, paths.slots
        ends = np.concatenate([rows[1:], leaf[None]])
        steps = rows != ends
        reward = np.where(steps, self.reward[rows, slots], 0.0)
        discount = np.where(steps, self.discount[rows, slots], 1.0)
        returns = np.empty(rows.shape)
        running = value
        for d in range(len(rows) - 1, -1, -1):
            running = reward[d] + discount[d] * running
            returns[d] = running
        at, edge, gain = rows[steps], slots[steps], returns[steps]
        self.n[at, edge] += 1
        self.w[at, edge] += gain
        self.visits[at] += 1
        self.total[at] += gain
        self.own[leaf] += 1
        self.visits[leaf] += 1
        self.total[leaf] += value
        if isinstance(self.backup_rule, MeanBackup):
            self.q[at, edge] = self.w[at, edge] / self.n[at, edge]
        else:
            for d in range(len(rows) - 1, -1, -1):
                where = np.flatnonzero(steps[d])
                r, s = rows[d, where], slots[d, where]
                self.q[r, s] = self.reward[r, s] + self.discount[r, s] * self.value_of(ends[d, where])
        if not self.select_rule.local or self.virtual == "loss":
            q = self.q[at, edge]
            tree = at // self.capacity
            np.minimum.at(self.lowest, tree, q)
            np.maximum.at(self.highest, tree, q)
        self.refresh(np.concatenate([at, leaf]))

    # -- reading --
    def edge_rows(self, tree: int, node: int | None = None) -> int:
        """Row of a node (default: the root)."""
        return tree * self.capacity + int(self.root[tree] if node is None else node)

    def path_to(self, tree: int, node: int) -> list[int]:
        """Nodes of a tree from its first root to this one."""
        out = []
        while node >= 0:
            out.append(node)
            node = int(self.parent[tree * self.capacity + node])
        return out[::-1]

    # -- storing --
    def to_arrays(self) -> dict[str, np.ndarray]:
        """Everything that is not derived, cut to the nodes in use: [T, most nodes, ...]."""
        most = max(1, int(self.size.max(initial=0)))
        out = {
            name: getattr(self, name).reshape(self.trees, self.capacity, -1)[:, :most].copy()
            for name in [*_NODE, *_EDGE]
            if name not in _DERIVED
        }
        out |= {f"column/{k}": v.reshape(self.trees, self.capacity)[:, :most].copy() for k, v in self.columns.items()}
        return out | {name: getattr(self, name).copy() for name in ("size", "root", "lowest", "highest")}

    def from_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Fill a new forest of the same settings from `to_arrays`.

        Raises:
            KeyError, ValueError: arrays are missing, or do not fit.
        """
        size = arrays["size"]
        if size.shape != (self.trees,):
            raise ValueError(f"{size.shape} trees in the file, {self.trees} wanted")
        most, width = arrays["n"].shape[1:]
        self.reserve(most)
        self.widen(width)
        for name in [*_NODE, *_EDGE]:
            if name in _DERIVED:
                continue
            stored = arrays[name]
            mine = getattr(self, name).reshape(self.trees, self.capacity, -1)
            if stored.shape[:2] != (self.trees, most) or stored.dtype != mine.dtype:
                raise ValueError(f"array {name!r} has shape {stored.shape} and type {stored.dtype}")
            mine[:, :most, : stored.shape[2]] = stored
        for name, mine in self.columns.items():
            mine.reshape(self.trees, self.capacity)[:, :most] = arrays[f"column/{name}"]
        for name in ("size", "root", "lowest", "highest"):
            getattr(self, name)[:] = arrays[name]
        child = self.child.reshape(self.trees, -1)
        if (size < 0).any() or (size > most).any() or (child.max(1) >= np.maximum(size, 1)).any():
            raise ValueError("an edge leads to a node that is not there")
        live = [self.rows_of(np.full(s, t), np.arange(s)) for t, s in enumerate(size.tolist())]
        if live:
            self.refresh(np.concatenate(live))
