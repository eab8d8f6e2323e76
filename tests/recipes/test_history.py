"""Accuracy histories of One-Shot RLVR: acceptance checks 1, 2 and 14 of the specification, rules, ties, files."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import ConfigError, DataError
from forethought.recipes.one_shot_rlvr.history import (
    AccuracyHistory,
    lim_scores,
    rank,
    repeat_plan,
    select,
    variance_scores,
)

HAND = {"7": [0, 0.5, 1, 1], "12": [0.25] * 5, "3": [0, 1], "40": [1, 1, 1]}


# -- scores --
def test_variance_by_value():
    """Acceptance 1."""
    scores = variance_scores(HAND)
    assert scores == pytest.approx({"3": 0.25, "7": 0.171875, "12": 0, "40": 0})
    assert scores["12"] == scores["40"] == 0
    assert rank(HAND, "std").scores["7"] == pytest.approx(0.414578, abs=1e-6)
    assert list(scores) == ["3", "7", "12", "40"]  # numbers in numeric order


def test_a_constant_history_has_exactly_no_variance():
    """NumPy's own variance of [0.1, 0.1, 0.1] is 1.9e-34, which would rank it above a true zero."""
    assert np.var([0.1] * 3) > 0
    assert variance_scores({"a": [0.1] * 3, "b": [1 / 3] * 7}) == {"a": 0, "b": 0}


def test_an_empty_history_is_named():
    for rule in ("variance", "std", "lim"):
        with pytest.raises(DataError, match="history of index '9' is empty: the problem was never sampled"):
            rank({"3": [0.5], "9": []}, rule)
    pool = AccuracyHistory([4, 5, 6])
    pool.record(0, 5, 0.5)
    with pytest.raises(DataError, match=r"index '4' \(and 1 more\) is empty"):
        variance_scores(pool)
    for rule in ("random", "index"):  # these look at no history
        assert set(rank(pool, rule).order) == {"4", "5", "6"}
        with pytest.raises(DataError, match="holds no problem"):
            rank({}, rule)
    with pytest.raises(DataError, match="holds no problem"):
        variance_scores({})


def test_lim_by_hand():
    """Two epochs (the shortest list). Means 0.5 and 0.75, room 0.25 + 0.0625 = 0.3125.

    a: (0 - 0.5)^2 + (0.5 - 0.75)^2 = 0.3125; b: 0.25 + 0.0625 = 0.3125; c: 0 + 0.
    """
    history = {"a": [0, 0.5, 0.25], "b": [1, 1], "c": [0.5, 0.75, 1, 0]}
    assert lim_scores(history) == pytest.approx({"a": 0.0, "b": 0.0, "c": 1.0})
    ranking = rank(history, "lim")
    assert ranking.order[0] == "c" and ranking.ties == 2
    assert lim_scores({"a": [1, 1], "b": [1, 1, 0]}) == {"a": 1, "b": 1}  # no room: 0 / 0 is not NaN here
    assert lim_scores({"a": [0.0], "b": [0.5]}) == pytest.approx({"a": 1 - 0.0625 / 0.5625, "b": 1 - 0.0625 / 0.5625})


# -- ranking --
def test_order_ties_and_selection():
    ranking = rank(HAND)
    assert ranking.order[:2] == ("3", "7") and set(ranking.order[2:]) == {"12", "40"} and ranking.ties == 2
    assert ranking.rule == "variance" and ranking.seed == 0
    assert select(ranking) == ["3"] and select(ranking, 4) == list(ranking.order)
    for k in (0, 5):
        with pytest.raises(ConfigError, match=f"k={k}: the ranking holds 4 problems"):
            select(ranking, k)


def test_ties_are_broken_by_the_seed_and_nothing_else_moves():
    history = {str(i): [0.0, 0.0] for i in range(20)} | {"99": [0, 1]}
    orders = {rank(history, seed=seed).order for seed in range(10)}
    assert len(orders) == 10 and {o[0] for o in orders} == {"99"}
    assert rank(history, seed=3).ties == 20
    turned = dict(reversed(history.items()))
    assert rank(turned, seed=3) == rank(history, seed=3)


def test_equal_variances_are_ties_whatever_the_floats_say():
    """1/3, 2/3 and their mirror image differ in the last bit, and so do sums in another order."""
    left, right = [1 / 3, 0.0, 0.7, 0.1], [0.1, 0.7, 0.0, 1 / 3]
    history = {"a": left, "b": right, "c": [1 - x for x in left]}
    assert len({float(np.var(v)) for v in history.values()}) > 1
    for rule in ("variance", "std"):
        assert rank(history, rule).ties == 3


def test_random_and_index():
    history = {str(i): [0.5, 1] for i in range(12)}
    assert rank(history, "index").order == tuple(map(str, range(12))) and rank(history, "index").ties == 0
    drawn = [rank(history, "random", seed) for seed in range(6)]
    assert len({r.order for r in drawn}) == 6 and all(r.ties == 0 for r in drawn)
    assert rank(history, "random", 4) == drawn[4]
    first = [rank(history, "random", seed).order[0] for seed in range(600)]
    assert all(20 < first.count(i) < 90 for i in history)  # 50 each
    with pytest.raises(ConfigError, match="rule='varience': give one of variance, .*did you mean 'variance'"):
        rank(history, "varience")  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=9), min_size=1, max_size=12), st.integers(0, 5))
def test_std_and_variance_give_one_order(counts, seed):
    history = {str(i): [c / 8 for c in row] for i, row in enumerate(counts)}
    by_variance, by_std = rank(history, "variance", seed), rank(history, "std", seed)
    assert by_variance.order == by_std.order and by_variance.ties == by_std.ties
    scores = [by_std.scores[i] for i in by_std.order]
    assert all(a >= b - 1e-9 for a, b in zip(scores, scores[1:], strict=False))
    assert by_std.scores == pytest.approx({i: float(np.std(v)) for i, v in history.items()}, abs=1e-12)


# -- recording --
def test_shuffled_batches_give_the_same_table():
    """Acceptance 14 and pitfall 6: keyed by index, never by batch position."""
    cells = [(step, index, (step * index) % 9) for step in range(4) for index in (11, 2, 30) if (step + index) % 4]
    tables = []
    for seed in range(4):
        rows = random.Random(seed).sample(cells, len(cells))
        history = AccuracyHistory([30, 2, 11] if seed % 2 else [])
        for step, index, correct in rows:
            history.record(step, index if seed % 3 else str(index), n_correct=correct, n=8)
        tables.append((history.table(), history.to_json(), rank(history)))
    assert all(t == tables[0] for t in tables)
    table = tables[0][0]
    assert [(r["step"], r["index"]) for r in table] == [
        (s, str(i)) for s in range(4) for i in (2, 11, 30) if (s + i) % 4
    ]
    assert {r["n"] for r in table} == {8} and table[0] == {"step": 0, "index": "2", "n": 8, "mean": 0.0}


def test_groups_of_one_problem_add_up():
    history = AccuracyHistory()
    history.record_rewards(5, "pi1", [1, 0, math.nan, 1])
    history.record_rewards(5, "pi1", np.array([0.0] * 5))
    history.record_rewards(5, "broken", [math.nan] * 8)
    assert history.table() == [{"step": 5, "index": "pi1", "n": 8, "mean": 0.25}] and len(history) == 1
    history.record(7, "pi1", n_correct=3, n=4)
    history.record(6, "pi1", 0.5)
    assert history.shares() == {"pi1": [0.25, 0.5, 0.75]}
    assert [r["n"] for r in history.table()] == [8, None, 4]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"step": 2, "index": 5, "share": 1.25}, "index '5' at step 2: share 1.25: give a number from 0 to 1"),
        ({"step": 2, "index": 5, "share": math.nan}, "index '5' at step 2: share nan"),
        ({"step": 2, "index": 5, "share": "0.5"}, "index '5' at step 2: share '0.5'"),
        ({"step": 2, "index": 5, "share": True}, "index '5' at step 2: share True"),
        ({"step": 2, "index": 5}, "index '5' at step 2: give either a share, or n_correct with n"),
        ({"step": 2, "index": 5, "share": 0.5, "n_correct": 4, "n": 8}, "give either a share, or n_correct with n"),
        ({"step": 2, "index": 5, "n_correct": 4}, "give either a share, or n_correct with n"),
        ({"step": 2, "index": 5, "share": 0.5, "n": 8}, "give either a share, or n_correct with n"),
        ({"step": 2, "index": 5, "n_correct": 9, "n": 8}, "n_correct=9 of n=8: give a number from 0 to n"),
        ({"step": 2, "index": 5, "n_correct": 0, "n": 0}, "n=0: give the number of responses"),
        ({"step": -1, "index": 5, "share": 0.5}, "index '5': step=-1: give a whole number from 0"),
        ({"step": 1.5, "index": 5, "share": 0.5}, "index '5': step=1.5"),
        ({"step": 2, "index": None, "share": 0.5}, "index None: a problem's stable index is text or a whole number"),
        ({"step": 2, "index": 5.0, "share": 0.5}, "index 5.0: a problem's stable index"),
        (
            {"step": 2, "index": 8, "share": 0.5},
            r"index '8' at step 2 is there already \(0.5\); shares cannot be added",
        ),
        ({"step": 2, "index": 8, "n_correct": 1, "n": 2}, "index '8' at step 2 is there already as a share"),
    ],
)
def test_bad_records_are_refused_by_index(kwargs, message):
    history = AccuracyHistory()
    history.record(2, 8, 0.5)
    before = history.table()
    with pytest.raises(DataError, match=message):
        history.record(**kwargs)
    assert history.table() == before and history.indices == ["8"]


def test_a_reward_that_is_no_share_is_refused():
    with pytest.raises(DataError, match="index '5' at step 3: reward -1: give 0 or 1"):
        AccuracyHistory().record_rewards(3, 5, [1, -1])


# -- files and resume --
def test_json_round_trip_and_resume():
    history = AccuracyHistory(["never"])
    for step, index, correct in ((3, "b", 1), (1, "b", 2), (2, 10, 0.1 + 0.2), (2, 9, 7)):
        history.record(step, index, n_correct=correct, n=7)
    history.record(4, 9, 0.3)
    text = json.dumps(history.to_json())
    again = AccuracyHistory.from_json(json.loads(text))
    assert again.to_json() == history.to_json() and again.table() == history.table()
    assert again.indices == ["9", "10", "b", "never"]
    other = AccuracyHistory()
    other.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for h in (history, other):  # goes on as the unbroken one
        h.record(3, "b", n_correct=1, n=1)
    assert other.to_json() == history.to_json()
    history.record(9, "b", 1.0)
    assert other.to_json() != history.to_json()  # shares no state


def test_the_published_format_is_read_and_written(tmp_path):
    published = {"12": [0.0, 0.5, 1.0], "3": [0.25]}
    history = AccuracyHistory.from_json(published)
    assert history.shares() == {"3": [0.25], "12": [0.0, 0.5, 1.0]}
    assert history.table()[-1] == {"step": 2, "index": "12", "n": None, "mean": 1.0}
    (tmp_path / "a.json").write_text(json.dumps(history.shares()))
    assert AccuracyHistory.read(tmp_path / "a.json").to_json() == history.to_json()
    (tmp_path / "b.json").write_text(json.dumps(history.to_json()))
    assert AccuracyHistory.read(tmp_path / "b.json").to_json() == history.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"5": [0.5, 1.5]}', "index '5' at step 1: share 1.5"),
        ('{"5": [0.5, null]}', "index '5' at step 1: give either a share"),
        ('{"5": 0.5}', "index '5': expected a list, got float"),
        ('{"5": "0.5"}', "index '5': expected a list, got str"),
        ('{"5": [NaN]}', "NaN"),
        ('{"5": [0.5], "5": [1.0]}', "'5' is given twice"),
        ("[[0.5]]", "expected an object of index -> shares, got list"),
        ('{"schema": 2, "history": {}}', "schema 2 is not known"),
        ('{"schema": 1}', "field 'history' is missing"),
        ('{"schema": 1, "history": {"5": [[0, 1]]}}', r"index '5': entry 0 is \[0, 1\], not \[step, correct, n\]"),
        ('{"5": [0.5', "not JSON"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, text, message):
    path = tmp_path / "acc.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"acc.json: .*{message}"):
        AccuracyHistory.read(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere.json: cannot be read: No such file"):
        AccuracyHistory.read(tmp_path / "nowhere.json")


def test_published_history(shared):
    """Acceptance 2, and the other figures that the specification recomputed from the file."""
    history = AccuracyHistory.read(shared / "data" / "math" / "acc_step_500.json")
    shares = history.shares()
    lengths = [len(v) for v in shares.values()]
    assert (len(history), min(lengths), max(lengths)) == (1209, 44, 57) and np.mean(lengths) == pytest.approx(
        52.9, abs=0.05
    )
    ranking = rank(history, "std")
    order = ranking.order
    assert ranking.scores[order[0]] == pytest.approx(0.40676, abs=1e-5)
    assert np.mean(shares[order[0]]) == pytest.approx(0.44104, abs=1e-5)
    assert [round(ranking.scores[order[i - 1]], 4) for i in (2, 13, 605)] == [0.3961, 0.2726, 0.1073]
    constant = [i for i in order if ranking.scores[i] == 0]
    assert len(constant) == 104 and constant == list(order[-104:])
    assert sum(shares[i][0] == 0 for i in constant) == 99 and sum(shares[i][0] == 1 for i in constant) == 5
    assert 104 < ranking.ties < 1209
    assert rank(history, "variance").order == order
    assert rank(history, "variance", seed=1).order[0] == order[0] and rank(history, seed=1).order[-104:] != order[-104:]
    assert lim_scores(history)[rank(history, "lim").order[0]] == max(lim_scores(history).values()) < 1


# -- the plan --
def test_repeat_plan():
    assert repeat_plan(["pi1"]) == {"pi1": 128}
    assert repeat_plan(["a", "b"]) == {"a": 64, "b": 64}
    assert repeat_plan(list("abcd")) == dict.fromkeys("abcd", 32)
    assert repeat_plan(range(16)) == dict.fromkeys(map(str, range(16)), 8)
    assert repeat_plan(["c", "a", "b"]) == {"c": 43, "a": 43, "b": 42}  # what is left over goes by order
    assert repeat_plan(["a", "b", "c"], groups=16) == {"a": 6, "b": 5, "c": 5}
    assert sum(repeat_plan(range(100), groups=128).values()) == 128
    with pytest.raises(ConfigError, match="groups=2: 3 problems are selected and each needs at least one group"):
        repeat_plan(["a", "b", "c"], groups=2)
    with pytest.raises(ConfigError, match="no problem is selected"):
        repeat_plan([])
    with pytest.raises(ConfigError, match="index '4' is selected twice"):
        repeat_plan([4, 5, "4"])
