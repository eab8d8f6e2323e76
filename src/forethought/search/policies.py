"""Policies of a search over environments: legal actions with priors, and actions sampled from a language model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from forethought.config import derive_seed
from forethought.errors import ConfigError
from forethought.models.engine import Engine, Sampling
from forethought.search.env_world import Proposal, State
from forethought.search.rules import check_number
from forethought.tree.tree import Kind, Stop, TokenTree


class LegalActions:
    """All actions that a state admits.

    Args:
        actions: State -> its actions; default: `info["actions"]` of the Step.
        prior: (State, actions) -> one weight each, made to sum to 1; default: equal.
    """

    def __init__(
        self,
        actions: Callable[[State], Iterable[str]] | None = None,
        prior: Callable[[State, Sequence[str]], Sequence[float]] | None = None,
    ):
        self.actions, self.prior = actions, prior

    def __call__(self, states: Sequence[State]) -> list[Proposal]:
        return [self._one(state) for state in states]

    def _one(self, state: State) -> Proposal:
        if self.actions is None and "actions" not in state.step.info:
            raise ConfigError(
                f"task {state.tree!r}: its Step has no info['actions'] to list; give LegalActions(actions=...)"
            )
        listed = tuple(self.actions(state) if self.actions else state.step.info["actions"])
        if self.prior is None or not listed:
            return Proposal(listed)
        weights = np.asarray(self.prior(state, listed), np.float64)
        if weights.shape != (len(listed),) or not (np.isfinite(weights).all() and weights.sum() > 0):
            raise ConfigError(f"task {state.tree!r}: prior weights {weights} for {len(listed)} actions")
        return Proposal(listed, tuple((weights / weights.sum()).tolist()))


def count_prior(counts: Sequence[float] | np.ndarray, *, temperature: float = 1.0) -> np.ndarray:
    """Priors from how often each action was sampled: proportional to count^(1 / temperature).

    Raises:
        ConfigError: temperature not positive.
    """
    check_number("prior temperature", temperature, above=0)
    logs = np.log(np.asarray(counts, np.float64)) / temperature
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()


Keep = Literal["best", "sample", "random"]


class SampledActions:
    """Actions that a language model says, as in R-MCTS (arXiv 2410.02052): sample many, read them, count equal ones.

    Every tree of the search has one `TokenTree` (`trees`, by name): a state's prompt, the samples below it, and below
    the sample that an action was first read from the text of the next state. Each token is generated once, and paths
    hold exactly the ids that the model saw and produced.

    Args:
        engine: the model.
        first: State -> token ids of its prompt. follow: State -> the ids that come after the action that led to it.
        read: text of a sample -> the action, in canonical form, or None where there is none.
        decode: ids -> text.
        n: samples a state. keep: how many different actions at most. sampling: how to sample.
        choose: which actions stay: "best" the most frequent (ties: the first), "sample" drawn without replacement by
            frequency, "random" any. Priors are shares of the kept counts, flattened by prior_temperature above 1.
        retries: further rounds of n samples where none can be read; then the state's one action is a dead end.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        first: Callable[[State], Sequence[int]],
        follow: Callable[[State], Sequence[int]],
        read: Callable[[str], str | None],
        decode: Callable[[Sequence[int]], str],
        n: int = 20,
        keep: int = 5,
        sampling: Sampling | None = None,
        choose: Keep = "best",
        prior_temperature: float = 1.0,
        retries: int = 1,
    ):
        if n < 1 or keep < 1 or retries < 0:
            raise ConfigError(f"sampled actions: n={n}, keep={keep}, retries={retries}: at least 1, 1 and 0")
        if choose not in ("best", "sample", "random"):
            raise ConfigError(f"choose={choose!r}: give 'best', 'sample' or 'random'")
        check_number("prior_temperature", prior_temperature, above=0)
        self.engine, self.first, self.follow, self.read, self.decode = engine, first, follow, read, decode
        self.n, self.keep, self.choose, self.prior_temperature = n, keep, choose, prior_temperature
        self.sampling = sampling or Sampling(max_tokens=64, top_p=0.95)
        self.retries = retries
        self.trees: dict[str, TokenTree] = {}
        self._counts: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(0, np.int64))
        self._place: dict[str, int] = {}

    def attach(self, names: Sequence[str], counts: defaultdict[str, np.ndarray]) -> None:
        """Count tokens in a search's accounts, and begin with no trees."""
        self._counts, self._place = counts, {name: i for i, name in enumerate(names)}
        self.trees = {}

    def __call__(self, states: Sequence[State]) -> list[Proposal]:
        read: list[dict[str, list[int]]] = [{} for _ in states]
        left = list(range(len(states)))
        for _ in range(1 + self.retries):
            leaves = [(self._tree(states[i]), self._leaf(states[i])) for i in left]
            for i, nodes in zip(left, self.engine.extend(leaves, self.n, self.sampling), strict=True):
                tree = self.trees[states[i].tree]
                for node in nodes:
                    self._counts["tokens"][self._place[states[i].tree]] += int(tree.length[node])
                    text = None if tree.stop[node] == Stop.ERROR else self.decode(tree.node_ids(node))
                    action = None if text is None else self.read(text)
                    if action is None:
                        tree.meta[node]["unread"] = True
                        self._counts["unread"][self._place[states[i].tree]] += 1
                    else:
                        read[i].setdefault(action, []).append(node)
            left = [i for i in left if not read[i]]
            if not left:
                break
        return [self._proposal(state, found) for state, found in zip(states, read, strict=True)]

    def _proposal(self, state: State, found: dict[str, list[int]]) -> Proposal:
        if not found:
            return Proposal((None,), (0.0,))
        actions = list(found)
        counts = np.array([len(found[a]) for a in actions], np.float64)
        size = min(self.keep, len(actions))
        if self.choose == "best":
            kept = np.argsort(-counts, kind="stable")[:size]
        else:
            rng = np.random.default_rng(derive_seed("keep", self.sampling.seed, state.tree, *state.actions))
            share = counts / counts.sum() if self.choose == "sample" else None
            kept = np.sort(rng.choice(len(actions), size=size, replace=False, p=share))
            kept = kept[np.argsort(-counts[kept], kind="stable")]
        chosen = tuple(actions[k] for k in kept)
        state.memo["tokens"] = {a: found[a][0] for a in chosen}
        prior = count_prior(counts[kept], temperature=self.prior_temperature)
        return Proposal(chosen, tuple(prior.tolist()))

    # -- tokens --
    def _tree(self, state: State) -> TokenTree:
        if state.tree not in self.trees:
            seed = state.root.seed
            self.trees[state.tree] = TokenTree(self.first(state), task=state.tree, seed=seed)
            state.memo["leaf"] = 0
        return self.trees[state.tree]

    def _leaf(self, state: State) -> int:
        """The token node that a state's prompt ends in."""
        if "leaf" not in state.memo:
            tree = self._tree(state)
            if state.parent is None:
                state.memo["leaf"] = 0
            else:
                said = state.parent.memo["tokens"][state.action]
                state.memo["leaf"] = tree.add(said, self.follow(state), kind=Kind.OBSERVATION)
        return state.memo["leaf"]

    # -- storing --
    def to_arrays(self) -> dict[str, dict[str, np.ndarray]]:
        return {name: tree.to_arrays() for name, tree in self.trees.items()}

    def from_arrays(self, stored: dict[str, dict[str, Any]]) -> None:
        self.trees = {name: TokenTree.from_arrays(arrays) for name, arrays in stored.items()}
