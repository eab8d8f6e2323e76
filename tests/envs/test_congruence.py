"""Puzzles with one solution, splits by normal form, demonstrations, and the strict trace parser."""

import random

import pytest

from forethought.envs.congruence import (
    Mix,
    Puzzle,
    PuzzleConfig,
    attempt,
    mixture,
    parse_puzzle,
    parse_trace,
    pieces,
    puzzles,
    search_trace,
    search_traces,
)
from forethought.envs.pools import split_of
from forethought.errors import ConfigError, DataError
from forethought.rewards.split import Splitter

QUADRATIC = PuzzleConfig(max_a=3, top=9, min_p=11, max_p=31)
LINEAR = PuzzleConfig(max_a=0, max_b=5, max_c=5, max_p=47)
SPEC = Puzzle(3, 2, 1, 17, 9, 19)  # the puzzle of the module's grammar: 3*49+2*7+1=162, 162 mod 17=9


@pytest.mark.parametrize("config", [PuzzleConfig(), QUADRATIC, LINEAR], ids=["default", "quadratic", "linear"])
def test_puzzles_have_one_solution_and_say_what_they_are(config):
    rows = puzzles(60, 0, "train", config=config)
    assert len({r["prompt"] for r in rows}) == 60
    for row in rows:
        puzzle = parse_puzzle(row["prompt"])
        assert puzzle.text == row["prompt"] and puzzle.solutions() == [int(row["answer"])]
        assert puzzle.value(3) == puzzle.a * 9 + puzzle.b * 3 + puzzle.c
        assert bool(puzzle.a) == bool(config.max_a)
    assert rows[:10] == puzzles(10, 0, "train", config=config)


def test_splits_share_no_puzzle_in_any_wording():
    keys = {s: {parse_puzzle(r["prompt"]).key for r in puzzles(150, 7, s)} for s in ("train", "validation", "heldout")}
    assert not keys["train"] & keys["heldout"] and not keys["train"] & keys["validation"]
    assert not keys["heldout"] & keys["validation"]
    # Moving a constant to the other side, or adding p to it, is the same puzzle; another sign of one is not.
    same = [Puzzle(0, 3, 5, 17, 9, 11), Puzzle(0, 3, 0, 17, 4, 11), Puzzle(0, 20, 5, 17, 9, 11)]
    assert len({p.key for p in same}) == 1
    assert Puzzle(0, 3, 4, 17, 9, 11).key != same[0].key
    row = puzzles(1, 0, "heldout")[0]
    assert split_of(row["family"], parse_puzzle(row["prompt"]).key) == "heldout"


def test_more_puzzles_than_there_are():
    with pytest.raises(DataError, match="only .* puzzles were found"):
        puzzles(10_000, 0, "validation", config=PuzzleConfig(max_a=0, max_b=1, max_c=1, max_p=14))


def test_what_is_no_puzzle():
    with pytest.raises(DataError, match="no puzzle of the form"):
        parse_puzzle("find y")
    with pytest.raises(DataError, match="modulus 0"):
        parse_puzzle("find x in 0..11: (3*x+5) mod 0=9")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top": 0}, "top=0"),
        ({"max_a": 0, "max_b": 0}, "max_b=0: give at least 1"),
        ({"max_a": -1}, "max_a=-1"),
        ({"min_p": 11}, "top < min_p"),
        ({"max_p": 12}, "min_p <= max_p"),
    ],
)
def test_bad_sizes(settings, message):
    with pytest.raises(ConfigError, match=message):
        PuzzleConfig(**settings)


# -- traces --


def test_attempts_are_written_as_in_the_grammar():
    puzzle = Puzzle(3, 2, 1, 17, 9, 19)
    assert attempt(puzzle, 7, spelled=True) == "try 7: 3*49+2*7+1=162 mod 17=9 yes. "
    assert attempt(puzzle, 4) == "try 4: 57 mod 17=6 no. "
    assert attempt(Puzzle(0, 3, 5, 17, 9, 11), 7, spelled=True) == "try 7: 3*7+5=26 mod 17=9 yes. "


def test_search_traces_are_true_and_end_in_a_box():
    rows = search_traces(puzzles(80), min_tries=2, max_tries=5, seed=1)
    tries = []
    for row in rows:
        puzzle = parse_puzzle(row["prompt"])
        trace = parse_trace(row["completion"], puzzle)
        assert trace.malformed == trace.false_arithmetic == trace.false_yes == trace.false_no == 0
        assert trace.tries == trace.distinct and 1 <= trace.tries <= 5
        split = Splitter()(row["completion"])
        assert split.answer is not None and 0 <= int(split.answer) <= puzzle.top
        found = any(t.solves for t in trace.attempts)
        assert puzzle.solves(int(split.answer)) if found else int(split.answer) not in [t.x for t in trace.attempts]
        tries.append(trace.tries)
    assert max(tries) == 5
    with pytest.raises(ConfigError, match="min_tries=3, max_tries=2"):
        search_traces(puzzles(1), min_tries=3, max_tries=2)
    with pytest.raises(DataError, match="no tasks"):
        search_traces([], min_tries=1, max_tries=2)


def test_repeats_make_tries_that_are_not_new():
    puzzle = parse_puzzle(puzzles(1)[0]["prompt"])
    rng = random.Random(0)
    traces = [parse_trace(search_trace(puzzle, 12, rng, repeats=0.8), puzzle) for _ in range(40)]
    assert sum(t.tries for t in traces) > sum(t.distinct for t in traces) + 40


def test_the_mixture_has_its_shares():
    mix = Mix(direct=0.5, one_try=0.2, multi_try=0.1, facts=0.2)
    rows = mixture(puzzles(50), mix, n=200)
    kinds = [r["kind"] for r in rows]
    assert {k: kinds.count(k) for k in set(kinds)} == {"direct": 100, "one_try": 40, "multi_try": 20, "facts": 40}
    for row in rows:
        if row["kind"] == "facts":
            assert row["prompt"].startswith("check ") and "try" not in row["completion"]
            assert 1 <= row["completion"].count(".") <= 3
        else:
            puzzle = parse_puzzle(row["prompt"])
            trace = parse_trace(row["completion"], puzzle)
            assert trace.false_arithmetic == 0 and Splitter()(row["completion"]).answer is not None
            assert {"direct": trace.tries == 0, "one_try": trace.tries == 1}.get(row["kind"], True)
    assert rows == mixture(puzzles(50), mix, n=200) and rows != mixture(puzzles(50), mix, 1, n=200)
    with pytest.raises(ConfigError, match="= 1.5: make them sum to 1"):
        Mix(direct=1.0, one_try=0.3, multi_try=0.1, facts=0.1)
    with pytest.raises(ConfigError, match="max_tries=1"):
        Mix(max_tries=1)


@pytest.mark.parametrize("config", [PuzzleConfig(), QUADRATIC, LINEAR], ids=["default", "quadratic", "linear"])
def test_texts_are_made_of_the_pieces(config):
    words = sorted(pieces(config), key=len, reverse=True)
    assert len(set(words)) == len(words)
    rows = mixture(puzzles(30, config=config), n=60, spelled=True)
    for text in (part for r in rows for part in (r["prompt"], r["completion"])):
        rest = text
        while rest:
            piece = next((w for w in words if rest.startswith(w)), None)
            assert piece is not None, text
            rest = rest[len(piece) :]


# -- the parser (acceptance check 14) --


def test_tries_distinct_tries_and_false_claims():
    trace = parse_trace("try 7: 162 mod 17=9 yes. try 4: 57 mod 17=6 no. try 4: 57 mod 17=6 no.", SPEC)
    assert (trace.tries, trace.distinct, trace.false_arithmetic, trace.false_yes, trace.false_no) == (3, 2, 0, 0, 0)
    wrong = parse_trace("try 7: 3*49+2*7+1=163 mod 17=10 no. try 4: 57 mod 17=6 yes. \\boxed{4}", SPEC)
    assert (wrong.tries, wrong.false_arithmetic, wrong.false_yes, wrong.false_no) == (2, 1, 1, 1)


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("try 7: 3*49+2*7+1=162 mod 17=9 yes.", True),
        ("try 7: 162 mod 17=9 yes", True),
        ("so I try 7 : 162 mod 17 = 9 yes.", True),
        ("try 7: 3*49+2*7+2=162 mod 17=9 yes.", False),  # the sum is another number
        ("try 7: 3*49=162 mod 17=9 yes.", False),
        ("try 7: 161 mod 17=8 no.", False),  # true equalities, but not of this puzzle at 7
        ("try 7: 162 mod 18=0 no.", False),
        ("try 7: 162 mod 17=8 no.", False),
    ],
)
def test_false_arithmetic(text, sound):
    trace = parse_trace(text, SPEC)
    assert trace.tries == 1 and trace.false_arithmetic == (not sound)


def test_what_is_no_try():
    trace = parse_trace(
        "try 7. try: 4. try 5: 86 no. retry 7: 162 mod 17=9 yes. try 99999999999999999999: 1 mod 17=1 no.", SPEC
    )
    assert trace.tries == 0 and trace.malformed == 4
    assert parse_trace("", SPEC).tries == 0
    out = parse_trace("try 30: 2761 mod 17=7 no.", SPEC)  # a try, but of a number outside of the range
    assert (out.tries, out.distinct, out.false_arithmetic) == (1, 0, 0)


def test_recovery_needs_a_failed_try_first_and_a_true_one_later():
    failed, right = attempt(SPEC, 4), attempt(SPEC, 7)
    assert parse_trace(failed + right, SPEC).recovered and parse_trace(failed + right, SPEC).failed_first
    assert not parse_trace(right + failed, SPEC).recovered and not parse_trace(right, SPEC).failed_first
    assert not parse_trace(failed + failed, SPEC).recovered
    assert not parse_trace(failed + right.replace("yes", "no"), SPEC).recovered
    assert not parse_trace(failed.replace("no", "yes") + failed, SPEC).recovered


def test_the_example_of_the_module_is_true():
    from forethought.envs import congruence

    lines = [line.strip() for line in (congruence.__doc__ or "").splitlines()]
    trace = next(line for line in lines if line.startswith("try 7"))
    puzzle = parse_puzzle(congruence.__doc__ or "")
    found = parse_trace(trace, puzzle)
    assert found.tries == 3 and found.recovered and not (found.false_arithmetic or found.false_yes or found.false_no)
    assert puzzle.solutions() == [int(Splitter()(trace).answer or -1)]
    assert attempt(puzzle, 7, spelled=True) == "try 7: 1*49+3*7+4=74 mod 17=6 no. "
