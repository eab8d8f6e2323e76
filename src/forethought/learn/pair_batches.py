"""Preference pairs on token trees: what a pair is, micro-batches that never split one, and sums over its answers.

A pair is one tree that holds the prompt once and both answers below it; pairs of the same samples share the tree, so
the prompt of eight samples is computed once for all of their pairs. The tokens of an answer are those with a weight on
the way to its end node (its end token among them); a token that both answers share counts for both.

P: pairs, M: targets of a batch, S: distinct answers, L: (answer, token) incidences.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from forethought.errors import DataError
from forethought.models.policy import Policy
from forethought.tree.pack import Batch, Layout, pack, write_back
from forethought.tree.tree import TokenTree

REFERENCE, PREVIOUS = "ref_logprob", "prev_logprob"
"""Token columns of the log-probs under the reference and under the previous iterate."""
REASONS = {
    "identical": "both answers are equal",
    "empty": "an answer is empty",
    "prompts differ": "the answers follow different prompts",
    "too long": "a path is too long",
}
"""Why a pair cannot be trained on, by the name it is counted under."""


@dataclass(eq=False)
class PreferencePair:
    """Two answers to one prompt.

    tree: holds the prompt and both answers, with weights above 0 on the answers' tokens. chosen, rejected: the nodes
    that end them. p: the oracle's probability that the chosen one wins; where the label was drawn it may lie below 1/2.
    win_chosen, win_rejected: mean probability of each to win against the policy that sampled them (SPPO, Nash-MD).
    """

    tree: TokenTree
    chosen: int
    rejected: int
    p: float = 1.0
    task: Mapping[str, Any] = field(default_factory=dict)
    win_chosen: float | None = None
    win_rejected: float | None = None

    @property
    def name(self) -> str:
        return str(self.task.get("id", self.tree.task))

    def answers(self) -> tuple[np.ndarray, np.ndarray]:
        """Token indices of the chosen and of the rejected answer."""
        return answer_tokens(self.tree, self.chosen), answer_tokens(self.tree, self.rejected)


def answer_tokens(tree: TokenTree, node: int) -> np.ndarray:
    """Indices of the trained tokens on the path to `node`, in order."""
    path = tree.path_tokens(node)
    return path[tree.weight[path] > 0]


def problem(pair: PreferencePair, context: int | None = None) -> str | None:
    """What is wrong with a pair, a name of `REASONS`; None for a sound one.

    Raises:
        DataError: a node is none of the tree's, p is no probability, or a weight is negative or not finite.
    """
    tree = pair.tree
    for side in ("chosen", "rejected"):
        node = getattr(pair, side)
        if not 0 <= node < tree.n_nodes:
            raise DataError(f"pair {pair.name!r}: {side}={node} is no node of its tree (it has {tree.n_nodes})")
    if not 0 <= pair.p <= 1:
        raise DataError(f"pair {pair.name!r}: p={pair.p}: a probability lies in [0, 1]")
    if not np.isfinite(tree.weight).all() or (tree.weight < 0).any():
        raise DataError(f"pair {pair.name!r}: a token weight is NaN, infinite or negative; give 1 on answers, else 0")
    chosen, rejected = pair.answers()
    if not len(chosen) or not len(rejected):
        return "empty"
    ids = tree.ids
    if np.array_equal(ids[chosen], ids[rejected]):
        return "identical"
    prompts = []
    for node, first in ((pair.chosen, chosen[0]), (pair.rejected, rejected[0])):
        path = tree.path_tokens(node)
        prompts.append(ids[path[: int(np.flatnonzero(path == first)[0])]])
    if not np.array_equal(*prompts):
        return "prompts differ"
    if context is not None and max(tree.path_length(pair.chosen), tree.path_length(pair.rejected)) > context:
        return "too long"
    return None


def usable_pairs(
    pairs: Sequence[PreferencePair], *, context: int | None = None
) -> tuple[list[PreferencePair], Counter[str]]:
    """The pairs that can be trained on, and how many were left out by what (`REASONS`).

    Args:
        context: longest path in tokens (`policy.context`).
    """
    kept, dropped = [], Counter()
    for pair in pairs:
        wrong = problem(pair, context)
        if wrong:
            dropped[wrong] += 1
        else:
            kept.append(pair)
    return kept, dropped


def left_out(dropped: Mapping[str, int]) -> str:
    """The counts in words.

    >>> left_out({"identical": 2})
    '2 pairs (both answers are equal)'
    """
    return ", ".join(f"{n} pair{'s' * (n > 1)} ({REASONS[name]})" for name, n in dropped.items())


# -- batches -----------------------------------------------------------------------------------------------------------


def distinct(pairs: Iterable[PreferencePair]) -> list[TokenTree]:
    """The trees of these pairs, each once, in order of their first pair."""
    return list({id(p.tree): p.tree for p in pairs}.values())


def answer_weights(pairs: Sequence[PreferencePair]) -> list[np.ndarray]:
    """Per distinct tree, token weights [T]: 1 on the tokens of these pairs' answers, else 0."""
    out = {id(p.tree): np.zeros(p.tree.n_tokens, np.float32) for p in pairs}
    for pair in pairs:
        for tokens in pair.answers():
            out[id(pair.tree)][tokens] = 1
    return list(out.values())


def micro_batches(
    pairs: Sequence[PreferencePair], layout: Layout, max_tokens: int | None, columns: Iterable[str] = ()
) -> list[tuple[Batch, list[PreferencePair]]]:
    """Batches of about `max_tokens` packed tokens with the pairs that stand in each; no pair is split.

    Pairs of one tree stand together and share what they can. A pair larger than the budget has a batch of its own.

    Raises:
        DataError: see `pack`.
    """
    order = {id(tree): i for i, tree in enumerate(distinct(pairs))}
    groups: list[list[PreferencePair]] = []
    held: set[tuple[int, int]] = set()  # (tree, node), in the linear layout (tree, end of a row)
    room = 0
    for pair in sorted(pairs, key=lambda p: order[id(p.tree)]):
        tree, key = pair.tree, id(pair.tree)
        ends = {pair.chosen, pair.rejected}
        parts = ends if layout == "linear" else {n for end in ends for n in tree.path(end)}

        def cost(of: set[int], tree: TokenTree = tree) -> int:
            return sum(tree.path_length(n) if layout == "linear" else int(tree.length[n]) for n in of)

        more = cost({n for n in parts if (key, n) not in held})
        if not groups or (max_tokens is not None and room + more > max_tokens):
            groups.append([])
            held, room, more = set(), 0, cost(parts)
        groups[-1].append(pair)
        held |= {(key, n) for n in parts}
        room += more
    columns, out = list(columns), []
    for mine in groups:
        (batch,) = pack(distinct(mine), layout=layout, columns=columns, weights=answer_weights(mine))
        out.append((batch, mine))
    return out


class Answers:
    """Which targets of a batch belong to which answer.

    owner, target: [L], answer and target of each incidence; share: [L], 1 / rows that hold the target (linear layout).
    chosen, rejected: [P] answers of each pair.
    """

    def __init__(self, batch: Batch, pairs: Sequence[PreferencePair]):
        trees = distinct(pairs)
        place = {id(tree): i for i, tree in enumerate(trees)}
        source, token = batch.tree.cpu().numpy(), batch.token.cpu().numpy()
        rows = [np.flatnonzero(source == i) for i in range(len(trees))]
        number: dict[tuple[int, int], int] = {}
        owner, target = [], []
        for pair in pairs:
            for node in (pair.chosen, pair.rejected):
                key = (place[id(pair.tree)], node)
                if key in number:
                    continue
                number[key] = len(number)
                mine = rows[key[0]]
                inside = mine[np.isin(token[mine], answer_tokens(pair.tree, node))]
                owner.append(np.full(len(inside), number[key]))
                target.append(inside)
        device = batch.ids.device

        def tensor(values: Any) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, np.int64), device=device)

        self.count = len(number)
        self.owner, self.target = tensor(np.concatenate(owner)), tensor(np.concatenate(target))
        self.share = batch.weight.index_select(0, self.target)
        self.chosen = tensor([number[place[id(p.tree)], p.chosen] for p in pairs])
        self.rejected = tensor([number[place[id(p.tree)], p.rejected] for p in pairs])
        self.dtype = torch.float32 if device.type == "mps" else torch.float64  # sums of hundreds of nats, compared

    def only(self, pair: int) -> Answers:
        """The same batch with this pair alone."""
        one = copy.copy(self)
        one.chosen, one.rejected = self.chosen[pair : pair + 1], self.rejected[pair : pair + 1]
        return one

    def sums(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-target values [M] -> their sums over the chosen answers [P] and over the rejected ones [P]."""
        terms = (self.share * values.index_select(0, self.target)).to(self.dtype)
        sums = terms.new_zeros(self.count).index_add(0, self.owner, terms)
        return sums.index_select(0, self.chosen), sums.index_select(0, self.rejected)


@torch.no_grad()
def annotate(
    policy: Policy,
    pairs: Sequence[PreferencePair],
    column: str,
    *,
    temperature: float = 1.0,
    micro_tokens: int | None = 4096,
) -> None:
    """Log-probs of the answers' tokens under `policy`, without dropout, into a token column of their trees.

    The batches are those of `micro_batches`, so that the same pairs measured later meet the same rounding.

    Raises:
        DataError: a log-prob is not finite; names the pair.
    """
    training = policy.model.training
    policy.model.eval()
    try:
        for batch, mine in micro_batches(pairs, policy.layout, micro_tokens):
            values, _ = policy.logprobs(batch.to(policy.device), temperature=temperature)
            write_back(distinct(mine), batch, column, values)
    finally:
        policy.model.train(training)
    check_column(pairs, column)


def check_column(pairs: Sequence[PreferencePair], column: str) -> None:
    """Raises: DataError where a pair lacks the column, or has something there that is not finite."""
    for pair in pairs:
        if column not in pair.tree.columns:
            raise DataError(
                f"pair {pair.name!r}: its tree has no column {column!r}; fill it with annotate(policy, ...)"
            )
        for side, tokens in zip(("chosen", "rejected"), pair.answers(), strict=True):
            values = pair.tree.column(column)[tokens]
            bad = int((~np.isfinite(values)).sum())
            if bad:
                first = values[~np.isfinite(values)][0]
                raise DataError(
                    f"pair {pair.name!r}: column {column!r} is {first} at {bad} of the {len(tokens)} tokens of its "
                    f"{side} answer"
                )
