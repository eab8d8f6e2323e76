"""Oracles: what a comparison may be, how a failure is told, and that both orders are averaged."""

import logging
import math

import numpy as np
import pytest

from forethought.errors import ConfigError, RewardError
from forethought.rewards.adapters import RewardRunner, combine
from forethought.rewards.oracles import (
    BothOrders,
    BradleyTerry,
    FunctionOracle,
    Oracle,
    ask_oracle,
    bernoulli,
    check_oracle,
    codepoints,
    load_oracle,
    probability,
    text_item,
)
from forethought.rewards.reward import Reward

TASK = {"id": "q1", "prompt": "Which?"}
FILE = """
import os, time

def longer(task, a, b):
    return 0.9 if len(a) > len(b) else 0.1 if len(a) < len(b) else 0.5

def moody(task, a, b):
    if a == "hang":
        time.sleep(60)
    if a == "die":
        os._exit(3)
    if a == "raise":
        raise KeyError(task["id"])
    if a == "odd":
        return lambda: 1
    if a == "high":
        return 1.5
    return 0.25

def two(task, a):
    return 1.0

WORD = "no function"
"""


def first_wins(bias):
    return FunctionOracle(lambda task, a, b: min(1.0, (0.7 if a > b else 0.3) + bias), timeout=None)


# -- labels ------------------------------------------------------------------------------------------------------------


def test_bernoulli():
    assert [bernoulli(0.0, 1, "x"), bernoulli(1.0, 1, "x")] == [False, True]
    draws = [bernoulli(0.3, 7, "label", i) for i in range(5000)]
    assert draws == [bernoulli(0.3, 7, "label", i) for i in range(5000)]
    assert abs(np.mean(draws) - 0.3) < 0.02
    other = [bernoulli(0.3, 8, "label", i) for i in range(5000)]
    assert abs(np.mean(np.array(draws) & np.array(other)) - 0.09) < 0.02  # another seed, another draw
    # The same uniform number behind every p: a higher p never turns a win into a loss.
    assert all(bernoulli(0.6, 7, "label", i) >= d for i, d in enumerate(draws))
    with pytest.raises(RewardError, match="p=1.5: a probability lies in"):
        bernoulli(1.5, 0)
    with pytest.raises(RewardError, match="p=nan"):
        bernoulli(math.nan, 0)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.25, 0.25), (1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (1 + 1e-12, 1)]
)
def test_probability(value, expected):
    assert probability(value, "f") == expected


@pytest.mark.parametrize("value", [1.3, -0.01, math.nan, math.inf, None, "A", [0.5]])
def test_no_probability(value):
    with pytest.raises(RewardError) as err:
        probability(value, "oracle 'f'", (TASK, "yes", "no"))
    said = str(err.value)
    assert "oracle 'f' gave " in said and "task 'q1' ('yes' against 'no')" in said and "in [0, 1]" in said
    assert (repr(value) if not isinstance(value, float) else str(value)) in said


# -- functions ---------------------------------------------------------------------------------------------------------


def test_a_function(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    items = [(TASK, "long one", "x"), (TASK, "x", "long one"), (TASK, "a", "b")]
    by_name = FunctionOracle("mine.py:longer")
    try:
        assert by_name.compare(items) == [0.9, 0.1, 0.5]
        monkeypatch.chdir("/")  # its process has the whole path
        assert by_name.compare(items[:1]) == [0.9] and by_name.queries == 4
    finally:
        by_name.close()
    assert isinstance(by_name, Oracle)
    for timeout in (None, 5.0):
        oracle = FunctionOracle(lambda task, a, b: np.float64(len(a) > len(b)), timeout=timeout)
        assert oracle.compare(items) == [1.0, 0.0, 0.0] and oracle.queries == 3


def test_a_function_that_misbehaves_costs_its_own_items_only(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    oracle = FunctionOracle("mine.py:moody", timeout=1.0)
    try:
        got = oracle.compare([(TASK, a, "b") for a in ("fine", "hang", "die", "raise", "odd", "high", "fine")])
    finally:
        oracle.close()
    assert got[0] == got[6] == 0.25 and oracle.queries == 7
    said = [str(p) for p in got[1:6]]
    assert all(isinstance(p, RewardError) for p in got[1:6])
    assert "did not answer within its time limit of 1 s" in said[0] and "'q1'" in said[0]
    assert "ended its process instead of answering: its process exited with 3" in said[1]
    assert "raised KeyError: 'q1'" in said[2]
    assert "cannot leave its process" in said[3]
    assert "gave 1.5 for task 'q1' ('high' against 'b')" in said[4]


def test_a_function_in_a_thread_is_left_when_it_hangs():
    import time

    oracle = FunctionOracle(lambda task, a, b: time.sleep(20) if a == "hang" else 0.5, timeout=0.2)
    late, fine = oracle.compare([(TASK, "hang", "b"), (TASK, "a", "b")])
    assert isinstance(late, RewardError) and "time limit of 0.2 s" in str(late) and fine == 0.5


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mine.py:longest", "oracle 'mine.py:longest': mine.py has no 'longest'; did you mean 'longer'"),
        ("mine.py:two", r"oracle 'mine.py:two' takes \(task, a\); write f\(task, a, b\)"),
        ("mine.py:WORD", "is no function"),
        ("other.py:f", "does not exist"),
    ],
)
def test_wrong_functions(tmp_path, monkeypatch, spec, said):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        FunctionOracle(spec)


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan])
def test_wrong_timeout(timeout):
    with pytest.raises(ConfigError, match="timeout="):
        FunctionOracle(lambda task, a, b: 0.5, timeout=timeout)


def test_load_oracle(tmp_path):
    (tmp_path / "mine.py").write_text(
        FILE + "class Object:\n    queries = 0\n    def compare(self, items):\n        return [0.5] * len(items)\n"
        "ready = Object()\n"
    )
    assert load_oracle(f"{tmp_path}/mine.py:ready").compare([(TASK, "a", "b")]) == [0.5]
    oracle = load_oracle(f"{tmp_path}/mine.py:longer", timeout=None)
    assert isinstance(oracle, FunctionOracle) and oracle.compare([(TASK, "aa", "b")]) == [0.9]
    with pytest.raises(ConfigError, match="this is a class; name an instance"):
        load_oracle(f"{tmp_path}/mine.py:Object")
    (tmp_path / "bare.py").write_text("class O:\n    def compare(self, items):\n        pass\no = O()\n")
    with pytest.raises(ConfigError, match="needs a count `queries`"):
        load_oracle(f"{tmp_path}/bare.py:o")


# -- both orders -------------------------------------------------------------------------------------------------------


def test_both_orders_cancel_a_bias_to_the_first(caplog):
    oracle = BothOrders(first_wins(0.2))
    with caplog.at_level(logging.WARNING):
        assert oracle.compare([(TASK, "b", "a"), (TASK, "a", "b")]) == pytest.approx([0.7, 0.3])
        assert oracle.compare([(TASK, "c", "a")]) == pytest.approx([0.7])
    assert oracle.queries == 6 and oracle.violation.pairs == 3
    assert oracle.violation.largest == pytest.approx(0.4) and oracle.violation.mean == pytest.approx(0.4)
    (record,) = caplog.records  # told once
    said = record.getMessage()
    assert "|P(a, b) + P(b, a) - 1| is up to 0.4" in said and "'q1': P(a, b) = 0.9, P(b, a) = 0.5" in said
    assert "what stands first wins with 0.7" in said and "both orders are averaged" in said


def test_an_antisymmetric_oracle_is_not_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        oracle = BothOrders(first_wins(0.0))
        assert oracle.compare([(TASK, "b", "a")]) == pytest.approx([0.7])
        assert check_oracle(first_wins(2e-7), [(TASK, "b", "a")]).largest == pytest.approx(4e-7)  # rounding
    assert not caplog.records and "antisymmetric on 1 pairs" in str(oracle.violation)


def test_check_oracle_reports_the_violation(caplog):
    with caplog.at_level(logging.WARNING):
        seen = check_oracle(first_wins(1e-5), [(TASK, "b", "a"), (TASK, "c", "d")])
    assert seen.largest == pytest.approx(2e-5) and seen.pairs == 2
    assert "not antisymmetric" in caplog.text and "up to 2e-05" in caplog.text and "BothOrders(oracle)" in caplog.text


def test_check_oracle_refuses():
    with pytest.raises(
        RewardError, match=r"trial comparison before the run: .* gave 1.3 for task 'q1' \('b' against 'a'\)"
    ):
        check_oracle(FunctionOracle(lambda task, a, b: 1.3 if a > b else 0.5, timeout=None), [(TASK, "b", "a")])
    with pytest.raises(RewardError, match="gave nan"):
        check_oracle(FunctionOracle(lambda task, a, b: math.nan), [(TASK, "b", "a")])


def test_half_of_a_comparison_is_missing_not_biased():
    def one_way(task, a, b):
        if a < b:
            raise OSError("no route")
        return 0.9

    got = BothOrders(FunctionOracle(one_way, timeout=None)).compare(
        [(TASK, "b", "a"), (TASK, "c", "a"), (TASK, "d", "d")]
    )
    assert [isinstance(p, RewardError) for p in got] == [True, True, False] and got[2] == 0.5


class Loose:
    """An oracle of somebody else's."""

    def __init__(self, answers):
        self.answers, self.queries = answers, 0

    def compare(self, items):
        return self.answers


def test_answers_of_any_oracle_are_checked():
    items = [(TASK, "a", "b"), (TASK, "c", "d")]
    low, fine = ask_oracle(Loose([-0.5, 0.5]), items)
    assert fine == 0.5 and "oracle Loose gave -0.5 for task 'q1' ('a' against 'b')" in str(low)
    with pytest.raises(RewardError, match="oracle Loose gave 1 answers to 2 comparisons"):
        ask_oracle(Loose([0.5]), items)
    assert ask_oracle(Loose([]), []) == []


# -- rewards as oracles ------------------------------------------------------------------------------------------------


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def test_bradley_terry():
    oracle = BradleyTerry(length, scale=0.5)
    items = [(TASK, "abcd", "ab"), (TASK, "ab", "abcd"), (TASK, "ab", "xy")]
    got = oracle.compare(items)
    assert got == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1)), 0.5])
    assert got[0] + got[1] == pytest.approx(1, abs=1e-15)
    assert (oracle.queries, oracle.scored) == (3, 3)  # a text is scored once
    assert oracle.scores([(TASK, "abcd"), (TASK, "abcdef")]) == [4.0, 6.0] and oracle.scored == 4
    assert (
        oracle.compare([({"id": "q2", "prompt": "Which?"}, "abcd", "ab")]) == pytest.approx([got[0]])
        and oracle.scored == 6
    )
    assert check_oracle(oracle, items).largest <= 1e-15
    assert oracle.compare([(TASK, "a" * 3000, "")]) == [1.0] and oracle.compare([(TASK, "", "a" * 3000)])[0] < 1e-300
    oracle.close()


def test_bradley_terry_of_every_kind_of_reward(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    task = {"id": "q", "prompt": "2+3=", "answer": "5"}
    native = lambda tree, leaf, task, text: Reward(float(text == task["answer"]))  # noqa: E731
    several = combine([("right", native, 1.0), ("short", length, -0.25)])
    runner = RewardRunner(native, decode=codepoints, timeout=None)
    expected = 1 / (1 + math.exp(-1))
    for reward in (native, runner, lambda items: [native(*i, codepoints(i[0].node_ids(i[1]))) for i in items]):
        assert BradleyTerry(reward, timeout=None).compare([(task, "5", "6")]) == pytest.approx([expected])
    oracle = BradleyTerry(f"{tmp_path}/mine.py:score")
    assert oracle.compare([(task, "5", "6")]) == pytest.approx([expected])
    oracle.close()
    assert BradleyTerry(several, timeout=None).compare([(task, "5", "64")]) == pytest.approx(
        [1 / (1 + math.exp(-1.25))]
    )


def test_bradley_terry_missing_is_missing():
    def picky(tree, leaf, task, text):
        return None if text == "?" else float("nan") if text == "nan" else len(text)

    oracle = BradleyTerry(picky, timeout=None)
    none, nan, fine = oracle.compare([(TASK, "a", "?"), (TASK, "nan", "b"), (TASK, "ab", "a")])
    assert isinstance(none, RewardError) and "not applicable" in str(none)
    assert isinstance(nan, RewardError) and fine == pytest.approx(1 / (1 + math.exp(-1)))
    for scale in (0, -1, math.inf):
        with pytest.raises(ConfigError, match=f"scale={scale}"):
            BradleyTerry(length, scale=scale)


def test_text_item():
    tree, leaf, task = text_item(TASK, "día \N{GRINNING FACE}")
    assert codepoints(tree.node_ids(leaf)) == "día \N{GRINNING FACE}" and task is TASK
    assert text_item(TASK, "x", truncated=True)[0].stop[1] == 3
