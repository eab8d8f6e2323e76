"""Ways to answer with a model at one budget: greedy, best of n, majority, weighted vote, beam, tree search.

Every method gets the same number of generated tokens a prompt (rollouts of a critic included) and never goes above it:
a sample is begun only where it fits, and the last one may be cut to what is left. What was spent is counted and
returned, because few methods can use a budget to the last token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from forethought.errors import ConfigError
from forethought.models.engine import Engine, Sampling
from forethought.search.critics import Judgement
from forethought.search.mcts import Budget, SearchConfig, new_counts
from forethought.search.rules import UCT, FixedWidth, check_number
from forethought.search.search import search
from forethought.search.targets import best_leaf, greedy_leaf
from forethought.search.text_world import Option, TextCritic, TextDomain, TextLeaf
from forethought.tree.tree import Stop, TokenTree

Method = Literal["greedy", "best-of-n", "majority", "weighted", "beam", "mcts"]
METHODS: tuple[Method, ...] = ("greedy", "best-of-n", "majority", "weighted", "beam", "mcts")
NEEDS_CRITIC = ("best-of-n", "weighted", "beam", "mcts")


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How to answer.

    tokens: generated tokens a prompt, at most. sampling: one whole answer (its max_tokens is the longest answer;
    greedy takes temperature 0). option: one step of tree search; a step of beam is one part of it.
    beam: prefixes that are kept. expand: options of each.
    config: of the tree search. pick: its answer: "best" the finished answer with the highest evaluation, "greedy" the
    best edges down from the root, "vote" the answer with the largest sum of evaluations.
    """

    tokens: int
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=256, temperature=0.8))
    option: Option = field(default_factory=Option)
    beam: int = 4
    expand: int = 4
    config: SearchConfig = field(
        default_factory=lambda: SearchConfig(select=UCT(c=1.0), width=FixedWidth(k=4), max_depth=32)
    )
    pick: Literal["best", "greedy", "vote"] = "best"

    def __post_init__(self):
        for name in ("tokens", "beam", "expand"):
            value = getattr(self, name)
            check_number(name, value, least=1)
            if not isinstance(value, int):
                raise ConfigError(f"{name}={value!r}: give a whole number")
        if self.pick not in ("best", "greedy", "vote"):
            raise ConfigError(f"pick={self.pick!r}: give 'best', 'greedy' or 'vote'")


@dataclass
class Answered:
    """One prompt's answer.

    node: where it ends in `tree`; text: of the answer; value: the critic's (NaN: none was asked). spent: generated
    tokens. complete: it ended by itself. candidates: how many answers it was chosen from.
    """

    tree: TokenTree
    node: int
    text: str
    value: float
    spent: int
    complete: bool
    candidates: int


def answer(
    method: Method,
    engine: Engine,
    trees: Sequence[TokenTree],
    how: Inference,
    *,
    decode: Callable[[Sequence[int]], str],
    critic: TextCritic | None = None,
    extract: Callable[[str], str | None] | None = None,
    finished: Callable[[str], bool] | None = None,
    tasks: Sequence[Any] | None = None,
) -> list[Answered]:
    """Answer every prompt (the root of each tree, which is extended in place) by one method.

    Args:
        critic: values of finished answers and, for beam and tree search, of prefixes.
        extract: text -> the answer that votes are counted by (None: no vote); needed by "majority" and "weighted".
        finished: see `TextDomain`.

    Raises:
        ConfigError: an unknown method, a critic or extract missing, a budget below one step.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method!r}: give one of {', '.join(METHODS)}")
    if method in NEEDS_CRITIC and critic is None:
        raise ConfigError(f"{method} chooses by a critic; give one")
    if (method in ("majority", "weighted") or (method == "mcts" and how.pick == "vote")) and extract is None:
        raise ConfigError(f"{method} counts votes by answer; give extract, such as rewards.verify.extract_answer")
    ask = _Asker(engine, list(trees), how, decode, critic, extract, finished, list(tasks or [None] * len(trees)))
    cost = how.option.sampling.max_tokens + getattr(critic, "most_tokens", 0)
    if method == "beam" and how.tokens < cost:
        raise ConfigError(f"tokens={how.tokens}: one option of a beam may take {cost}; give more, or shorter options")
    if method == "mcts":
        return ask.tree_search()
    if method == "beam":
        return ask.beam()
    if method == "greedy":
        return ask.greedy()
    return ask.sampled(method)


@dataclass
class _Asker:
    engine: Engine
    trees: list[TokenTree]
    how: Inference
    decode: Callable[[Sequence[int]], str]
    critic: TextCritic | None
    extract: Callable[[str], str | None] | None
    finished: Callable[[str], bool] | None
    tasks: list[Any]

    def __post_init__(self):
        self.spent = [0] * len(self.trees)
        self.counts = new_counts(len(self.trees))
        join = getattr(self.critic, "attach", None)
        if join is not None:
            join([str(t) for t in range(len(self.trees))], self.counts)

    # -- shared parts --
    def left(self, t: int) -> int:
        return self.how.tokens - self.spent[t]

    def extend(self, places: Sequence[tuple[int, int]], sampling: Sampling) -> list[int]:
        """One sample at each (tree, node), none longer than its tree's budget still allows for all of them."""
        count: dict[int, int] = {}
        for t, _ in places:
            count[t] = count.get(t, 0) + 1
        limits = [min(sampling.max_tokens, self.left(t) // count[t]) for t, _ in places]
        out = [-1] * len(places)
        for limit in sorted(set(limits), reverse=True):
            mine = [i for i, size in enumerate(limits) if size == limit]
            leaves = [(self.trees[places[i][0]], places[i][1]) for i in mine]
            for i, (node,) in zip(
                mine, self.engine.extend(leaves, 1, replace(sampling, max_tokens=limit)), strict=True
            ):
                out[i] = node
        for (t, _), node in zip(places, out, strict=True):
            self.spent[t] += int(self.trees[t].length[node])
        return out

    def text(self, t: int, node: int) -> str:
        tree = self.trees[t]
        return self.decode([i for n in tree.path(node)[1:] for i in tree.node_ids(n)])

    def ended(self, t: int, node: int) -> bool:
        tree = self.trees[t]
        full = bool(node) and tree.length[node] == 0
        return bool(tree.stop[node] == Stop.EOS or full or (self.finished and self.finished(self.text(t, node))))

    def values(self, places: Sequence[tuple[int, int]], *, ended: bool | None = None) -> list[float]:
        """The critic's values; NaN where it cannot judge."""
        if not places or self.critic is None:
            return [math.nan] * len(places)
        leaves = [
            TextLeaf(
                self.trees[t],
                n,
                0,
                self.ended(t, n) if ended is None else ended,
                self.text(t, n),
                str(t),
                self.tasks[t],
            )
            for t, n in places
        ]
        out = []
        before = self.counts["tokens"].copy()
        results = self.critic(leaves)
        for t, more in enumerate((self.counts["tokens"] - before).tolist()):
            self.spent[t] += more
        for result in results:
            if isinstance(result, Exception):
                out.append(math.nan)
            elif isinstance(result, Judgement):
                out.append(float(result.value))
            elif isinstance(result, list | tuple):
                out.append(sum(result) / len(result))
            else:
                out.append(float(result))
        return out

    def answered(self, t: int, node: int, value: float, candidates: int) -> Answered:
        tree = self.trees[t]
        return Answered(tree, node, self.text(t, node), value, self.spent[t], self.ended(t, node), candidates)

    # -- methods --
    def greedy(self) -> list[Answered]:
        nodes = self.extend([(t, 0) for t in range(len(self.trees))], replace(self.how.sampling, temperature=0.0))
        return [self.answered(t, node, math.nan, 1) for t, node in enumerate(nodes)]

    def sampled(self, method: Method) -> list[Answered]:
        """Whole answers until no further one fits, then one is chosen."""
        size = self.how.sampling.max_tokens
        found: list[list[int]] = [[] for _ in self.trees]
        while True:
            fits = [self.left(t) // size or int(not found[t]) for t in range(len(self.trees))]  # a cut one before none
            places = [(t, 0) for t, count in enumerate(fits) for _ in range(count)]
            if not places:
                break
            for (t, _), node in zip(places, self.extend(places, self.how.sampling), strict=True):
                found[t].append(node)
        flat = [(t, n) for t, nodes in enumerate(found) for n in nodes]
        values = self.values(flat, ended=True) if method != "majority" else [math.nan] * len(flat)
        value = dict(zip(flat, values, strict=True))
        return [self.chosen(t, nodes, value, method) for t, nodes in enumerate(found)]

    def chosen(self, t: int, nodes: list[int], value: dict[tuple[int, int], float], method: Method) -> Answered:
        def worth(node: int) -> float:
            v = value.get((t, node), math.nan)
            return -math.inf if math.isnan(v) else v

        if method in ("majority", "weighted"):
            votes: dict[str, float] = {}
            first: dict[str, int] = {}
            for node in nodes:
                said = self.extract(self.text(t, node)) if self.extract else None
                weight = 1.0 if method == "majority" else worth(node)
                if said is None or weight == -math.inf:
                    continue
                votes[said] = votes.get(said, 0.0) + weight
                if said not in first or (method == "weighted" and worth(node) > worth(first[said])):
                    first[said] = node
            best = first[max(votes, key=lambda s: votes[s])] if votes else nodes[0]
        else:
            best = max(nodes, key=worth)
        return self.answered(t, best, value.get((t, best), math.nan), len(nodes))

    def beam(self) -> list[Answered]:
        """Keep the best prefixes by the critic, write each on by several options, until all have ended."""
        step = self.how.option.sampling
        cost = step.max_tokens + getattr(self.critic, "most_tokens", 0)
        beams: list[list[int]] = [[0] for _ in self.trees]
        done: list[dict[int, float]] = [{} for _ in self.trees]
        last: list[dict[int, float]] = [{} for _ in self.trees]
        while True:
            places = []
            for t, nodes in enumerate(beams):
                wanted = [(t, n) for n in nodes for _ in range(self.how.expand)]
                places += wanted[: self.left(t) // cost]
            if not places:
                break
            new = [(t, n) for (t, _), n in zip(places, self.extend(places, step), strict=True)]
            values = self.values(new)
            beams = [[] for _ in self.trees]
            for t in {t for t, _ in new}:
                mine = {n: v for (u, n), v in zip(new, values, strict=True) if u == t and not math.isnan(v)}
                done[t] |= {n: v for n, v in mine.items() if self.ended(t, n)}
                open_ = {n: v for n, v in mine.items() if n not in done[t]}
                beams[t] = sorted(open_, key=lambda n: -open_[n])[: self.how.beam]
                last[t] = open_ or last[t]
        out = []
        for t in range(len(self.trees)):
            pool = done[t] or last[t]
            node = max(pool, key=lambda n: pool[n], default=0)
            out.append(self.answered(t, node, pool.get(node, math.nan), len(pool)))
        return out

    def tree_search(self) -> list[Answered]:
        option, config = self.how.option, self.how.config
        parts = 1 if option.ends is None else option.parts
        rollout = getattr(self.critic, "most_tokens", 0)
        longest = max(option.sampling.max_tokens * parts, option.final.max_tokens if option.final else 0)
        room = self.how.tokens - (longest + rollout) * config.leaves
        if room < 1:
            raise ConfigError(
                f"tokens={self.how.tokens}: a round of tree search may take {(longest + rollout) * config.leaves}; give "
                "more, or shorter options and rollouts"
            )
        found = search(
            self.trees,
            None,
            self.engine,
            self.critic,
            Budget(tokens=room),
            config=replace(config, exhaust=True),
            decode=self.decode,
            option=option,
            finished=self.finished,
            tasks=self.tasks,
        )
        domain = found.search.domain
        assert isinstance(domain, TextDomain)
        out = []
        for t, view in enumerate(found.trees):
            self.spent[t] = int(found.search.counts["tokens"][t])
            ends = view.finished()
            value = {(t, domain.tokens[t][r][-1]): float(view.raw[r]) for r in ends}
            if self.how.pick == "vote" and ends:
                out.append(self.chosen(t, [n for _, n in value], value, "weighted"))
                continue
            row = greedy_leaf(view) if self.how.pick == "greedy" else best_leaf(view, "raw")
            row = row if row is not None else best_leaf(view, finished=False)
            row = row or 0
            out.append(self.answered(t, domain.tokens[t][row][-1], float(view.raw[row]), max(1, len(ends))))
        return out
