"""Plain-English families: right answers, disjoint splits, readable stories."""

import re

import pytest

from forethought.envs import _stories
from forethought.envs.families import BOXED_INSTRUCTION, families
from forethought.errors import DataError

FAMILIES = families()
NAMES = [
    "add-sub",
    "one-operation",
    "small-operation",
    "two-step",
    "compare",
    "sequence",
    "missing-number",
    "double-half",
    "story-one-step",
    "story-two-step",
]


def numbers(text):
    return [int(x) for x in re.findall(r"-?\d+", text)]


def test_the_families_are_these():
    assert list(FAMILIES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_splits_share_no_problem_and_ids_are_stable(name):
    size = 80 if name == "small-operation" else 200  # it has 222 problems in all
    train, held_out = FAMILIES[name](size, 1), FAMILIES[name](size // 4, 2, "heldout")
    for tasks in (train, held_out):
        assert len({t["id"] for t in tasks}) == len(tasks)
        for task in tasks:
            assert task["prompt"] == [{"role": "user", "content": task["problem"]}]
            assert re.fullmatch(r"\d+", task["answer"]) and task["family"] == name
    assert not {t["id"] for t in train} & {t["id"] for t in held_out}
    # the same numbers in the same place never stand on both sides, whatever the names and the wording
    skeleton = lambda t: re.sub(r"[A-Z][a-z]+|" + "|".join(_stories.THINGS), "_", t["problem"])  # noqa: E731
    assert not {skeleton(t) for t in train} & {skeleton(t) for t in held_out}
    assert FAMILIES[name](size + 20, 1)[:size] == train != FAMILIES[name](size, 5)


@pytest.mark.parametrize("name", ["add-sub", "one-operation", "two-step"])
def test_arithmetic_is_right(name):
    signs = set()
    for task in FAMILIES[name](300):
        expression = re.search(r"[\d(][\d+*/() -]*[\d)]", task["problem"]).group()
        signs |= set(expression) & set("+-*/")
        assert eval(expression) == int(task["answer"])
        assert all(n <= 228 for n in numbers(expression))
    assert signs == {"add-sub": {*"+-"}, "one-operation": {*"+-*/"}, "two-step": {*"+-*"}}[name]


def test_small_operations_are_right_and_small():
    tasks = FAMILIES["small-operation"](120)
    for task in tasks:
        expression = task["problem"].removeprefix("What is ").removesuffix("?")
        assert eval(expression) == int(task["answer"]) >= 0
        assert re.fullmatch(r"\d+ [-+*] \d+", expression) and all(
            1 <= n <= 12 for n in numbers(expression.replace("-", ""))
        )
    assert {s for t in tasks for s in t["problem"] if s in "+-*"} == set("+-*")


def test_add_sub_has_one_or_two_digits():
    assert all(1 <= n <= 99 for t in FAMILIES["add-sub"](500) for n in map(abs, numbers(t["problem"])))


def test_comparisons_are_right():
    words = set()
    for task in FAMILIES["compare"](400):
        word = re.search(r"is the (\w+):", task["problem"]).group(1)
        words.add(word)
        pick = max if word in ("larger", "largest", "greatest") else min
        found = numbers(task["problem"])
        assert pick(found) == int(task["answer"]) and len(set(found)) == len(found)
        assert (len(found) == 2) == (word in ("larger", "smaller"))
    assert words == {"larger", "smaller", "largest", "greatest", "smallest", "least"}


def test_sequences_go_on():
    for task in FAMILIES["sequence"](300):
        terms = [*numbers(task["problem"]), int(task["answer"])]
        assert len({b - a for a, b in zip(terms, terms[1:], strict=False)}) == 1 and min(terms) >= 0


def test_missing_numbers_and_multiples():
    for task in FAMILIES["missing-number"](200):
        a, b = numbers(task["problem"])
        assert int(task["answer"]) == (b - a if "added" in task["problem"] else a + b)
    factors = {"double": 2, "three times": 3, "half": 1 / 2, "third": 1 / 3}
    for task in FAMILIES["double-half"](200):
        factor = next(f for word, f in factors.items() if word in task["problem"])
        assert int(task["answer"]) == pytest.approx(numbers(task["problem"])[0] * factor)


def test_stories_match_their_templates():
    """Every template is met, filled completely, and answered by its operation."""
    sign = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
    table = {t: ops for source in (_stories.ONE_STEP, _stories.TWO_STEP) for ops, ts in source.items() for t in ts}
    patterns = {}
    for template, ops in table.items():
        pattern = re.escape(template)
        for field in "xyz":
            pattern = pattern.replace(rf"\{{{field}\}}", rf"(?P<{field}>\d+)", 1)
        for field in ("A", "B", "things"):
            pattern = pattern.replace(rf"\{{{field}\}}", rf"(?P<{field}>\w+)", 1).replace(
                rf"\{{{field}\}}", rf"(?P={field})"
            )
        patterns[re.compile(pattern)] = (template, ops.split())
    met = set()
    for task in [*FAMILIES["story-one-step"](1200), *FAMILIES["story-two-step"](1200)]:
        hits = [(t, ops, m) for p, (t, ops) in patterns.items() if (m := p.fullmatch(task["problem"]))]
        assert len(hits) == 1, task["problem"]
        template, ops, match = hits[0]
        met.add(template)
        found = match.groupdict()
        value = int(found["x"])
        for op, name in zip(ops, "yz", strict=False):
            value = eval(f"{value}{sign[op]}{found[name]}")
        assert value == int(task["answer"]) and value >= 1
        assert min(int(found[n]) for n in "xyz" if n in found) >= 2  # nouns are plural
        assert found.get("A") != found.get("B") or "A" not in found
    assert met == set(table)


def test_a_few_stories_in_full():
    stories = {t["problem"]: t["answer"] for t in FAMILIES["story-one-step"](4, 3)}
    assert stories == {
        "A box holds 10 stamps. Emil puts 8 more into it. How many stamps are in the box?": "18",
        "Emil used 44 balloons and still has 40. How many balloons did Emil have at the start?": "84",
        "Yusuf has 20 books, 2 times as many as Emil. How many books does Emil have?": "10",
        "Quinn has 36 walnuts and uses 3 each day. For how many days do they last?": "12",
    }


def test_an_instruction_ends_the_prompt_and_changes_no_id():
    plain, told = FAMILIES["add-sub"](5), FAMILIES["add-sub"](5, instruction=BOXED_INSTRUCTION)
    assert [t["id"] for t in plain] == [t["id"] for t in told]
    assert told[0]["prompt"][0]["content"] == f"{told[0]['problem']} {BOXED_INSTRUCTION}"


def test_more_than_there_are_is_an_error():
    with pytest.raises(DataError, match="family 'double-half', split 'validation': n=5000, but only .* were found"):
        FAMILIES["double-half"](5000, split="validation")
