"""Monte-Carlo tree search over many trees at once: the loop, its settings, its budget and its accounts.

A round takes up to `leaves` paths a tree (`Forest.descend`), asks a domain once for all new nodes (environment steps,
samples, evaluations), and backs the answers up in a fixed order: ticket by ticket, all trees together. Trees share
nothing but these calls, so a tree comes out the same alone and among others, node numbers included. With one leaf a
tree and round, results equal those of a plain sequential search bit for bit; with more, a path in flight counts as
visited (see `forest`), which changes the search: keep `leaves` below a tenth of the budget.

What fails (a critic, an environment, a sample that cannot be read) leaves all statistics as they were and is counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np

from forethought.config import derive_seed
from forethought.errors import ConfigError, RewardError
from forethought.search import kernels
from forethought.search.forest import NEW, NONE, Forest, Paths
from forethought.search.rules import UCT, Backup, MeanBackup, Noise, Selection, Width, check_number


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What each tree may spend; the search of a tree ends at the first limit. At least one must be given.

    simulations: descents that were backed up. nodes: nodes of the tree, its root included. tokens: generated tokens,
    those of rollouts included. evaluations: calls of the critic. Limits are looked at before every simulation, so the
    last one may run over the tokens; with several leaves a round, over the other three by no more than a round.
    """

    simulations: int | None = None
    nodes: int | None = None
    tokens: int | None = None
    evaluations: int | None = None

    def __post_init__(self):
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if not given:
            raise ConfigError("budget: nothing is limited; give simulations, nodes, tokens or evaluations")
        for name, value in given.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"budget: {name}={value!r}: give a whole number of at least 1")


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How to search.

    select, backup, width: see `rules`; width None gives a node all its edges (a domain that proposes edges one by one
        needs a width). gamma: discount a step.
    leaves: paths a tree and round. virtual: what a path in flight does, "visits" (counts in N and n) or "loss" (counts
        as a return of the lowest value seen in the tree as well).
    noise: Dirichlet noise on the root's priors. max_depth: nodes at this depth are leaves, whatever the domain says.
    exhaust: leave finished subtrees for good, so that no budget goes into visiting an ended node again; means then
        weigh actions differently than plain search does.
    stop_at: a tree is done when an evaluation reaches this. count_root: the root's own evaluation counts as a visit.
    retries: how often an edge whose step failed is tried again before it is closed. max_failures: failures in a row
        after which a tree is given up. seed: of the noise, and of whatever the domain draws.
    """

    select: Selection = field(default_factory=UCT)
    backup: Backup = field(default_factory=MeanBackup)
    width: Width | None = None
    gamma: float = 1.0
    leaves: int = 1
    virtual: Literal["visits", "loss"] = "visits"
    noise: Noise | None = None
    max_depth: int = 64
    exhaust: bool = False
    stop_at: float | None = None
    count_root: bool = False
    retries: int = 2
    max_failures: int = 20
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gamma={self.gamma!r}: give a number from 0 to 1")
        for name, least in (("leaves", 1), ("max_depth", 1), ("retries", 0), ("max_failures", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r}: give a whole number of at least {least}")
        if self.virtual not in ("visits", "loss"):
            raise ConfigError(f"virtual={self.virtual!r}: give 'visits' or 'loss'")
        if self.stop_at is not None:
            check_number("stop_at", self.stop_at)


class Status(IntEnum):
    """What came of a request for a new node."""

    OK = 0
    FAILED = 1  # an error outside the search: nothing is counted but the failure
    MERGED = 2  # the new state is no other than one that is there: the edge is closed
    SHARED = 3  # the edge leads to a node that is there (`Answers.same`)
    AGAIN = 4  # it would be merged with a node that is being made in the same round: ask again


@dataclass
class Requests:
    """New nodes that are wanted, [R]: tree, node to start from, its edge (NEW: propose one), depth of the new node, and
    whether it will be a leaf whatever the domain says (`max_depth`)."""

    trees: np.ndarray
    parents: np.ndarray
    slots: np.ndarray
    depth: np.ndarray
    final: np.ndarray

    def __len__(self) -> int:
        return len(self.trees)


@dataclass
class Answers:
    """What a domain says to requests (or about the roots), arrays [R].

    status: `Status`. reward: earned on the edge, seen by the player who moved. value: evaluation of the new node for
    its player to move, finite unless the request failed. ended: the episode is over, or was cut. player: who moves.
    prior [R, A], edges [R]: all edges of the new node, where the domain lists them. edge_prior: prior of a proposed
    edge. same: node number, where SHARED. columns: parts of the evaluation. state: the domain's own.
    """

    status: np.ndarray
    reward: np.ndarray
    value: np.ndarray
    ended: np.ndarray
    player: np.ndarray
    prior: np.ndarray | None = None
    edges: np.ndarray | None = None
    edge_prior: np.ndarray | None = None
    same: np.ndarray | None = None
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    state: Any = None

    @classmethod
    def blank(cls, count: int, columns: tuple[str, ...] = ()) -> Answers:
        """All OK, reward 0, value NaN, not ended, player 0."""
        return cls(
            status=np.zeros(count, np.int8),
            reward=np.zeros(count),
            value=np.full(count, math.nan),
            ended=np.zeros(count, bool),
            player=np.zeros(count, np.int8),
            columns={name: np.full(count, math.nan) for name in columns},
        )


class Domain(Protocol):
    """The world of a search: what is behind nodes and edges.

    names: one stable name a tree. grows: edges are proposed one by one (`NEW`), not listed. lists_all: every state lists
    all edges there are, and no request fails or is merged. columns: parts of its evaluation. counts: what it spent, by
    name, [T] each; "tokens" and "evaluations" are what budgets look at.
    """

    names: list[str]
    grows: bool
    lists_all: bool
    columns: tuple[str, ...]
    counts: defaultdict[str, np.ndarray]

    def roots(self) -> Answers:
        """The roots, in the order of `names`. A value of NaN: not evaluated."""
        ...

    def open(self, requests: Requests) -> Answers:
        """Work on all requests, in one batch where that helps."""
        ...

    def store(self, answers: Answers, index: np.ndarray, trees: np.ndarray, nodes: np.ndarray) -> None:
        """The answers at `index` are nodes `nodes` of `trees` from now on (roots too)."""
        ...


def new_counts(trees: int) -> defaultdict[str, np.ndarray]:
    """Counters by name, [T] each, 0 at first."""
    return defaultdict(lambda: np.zeros(trees, np.int64))


class Search:
    """A search that can be stopped and continued.

    Args:
        domain: the world. config: how to search.
        compiled: whether to use compiled rounds (see `kernels`) where they apply, which changes no number; None: if
            numba is there.

    Raises:
        ConfigError: no roots; a width is missing; compiled=True where it cannot be.

    Attributes: forest; counts (by name, [T] each; the domain's, and simulations, failures, merged, shared, revisits);
    stopped ([T] reason: "" while a tree is open; the name of a limit is not kept, so that a larger budget goes on);
    found ([T] node that reached `stop_at`, or -1); interrupted.
    """

    def __init__(self, domain: Domain, config: SearchConfig | None = None, *, compiled: bool | None = None):
        self.domain, self.config = domain, config or SearchConfig()
        if not domain.names:
            raise ConfigError("search: no roots; give at least one")
        if domain.grows and self.config.width is None:
            raise ConfigError("search: this world proposes actions one by one; give a width, such as FixedWidth(k=5)")
        self.counts = domain.counts
        trees = len(domain.names)
        self.stopped = [""] * trees
        self.found = np.full(trees, -1, np.int64)
        self.interrupted = False
        self._in_a_row = np.zeros(trees, np.int64)
        self._failed: dict[tuple[int, int, int], int] = {}
        self._trace: list[tuple[np.ndarray, np.ndarray]] = []
        c = self.config
        self.forest = Forest(
            trees,
            select=c.select,
            backup=c.backup,
            width_rule=c.width,
            gamma=c.gamma,
            virtual=c.virtual,
            columns=domain.columns,
        )
        self._started = False
        fits = domain.lists_all and c.leaves == 1 and c.stop_at is None and not c.exhaust
        fits = fits and kernels.available() and kernels.carries(self.forest)
        if compiled and not fits:
            raise ConfigError("compiled=True: needs numba, an array model, one leaf a round and plain rules; leave it")
        self._compiled = kernels.Rounds(self.forest) if fits and compiled is not False else None

    # -- the loop --
    def run(self, budget: Budget, *, progress: Callable[[int], None] | None = None) -> Forest:
        """Search until every tree has spent the budget (what was spent before counts) or stopped.

        Ctrl-C ends the search with what it has: `interrupted` is set, nothing is in flight, and `run` goes on.

        Args:
            progress: called after every round with the simulations so far, over all trees.

        Raises:
            RewardError: the critic gave a number that is not finite or outside its scale. EnvError: see the domain.
            Whatever is raised, the statistics hold all simulations that were backed up.
        """
        self.interrupted = False
        session = getattr(self.domain, "session", nullcontext)
        try:
            with session():
                if not self._started:
                    self._plant(budget)
                while self._round(budget):
                    if progress:
                        progress(int(self.counts["simulations"].sum()))
        except KeyboardInterrupt:
            self.interrupted = True
        return self.forest

    def trace(self, tree: int) -> list[int]:
        """Node in which each simulation of a tree ended, in order."""
        return [int(node) for trees, nodes in self._trace for node in nodes[trees == tree]]

    # -- storing --
    def state(self) -> dict[str, Any]:
        """What a saved search needs beside forest, counts and world."""
        return {
            "in_a_row": self._in_a_row.tolist(),
            "failed": [[*k, n] for k, n in self._failed.items()],
            "trace": [self.trace(t) for t in range(len(self.stopped))],
        }

    def restore(self, header: dict[str, Any]) -> None:
        """Take over the counters of a saved search, whose forest and world are in place.

        Raises:
            KeyError, TypeError, ValueError: they are not such counters.
        """
        for name, values in header["counts"].items():
            self.counts[name][:] = values
        self.stopped = [str(s) for s in header["stopped"]]
        if len(self.stopped) != len(self.found):
            raise ValueError(f"{len(self.stopped)} trees, {len(self.found)} wanted")
        self.found[:] = header["found"]
        self._in_a_row[:] = header["state"]["in_a_row"]
        self._failed = {(t, node, slot): n for t, node, slot, n in header["state"]["failed"]}
        self._trace = [
            (np.full(len(nodes), t), np.array(nodes, np.int64)) for t, nodes in enumerate(header["state"]["trace"])
        ]
        self._started = bool(self.forest.size.any())

    # -- the loop, inside --
    def _plant(self, budget: Budget) -> None:
        answers = self.domain.roots()
        forest, trees = self.forest, np.arange(len(self.stopped))
        sound = answers.status == Status.OK
        bad = sound & np.isinf(answers.value)
        self._check_values(answers.value, bad, trees)
        forest.reserve(1 + (budget.simulations or budget.nodes or 63))
        rows = forest.rows_of(trees, np.zeros_like(trees))
        forest.size[:] = 1
        forest.raw[rows], forest.player[rows], forest.ended[rows] = answers.value, answers.player, answers.ended
        forest.grows[rows] = self.domain.grows & ~answers.ended
        for name, column in answers.columns.items():
            forest.columns[name][rows] = column
        if answers.prior is not None and answers.edges is not None:
            prior = answers.prior.astype(np.float64)
            if self.config.noise is not None:
                for t in np.flatnonzero(answers.edges > 0):
                    rng = np.random.default_rng(derive_seed("root noise", self.config.seed, self.domain.names[t]))
                    prior[t, : answers.edges[t]] = self.config.noise.mix(prior[t, : answers.edges[t]], rng)
            forest.give_edges(rows, prior, np.where(answers.ended, 0, answers.edges))
        elif self.config.noise is not None:
            raise ConfigError("noise: the edges of this world have no priors when the search begins; leave it out")
        if self.config.count_root:
            if np.isnan(answers.value[sound]).any():
                raise ConfigError("count_root=True, but the root was not evaluated; leave it out or evaluate roots")
            forest.own[rows] = forest.visits[rows] = 1
            forest.total[rows] = answers.value
        self.domain.store(answers, trees, trees, np.zeros_like(trees))
        self._started = True
        forest.refresh(rows)
        for t in trees.tolist():
            if not sound[t]:
                self.counts["failures"][t] += 1
                self.stopped[t] = "failed"
            elif forest.best[rows[t]] == NONE:
                self.stopped[t] = "no actions"

    def _active(self, budget: Budget, ahead: int = 0) -> np.ndarray:
        """Trees that may take a further path while `ahead` of this round are in flight."""
        left = np.array([not s for s in self.stopped])
        if budget.simulations is not None:
            left &= self.counts["simulations"] + ahead < budget.simulations
        if budget.nodes is not None:
            left &= self.forest.size + ahead < budget.nodes
        for name in ("tokens", "evaluations"):
            limit = getattr(budget, name)
            if limit is not None:
                left &= self.counts[name] + (ahead if name == "evaluations" else 0) < limit
        return np.flatnonzero(left)

    def _round(self, budget: Budget) -> bool:
        """One round; False when no tree is left."""
        if self._compiled is not None:
            return self._compiled_round(self._compiled, budget)
        forest, several = self.forest, self.config.leaves > 1
        forest.reserve(self.config.leaves)
        tickets: list[Paths] = []
        try:
            blocked = np.zeros(len(self.stopped), bool)
            for number in range(self.config.leaves):
                trees = self._active(budget, number)
                trees = trees[~blocked[trees]] if several else trees
                if not len(trees):
                    break
                paths = forest.descend(trees, mark=several)
                if several:
                    # All edges below are being made at this moment: nothing to do here before they are.
                    waits = paths.kind == NONE
                    waits &= forest.open[paths.last].any(1) | (forest.pending[paths.last] > 0)
                    if waits.any():
                        forest.release(paths.take(np.flatnonzero(waits)))
                        blocked[paths.trees[waits]] = True
                        paths = paths.take(np.flatnonzero(~waits))
                if len(paths):
                    tickets.append(paths)
            if not tickets:
                return False
            answers, places = self._ask(tickets)
        except BaseException:
            for paths in tickets if several else []:
                forest.release(paths)
            forest.all_released()
            raise
        if several:
            for paths in tickets:
                forest.release(paths)
            forest.all_released()
            forest.refresh(np.unique(np.concatenate([p.rows.ravel() for p in tickets])))
        for paths, place in zip(tickets, places, strict=True):
            self._settle(paths, answers, place)
        return True

    def _compiled_round(self, rounds: kernels.Rounds, budget: Budget) -> bool:
        """The same for one leaf a tree in compiled code."""
        forest = self.forest
        trees = self._active(budget)
        if not len(trees):
            return False
        forest.reserve(1)
        last = rounds.descend(trees)
        slots = forest.best[last]
        new = slots != NONE
        every = bool(new.all())
        at = trees if every else trees[new]
        size = len(trees)
        columns: list[np.ndarray] = [np.zeros(size), np.zeros(size), np.zeros(size, bool), np.zeros(size, np.int8)]
        columns.append(np.zeros((size, 1)))
        answers = None
        if len(at):
            where = last if every else last[new]
            depth = forest.depth[where] + 1
            final = depth >= self.config.max_depth
            answers = self.domain.open(
                Requests(at, where % forest.capacity, slots if every else slots[new], depth, final)
            )
            worth = answers.value + answers.reward
            if not math.isfinite(worth.sum()):
                self._check_values(worth, ~np.isfinite(worth), at)
            assert answers.prior is not None
            found = [answers.reward, answers.value, answers.ended | final, answers.player, answers.prior]
            if every:
                columns = found
            else:
                columns[-1] = np.zeros((size, answers.prior.shape[1]))
                for wide, column in zip(columns, found, strict=True):
                    wide[new] = column
        leaves = rounds.grow(trees, last, new, *columns)
        nodes = leaves % forest.capacity
        if answers is not None:
            self.domain.store(answers, np.arange(len(at)), at, nodes if every else nodes[new])
        self.counts["simulations"][trees] += 1
        if not every:
            self.counts["revisits"][trees[~new]] += 1
        self._trace.append((trees, nodes))
        return True

    def _ask(self, tickets: list[Paths]) -> tuple[Answers | None, list[np.ndarray]]:
        """One call of the domain for all tickets; per ticket the index of each path's answer (-1: none needed)."""
        forest = self.forest
        parts, places, count = [], [], 0
        for paths in tickets:
            wanted = np.flatnonzero(paths.kind != NONE)
            place = np.full(len(paths), -1)
            place[wanted] = np.arange(count, count + len(wanted))
            count += len(wanted)
            places.append(place)
            last = paths.last[wanted]
            parts.append((paths.trees[wanted], last % forest.capacity, paths.kind[wanted], forest.depth[last] + 1))
        if not count:
            return None, places
        columns = parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts, strict=True)))
        requests = Requests(*columns, final=columns[3] >= self.config.max_depth)
        answers = self.domain.open(requests)
        checked = (answers.status == Status.OK) & ~np.isfinite(answers.value + answers.reward)
        self._check_values(answers.value + answers.reward, checked, requests.trees)
        answers.ended = answers.ended | requests.final
        return answers, places

    def _check_values(self, values: np.ndarray, bad: np.ndarray, trees: np.ndarray) -> None:
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise RewardError(
                f"task {self.domain.names[trees[i]]!r}: the value or reward of a node is {values[i]}; a critic gives "
                "finite numbers, and raises RewardError where it cannot judge"
            )

    # -- what came of it --
    def _settle(self, paths: Paths, answers: Answers | None, place: np.ndarray) -> None:
        """Grow and back up one ticket of each tree."""
        forest = self.forest
        value = np.zeros(len(paths))
        again = place < 0
        if again.any():
            raw = forest.raw[paths.last[again]]
            value[again] = np.where(np.isnan(raw), 0.0, raw)
            self.counts["revisits"][paths.trees[again]] += 1
        done = again
        if answers is not None and not again.all():
            status = np.where(again, -1, answers.status[place])
            made, shared = status == Status.OK, status == Status.SHARED
            if made.any():
                self._grow(paths, np.flatnonzero(made), answers, place)
                value[made] = answers.value[place[made]]
            if shared.any():
                assert answers.same is not None
                part = paths.take(np.flatnonzero(shared))
                forest.link(part, answers.same[place[shared]], answers.reward[place[shared]])
                paths.leaf[shared] = part.leaf
                value[shared] = forest.value_of(part.leaf)
                self.counts["shared"][part.trees] += 1
            done = again | made | shared
            for i in np.flatnonzero(~done).tolist():
                self._mishap(paths, i, int(status[i]))
        kept = paths if done.all() else paths.take(np.flatnonzero(done))
        if len(kept):
            value = value if len(kept) == len(paths) else value[done]
            forest.back_up(kept, value)
            ends = np.where(kept.kind == NONE, kept.last, kept.leaf)
            self._trace.append((kept.trees, ends % forest.capacity))
            self.counts["simulations"][kept.trees] += 1
            self._in_a_row[kept.trees] = 0
            if self.config.stop_at is not None:
                for i in np.flatnonzero(value >= self.config.stop_at).tolist():
                    self._find(kept, i)
            if self.config.exhaust:
                self._exhaust(kept, ends)

    def _grow(self, paths: Paths, index: np.ndarray, answers: Answers, place: np.ndarray) -> None:
        forest = self.forest
        part = paths if len(index) == len(paths) else paths.take(index)
        at = place[index]
        ended = answers.ended[at]
        rows = forest.add(
            part,
            reward=answers.reward[at],
            raw=answers.value[at],
            player=answers.player[at],
            ended=ended,
            grows=self.domain.grows,
            edge_prior=None if answers.edge_prior is None else answers.edge_prior[at],
        )
        if part is not paths:
            paths.leaf[index] = rows
            paths.slots[-1, index] = part.slots[-1]
        if answers.prior is not None and answers.edges is not None:
            forest.give_edges(rows, answers.prior[at], np.where(ended, 0, answers.edges[at]))
        for name, column in answers.columns.items():
            forest.columns[name][rows] = column[at]
        self.domain.store(answers, at, part.trees, rows % forest.capacity)

    def _mishap(self, paths: Paths, i: int, status: int) -> None:
        """A request that gave no node: no statistics change."""
        if status == Status.AGAIN:
            return
        forest = self.forest
        tree, row, slot = int(paths.trees[i]), int(paths.last[i]), int(paths.kind[i])
        node = row % forest.capacity
        barren = False
        if status == Status.MERGED:
            self.counts["merged"][tree] += 1
            if slot == NEW:
                forest.shut(np.array([row]))
                barren = not forest.open[row].any() and node == forest.root[tree]
            else:
                barren = forest.close(tree, node, slot, up=self.config.exhaust)
        else:
            self.counts["failures"][tree] += 1
            self._in_a_row[tree] += 1
            key = (tree, node, slot)
            self._failed[key] = self._failed.get(key, 0) + 1
            if slot != NEW and self._failed[key] > self.config.retries:
                barren = forest.close(tree, node, slot, up=self.config.exhaust)
            if self._in_a_row[tree] >= self.config.max_failures:
                self.stopped[tree] = "failed"
        if barren and not self.stopped[tree]:
            self.stopped[tree] = "exhausted" if self.counts["simulations"][tree] else "no actions"

    def _find(self, paths: Paths, i: int) -> None:
        tree = int(paths.trees[i])
        if not self.stopped[tree]:
            row = int(paths.leaf[i] if paths.kind[i] != NONE else paths.last[i])
            self.stopped[tree], self.found[tree] = "found", row % self.forest.capacity

    def _exhaust(self, paths: Paths, ends: np.ndarray) -> None:
        forest = self.forest
        for i in np.flatnonzero(forest.best[ends] == NONE).tolist():
            row, tree = int(ends[i]), int(paths.trees[i])
            if row % forest.capacity == forest.root[tree] or forest.close(
                tree, int(forest.parent[row]), int(forest.slot[row]), up=True
            ):
                self.stopped[tree] = self.stopped[tree] or "exhausted"
