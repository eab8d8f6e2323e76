"""Search trees -> training data: paths, sibling pairs, value and policy targets, traversals with backtracking.

Everything is a pure function of a `SearchTree`. What is left out is counted by name. Rows come out in TRL's formats
(`sft_rows`, `preference_rows`, `stepwise_rows`, for `data.write_jsonl`), or as token trees with the sampled ids
(`pair_tree`, `train_paths`), never re-tokenised text.

Sources: stepwise and complete pairs, AlphaLLM-CPL (arXiv 2410.06508; its thresholds are not public: the defaults are
choices); traversals, Exploratory and Imitation Learning of ExACT (arXiv 2410.02052).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from forethought.errors import ConfigError, DataError
from forethought.search.result import SearchTree
from forethought.search.rules import check_number
from forethought.tree.credit import assign
from forethought.tree.tree import Kind, Stop, TokenTree

Score = Literal["q", "raw"]


def _scores(tree: SearchTree, score: Score) -> np.ndarray:
    """[N] by which siblings are compared, seen by who moves: Q of the edge, or the node's own first evaluation."""
    if score == "q":
        return tree.q
    if score == "raw":
        turned = np.zeros(len(tree), bool)
        turned[1:] = tree.player[1:] != tree.player[np.maximum(tree.parent[1:], 0)]
        return np.where(turned, -tree.raw, tree.raw)
    raise ConfigError(f"score={score!r}: give 'q' (mean return) or 'raw' (the node's own evaluation)")


# -- paths -------------------------------------------------------------------------------------------------------------


def greedy_leaf(tree: SearchTree, by: Literal["q", "visits"] = "q") -> int:
    """Follow the best edge from the root (ties: the other number, then the first) to a node without visited edges."""
    if by not in ("q", "visits"):
        raise ConfigError(f"by={by!r}: give 'q' or 'visits'")
    row = 0
    while True:
        seen = [c for c in tree.children(row) if tree.visits[c] > 0 and tree.made[c]]
        if not seen:
            return row
        first, second = (tree.q, tree.visits) if by == "q" else (tree.visits, tree.q)
        row = max(seen, key=lambda c: (first[c], second[c]))


def best_leaf(tree: SearchTree, score: Score = "q", *, finished: bool = True) -> int | None:
    """The leaf with the highest score (ties: more visits, then the first); None without one.

    Args:
        finished: only where an episode or answer is over; else all nodes without children.
    """
    scores = _scores(tree, score)
    rows = [r for r in (tree.finished() if finished else tree.leaves()) if r and math.isfinite(scores[r])]
    return max(rows, key=lambda r: (scores[r], tree.visits[r]), default=None)


def best_path(tree: SearchTree, score: Score = "q") -> list[int]:
    """Rows from the root to the best finished leaf, or to the best leaf where none is finished."""
    leaf = best_leaf(tree, score)
    if leaf is None:
        leaf = best_leaf(tree, score, finished=False)
    return tree.path(leaf if leaf is not None else 0)


def successful(
    tree: SearchTree, success: Callable[[SearchTree, int], bool] | None = None, *, threshold: float | None = None
) -> list[int]:
    """Finished leaves that succeeded.

    Args:
        success: decides; default: what the world says (`tree.success`).
        threshold: instead, the leaf's own evaluation must be above it (an outcome model's filter).

    Raises:
        DataError: none is given, and the world says nothing.
    """
    rows = tree.finished()
    if success is not None:
        return [r for r in rows if success(tree, r)]
    if threshold is not None:
        return [r for r in rows if tree.raw[r] > threshold]
    if rows and np.isnan(tree.success[rows]).all():
        raise DataError(f"tree {tree.name!r}: nothing says which answers are right; give success or a threshold")
    return [r for r in rows if tree.success[r] == 1]


# -- pairs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreePair:
    """A preference between two rows of one tree.

    kind: "step" (siblings; what differs is one option) or "full" (two finished answers). parent: the row where they
    part: the siblings' parent, or the root. gap: score of the chosen minus that of the rejected.
    """

    parent: int
    chosen: int
    rejected: int
    gap: float
    kind: Literal["step", "full"]


PairRule = Literal["best_each", "all", "best_worst"]


def step_pairs(
    tree: SearchTree,
    tau: float,
    *,
    rule: PairRule = "best_each",
    most: int = 4,
    least_visits: int = 1,
    score: Score = "q",
    shrink: float = 0.0,
    floor: float = -math.inf,
) -> tuple[list[TreePair], Counter[str]]:
    """Pairs of siblings whose scores differ by more than `tau`.

    Args:
        rule: "best_each" the best sibling against each other one, "all" every ordered pair, "best_worst" one a parent.
        most: pairs a parent, largest gaps first.
        least_visits: siblings visited less often are not compared (a value of one visit is mostly luck).
        shrink: k0 of Q * n / (n + k0) towards the parent's value, for the same reason.
        floor: the chosen one's score must be above it (two bad options teach nothing).

    Returns:
        The pairs, and counts: "pairs", "unused parents" (with siblings to compare, but no gap), "missing scores" (NaN),
        "few visits", "equal text", "below floor", "over most".

    Raises:
        ConfigError: tau negative or not finite, an unknown rule, most or least_visits below 1, shrink negative.
    """
    check_number("tau", tau, least=0)
    check_number("most", most, least=1)
    check_number("least_visits", least_visits, least=1)
    check_number("shrink", shrink, least=0)
    if rule not in ("best_each", "all", "best_worst"):
        raise ConfigError(f"rule={rule!r}: give 'best_each', 'all' or 'best_worst'")
    scores, counts = _scores(tree, score), Counter[str]()
    out: list[TreePair] = []
    for parent in range(len(tree)):
        rows = [r for r in tree.children(parent) if tree.made[r] and tree.visits[r] > 0]
        lost = [r for r in rows if math.isnan(scores[r])]
        few = [r for r in rows if r not in lost and tree.visits[r] < least_visits]
        counts["missing scores"] += len(lost)
        counts["few visits"] += len(few)
        value = {}
        for r in rows:
            if r not in lost and r not in few:
                n = tree.visits[r]
                value[r] = scores[r] if not shrink else (n * scores[r] + shrink * tree.value[parent]) / (n + shrink)
        ordered = sorted(value, key=lambda r: -value[r])
        if len(ordered) < 2:
            continue
        losers = ordered[1:] if rule != "best_worst" else ordered[-1:]
        winners = ordered if rule == "all" else ordered[:1]
        found = [
            TreePair(parent, a, b, float(value[a] - value[b]), "step")
            for a in winners
            for b in losers
            if a != b and value[a] - value[b] > tau
        ]
        sound = [p for p in found if tree.text[p.chosen].strip() != tree.text[p.rejected].strip()]
        above = [p for p in sound if value[p.chosen] > floor]
        counts["equal text"] += len(found) - len(sound)
        counts["below floor"] += len(sound) - len(above)
        above.sort(key=lambda p: -p.gap)
        counts["over most"] += max(0, len(above) - most)
        counts["unused parents"] += not above
        out += above[:most]
    counts["pairs"] = len(out)
    return out, counts


def full_pairs(
    tree: SearchTree, tau: float, *, most: int = 4, score: Score = "raw"
) -> tuple[list[TreePair], Counter[str]]:
    """Pairs of finished answers: the best one against those that score less by more than `tau`, the worst first.

    A path that was cut (no end token, context full) is never chosen, and counts as "cut" where it would have been.

    Raises:
        ConfigError: tau negative or not finite, most below 1.
    """
    check_number("tau", tau, least=0)
    check_number("most", most, least=1)
    scores, counts = _scores(tree, score), Counter[str]()
    rows = [r for r in tree.finished() if math.isfinite(scores[r])]
    whole = [r for r in rows if not _cut(tree, r)]
    best = max(whole, key=lambda r: (scores[r], tree.visits[r]), default=None)
    if best is None or (rows and max(scores[r] for r in rows) > scores[best]):
        counts["cut"] += 1
    out: list[TreePair] = []
    if best is not None:
        said: set[str] = {tree.said(best).strip()}
        for r in sorted(rows, key=lambda r: scores[r]):
            if scores[best] - scores[r] <= tau or len(out) == most:
                break
            if tree.said(r).strip() in said:
                counts["equal text"] += 1
                continue
            said.add(tree.said(r).strip())
            out.append(TreePair(0, best, r, float(scores[best] - scores[r]), "full"))
    counts["pairs"] = len(out)
    return out, counts


def _cut(tree: SearchTree, row: int) -> bool:
    """The answer ends because it was cut, not because it was complete."""
    if tree.tokens is None:
        return False
    tokens, place = tree.tokens
    return Stop(int(tokens.stop[place[row]])) not in (Stop.EOS, Stop.STRING)


def drop_contradictions(tree: SearchTree, pairs: Sequence[TreePair]) -> tuple[list[TreePair], int]:
    """Pairs without those that say both a > b and b > a after the same prefix (all of them go), and how many went.

    Options are compared by their text, so that equal options under one prefix (a merge that failed) are one.
    """

    def key(p: TreePair) -> tuple[str, str, str]:
        prefix = tree.said(p.parent)
        return prefix, tree.said(p.chosen)[len(prefix) :].strip(), tree.said(p.rejected)[len(prefix) :].strip()

    keys = {key(p) for p in pairs}
    kept = [p for p in pairs if (key(p)[0], key(p)[2], key(p)[1]) not in keys]
    return kept, len(pairs) - len(kept)


def pair_tree(tree: SearchTree, pair: TreePair) -> tuple[TokenTree, int, int]:
    """A pair of a text search as a token tree: the shared prefix once, both continuations with their sampled ids, of
    weight 1.

    A step holds no end token unless the model said it there, so that nothing teaches it to stop in the middle.

    Returns:
        (tree, node of the chosen, node of the rejected): what `learn.pairs.PreferencePair` takes.

    Raises:
        DataError: the search was not over text.
    """
    if tree.tokens is None:
        raise DataError(f"tree {tree.name!r}: a search over an environment has no token pairs; use preference_rows")
    tokens, place = tree.tokens
    prefix = tokens.path_ids(int(place[pair.parent]))
    name = f"{tree.name}/{pair.chosen}-{pair.rejected}"
    out = TokenTree(prefix, kind=Kind.PROMPT, task=name, seed=tokens.seed, meta={"kind": pair.kind, "gap": pair.gap})
    nodes = []
    for row in (pair.chosen, pair.rejected):
        path = tokens.path(int(place[row]))
        spans = [tokens.span(n) for n in path[path.index(int(place[pair.parent])) + 1 :]]
        ids = np.concatenate([tokens.ids[s] for s in spans])
        logprobs = np.concatenate([tokens.logprob[s] for s in spans])
        stop = Stop(int(tokens.stop[place[row]]))
        node = out.add(0, ids, sampled=True, logprobs=logprobs, stop=stop)
        out.weight[out.span(node)] = 1.0
        nodes.append(node)
    return out, nodes[0], nodes[1]


def train_paths(tree: SearchTree, rows: Sequence[int], advantage: float | Sequence[float] = 1.0) -> int:
    """Put weight and advantage on the sampled tokens of these paths of a text search; returns how many token places.

    Raises:
        DataError: the search was not over text.
    """
    if tree.tokens is None:
        raise DataError(f"tree {tree.name!r}: a search over an environment has no sampled tokens; use sft_rows")
    tokens, place = tree.tokens
    values = [advantage] * len(rows) if isinstance(advantage, int | float) else list(advantage)
    return sum(
        assign(tokens, int(place[r]), float(a), from_node=int(place[0])) for r, a in zip(rows, values, strict=True)
    )


# -- values and visits -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValueTarget:
    """What the search says a node is worth for its player to move, and from how many visits."""

    row: int
    value: float
    visits: int


def value_targets(tree: SearchTree, *, least_visits: int = 1) -> list[ValueTarget]:
    """Nodes that were visited often enough, with their values by the backup rule."""
    check_number("least_visits", least_visits, least=1)
    return [
        ValueTarget(r, float(tree.value[r]), int(tree.visits[r]))
        for r in range(len(tree))
        if tree.made[r] and tree.visits[r] >= least_visits
    ]


def outcome_targets(tree: SearchTree, leaf: int, outcome: float, *, prompt: bool = True) -> list[ValueTarget]:
    """Every prefix of one path with the path's final outcome as its target (`prompt`: the bare prompt too)."""
    return [ValueTarget(r, outcome, 1) for r in tree.path(leaf) if r or prompt]


@dataclass(frozen=True)
class PolicyTarget:
    """Visit shares of a node's edges: rows, texts and probabilities, those never visited included with 0."""

    row: int
    children: tuple[int, ...]
    texts: tuple[str, ...]
    probabilities: tuple[float, ...]


def policy_targets(tree: SearchTree, *, temperature: float = 1.0, least_visits: int = 1) -> list[PolicyTarget]:
    """Visits^(1 / temperature) of every node whose edges were followed at least `least_visits` times.

    Raises:
        ConfigError: temperature not positive, least_visits below 1.
    """
    check_number("temperature", temperature, above=0)
    check_number("least_visits", least_visits, least=1)
    out = []
    for row in range(len(tree)):
        children = tree.children(row)
        visits = tree.visits[children].astype(np.float64) if children else np.zeros(0)
        if visits.sum() < least_visits:
            continue
        seen = visits > 0
        logs = np.log(visits[seen]) / temperature
        shares = np.zeros(len(children))
        shares[seen] = np.exp(logs - logs.max())
        shares /= shares.sum()
        texts = tuple(tree.text[c] for c in children)
        out.append(PolicyTarget(row, tuple(children), texts, tuple(shares.tolist())))
    return out


# -- traversals --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """A step of a traversal: "act" takes the edge to `row`; "back" goes one node up to `row`, "goto" several."""

    kind: Literal["act", "back", "goto"]
    row: int


def traversal(paths: Sequence[Sequence[int]], *, undoable: Callable[[int], bool] | None = None) -> list[Move]:
    """Paths of one tree (rows, each from the root) as one walk with backtracking: what Exploratory Learning trains on.

    A path equal to the one before, or a beginning of it, adds nothing. From one path to the next the walk goes back to
    where they part: one node up is "back", more is one "goto".

    Args:
        undoable: whether the action that led to a row can be undone; one that cannot (a final answer) is taken out of
            the walk when the walk would have to leave it.

    Raises:
        DataError: a path is empty, or two begin in different rows.
    """
    moves: list[Move] = []
    at: list[int] = []
    for path in paths:
        if not path or (at and path[0] != at[0]):
            raise DataError(f"traversal: path {list(path)} does not begin in the root of the others")
        if not at:
            at = [path[0]]
        if list(path) == at[: len(path)] and len(moves):
            continue
        shared = next((i for i, (a, b) in enumerate(zip(at, path, strict=False)) if a != b), min(len(at), len(path)))
        while len(at) > shared and undoable is not None and not undoable(at[-1]) and moves[-1] == Move("act", at[-1]):
            moves.pop()
            at.pop()
        if len(at) == shared + 1:
            moves.append(Move("back", at[shared - 1]))
        elif len(at) > shared:
            moves.append(Move("goto", at[shared - 1]))
        moves += [Move("act", row) for row in path[shared:]]
        at = list(path)
    return moves


def direct(moves: Sequence[Move]) -> list[Move]:
    """A traversal with every excursion cut, as Imitation Learning trains on: the steps that were not gone back on."""
    kept: list[Move] = []
    for move in moves:
        if move.kind == "act":
            kept.append(move)
            continue
        while kept and kept[-1].row != move.row:
            kept.pop()
    return kept


def explored_paths(
    tree: SearchTree,
    trace: Sequence[int],
    goal: int,
    *,
    limit: int = 50,
    similar: Callable[[int, int], bool] | None = None,
) -> list[list[int]]:
    """Paths of a search in the order in which it took them, up to the first that ends in `goal`.

    Args:
        trace: the leaf of every simulation (`Search.trace`). limit: paths at most; `goal`'s own is always the last.
        similar: (leaf, leaf before) -> the path says nothing new and is dropped; the goal's never is.

    Raises:
        DataError: the search never went to `goal`.
    """
    out: list[list[int]] = []
    for leaf in trace:
        if leaf != goal and len(out) >= limit - 1:
            continue
        if leaf == goal or not out or not (similar and similar(leaf, out[-1][-1])):
            out.append(tree.path(leaf))
        if leaf == goal:
            return out
    raise DataError(f"tree {tree.name!r}: row {goal} is not in the trace; the search never ended a path there")


def prefix_samples(items: Sequence[Any], *, first: int = 4, last: int = 12) -> list[list[Any]]:
    """Prefixes of an alternating list (state, action, state, action ...) that end in an action, as training samples.

    Those longer than first + last keep the first and the last items. The loss belongs on the last item alone.

    Raises:
        ConfigError: first or last below 1.
    """
    check_number("first", first, least=1)
    check_number("last", last, least=1)
    out = []
    for end in range(2, len(items) + 1, 2):
        prefix = list(items[:end])
        out.append(prefix if end <= first + last else prefix[:first] + prefix[end - last :])
    return out


# -- rows in TRL's formats ---------------------------------------------------------------------------------------------


def _prompt(tree: SearchTree, prompt: str | None) -> str:
    if prompt is not None:
        return prompt
    given = tree.task.get("prompt") if isinstance(tree.task, dict) else None
    if isinstance(given, str):
        return given
    raise DataError(f"tree {tree.name!r}: its task has no text column 'prompt'; give prompt=")


def messages(tree: SearchTree, row: int) -> list[dict[str, str]]:
    """A path of a search over an environment as chat: what the world showed (user) and what was done (assistant)."""
    out = [{"role": "user", "content": tree.seen[0]}]
    for r in tree.path(row)[1:]:
        out += [{"role": "assistant", "content": tree.text[r]}, {"role": "user", "content": tree.seen[r]}]
    return out


def sft_rows(tree: SearchTree, rows: Sequence[int], *, prompt: str | None = None) -> list[dict[str, Any]]:
    """One row a path. Text: `prompt`, `completion`. Environments: `messages`, up to the last action."""
    facts = [{"tree": tree.name, "score": _null(tree.raw[r])} for r in rows]
    if tree.tokens is None:
        return [{"messages": messages(tree, r)[:-1], **f} for r, f in zip(rows, facts, strict=True)]
    text = _prompt(tree, prompt)
    return [{"prompt": text, "completion": tree.said(r), **f} for r, f in zip(rows, facts, strict=True)]


def preference_rows(tree: SearchTree, pairs: Sequence[TreePair], *, prompt: str | None = None) -> list[dict[str, Any]]:
    """`prompt`, `chosen`, `rejected`, and kind, gap, visits of both. The prompt of a step ends where they part."""
    out: list[dict[str, Any]] = []
    for p in pairs:
        row: dict[str, Any] = {"tree": tree.name, "kind": p.kind, "gap": p.gap}
        row |= {"visits": [int(tree.visits[p.chosen]), int(tree.visits[p.rejected])]}
        if tree.tokens is None:
            shared = messages(tree, p.parent)
            row["prompt"] = shared
            for name, r in (("chosen", p.chosen), ("rejected", p.rejected)):
                row[name] = messages(tree, r)[len(shared) : -1]
        else:
            prefix = tree.said(p.parent)
            row["prompt"] = _prompt(tree, prompt) + prefix
            row["chosen"], row["rejected"] = (tree.said(r)[len(prefix) :] for r in (p.chosen, p.rejected))
        out.append(row)
    return out


def stepwise_rows(
    tree: SearchTree, rows: Sequence[int], threshold: float, *, prompt: str | None = None
) -> list[dict[str, Any]]:
    """One row a path: `prompt`, `completions` (its steps) and `labels` (value of the step above the threshold)."""
    return [
        {
            "prompt": _prompt(tree, prompt),
            "completions": [tree.text[r] for r in tree.path(leaf)[1:]],
            "labels": [bool(tree.value[r] > threshold) for r in tree.path(leaf)[1:]],
            "tree": tree.name,
        }
        for leaf in rows
    ]


def _null(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
