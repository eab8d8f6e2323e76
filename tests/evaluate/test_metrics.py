"""Shares and counts beside accuracy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forethought.envs.env import Step
from forethought.errors import ConfigError, DataError, EnvError
from forethought.evaluate.metrics import (
    Row,
    distinct_answers,
    episode_success,
    has_box,
    is_repeated,
    ngram_repetition,
    reflection_counts,
    summary,
)
from forethought.tree.tree import Stop


def row(right=True, **kwargs):
    return Row(**({"task": "t", "sample": 0, "right": right, "score": float(right)} | kwargs))


def test_summary():
    rows = [
        row(text=r"so \boxed{4}", length=10, parts={"format": 1.0, "short": 0.5}),
        row(False, text="let me recheck: we Recalculate", length=20, stop=Stop.LENGTH, parts={"format": 0.0}),
        row(True, text=r"\boxed{\frac{1}{2}}. Rethinking, re-checked", length=30, repeated=True),
        row(False, score=None, error="timed out", text=r"\boxed{4", length=100, stop=Stop.LENGTH),
    ]
    assert summary(rows) == pytest.approx(
        {
            "accuracy": 0.5,
            "errors": 0.25,
            "boxed": 0.5,
            "truncated": 0.5,
            "repeated": 0.25,
            "length/mean": 40.0,
            "length/p95": 89.5,
            "reflection/rethink": 0.25,
            "reflection/recheck": 0.5,
            "reflection/recalculate": 0.25,
            "score": 2 / 3,
            "score/format": 0.5,
            "score/short": 0.5,
        }
    )
    assert "score" not in summary([row(False, score=None, error="e")])
    with pytest.raises(DataError, match="no rows: nothing was evaluated"):
        summary([])


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (r"\boxed{12}", True),
        (r"\boxed{\frac{\sqrt{3}}{2}} done", True),
        (r"first \boxed{1}, then \boxed{2", False),
        (r"\boxed 5", False),
        ("boxed{5}", False),
        ("", False),
    ],
)
def test_has_box(text, want):
    assert has_box(text) == want


def test_ngram_repetition():
    assert ngram_repetition("abcabcabc", 3) == pytest.approx(1 - 3 / 7)
    assert ngram_repetition([1, 2, 3, 4, 5], 2) == 0
    assert ngram_repetition([1, 1, 1, 1, 1], 1) == 0.8
    assert ngram_repetition([1, 2, 3], 4) == 0 == ngram_repetition([], 1)
    with pytest.raises(ConfigError, match="n=0: give n-grams of at least 1"):
        ngram_repetition([1], 0)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_repetition_lies_below_one_and_doubling_never_lowers_it(tokens, n):
    share = ngram_repetition(tokens, n)
    assert 0 <= share < 1
    assert ngram_repetition(tokens * 2, n) >= share - 1e-12


def test_is_repeated():
    assert is_repeated([1, 2, 3] * 20)
    assert not is_repeated(list(range(60)))
    assert not is_repeated([7] * 31)  # too short to be called a loop
    assert is_repeated([7] * 31, least=31)
    assert is_repeated(list(range(50)) + [9, 8] * 30)
    assert not is_repeated(list(range(50)) + [9, 8] * 10)


def test_reflection_counts_whole_words_only():
    got = reflection_counts(
        ["Rethink! rethought; unrethinkable", "re-check recheck rechecks", "recalculation precalculate"]
    )
    assert got == {"rethink": 2, "recheck": 3, "recalculate": 1}


def test_distinct_answers():
    assert distinct_answers(["4", None, "12.7", "4", None, "4"]) == [("4", 3), (None, 2), ("12.7", 1)]


def test_done_is_not_won():
    """Case H19: limit 30; won at step 12, never, won exactly at step 30."""
    last = [
        Step("won", 1.0, terminated=True, info={"success": True}),
        Step("out of time", 0.0, truncated=True, info={"success": False}),
        Step("won", 1.0, terminated=True, info={"success": True}),
    ]
    rows = [row(episode_success(s), task=str(i)) for i, s in enumerate(last)]
    assert summary(rows)["accuracy"] == pytest.approx(2 / 3)
    assert math.isclose(sum(s.done for s in last) / 3, 1.0)  # what counting ends would give
    with pytest.raises(EnvError, match="done is not won, so the environment must say"):
        episode_success(Step("over", 1.0, terminated=True))
    with pytest.raises(EnvError, match="the episode is not over"):
        episode_success(Step("on", info={"success": True}))
