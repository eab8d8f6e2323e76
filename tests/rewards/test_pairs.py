"""Pairs from samples: values of the INPO and Phi-4-Mini specs, every filter counted, everything seeded."""

import itertools

import numpy as np
import pytest

from forethought.errors import ConfigError, DataError, RewardError
from forethought.rewards.oracles import BradleyTerry, FunctionOracle
from forethought.rewards.pairs import (
    Pair,
    PairCounts,
    Sample,
    distinct_records,
    iid_pairs,
    max_min_pair,
    oracle_pairs,
    preference_records,
    tournament_pair,
    usable,
    verified_pairs,
    win_matrix,
)

CYCLE = np.array([[0.5, 0.9, 0.3], [0.1, 0.5, 0.8], [0.7, 0.2, 0.5]])


class Asked:
    """Answers index pairs from a function, and keeps the rounds."""

    def __init__(self, p):
        self.p, self.rounds = p, []

    def __call__(self, matches):
        self.rounds.append(list(matches))
        return [self.p(i, j) for i, j in matches]

    @property
    def queries(self):
        return sum(map(len, self.rounds))


def strength(order):
    """The later in `order`, the stronger."""
    place = {sample: n for n, sample in enumerate(order)}
    return lambda i, j: 0.9 if place[i] > place[j] else 0.1


TEXTS = [f"answer {i}" for i in range(8)]


# -- tournament --------------------------------------------------------------------------------------------------------


def test_tournament_asks_eleven_questions_of_eight_samples():
    ask, counts = Asked(strength([3, 1, 0, 2, 6, 7, 5, 4])), PairCounts()
    assert tournament_pair(TEXTS, ask, counts=counts) == Pair(4, 3, 0.9)
    assert ask.queries == counts.queries == 11
    assert [len(r) for r in ask.rounds] == [4, 4, 2, 1]  # winners and losers of a round together
    assert ask.rounds[0] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert ask.rounds[1:3] == [[(0, 2), (4, 7), (1, 3), (5, 6)], [(2, 4), (3, 6)]]
    assert ask.rounds[-1] == [(4, 3)]
    assert counts.to_json() == {"prompts": 1, "samples": 8, "queries": 11, "pairs": 1, "dropped": {}}


@pytest.mark.parametrize(("k", "queries"), [(2, 2), (4, 5), (8, 11), (16, 23)])
def test_tournament_queries(k, queries):
    ask = Asked(strength(range(k)))
    assert tournament_pair([str(i) for i in range(k)], ask) == Pair(k - 1, 0, 0.9)
    assert ask.queries == queries


def test_a_tie_picks_the_first():
    def p(i, j):  # every comparison ties but the final
        return 0.8 if (i, j) == (0, 7) and len(ask.rounds) == 4 else 0.5

    ask = Asked(p)
    assert tournament_pair(TEXTS, ask) == Pair(0, 7, 0.8)
    assert ask.rounds == [
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 2), (4, 6), (1, 3), (5, 7)],
        [(0, 4), (3, 7)],
        [(0, 7)],
    ]


@pytest.mark.parametrize(("final", "reason"), [(0.4, "pair/upset"), (0.5, "pair/tie")])
def test_a_final_that_does_not_confirm_drops_the_pair(final, reason):
    better = strength(range(8))
    ask, counts = Asked(lambda i, j: final if len(ask.rounds) == 4 else better(i, j)), PairCounts()
    assert tournament_pair(TEXTS, ask, counts=counts) is None
    assert ask.queries == 11 and dict(counts.dropped) == {reason: 1} and counts.pairs == 0


@pytest.mark.parametrize("k", [3, 5, 6, 7, 12])
def test_tournament_needs_a_power_of_two(k):
    with pytest.raises(ConfigError, match=rf"samples={k}: a tournament needs a power of two"):
        tournament_pair([str(i) for i in range(k)], Asked(lambda i, j: 0.5))
    with pytest.raises(ConfigError, match="power of two"):
        oracle_pairs(
            FunctionOracle(lambda t, a, b: 0.5), [({"id": 0}, [str(i) for i in range(k)])], "tournament", seed=0
        )


@pytest.mark.parametrize("k", [0, 1])
def test_a_pair_needs_two(k):
    for make in (tournament_pair, lambda s, a: iid_pairs(s, a, seed=0), max_min_pair):
        with pytest.raises(ConfigError, match=rf"samples={k}"):
            make(["x"] * k, Asked(lambda i, j: 0.5))


def test_tournament_after_a_filter_plays_with_the_largest_power_of_two():
    ask, counts = Asked(strength(range(8))), PairCounts()
    assert tournament_pair(TEXTS, ask, use=[0, 2, 3, 5, 6, 7], counts=counts) == Pair(5, 0, 0.9)
    assert ask.queries == 5 and dict(counts.dropped) == {"sample/surplus": 2}


def test_a_failed_comparison_drops_the_prompt_and_is_counted():
    ask, counts = Asked(lambda i, j: RewardError("no answer") if (i, j) == (2, 3) else 0.9), PairCounts()
    assert tournament_pair(TEXTS, ask, counts=counts) is None
    assert dict(counts.dropped) == {"prompt/not judged": 1} and ask.queries == 4
    assert counts.failure == "no answer"


def test_sign_only_tournament_on_a_cycle_favours_nobody():
    """INPO, pitfall 1: whatever the strengths, all 3^8 tuples from the uniform policy together push nowhere."""
    flow, kept = np.zeros((3, 3)), 0
    for drawn in itertools.product(range(3), repeat=8):
        pair = tournament_pair([str(a) for a in drawn], lambda ms, d=drawn: [CYCLE[d[i], d[j]] for i, j in ms])
        if pair is not None:
            flow[drawn[pair.chosen], drawn[pair.rejected]] += 1
            kept += 1
    assert flow[0, 1] == flow[1, 2] == flow[2, 0] == kept / 3
    assert flow[1, 0] == flow[2, 1] == flow[0, 2] == 0
    assert (flow.sum(1) == flow.sum(0)).all()  # every action is chosen as often as it is rejected
    assert round(kept / 3**8, 2) == 0.34


def test_iid_pairs_do_see_the_strengths():
    """The same cycle by i.i.d. pairs: action 0 wins more than it loses (row means of P are .567, .467, .467)."""
    texts = [str(a) for a in np.random.default_rng(0).integers(0, 3, 12_000)]
    ask = lambda ms: [CYCLE[int(texts[i]), int(texts[j])] for i, j in ms]  # noqa: E731
    hard, soft = np.zeros(3), np.zeros(3)
    for pair in iid_pairs(texts, ask, seed=1):
        hard[int(texts[pair.chosen])] += 1
        hard[int(texts[pair.rejected])] -= 1
    for pair in iid_pairs(texts, ask, seed=1, soft=True):
        soft[int(texts[pair.chosen])] += 2 * pair.p - 1
        soft[int(texts[pair.rejected])] -= 2 * pair.p - 1
    expected = 12_000 / 3 * np.array([0.4, -0.2, -0.2]) / 3  # a partner's mean of 2 P - 1; first or second
    assert np.allclose(soft, expected, atol=150)
    assert np.allclose(hard, expected, atol=260)


# -- i.i.d. and soft ---------------------------------------------------------------------------------------------------


def test_iid_pairs_are_neighbours_with_a_seeded_label():
    ask, counts = Asked(lambda i, j: 0.7), PairCounts()
    pairs = iid_pairs(TEXTS[:5], ask, seed=3, key=(1, "task"), counts=counts)
    assert ask.rounds == [[(0, 1), (2, 3)]]
    assert dict(counts.dropped) == {"sample/odd": 1} and counts.pairs == counts.queries == 2
    for (i, j), pair in zip([(0, 1), (2, 3)], pairs, strict=True):
        assert pair in (Pair(i, j, 0.7), Pair(j, i, pytest.approx(0.3)))
    assert pairs == iid_pairs(TEXTS[:5], ask, seed=3, key=(1, "task"))
    drawn = [iid_pairs(TEXTS[:2], ask, seed=s)[0].chosen == 0 for s in range(2000)]
    assert abs(np.mean(drawn) - 0.7) < 0.03


def test_iid_extremes_and_soft():
    sure = iid_pairs(TEXTS[:4], lambda ms: [1.0, 0.0], seed=0)
    assert sure == [Pair(0, 1, 1.0), Pair(3, 2, 1.0)]
    assert iid_pairs(TEXTS[:4], lambda ms: [0.2, 0.5], seed=0, soft=True) == [Pair(0, 1, 0.2), Pair(2, 3, 0.5)]


def test_equal_answers_are_skipped_without_a_query_and_failures_counted():
    ask, counts = Asked(lambda i, j: RewardError("late") if i == 2 else 1.0), PairCounts()
    found = iid_pairs(["a", "a", "b", "c", "d", "e"], ask, seed=0, counts=counts)
    assert found == [Pair(4, 5, 1.0)]
    assert ask.rounds == [[(2, 3), (4, 5)]]
    assert dict(counts.dropped) == {"pair/identical": 1, "pair/not judged": 1}


# -- best against worst ------------------------------------------------------------------------------------------------


def rewarded(*rewards):
    return [Sample(f"answer {i}", reward=r) for i, r in enumerate(rewards)]


def test_max_min_by_reward():
    counts = PairCounts()
    assert max_min_pair(rewarded(0.2, 3.0, -1.0, 3.0, -1.0), counts=counts) == Pair(1, 2, 1.0)
    assert counts.pairs == 1 and counts.queries == 0
    counts = PairCounts()
    assert max_min_pair(rewarded(1.0, 1.0, None), counts=counts) is None
    assert dict(counts.dropped) == {"sample/not judged": 1, "pair/tie": 1}
    assert max_min_pair([Sample("x", reward=1.0), Sample("x", reward=0.0)]) is None


def test_max_min_by_round_robin():
    ask, counts = Asked(strength([2, 0, 3, 1])), PairCounts()
    assert max_min_pair(TEXTS[:4], ask, counts=counts) == Pair(1, 2, 0.9)
    assert counts.queries == ask.queries == 6
    assert max_min_pair(TEXTS[:3], lambda ms: [CYCLE[i, j] for i, j in ms]) == Pair(0, 1, 0.9)


def test_win_matrix():
    got = win_matrix(["a", "b", "c"], lambda ms: [CYCLE[i, j] for i, j in ms])
    assert np.allclose(got, CYCLE)
    assert np.allclose(got.mean(1), [0.5667, 0.4667, 0.4667], atol=1e-4)
    got = win_matrix(["a", "b", "a"], lambda ms: [RewardError("x"), 0.25])
    assert got[0, 2] == 0.5 and np.isnan(got[0, 1]) and (got[1, 2], got[2, 1]) == (0.25, 0.75)


# -- verified pairs ----------------------------------------------------------------------------------------------------


def judged(verdicts, **kw):
    full = {"r": "right", "w": "wrong", "u": "unknown"}
    return [Sample(f"answer {i}", length=10 + i, verdict=full[v], **kw) for i, v in enumerate(verdicts)]


def test_verified_pairs_of_three_right_and_two_wrong():
    counts = PairCounts()
    (pair,) = verified_pairs(judged("rrwrw"), cap=1, counts=counts)
    assert pair.chosen in (0, 1, 3) and pair.rejected in (2, 4) and pair.p == 1.0
    assert counts.to_json() == {"prompts": 1, "samples": 5, "queries": 0, "pairs": 1, "dropped": {}}
    everything = verified_pairs(judged("rrwrw"), cap=100)
    assert sorted((p.chosen, p.rejected) for p in everything) == [(r, w) for r in (0, 1, 3) for w in (2, 4)]
    assert len({(p.chosen, p.rejected) for p in verified_pairs(judged("rrwrw"), cap=4)}) == 4


@pytest.mark.parametrize(
    ("verdicts", "reason"),
    [
        ("rrr", {"prompt/all right": 1}),
        ("www", {"prompt/all wrong": 1}),
        ("ru", {"sample/unknown": 1, "prompt/all right": 1}),
        ("uw", {"sample/unknown": 1, "prompt/all wrong": 1}),
        ("uu", {"sample/unknown": 2, "prompt/too few": 1}),
    ],
)
def test_no_verified_pair(verdicts, reason):
    counts = PairCounts()
    assert verified_pairs(judged(verdicts), cap=9, counts=counts) == []
    assert dict(counts.dropped) == reason and counts.pairs == 0


def test_unknown_is_never_used():
    for seed in range(30):
        pairs = verified_pairs(judged("ruwuru"), cap=2, seed=seed)
        assert {(p.chosen, p.rejected) for p in pairs} == {(0, 2), (4, 2)}


def test_verified_filters():
    samples = [
        Sample("long right", 90, verdict="right"),
        Sample("cut", 64, truncated=True, verdict="wrong"),
        Sample("yes", 3, verdict="right"),
        Sample("yes", 3, verdict="right"),
        Sample("", 1, verdict="wrong"),
        Sample("no", 3, verdict="wrong"),
        Sample("", failed="HTTP 500", verdict="unknown"),
    ]
    counts = PairCounts()
    assert verified_pairs(samples, cap=9, max_length=64, counts=counts) == [Pair(2, 5)]
    assert dict(counts.dropped) == {
        "sample/too long": 1,
        "sample/truncated": 1,
        "sample/repeated": 1,
        "sample/empty": 1,
        "sample/failed": 1,
    }
    with_cut = verified_pairs(samples, cap=9, keep_truncated=True)
    assert {(p.chosen, p.rejected) for p in with_cut} == {(0, 1), (0, 5), (2, 1), (2, 5)}


def test_a_text_that_is_right_and_wrong_makes_no_pair():
    counts = PairCounts()
    flaky = [Sample("x", verdict="right"), Sample("x", verdict="wrong")]
    assert verified_pairs(flaky, counts=counts) == [] and dict(counts.dropped) == {"pair/identical": 1}
    assert verified_pairs([*flaky, Sample("y", verdict="right"), Sample("z", verdict="wrong")]) == [Pair(2, 3)]


def test_verified_pairs_are_seeded():
    samples = judged("rrrrrrwwwwww")
    draws = [verified_pairs(samples, cap=3, seed=s, key=("q7",)) for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert verified_pairs(samples, cap=3, seed=0, key=("q8",)) != draws[0]
    seen = {(p.chosen, p.rejected) for s in range(400) for p in verified_pairs(samples, seed=s)}
    assert len(seen) == 36  # every pair can be drawn


def test_verified_bad_input():
    with pytest.raises(ConfigError, match="cap=0: give at least 1"):
        verified_pairs(judged("rw"), cap=0)
    with pytest.raises(DataError, match="sample 0: verdict is None; give 'right', 'wrong' or 'unknown'"):
        verified_pairs(["a", "b"])


# -- many prompts ------------------------------------------------------------------------------------------------------


class Batches:
    """An oracle that keeps its batches: the larger number in the text wins."""

    def __init__(self):
        self.queries, self.sizes = 0, []

    def compare(self, items):
        self.queries += len(items)
        self.sizes.append(len(items))
        return [0.9 if int(a) > int(b) else 0.1 for _, a, b in items]


def test_rounds_of_many_prompts_are_one_batch():
    oracle = Batches()
    groups = [({"id": f"t{n}"}, [str(10 * n + (3 * i) % 8) for i in range(8)]) for n in range(5)]
    found = oracle_pairs(oracle, groups, "tournament", seed=0)
    assert oracle.sizes == [20, 20, 10, 5] and oracle.queries == 55
    assert all(pairs == [Pair(5, 0, 0.9)] and counts.queries == 11 for pairs, counts in found)


def test_prompts_of_different_fate():
    oracle = Batches()
    cut = [Sample("9", truncated=True)] * 7
    groups = [
        ({"id": "short"}, ["1"] * 8),
        ({"id": "cut"}, [Sample("1"), *cut]),
        ({"id": "fine"}, [str(i) for i in range(8)]),
    ]
    (none, a), (few, b), (pair, c) = oracle_pairs(oracle, groups, "tournament", seed=0)
    assert (none, few, pair) == ([], [], [Pair(7, 0, 0.9)])
    assert dict(a.dropped) == {"pair/identical": 1} and a.queries == 0
    assert dict(b.dropped) == {"sample/truncated": 7, "prompt/too few": 1}
    assert c.queries == 11 == oracle.queries
    total = PairCounts()
    for counts in (a, b, c):
        total.add(counts)
    assert (total.prompts, total.samples, total.pairs) == (3, 24, 1)


def test_labels_do_not_depend_on_the_batch():
    oracle = FunctionOracle(lambda task, a, b: 0.5, timeout=None)
    groups = [({"id": n}, TEXTS) for n in range(6)]
    together = [pairs for pairs, _ in oracle_pairs(oracle, groups, "iid", seed=4, key=(2,))]
    alone = [oracle_pairs(oracle, [g], "iid", seed=4, key=(2,))[0][0] for g in groups]
    assert together == alone
    assert len({tuple(p) for p in together}) > 1  # the label depends on the task
    again = [pairs for pairs, _ in oracle_pairs(oracle, groups, "iid", seed=4, key=(3,))]
    assert again != together


def test_modes_of_oracle_pairs():
    groups = [({"id": "a"}, ["1", "4", "2", "3"])]
    assert oracle_pairs(Batches(), groups, "soft", seed=0)[0][0] == [Pair(0, 1, 0.1), Pair(2, 3, 0.1)]
    ((pairs, counts),) = oracle_pairs(Batches(), groups, "max_min", seed=0)
    assert pairs == [Pair(1, 0, 0.9)] and counts.queries == 6
    scorer = BradleyTerry(lambda tree, leaf, task, text: float(text), scale=0.5, timeout=None)
    ((pairs, counts),) = oracle_pairs(scorer, groups, "max_min", seed=0)
    assert [(p.chosen, p.rejected) for p in pairs] == [(1, 0)]
    assert pairs[0].p == pytest.approx(1 / (1 + np.exp(-1.5)))
    assert (scorer.scored, scorer.queries, counts.queries) == (4, 1, 1)
    with pytest.raises(ConfigError, match="mode='best'"):
        oracle_pairs(Batches(), groups, "best", seed=0)


def test_when_every_comparison_fails_the_first_is_named():
    def broken(task, a, b):
        raise KeyError("model")

    with pytest.raises(
        RewardError, match="all 2 comparisons failed; the first: oracle 'broken' raised KeyError: 'model'"
    ):
        oracle_pairs(FunctionOracle(broken), [({"id": "q"}, ["1", "4", "2", "3"])], "iid", seed=0)


# -- counts and records ------------------------------------------------------------------------------------------------


def test_usable():
    counts = PairCounts()
    samples = [Sample("a", 5), Sample("b", 5, truncated=True), Sample("", 1), Sample("c", 50), "d"]
    assert usable(samples, max_length=10, counts=counts) == [0, 4]
    assert dict(counts.dropped) == {"sample/truncated": 1, "sample/empty": 1, "sample/too long": 1}
    assert usable(samples, keep_truncated=True, keep_empty=True) == [0, 1, 2, 3, 4]


def test_an_empty_result_says_which_filter_removed_what():
    counts = PairCounts()
    for verdicts in ("rrr", "www", "www", "uw"):
        verified_pairs(judged(verdicts), counts=counts)
    with pytest.raises(DataError) as err:
        counts.require("stage 3")
    assert str(err.value) == (
        "stage 3: nothing is left: 0 pairs from 4 prompts, 11 samples; left out: 1 samples whose verdict is unknown, "
        "1 prompts without a wrong sample, 3 prompts without a right sample. Most were removed as: "
        "prompts without a right sample"
    )
    counts.failure = "HTTP 500"
    with pytest.raises(DataError, match="the first failure: HTTP 500"):
        counts.require()
    counts.pairs = 1
    counts.require()
    assert counts.metrics()["pairs/dropped/prompt_all_wrong"] == 3
    assert PairCounts.from_json(counts.to_json()) == counts


def test_records_are_trls():
    samples = [Sample("5", 2, reward=1.0, verdict="right", why="literal"), Sample("6", 3, reward=0.0, verdict="wrong")]
    (row,) = preference_records({"id": "q", "prompt": "2+3=", "answer": "5"}, samples, [Pair(0, 1)])
    assert row == {
        "prompt": "2+3=",
        "chosen": "5",
        "rejected": "6",
        "p": 1.0,
        "id": "q",
        "chosen_sample": 0,
        "rejected_sample": 1,
        "chosen_length": 2,
        "rejected_length": 3,
        "chosen_reward": 1.0,
        "rejected_reward": 0.0,
        "chosen_verdict": "right",
        "rejected_verdict": "wrong",
        "chosen_why": "literal",
    }
    chat = [{"role": "user", "content": "2+3=?"}]
    (row,) = preference_records({"id": "q", "prompt": chat}, ["5", "6"], [Pair(1, 0, 0.75)])
    assert row["chosen"] == [{"role": "assistant", "content": "6"}] and row["p"] == 0.75
    assert row["rejected"] == [{"role": "assistant", "content": "5"}] and "chosen_length" not in row


def test_distinct_records():
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "id": "1"}
    counts = PairCounts(pairs=3)
    assert distinct_records([row, {**row, "id": "2"}, {**row, "rejected": "c"}], counts) == [
        row,
        {**row, "rejected": "c"},
    ]
    assert counts.pairs == 2 and dict(counts.dropped) == {"pair/duplicate": 1}
    with pytest.raises(DataError, match="record 1 .*'2'.*: chosen equals rejected"):
        distinct_records([row, {**row, "id": "2", "rejected": "a"}])
    with pytest.raises(DataError, match="record 0 .*: rejected is empty"):
        distinct_records([{**row, "rejected": ""}])
