"""H36 and its kind: numbers that were not given, and text that must never run."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import RewardError
from forethought.rewards.countdown import score_countdown

NUMBERS = [3, 7, 25, 50]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("50+25+3", 1),
        ("75+3", 0),
        ("25+25+25+3", 0),
        ("78", 0),
        ("50+25+3.0000001", 0),
        ('__import__("os").getpid()', 0),
        (r"so \boxed{50 + (25 + 3)}", 1),
        ("50+25+3 = 78", 1),
        ("50+25+3 = 79", 0),
        ("50+25+3 = 70 = 78", 0),
        ("50 + 25 × 1 + 3", 0),
        ("3*25+3", 0),
        ("7**2+29", 0),
        ("156//2", 0),
        ("50/0", 0),
        ("0x32+25+3", 0),
        ("5_0+25+3", 0),
        ("1e1", 0),
        ("True+50", 0),
        ("50 if 1 else 25", 0),
        ("[50+25+3][0]", 0),
        ("(lambda: 78)()", 0),
        ("max(50,25)", 0),
        ("", 0),
        ("((((", 0),
        ("(" * 300 + "3" + ")" * 300, 0),
        ("-" * 400 + "3", 0),
        ("9" * 400, 0),
        ("50+25+3\x00", 0),
        ("50+25+3; import os", 0),
        ("−(−50)+25+3", 1),
    ],
)
def test_h36(answer, score):
    assert score_countdown(answer, NUMBERS, 78).score == score


def test_reasons_and_exact_value():
    assert "not given" in score_countdown("75+3", NUMBERS, 78).reason
    assert score_countdown("7/3+7/3", [7, 7, 3, 3], 5).value == Fraction(14, 3)
    thirds = score_countdown("(7/3)*3", [7, 3, 3], 7)
    assert thirds.score == 1.0 and thirds.value == 7
    assert "limit" in score_countdown("1+" * 400 + "1", [1], 401).reason


def test_each_number_at_most_as_often_as_given():
    assert score_countdown("5+5", [5, 5], 10).score == 1.0
    assert score_countdown("5+5", [5], 10).score == 0.0
    assert score_countdown("5+2", [5, 2, 9], 7).score == 1.0
    assert score_countdown("5+2", [5, 2, 9], 7, use_all=True).score == 0.0


@pytest.mark.parametrize("bad", [([], 5), ([float("nan")], 5), ([1], float("inf")), ([True], 1), (["1"], 1)])
def test_bad_tasks_raise(bad):
    with pytest.raises(RewardError):
        score_countdown("1", *bad)


@settings(max_examples=200, deadline=None)
@given(st.text("0123456789+-*/(). _x='", max_size=30))
def test_any_text_gets_a_score(text):
    assert score_countdown(text, NUMBERS, 78).score in (0.0, 1.0)


@settings(max_examples=100, deadline=None)
@given(st.permutations([3, 7, 25, 50]), st.lists(st.sampled_from("+-*"), min_size=3, max_size=3))
def test_the_value_is_python_arithmetic(numbers, operators):
    text = str(numbers[0]) + "".join(f"{o}{n}" for o, n in zip(operators, numbers[1:], strict=True))
    target = eval(text)  # our own text
    assert score_countdown(text, NUMBERS, target).score == 1.0
    assert score_countdown(text, NUMBERS, target + 1).score == 0.0
