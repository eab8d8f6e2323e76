"""Marks of free text and exact counts of traces."""

import pytest

from forethought.envs.congruence import Puzzle, attempt
from forethought.errors import DataError
from forethought.evaluate.behaviour import at_equal_length, mean_behaviour, text_behaviour, trace_behaviour

PUZZLE = Puzzle(3, 2, 1, 17, 9, 19)  # 7 solves it, 4 and 5 do not


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [
        ("Wait, that's wrong. Let me go back.", "backtrack", 3),
        ("Hold on: this cannot be right, I made a mistake.", "backtrack", 3),
        ("That is right. We waited backwards.", "backtrack", 0),
        ("Alternatively, another approach. Let me try 5.", "another way", 3),
        ("We try to double-check, verify and substitute back; let me check.", "verification", 4),
        ("The check arrived by mail.", "verification", 0),
    ],
)
def test_marks(text, kind, count):
    assert text_behaviour(text)[kind] == count


def test_text_numbers():
    found = text_behaviour(r"a b c d a b c d \boxed{1} or \boxed{2}")
    assert found["boxes"] == 2 and found["words"] == 11
    assert found["repetition"] == pytest.approx(1 / 8)
    assert text_behaviour("wait, " * 100)["compression"] < 0.1 < text_behaviour("the quick brown fox")["compression"]
    assert text_behaviour("")["compression"] > 0


def test_trace_numbers():
    text = attempt(PUZZLE, 4) + attempt(PUZZLE, 4) + attempt(PUZZLE, 7) + r"\boxed{7}"
    found = trace_behaviour(text, PUZZLE)
    assert (found["tries"], found["distinct tries"], found["recovered"]) == (3, 2, 1)
    assert (found["first right"], found["final right"], found["failed first"]) == (0, 1, 1)
    assert found["repetition"] > 0
    assert trace_behaviour(text, PUZZLE, tokens=list(range(30)))["repetition"] == 0
    direct = trace_behaviour(r"\boxed{7} no, \boxed{5}", PUZZLE)
    assert (direct["first right"], direct["final right"], direct["tries"]) == (1, 0, 0)
    for odd in (r"\boxed{-7}", r"\boxed{7.0}", "", r"\boxed{²}", r"\boxed{99999999999}"):
        assert trace_behaviour(odd, PUZZLE)["final right"] == 0


def test_means_and_the_gain_from_revision():
    right = attempt(PUZZLE, 7) + r"\boxed{7}"
    revised = attempt(PUZZLE, 4) + right
    stuck = attempt(PUZZLE, 4) + r"\boxed{5}"
    got = mean_behaviour(trace_behaviour(t, PUZZLE) for t in (right, revised, stuck, stuck))
    assert got["gain from revision"] == pytest.approx(0.5 - 0.25) and got["tries"] == 1.25
    assert got["recovered of failed"] == pytest.approx(1 / 3) and got["recovered"] == 0.25
    assert "recovered of failed" not in mean_behaviour([trace_behaviour(right, PUZZLE)])
    with pytest.raises(DataError, match="no responses"):
        mean_behaviour([])


def test_at_equal_length():
    ours = [(5, 1.0), (6, 0.0), (15, 1.0), (40, 1.0)]
    theirs = [(5, 0.0), (15, 0.0), (16, 1.0)]
    # bins [0, 10) and [10, 20): weights 1 and 1, means 0.5, 1 against 0, 0.5
    assert at_equal_length(ours, theirs, [0, 10, 20]) == pytest.approx((0.75, 0.25))
    assert at_equal_length(ours, theirs, [30, 50]) is None
    with pytest.raises(DataError, match="rising numbers"):
        at_equal_length(ours, theirs, [10, 10])
