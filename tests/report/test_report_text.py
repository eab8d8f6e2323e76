"""Text and numbers for people: what is escaped, cut and rounded, and how."""

import doctest
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forethought.report import reading, text
from forethought.report.text import (
    esc,
    is_fraction,
    number,
    script_json,
    show_count,
    show_number,
    show_seconds,
    truncate,
    visible,
)


def test_examples_in_docstrings_are_true():
    for module in (text, reading):
        result = doctest.testmod(module)
        assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("a\x1b[31mb", "a␛[31mb"),
        ("\x00\x7f", "␀␡"),
        ("a\r\nb\rc", "a\nb␍c"),
        ("tab\there\n", "tab\there\n"),
        ("\ud800x\udfff", "\ufffdx\ufffd"),
        ("a\u202eb", "a[U+202E]b"),
        ("\u2028", "[U+2028]"),
        ("日本 😀 é", "日本 😀 é"),
    ],
)
def test_visible(raw, seen):
    assert visible(raw) == seen


@given(st.text(st.characters(codec=None, exclude_categories=())))
def test_escaped_text_is_encodable_and_holds_no_markup(raw):
    out = esc(raw)
    out.encode()
    assert not set(out) & set("<>\"'\x1b\r\x00\u202e")
    assert visible(visible(raw)) == visible(raw)


def test_script_json_cannot_end_its_block():
    value = {"x": "</script><!-- & \ud800"}
    out = script_json(value)
    assert not set(out) & set("<>&")
    assert json.loads(out) == value
    with pytest.raises(ValueError):
        script_json([math.nan])


@given(st.text(max_size=60), st.integers(4, 30))
def test_truncate_counts_what_it_leaves_out(raw, limit):
    short, hidden = truncate(raw, limit)
    assert hidden == max(0, len(raw) - limit)
    if hidden:
        head, tail = limit - limit // 4, limit // 4
        assert short == f"{raw[:head]} … {raw[len(raw) - tail :]}"
    else:
        assert short == raw


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (3.0, "3"),
        (-0.25, "-0.250"),
        (17.25, "17.25"),
        (123.456, "123.5"),
        (46080, "46,080"),
        (12345.678, "12,346"),
        (2.5e9 + 0.5, "2.5e+09"),
        (1e-7, "1e-07"),
        (0.0312, "0.0312"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
        (True, "–"),
        ("3", "–"),
        (10**30, "1.000e+30"),
    ],
)
def test_show_number(value, shown):
    assert show_number(value) == shown


def test_percent_counts_and_durations():
    assert show_number(0.83333, percent=True) == "83.3%"
    assert show_count(999) == "999" and show_count(46080) == "46.1k" and show_count(2_000_000) == "2M"
    assert show_seconds(0.04) == "0.0 s" and show_seconds(59.96) == "60.0 s" and show_seconds(3600) == "1 h 0 min"
    assert show_count(None) == show_seconds(None) == "–"


def test_number_accepts_finite_numbers_only():
    assert [number(v) for v in (1, 1.5, True, None, "1", math.nan, -math.inf)] == [1, 1.5, *[None] * 5]


@pytest.mark.parametrize(
    ("name", "values", "want"),
    [
        ("heldout_accuracy/after", [0.5, None], True),
        ("pass@8", [1.0], True),
        ("completions/clipped_ratio", [0], True),
        ("accuracy", [56.2], False),
        ("accuracy", [-0.1], False),
        ("tokens_generated", [0.5], False),
        ("learning_rate", [1e-5], False),
        ("ratio/mean", [0.99], False),
        ("reward/mean", [0.5], False),
        ("white_space", [0.5], False),
    ],
)
def test_is_fraction(name, values, want):
    assert is_fraction(name, values) is want
