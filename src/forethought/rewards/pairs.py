"""Preference pairs from the samples of a prompt: i.i.d., soft, tournament, best against worst, verified right and wrong.

Everything here is a pure function of its arguments: the same samples, answers and seed give the same pairs. A function
takes one prompt's K samples and gives `Pair`s of indices into them; `oracle_pairs` does it for many prompts at once, so
that each round of all tournaments is one batch of queries. Whatever is left out is counted by name (`PairCounts`):
nothing disappears silently.

Sources. Tournament, i.i.d. and soft pairs: INPO, arXiv 2407.00617, sections 3 and 5. Verified pairs: Phi-4-Mini-
Reasoning, arXiv 2504.21233, "Rollout DPO".

What the theory needs. INPO's loss is a regression on pairs that are i.i.d. from the policy, labelled by one draw of the
oracle (`iid_pairs`; `soft=True` keeps the probability in place of the draw, with the same mean and less noise). The
tournament is a heuristic outside of that: on a cycle of preferences of which it sees only the signs, its pairs favour
nobody, and a policy that learns from them stays where it is. Use it where there is a best answer.

Answers of the same text are never compared: P(y > y) = 1/2 needs no query.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import numpy as np

from forethought.config import derive_seed
from forethought.errors import ConfigError, DataError, RewardError
from forethought.rewards.oracles import Oracle, Task, ask_oracle, bernoulli
from forethought.rewards.pair_data import (
    REASONS,
    Pair,
    PairCounts,
    Sample,
    Verdict,
    as_samples,
    distinct_records,
    preference_records,
    usable,
)

__all__ = [
    "MODES",
    "REASONS",
    "Ask",
    "Pair",
    "PairCounts",
    "PairMode",
    "Sample",
    "Verdict",
    "as_samples",
    "check_tournament",
    "distinct_records",
    "iid_pairs",
    "max_min_pair",
    "oracle_pairs",
    "preference_records",
    "tournament_pair",
    "usable",
    "verified_pairs",
    "win_matrix",
]

PairMode = Literal["iid", "soft", "tournament", "max_min"]
MODES: tuple[PairMode, ...] = ("iid", "soft", "tournament", "max_min")
TIE = 1e-9
"""Closer than this to 1/2, neither answer wins."""

Ask = Callable[[list[tuple[int, int]]], Sequence[float | RewardError]]
"""Index pairs (i, j) -> P(sample i beats sample j), or the error in its place."""
_Plan = Generator[list[tuple[int, int]], "list[float | RewardError]", list[Pair]]
"""Asks rounds of comparisons, receives their answers, returns pairs."""


# -- the four ways to ask an oracle ------------------------------------------------------------------------------------


def iid_pairs(
    samples: Sequence[Sample | str],
    ask: Ask,
    *,
    seed: int,
    key: Sequence[str | int] = (),
    soft: bool = False,
    use: Sequence[int] | None = None,
    counts: PairCounts | None = None,
) -> list[Pair]:
    """Neighbours as pairs: (0, 1), (2, 3) ...; one query each. They are i.i.d. where the samples are.

    Pairs of equal texts carry only a constant and are skipped; the rest is not reweighted, and ties stay (their target
    is no difference).

    Args:
        ask: see `Ask`. seed, key: of the label's draw, with the two indices; e.g. key = (iteration, task id).
        soft: no draw; `p` of the pair is P(first beats second).
        use: the indices to use (`usable`); all by default.
        counts: is added to.

    Raises:
        ConfigError: fewer than 2 samples.
    """
    return _alone(_iid, samples, ask, use, counts, seed=seed, key=tuple(key), soft=soft)


def tournament_pair(
    samples: Sequence[Sample | str], ask: Ask, *, use: Sequence[int] | None = None, counts: PairCounts | None = None
) -> Pair | None:
    """The final winner against the final loser of a knock-out, if the winner wins that last comparison too.

    Neighbours play; then winners play winners and losers play losers, to one of each; on a tie the first counts as winner. K
    samples take K/2 + 2 (K/2 - 1) + 1 queries: 11 for 8. A final that ties or turns round gives no pair, and is counted.

    Args:
        use: the indices to use; of these the first 2^n play. Other arguments as in `iid_pairs`.

    Raises:
        ConfigError: the number of samples is not a power of two, at least 2.
    """
    found = _alone(_tournament, samples, ask, use, counts)
    return found[0] if found else None


def max_min_pair(
    samples: Sequence[Sample | str],
    ask: Ask | None = None,
    *,
    use: Sequence[int] | None = None,
    counts: PairCounts | None = None,
) -> Pair | None:
    """The sample of the highest reward against that of the lowest; the first of several.

    With `ask` the rewards are not read: the score of a sample is its mean probability to win against all others, which
    takes K (K - 1) / 2 queries. Without, `p` is 1: a reward says who wins, not how surely.

    Raises:
        ConfigError: fewer than 2 samples.
    """
    if ask is not None:
        found = _alone(_round_robin, samples, ask, use, counts)
        return found[0] if found else None
    samples, use, counts = _prepared(samples, use, counts)
    judged = [i for i in use if samples[i].reward is not None]
    counts.drop("sample/not judged", len(use) - len(judged))
    pair = _extremes({i: float(samples[i].reward or 0) for i in judged}, samples, counts)
    counts.pairs += pair is not None
    return pair


def win_matrix(samples: Sequence[Sample | str], ask: Ask) -> np.ndarray:
    """P [K, K] with P[i, j] = P(i beats j), 1/2 on the diagonal, NaN where a comparison failed; K (K - 1) / 2 queries.

    The mean of a row is what SPPO regresses on.
    """
    samples = as_samples(samples)
    matches = [(i, j) for i in range(len(samples)) for j in range(i + 1, len(samples))]
    out = np.full((len(samples), len(samples)), np.nan)
    np.fill_diagonal(out, 0.5)
    for (i, j), p in zip(matches, _answers(samples, ask, matches, PairCounts()), strict=True):
        if not isinstance(p, RewardError):
            out[i, j], out[j, i] = p, 1 - p
    return out


def _iid(samples: list[Sample], use: list[int], counts: PairCounts, seed: int, key: tuple, soft: bool) -> _Plan:
    counts.drop("sample/odd", len(use) % 2)
    matches = _neighbours(use)
    different = [(i, j) for i, j in matches if samples[i].text != samples[j].text]
    counts.drop("pair/identical", len(matches) - len(different))
    answers = yield different
    out = []
    for (i, j), p in zip(different, answers, strict=True):
        if isinstance(p, RewardError):
            counts.drop("pair/not judged")
        elif soft or bernoulli(p, seed, "label", *key, i, j):
            out.append(Pair(i, j, p))
        else:
            out.append(Pair(j, i, 1 - p))
    return out


def _tournament(samples: list[Sample], use: list[int], counts: PairCounts) -> _Plan:
    size = 1 << (len(use).bit_length() - 1)
    counts.drop("sample/surplus", len(use) - size)
    winners, losers = use[:size], []  # before the first round everybody is in one field
    while len(winners) > 1 or len(losers) > 1:
        tops, bottoms = _neighbours(winners), _neighbours(losers)
        answers = _all_known((yield [*tops, *bottoms]), counts)
        if answers is None:
            return []
        played = [(i, j) if p >= 0.5 - TIE else (j, i) for (i, j), p in zip([*tops, *bottoms], answers, strict=True)]
        winners = [won for won, _ in played[: len(tops)]]
        losers = [lost for _, lost in (played[len(tops) :] if bottoms else played)]
    return (yield from _final(samples, winners[0], losers[0], counts))


def _all_known(answers: list[float | RewardError], counts: PairCounts) -> list[float] | None:
    """The answers, or None (and a count) where one is missing."""
    known: list[float] = [p for p in answers if not isinstance(p, RewardError)]
    if len(known) == len(answers):
        return known
    counts.drop("prompt/not judged")
    return None


def _neighbours(indices: list[int]) -> list[tuple[int, int]]:
    return list(zip(indices[0::2], indices[1::2], strict=False))


def _final(samples: list[Sample], won: int, lost: int, counts: PairCounts) -> _Plan:
    """The last comparison, which decides whether there is a pair."""
    if samples[won].text == samples[lost].text:
        counts.drop("pair/identical")
        return []
    (p,) = yield [(won, lost)]
    if isinstance(p, RewardError):
        counts.drop("prompt/not judged")
    elif abs(p - 0.5) <= TIE:
        counts.drop("pair/tie")
    elif p < 0.5:
        counts.drop("pair/upset")
    else:
        return [Pair(won, lost, p)]
    return []


def _round_robin(samples: list[Sample], use: list[int], counts: PairCounts) -> _Plan:
    matches = [(i, j) for n, i in enumerate(use) for j in use[n + 1 :]]
    answers = _all_known((yield matches), counts)
    if answers is None:
        return []
    score, between = dict.fromkeys(use, 0.5), {}
    for (i, j), p in zip(matches, answers, strict=True):
        score[i] += p
        score[j] += 1 - p
        between[i, j], between[j, i] = p, 1 - p
    pair = _extremes({i: s / len(use) for i, s in score.items()}, samples, counts)
    return [] if pair is None else [Pair(pair.chosen, pair.rejected, between[pair.chosen, pair.rejected])]


def _extremes(score: dict[int, float], samples: list[Sample], counts: PairCounts) -> Pair | None:
    if len(score) < 2:
        counts.drop("prompt/too few")
        return None
    best, worst = max(score, key=lambda i: score[i]), min(score, key=lambda i: score[i])
    if score[best] - score[worst] <= TIE:
        counts.drop("pair/tie")
        return None
    if samples[best].text == samples[worst].text:  # a reward that is not a function of the text
        counts.drop("pair/identical")
        return None
    return Pair(best, worst)


# -- running the plans -------------------------------------------------------------------------------------------------


def _prepared(samples, use, counts) -> tuple[list[Sample], list[int], PairCounts]:
    samples = as_samples(samples)
    use = list(range(len(samples))) if use is None else list(use)
    if len(samples) < 2:
        raise ConfigError(f"samples={len(samples)}: a pair needs at least 2 samples of a prompt")
    counts = counts if counts is not None else PairCounts()
    counts.prompts += 1
    counts.samples += len(samples)
    return samples, use, counts


def check_tournament(k: int) -> None:
    """Raises: ConfigError where k samples cannot play a knock-out."""
    if k < 2 or k & (k - 1):
        raise ConfigError(f"samples={k}: a tournament needs a power of two of samples, at least 2 (2, 4, 8, 16 ...)")


def _alone(plan: Callable[..., _Plan], samples, ask: Ask, use, counts, **settings: Any) -> list[Pair]:
    samples, chosen, counts = _prepared(samples, use, counts)
    if plan is _tournament and use is None:
        check_tournament(len(samples))
    if len(chosen) < 2:
        counts.drop("prompt/too few")
        return []
    running = plan(samples, chosen, counts, **settings)
    try:
        matches = next(running)
        while True:
            matches = running.send(_answers(samples, ask, matches, counts))
    except StopIteration as end:
        counts.pairs += len(end.value)
        return end.value


def _answers(samples: list[Sample], ask: Ask, matches: list[tuple[int, int]], counts: PairCounts):
    """Answers to all matches; those between equal texts are 1/2 without a query."""
    open_ = [(i, j) for i, j in matches if samples[i].text != samples[j].text]
    given = list(ask(open_)) if open_ else []
    counts.queries += len(open_)
    if len(given) != len(open_):
        raise RewardError(f"the oracle gave {len(given)} answers to {len(open_)} comparisons; give one each")
    counts.failure = counts.failure or next((str(p) for p in given if isinstance(p, RewardError)), "")
    known = dict(zip(open_, given, strict=True))
    return [known.get(match, 0.5) for match in matches]


def oracle_pairs(
    oracle: Oracle,
    groups: Sequence[tuple[Task, Sequence[Sample | str]]],
    mode: PairMode,
    *,
    seed: int,
    key: Sequence[str | int] = (),
    keep_truncated: bool = False,
    keep_empty: bool = False,
    max_length: int | None = None,
) -> list[tuple[list[Pair], PairCounts]]:
    """Pairs of many prompts; each round of all of them is one call of `oracle.compare`.

    "max_min" reads the rewards of an oracle that has them (`scores`, as `BradleyTerry`), else it asks for all pairs.

    Args:
        groups: (task with an "id", its samples). All must have the same number of samples in tournament mode.
        seed, key: labels are drawn from (seed, key, task id, indices).
        keep_truncated, keep_empty, max_length: see `usable`.

    Returns: per group its pairs and its counts.

    Raises:
        ConfigError: fewer than 2 samples, no power of two in a tournament. RewardError: every single comparison failed
        (the first is named), or the oracle gave another number of answers.
    """
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r}: one of {', '.join(MODES)}")
    scores = getattr(oracle, "scores", None)
    all_counts = [PairCounts() for _ in groups]
    every: list[list[Sample]] = []
    plans: dict[int, _Plan] = {}
    found: list[list[Pair]] = [[] for _ in groups]
    for g, (task, samples) in enumerate(groups):
        counts = all_counts[g]
        filters = {"keep_truncated": keep_truncated, "keep_empty": keep_empty, "max_length": max_length}
        if mode == "tournament":
            check_tournament(len(samples))
        samples, use, _ = _prepared(samples, usable(samples, **filters, counts=counts), counts)
        every.append(samples)
        if len(use) < 2:
            counts.drop("prompt/too few")
        elif mode in ("iid", "soft"):
            plans[g] = _iid(samples, use, counts, seed, (*key, str(task["id"])), mode == "soft")
        elif mode == "tournament":
            plans[g] = _tournament(samples, use, counts)
        elif scores is None:
            plans[g] = _round_robin(samples, use, counts)
        else:
            plans[g] = _by_scores(scores, task, samples, use, counts)
    waiting: dict[int, list[tuple[int, int]]] = {}
    answers: dict[int, list[float | RewardError]] = {}
    failed = 0
    while plans:
        for g, plan in list(plans.items()):
            try:
                waiting[g] = plan.send(answers[g]) if g in answers else next(plan)
            except StopIteration as end:
                found[g] = end.value
                all_counts[g].pairs += len(end.value)
                del plans[g]
                waiting.pop(g, None)
        answers = _one_round(oracle, groups, every, waiting, all_counts)
        failed += sum(isinstance(p, RewardError) for given in answers.values() for p in given)
    asked = sum(counts.queries for counts in all_counts)
    if asked and failed == asked:
        first = next(counts.failure for counts in all_counts if counts.failure)
        raise RewardError(f"all {asked} comparisons failed; the first: {first}")
    return list(zip(found, all_counts, strict=True))


def _one_round(oracle, groups, every, waiting, all_counts) -> dict[int, list[float | RewardError]]:
    """The next round of every prompt as one batch; equal texts are not asked."""
    items = [
        (groups[g][0], every[g][i].text, every[g][j].text)
        for g, matches in waiting.items()
        for i, j in matches
        if every[g][i].text != every[g][j].text
    ]
    given = iter(ask_oracle(oracle, items) if items else [])

    def ask(matches: list[tuple[int, int]]) -> list[float | RewardError]:
        return [next(given) for _ in matches]

    return {g: list(_answers(every[g], ask, matches, all_counts[g])) for g, matches in waiting.items()}


def _by_scores(scores, task: Task, samples: list[Sample], use: list[int], counts: PairCounts) -> _Plan:
    """Best against worst by an oracle's own rewards; the oracle then says how surely the best one wins."""
    given = scores([(task, samples[i].text) for i in use])
    score = {i: s for i, s in zip(use, given, strict=True) if not isinstance(s, RewardError)}
    counts.drop("sample/not judged", len(use) - len(score))
    pair = _extremes(score, samples, counts)
    if pair is None:
        return []
    (p,) = yield [(pair.chosen, pair.rejected)]
    if isinstance(p, RewardError):
        counts.drop("prompt/not judged")
        return []
    return [Pair(pair.chosen, pair.rejected, p)]


# -- verified pairs ----------------------------------------------------------------------------------------------------


def verified_pairs(
    samples: Sequence[Sample | str],
    *,
    cap: int = 1,
    seed: int = 0,
    key: Sequence[str | int] = (),
    keep_truncated: bool = False,
    max_length: int | None = None,
    counts: PairCounts | None = None,
) -> list[Pair]:
    """A right sample against a wrong one of the same prompt: min(cap, right x wrong) distinct pairs, drawn at random.

    A sample whose verdict is unknown (a verifier that timed out, a gold answer that cannot be read) is on neither side:
    an unknown answer is no wrong answer. Samples of one text count once; a text that was called right and wrong is used
    for no pair.

    Args:
        samples: each with its `verdict`. cap: pairs of a prompt at most.
        seed, key: of the draw; give the task's id as key.
        keep_truncated: a truncated answer counted as wrong teaches brevity, so it is left out unless asked.

    Raises:
        ConfigError: cap below 1. DataError: a sample has no verdict.
    """
    if cap < 1:
        raise ConfigError(f"cap={cap}: give at least 1 pair a prompt")
    samples = as_samples(samples)
    counts = counts if counts is not None else PairCounts()
    counts.prompts += 1
    counts.samples += len(samples)
    sides: dict[str, dict[str, int]] = {"right": {}, "wrong": {}}
    for i in usable(samples, keep_truncated=keep_truncated, max_length=max_length, counts=counts):
        sample = samples[i]
        if sample.verdict not in ("right", "wrong", "unknown"):
            raise DataError(f"sample {i}: verdict is {sample.verdict!r}; give 'right', 'wrong' or 'unknown'")
        if sample.verdict == "unknown":
            counts.drop("sample/unknown")
            continue
        side = sides[sample.verdict]
        if sample.text in side:
            counts.drop("sample/repeated")
        else:
            side[sample.text] = i
    right, wrong = sides["right"], sides["wrong"]
    if not right or not wrong:
        counts.drop("prompt/all right" if right else "prompt/all wrong" if wrong else "prompt/too few")
        return []
    for text in right.keys() & wrong.keys():
        counts.drop("pair/identical")
        del right[text], wrong[text]
    if not right or not wrong:
        return []
    good, bad = list(right.values()), list(wrong.values())
    generator = np.random.default_rng(derive_seed(seed, "pairs", *key))
    drawn = generator.choice(len(good) * len(bad), size=min(cap, len(good) * len(bad)), replace=False)
    pairs = [Pair(good[n // len(bad)], bad[n % len(bad)]) for n in sorted(int(n) for n in drawn)]
    counts.pairs += len(pairs)
    return pairs
