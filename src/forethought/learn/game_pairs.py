"""From the samples of a preference game's prompts to pairs on token trees.

Pairs for DPO, IPO and INPO come from `rewards.pairs.oracle_pairs`. SPPO and Nash-MD read win probabilities instead: every
two answers of a prompt are compared (K (K - 1) / 2 queries), and

    SPPO      win_i = mean over all K answers j of P(i beats j), itself among them with 1/2 (as the paper's code has it)
    Nash-MD   win_i = mean over the others, weighed with (reference(j) / policy(j))^mixture of whole answers: an estimate
              of P(i beats an answer of the geometric mixture) that needs no model of the mixture; exact for large K,
              biased towards the policy for small
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from forethought.errors import RewardError
from forethought.learn.pair_batches import PREVIOUS, REFERENCE, PreferencePair
from forethought.rewards.oracles import Oracle, Task, ask_oracle
from forethought.rewards.pairs import Pair, PairCounts, PairMode, Sample, oracle_pairs, usable
from forethought.tree.tree import Kind, Stop, TokenTree

Group = tuple[Task, TokenTree]
"""A prompt with its sampled answers as the children of the root."""


def samples_of(tree: TokenTree, decode: Callable[[Sequence[int]], str]) -> list[Sample]:
    """The answers below the root as pairs need to know them."""
    out = []
    for node in tree.children(0):
        stop = Stop(int(tree.stop[node]))
        failed = str(tree.meta[node].get("error", "sampling failed")) if stop is Stop.ERROR else ""
        out.append(Sample(decode(tree.node_ids(node)), int(tree.length[node]), stop is Stop.LENGTH, failed))
    return out


def compared(
    oracle: Oracle,
    groups: Sequence[Group],
    decode: Callable[[Sequence[int]], str],
    mode: PairMode,
    *,
    seed: int,
    key: Sequence[str | int],
    keep_truncated: bool = False,
    max_length: int | None = None,
) -> tuple[list[PreferencePair], PairCounts]:
    """Pairs by `mode`, on trees that hold the answers they use and no others; see `oracle_pairs`."""
    counts = PairCounts()
    made = oracle_pairs(
        oracle,
        [(task, samples_of(tree, decode)) for task, tree in groups],
        mode,
        seed=seed,
        key=key,
        keep_truncated=keep_truncated,
        max_length=max_length,
    )
    out = []
    for (task, tree), (pairs, mine) in zip(groups, made, strict=True):
        counts.add(mine)
        out += _on_own_tree(task, tree, pairs, {})
    return out, counts


def with_wins(
    oracle: Oracle,
    groups: Sequence[Group],
    decode: Callable[[Sequence[int]], str],
    mode: PairMode,
    *,
    annotate: Callable[[Sequence[PreferencePair]], None] | None = None,
    mixture: float = 0.0,
    keep_truncated: bool = False,
    max_length: int | None = None,
) -> tuple[list[PreferencePair], PairCounts]:
    """Pairs of answers with their win probabilities (see above); equal answers are not left out, for both count.

    Args:
        mode: "iid" pairs neighbours, "max_min" the answers of the highest and the lowest probability.
        annotate: fills the columns of reference and previous iterate; then the opponent is the mixture (Nash-MD).

    Raises:
        RewardError: every comparison failed; the first is named.
    """
    counts = PairCounts()
    samples, use = [], []
    for _, tree in groups:
        mine = samples_of(tree, decode)
        counts.prompts += 1
        counts.samples += len(mine)
        samples.append(mine)
        use.append(usable(mine, keep_truncated=keep_truncated, max_length=max_length, counts=counts))
    texts = [[mine[i].text for i in chosen] for mine, chosen in zip(samples, use, strict=True)]
    matrices = win_matrices(oracle, [task for task, _ in groups], texts, counts)
    weights = None if annotate is None else _mixture_weights(groups, use, annotate, mixture)
    out = []
    for g, (task, tree) in enumerate(groups):
        wins = win_rates(matrices[g], None if weights is None else weights[g])
        known = [a for a in range(len(wins)) if math.isfinite(wins[a])]
        counts.drop("sample/not judged", len(wins) - len(known))
        pairs: list[tuple[int, int]] = []
        if len(known) < 2:
            counts.drop("prompt/too few")
        elif mode == "max_min":
            best, worst = max(known, key=lambda a: wins[a]), min(known, key=lambda a: wins[a])
            if texts[g][best] == texts[g][worst]:
                counts.drop("pair/tie")
            else:
                pairs = [(best, worst)]
        else:
            counts.drop("sample/odd", len(known) % 2)
            pairs = list(zip(known[0::2], known[1::2], strict=False))
        counts.pairs += len(pairs)
        sure = [float(np.nan_to_num(matrices[g][a, b], nan=0.5)) for a, b in pairs]
        of = [Pair(use[g][a], use[g][b], p) for (a, b), p in zip(pairs, sure, strict=True)]
        out += _on_own_tree(task, tree, of, {use[g][a]: float(wins[a]) for a in known})
    return out, counts


def win_matrices(
    oracle: Oracle, tasks: Sequence[Task], texts: Sequence[Sequence[str]], counts: PairCounts
) -> list[np.ndarray]:
    """P [k, k] of each prompt's answers, P[i, j] = P(i beats j); all prompts in one batch of queries.

    1/2 between equal texts, without a query; NaN where a comparison failed.

    Raises:
        RewardError: every comparison failed.
    """
    places = [
        (g, a, b)
        for g, mine in enumerate(texts)
        for a in range(len(mine))
        for b in range(a + 1, len(mine))
        if mine[a] != mine[b]
    ]
    given = ask_oracle(oracle, [(tasks[g], texts[g][a], texts[g][b]) for g, a, b in places]) if places else []
    failed = [p for p in given if isinstance(p, RewardError)]
    counts.queries += len(places)
    counts.failure = counts.failure or (str(failed[0]) if failed else "")
    if places and len(failed) == len(places):
        raise RewardError(f"all {len(places)} comparisons failed; the first: {failed[0]}")
    out = [np.full((len(mine), len(mine)), 0.5) for mine in texts]
    for (g, a, b), p in zip(places, given, strict=True):
        known = math.nan if isinstance(p, RewardError) else p
        out[g][a, b], out[g][b, a] = known, 1 - known
    return out


def win_rates(matrix: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Win probability [k] of each answer from P [k, k]; NaN where no comparison with another one is known.

    Without weights the mean over the row, itself among them with 1/2; with weights [k] that over the others.
    """
    out = np.full(len(matrix), math.nan)
    for i, row in enumerate(matrix):
        others = np.isfinite(row)
        others[i] = False
        if others.any():
            known = others if weights is not None else np.isfinite(row)
            mass = np.ones(len(row)) if weights is None else weights
            out[i] = (row[known] * mass[known]).sum() / mass[known].sum()
    return out


def _mixture_weights(groups, use, annotate, mixture: float) -> list[np.ndarray]:
    """Per prompt (reference / policy)^mixture of each usable answer, scaled so that the largest is 1."""
    leaves = [[(tree, tree.children(0)[i]) for i in mine] for (_, tree), mine in zip(groups, use, strict=True)]
    for mine in leaves:
        for tree, leaf in mine:
            tree.weight[tree.span(leaf)] = 1
    annotate([PreferencePair(tree, leaf, leaf) for mine in leaves for tree, leaf in mine])
    out = []
    for mine in leaves:
        spans = [(tree, tree.span(leaf)) for tree, leaf in mine]
        ratios = [tree.column(REFERENCE)[s].astype(float) - tree.column(PREVIOUS)[s] for tree, s in spans]
        logs = mixture * np.array([ratio.sum() for ratio in ratios])
        out.append(np.exp(logs - logs.max()) if len(logs) else logs)
    return out


def _on_own_tree(task: Task, tree: TokenTree, pairs: Sequence[Pair], wins: dict[int, float]) -> list[PreferencePair]:
    """Pairs of sample indices on a new tree with the prompt and the answers that stand in a pair."""
    nodes = tree.children(0)
    own = TokenTree(tree.node_ids(0), kind=Kind.PROMPT, task=tree.task, seed=tree.seed)
    made: dict[int, int] = {}
    out = []
    for pair in pairs:
        for i, p in ((pair.chosen, pair.p), (pair.rejected, 1 - pair.p)):
            if i in made:
                continue
            node = nodes[i]
            made[i] = own.add(
                0,
                tree.node_ids(node),
                sampled=True,
                logprobs=tree.logprob[tree.span(node)],
                stop=Stop(int(tree.stop[node])),
                reward=wins.get(i, p),
            )
            own.weight[own.span(made[i])] = 1
        out.append(
            PreferencePair(
                own,
                made[pair.chosen],
                made[pair.rejected],
                pair.p,
                task,
                win_chosen=wins.get(pair.chosen),
                win_rejected=wins.get(pair.rejected),
            )
        )
    return out


def pair_metrics(pairs: Sequence[PreferencePair]) -> dict[str, float]:
    """What annotated pairs say before the first step: how sure the oracle is, lengths, sampler against learner."""
    sides = [(pair.tree, side) for pair in pairs for side in pair.answers()]
    gaps = np.concatenate([np.abs(tree.logprob[s].astype(float) - tree.column(PREVIOUS)[s]) for tree, s in sides])
    gaps = gaps[np.isfinite(gaps)]
    return {
        "pairs/p": float(np.mean([pair.p for pair in pairs])),
        "chosen/mean_length": float(np.mean([len(s) for _, s in sides[0::2]])),
        "rejected/mean_length": float(np.mean([len(s) for _, s in sides[1::2]])),
        "logprob_gap/mean": float(gaps.mean()) if len(gaps) else 0.0,
        "logprob_gap/max": float(gaps.max()) if len(gaps) else 0.0,
    }
