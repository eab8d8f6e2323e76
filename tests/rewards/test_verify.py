"""Reading answers, the three modes, gold forms, limits. Pairs: test_verify_pairs; the pool: test_verify_pool."""

import math
import subprocess
import sys
import textwrap
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import ConfigError, RewardError
from forethought.rewards.verify import check, extract_answer, gold_texts, last_box, last_number

PIECES = [
    *r"0123456789.,+-*/^_{}()[]|=<>!%\ abxyfeiπ°±∞½:;'&$",
    *r"\frac|\sqrt|\pm |\text{|\cup |\boxed{|\begin{pmatrix}|\end{pmatrix}|\\|\infty|\ldots|\{|\}".split("|"),
    *r"\overline| or |cm|sin|^\circ|\sum|_8|1,234|e5|12:30".split("|"),
]
TOWER = r"\frac{7^{7^{7^{7}}} - 1}{6}"


def boxed(answer):
    return rf"so the answer is \boxed{{{answer}}}."


# -- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{12.8}", "12.8"),
        (r"first \boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{\frac{3}{\sqrt{2^{4}}}} ok", r"\frac{3}{\sqrt{2^{4}}}"),
        (r"\boxed{unclosed", None),
        (r"\boxed{12}, no: \boxed{13", None),  # the last box decides
        (r"\boxed 5", None),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"no box", None),
        (r"\boxed{}", ""),
        (r"\boxed{x = \boxed{5}}", r"x = \boxed{5}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),  # an escaped brace is no brace
        (r"} { \boxed{7} }", "7"),
        (r"\boxed{\boxed{5}", "5"),
        (r"\boxed{\text{a \} b}} tail", r"\text{a \} b}"),
    ],
)
def test_last_box(text, expected):
    assert last_box(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The result is 7.", "7"),
        ("11-6", "6"),
        ("11 - 6 = 5", "5"),
        ("it is -6", "-6"),
        ("x=-6", "-6"),
        ("about 1,234.5 km", "1,234.5"),
        ("5,8", "8"),
        ("half is 1/2", "1/2"),
        (r"so \frac{3}{4}.", r"\frac{3}{4}"),
        ("a .5 b", ".5"),
        ("1.2e5", "1.2e5"),
        ("10,\\!080", "10,080"),
        ("−3", "-3"),
        ("**73**", "73"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text, expected):
    assert last_number(text) == expected


def test_readers_differ_in_strictness():
    worked = "11 - 6 = 5"
    assert check(worked, 5, extract="last_number").correct
    assert not check(worked, 5, extract="bare").extracted
    assert not check(worked, 5, extract="box").extracted
    assert check(" 5.", 5, extract="bare").correct
    assert check("-1,234", -1234, extract="bare").correct
    assert not check("5 apples", 5, extract="bare").extracted
    assert check(boxed(5), 5, extract="box").correct


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"try 3, so \boxed{4}", "4"),
        ("work 3*4\n#### 12", "12"),
        ("The answer is: $x=5$.", "x=5"),
        ("Final answer: 7", "7"),
        (r"we get $a$ and then $\frac{1}{2}$ as said", r"\frac{1}{2}"),
        ("hence **73** apples", "73"),
        ("there are 3 and 4", "4"),
        ("none", None),
    ],
)
def test_any_reader(text, expected):
    assert extract_answer(text, extract="any") == expected


def test_only_what_follows_the_thinking_mark_is_read():
    text = rf"<think>{boxed(3)}</think> The answer is \boxed{{4}}"
    assert check(text, 4, thinking_end="</think>").correct
    assert not check(text, 3, thinking_end="</think>").correct
    unfinished = check(rf"<think>{boxed(4)}", 4, thinking_end="</think>")
    assert not unfinished.extracted and not unfinished.correct and "'</think>' is missing" in unfinished.reason


def test_prompt_box_is_not_read_because_only_the_response_is_given():
    verdict = check("I do not know.", 4)
    assert (verdict.extracted, verdict.correct, verdict.reason) == (False, False, r"no closed \boxed{}")


def test_empty_response_and_empty_box():
    assert not check("", 4).extracted
    assert not check(r"\boxed{}", 4).extracted
    assert not check("", 4, form="final").extracted


# -- golds --------------------------------------------------------------------------------------------------------


def test_gold_may_be_number_text_list_or_whole_solution():
    for gold in (
        12.8,
        "12.8",
        ["7", 12.8],
        Fraction(64, 5),
        np.float64(12.8),
        r"we get \boxed{12.8}",
        "work\n#### 12.8",
    ):
        assert check(boxed("12.80"), gold).correct
    assert gold_texts(27.0) == ["27"] and gold_texts(np.int64(3)) == ["3"] and gold_texts(1e-05) == ["1e-05"]
    assert check(boxed("0.3"), 0.1 + 0.2).correct  # the noise of a printed float


@pytest.mark.parametrize(
    ("gold", "words"),
    [
        ("", "empty"),
        ("  ", "empty"),
        (r"\boxed{}", "empty"),
        (math.nan, "not a finite number"),
        (None, "give text or a number"),
        ([], "at least one"),
        (True, "give text or a number"),
        ([1, ""], "empty"),
    ],
)
def test_unusable_gold_raises(gold, words):
    with pytest.raises(RewardError, match=words):
        check(boxed(4), gold)


def test_bad_settings_name_the_nearest():
    with pytest.raises(ConfigError, match="mode='mathverify'.*did you mean 'math-verify'"):
        check(boxed(4), 4, mode="mathverify")
    with pytest.raises(ConfigError, match="extract='boxed'"):
        check(boxed(4), 4, extract="boxed")
    with pytest.raises(ConfigError, match="timeout=0"):
        check(boxed(4), 4, timeout=0)
    with pytest.raises(RewardError, match="response=None"):
        check(None, 4)


# -- modes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "gold", "answer", "correct"),
    [
        # acceptance check 8
        ("train-strict", "12.8", "12.8", True),
        ("train-strict", "12.8", "12.80", True),
        ("train-strict", "12.8", "12.7", False),
        ("train-strict", "12.8", "128", False),
        ("train-strict", "1/2", r"\frac12", True),
        ("train-strict", "1/2", "0.5", True),
        ("train-strict", "1/2", "2/4", False),
        ("train-strict", r"\frac{1}{2}", r"\frac{2}{4}", False),
        ("train-strict", "4", "4.0", True),
        ("train-strict", "4", "2+2", False),
        ("train-strict", "4", r"\sqrt{16}", False),
        ("train-strict", r"-\frac{3}{4}", r"\frac{-3}{4}", True),
        ("train-strict", r"2\sqrt{3}", r"\sqrt{12}", True),
        ("train-strict", "(1,2)", "(1, 2)", True),
        ("train-strict", "(1/2,2)", "(2/4,2)", False),
        ("train-strict", "(1,2)", "[1,2]", False),
        ("train-strict", r"\{1,2\}", r"\{2,1\}", False),  # no structures but tuples
        ("train-strict", "x+1", "1+x", True),
        ("train-strict", r"\text{yes}", "yes", True),
        ("math-verify", "1/2", "2/4", True),
        ("math-verify", "4", "2+2", True),
        ("math-verify", "12.8", "12.7", False),
        ("eval-qwen", "12.8", "12.8005", True),
        ("eval-qwen", "12.8", "12.82", False),
        ("eval-qwen", "0.35", "35", True),
        ("eval-qwen", "35", "0.35", True),
        ("eval-qwen", "0.35", "3.5", False),
        ("eval-qwen", "0.35", r"35\%", True),
        ("eval-qwen", r"\sqrt{2}", "1.4142", True),
        ("eval-qwen", r"\sqrt{2}", "1.41", False),
        ("eval-qwen", r"\{1,2\}", "(1,2)", True),
        ("eval-qwen", "(1,2)", "(2,1)", False),
        ("eval-qwen", "B", "(B) 12", True),
        ("eval-qwen", "B", "(C) 12", False),
        ("math-verify", "0.35", "35", False),
        ("math-verify", r"\sqrt{2}", "1.4142", False),
    ],
)
def test_modes(mode, gold, answer, correct):
    assert check(boxed(answer), gold, mode).correct is correct


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        # units, dollar, percent, degree and a name in front are taken off, on both sides
        (
            "12.8",
            [
                r"12.8\text{ mph}",
                "12.8 mph",
                r"12.8\text{ miles per hour}",
                r"\$12.8",
                r"12.8\%",
                r"12.8^\circ",
                "V=12.8",
            ],
            [r"12.7\text{ mph}", r"\$12.7", r"128\%", r"0.128\%", r"1280\%", "12.8x", "12.8, 12.7", "12.8000001"],
        ),
        (r"12.8\text{ mph}", ["12.8", r"\left(12.8\right)", "64/5", r"12\frac{4}{5}", "12 4/5"], ["12.7", "12,8"]),
        ("-5", [r"-5\%", r"-5\text{ m}"], ["5", r"5\%"]),
        ("50", [r"50\%"], [r"0.5", r"5000\%"]),
        ("1/2", [r"\frac{1}{2}\text{ cm}", r"0.5\%"], [r"\frac{2}{4}\text{ cm}", r"50\%"]),
        ("4", [r"4\text{ cm}^2"], [r"(2+2)\text{ cm}"]),
        # million, commas, mixed numbers, lower case
        ("5000000", ["5 million", r"5\text{ million}", r"\$5 million", "5,000,000"], ["5", "6 million", "2,5 million"]),
        ("2500000", ["2.5 million", r"2.5\text{ million dollars}"], ["2.5 billion"]),
        ("11/8", ["1 3/8", r"1\frac38"], ["22/16", "13/8"]),
        ("x+1", ["X+1"], ["y+1"]),
        ("yes", ["YES", r"\text{Yes}"], ["no"]),
        # tuples item by item and in order
        ("1,2", ["1, 2", "1 , 2", "1 and 2"], ["2,1", "(1,2)", "12", "1", r"\{1,2\}"]),
        ("(1,2)", [r"(1\text{ cm},2\text{ cm})"], ["(2,1)", "1,2"]),
        # nothing equals its rounding
        (r"\pi", [r"\pi\text{ cm}"], ["3.14159", "3.14159265358979"]),
        ("1/3", [], ["0.333333", "0.333333333333"]),
    ],
)
def test_strict_mode_takes_marks_off_and_keeps_values_and_order(gold, right, wrong):
    assert [a for a in right if not check(boxed(a), gold, "train-strict").correct] == []
    assert [a for a in wrong if check(boxed(a), gold, "train-strict").correct] == []


def test_the_first_tier_that_says_yes_is_named():
    tiers = {
        "12": "literal",
        r"\,12 ": "normalised",
        "24/2": "rational",
        "x=12": "structural",
    }
    for answer, tier in tiers.items():
        assert check(answer, "12", form="final").tier == tier
    assert check("0.333333", "1/3", form="final").tier == "decimal"
    assert check(r"2\sqrt{3}", r"\sqrt{12}", form="final").tier == "algebra"
    assert check(r"\sin^2 x + \cos^2 x", "1", form="final").tier == "symbolic"
    wrong = check("13", "12", form="final")
    assert (wrong.tier, wrong.correct, wrong.extracted, wrong.answer) == (None, False, True, "13")


# -- hostile input: H16, acceptance check 10 ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        TOWER,
        "9^{9^{9^{9}}}",
        "2003^{2002^{2001}}",
        "{" * 100_000 + "}" * 100_000,
        "9" * 1_000_000,
        "x+" * 3_500 + "1",
        "(" * 500 + "1" + ")" * 500,
        r"\sqrt{" * 200 + "2" + "}" * 200,
        "1e999999999",
        "(10^{12})!",
        "2" + "!" * 3_000,
        r"\sin " * 1_500 + "x",
    ],
    ids=lambda a: a[:12],
)
def test_hostile_answer_is_decided_fast_and_says_limit(answer):
    begin = time.perf_counter()
    verdict = check(rf"\boxed{{{answer}}}", "12")
    assert time.perf_counter() - begin < 2
    assert verdict.extracted and not verdict.correct and not verdict.timed_out
    assert "limit" in verdict.reason or answer.startswith("x+")


def test_a_megabyte_without_a_box_is_read_in_linear_time():
    for text in ("\\boxed{" * 140_000, "{" * 1_000_000, "1" * 1_000_000, "$ " * 400_000, "answer is " * 90_000):
        for extract in ("box", "last_number", "bare", "any"):
            begin = time.perf_counter()
            check(text, "12", extract=extract)
            assert time.perf_counter() - begin < 2


def test_nothing_is_ever_executed(tmp_path):
    target = tmp_path / "touched"
    for text in (f"__import__('os').system('touch {target}')", f"open('{target}','w')", "exit()", "x.__class__"):
        assert not check(boxed(text), "12").correct
        assert not check(text, "12", form="final", mode="eval-qwen").correct
    assert not target.exists()


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        # H15 and its kind: tiny numbers, half-read formulas, names without their values
        ("10^{-12}", r"2\cdot 10^{-12}"),
        ("P=(2,5)", "P=(2,5.5)"),
        (r"\frac{3^{900}+2}{7}", r"\frac{2}{7}"),
        ("09:30", "09:03"),
        (r"1, 4, 9, \ldots, n^2", r"1, 8, 27, \ldots, n^3"),
        ("4", r"4\sqrt(2)"),
        ("1-1/e", "1+1/e"),
        ("n=2,3,4", "n=1,2,3"),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    ],
)
def test_published_false_positives_are_refused(gold, answer):
    for mode in ("math-verify", "train-strict"):
        assert not check(answer, gold, mode, form="final").correct
        assert not check(gold, answer, mode, form="final").correct


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_any_text_gets_a_verdict_and_equals_itself(text):
    for mode in ("math-verify", "train-strict", "eval-qwen"):
        verdict = check(text, "12", mode, form="final", timeout=20)
        assert isinstance(verdict.correct, bool)
        if text.strip() and "####" not in text and last_box(text) is None:
            assert check(text, text, mode, form="final").correct


@settings(max_examples=200, deadline=None)
@given(st.fractions(max_denominator=10_000), st.fractions(max_denominator=10_000))
def test_rationals_are_compared_exactly_in_every_notation(a, b):
    for text in (f"{a}", rf"\frac{{{a.numerator}}}{{{a.denominator}}}", f"{a.numerator}/{a.denominator}"):
        assert check(text, str(a), form="final").correct
        assert check(text, str(b), form="final").correct is (a == b)


@settings(max_examples=100, deadline=None)
@given(st.decimals(-1_000_000, 1_000_000, places=3), st.decimals(-1_000_000, 1_000_000, places=3))
def test_written_decimals_are_compared_exactly(a, b):
    assert check(f"{a:,}", f"{a}", form="final").correct
    assert check(f"{a}", f"{b}", form="final").correct is (a == b)


def test_import_is_light():
    code = """
        import sys, forethought.rewards.verify
        print([m for m in ("sympy", "torch", "numpy", "mpmath", "math_verify") if m in sys.modules])
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
