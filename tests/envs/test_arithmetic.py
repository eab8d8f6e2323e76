"""The chain world and its demonstrations."""

import re
from collections import Counter

import pytest

from forethought.envs import arithmetic, pools
from forethought.envs.arithmetic import (
    ALPHABET,
    ChainConfig,
    Shares,
    chains,
    demonstrations,
    expression,
    shortcut,
    worked,
    wrong_label,
)
from forethought.errors import ConfigError, DataError

EXAMPLE = {"id": "e", "prompt": "", "answer": "1", "chain": [7, ["+", 5], ["*", 3], ["-", 8], [" mod ", 9]]}


def evaluate(prompt):
    """An independent reading of a prompt: Python's own arithmetic."""
    text = prompt.removesuffix(" = ?\n").replace(" mod ", "%")
    for op, name in (("#", "@"), ("&", "|"), ("~", "^")):
        text = text.replace(op, name)

    class Number(int):
        def __or__(self, other):
            return Number(min(self, other))

        def __xor__(self, other):
            return Number(abs(int(self) - int(other)))

        def __matmul__(self, other):
            return Number(max(self, other))

    return int(eval(re.sub(r"(\d+)", r"Number(\1)", text), {"Number": Number}))


def test_the_example_of_the_specification():
    assert expression(EXAMPLE["chain"]) == "((7+5)*3-8) mod 9"
    assert worked(EXAMPLE) == r"7+5=12;12*3=36;36-8=28;28 mod 9=1;\boxed{1}"
    assert shortcut(EXAMPLE) == 8


def test_brackets_say_the_order():
    assert expression([2, ["*", 3], ["*", 4], [" mod ", 5]]) == "(2*3*4) mod 5"
    assert expression([2, ["*", 3], ["+", 4], ["*", 2], [" mod ", 5]]) == "((2*3+4)*2) mod 5"
    assert expression([9, ["-", 4], [" mod ", 5]]) == "(9-4) mod 5"
    assert expression([9, ["#", 4], ["&", 5], ["~", 1]]) == "((9#4)&5)~1"


@pytest.mark.parametrize("family", ["chain", "chain-shifted"])
def test_answers_are_right_and_sizes_hold(family):
    tasks = chains(600, 3, "heldout", family=family)
    assert len({t["id"] for t in tasks}) == len({t["prompt"] for t in tasks}) == 600
    for task in tasks:
        assert int(task["answer"]) == evaluate(task["prompt"])
        numbers = [int(x) for x in re.findall(r"\d+", task["prompt"] + worked(task))]
        assert max(numbers) <= 99 and set(task["prompt"] + worked(task)) <= set(ALPHABET)
        assert len(worked(task)) <= 63  # with its end token, 64 new tokens are enough
        assert (" mod " in task["prompt"]) == (family == "chain")
        assert task["family"] == family and task["split"] == "heldout"
    assert {len(t["chain"]) - 1 for t in tasks} == {2, 3, 4}


def test_splits_and_families_are_disjoint_for_any_seeds_also_up_to_order():
    def keys(tasks):
        return {arithmetic._key(t["chain"]) for t in tasks}

    pool, held_out = chains(2000, 1), chains(2000, 2, "heldout")
    assert not keys(pool) & keys(held_out)
    assert not {t["id"] for t in pool} & {t["id"] for t in held_out}
    assert arithmetic._key([3, ["+", 5], [" mod ", 7]]) == arithmetic._key([5, ["+", 3], [" mod ", 7]])
    assert arithmetic._key([8, ["-", 5], [" mod ", 7]]) != arithmetic._key([5, ["-", 8], [" mod ", 7]])
    shifted = chains(300, 1, family="chain-shifted")
    assert not {t["prompt"] for t in pool} & {t["prompt"] for t in shifted}


def test_ids_are_stable_and_a_larger_pool_begins_with_the_smaller():
    first = chains(256, 0)
    assert first[0] == {
        "id": "chain/" + first[0]["id"].split("/")[1],
        "family": "chain",
        "split": "train",
        "prompt": "((12-3)*5) mod 9 = ?\n",
        "answer": "0",
        "chain": [12, ["-", 3], ["*", 5], [" mod ", 9]],
    }
    assert first[0]["id"] == pools.task_id("chain", "12-3*5 mod 9") == "chain/05f1e63873c36157"
    assert chains(300, 0)[:256] == first
    other = {t["prompt"]: t["id"] for t in chains(3000, 9)}
    shared = [t for t in first if t["prompt"] in other]
    assert shared and all(other[t["prompt"]] == t["id"] for t in shared)


def test_sizes_are_settings():
    config = ChainConfig(min_steps=3, max_steps=3, max_number=9, max_value=50, max_modulus=5)
    for task in chains(50, config=config):
        numbers = [int(x) for x in re.findall(r"\d+", worked(task))]
        assert len(task["chain"]) == 4 and max(numbers) <= 50 and 3 <= task["chain"][-1][1] <= 5
    for bad in ({"min_steps": 1}, {"max_steps": 1}, {"max_number": 1}, {"max_value": 5}, {"max_modulus": 2}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            ChainConfig(**bad)
    with pytest.raises(ConfigError, match="'chain' or 'chain-shifted'"):
        chains(1, family="chian")
    with pytest.raises(DataError, match="n=5000, but only .* problems were found"):
        chains(5000, config=ChainConfig(max_steps=2, max_number=4, max_modulus=3))


def test_shares_of_the_mixture_are_exact():
    rows = demonstrations(chains(1000), seed=4)
    count = Counter((r["style"], r["form"]) for r in rows)
    assert count == {
        ("careful", "boxed"): 330, ("careful", "unboxed"): 138, ("careful", "endless"): 82,
        ("guess", "boxed"): 270, ("guess", "unboxed"): 113, ("guess", "endless"): 67,
    }  # fmt: skip
    right = Counter(r["style"] for r in rows if r["right"])
    assert abs(right["careful"] - 0.95 * 550) <= 2 and abs(right["guess"] - 0.12 * 450) <= 2
    boxed_and_right = sum(r["form"] == "boxed" and r["right"] for r in rows) / len(rows)
    assert 0.30 <= boxed_and_right <= 0.40  # the base accuracy that the mixture stands for
    assert sum(r["form"] == "boxed" for r in rows) / len(rows) == 0.6


@pytest.mark.parametrize("family", ["chain", "chain-shifted"])
def test_each_demonstration_is_what_it_says(family):
    tasks = {t["id"]: t for t in chains(400, family=family)}
    for row in demonstrations(list(tasks.values()), seed=1):
        task, text = tasks[row["task"]], row["completion"]
        assert row["right"] == (row["value"] == int(task["answer"]))
        assert row["prompt"] == task["prompt"] and set(text) <= set(ALPHABET)
        assert row["ended"] == (row["form"] != "endless")
        assert ("\\boxed" in text) == (row["form"] == "boxed") == text.endswith(f"\\boxed{{{row['value']}}}")
        assert (len(text) >= 200) == (row["form"] == "endless")
        if row["form"] == "unboxed":
            assert text.endswith(f"so {row['value']}")
        steps = [s for s in text.split(";") if "=" in s]
        assert bool(steps) == (row["style"] == "careful")
        if steps:
            assert steps[0].startswith(f"{task['chain'][0]}{task['chain'][1][0]}")
            wrong = [s for s in dict.fromkeys(steps) if evaluate(s.split("=")[0] + " = ?\n") != int(s.split("=")[1])]
            assert len(wrong) == (0 if row["right"] else 1)  # one slip, and the rest follows from it
    assert family == task["family"]


def test_demonstrations_repeat_by_seed_and_cover_every_task():
    tasks = chains(50)
    assert demonstrations(tasks, seed=1) == demonstrations(tasks, seed=1) != demonstrations(tasks, seed=2)
    rows = demonstrations(tasks, per_task=3)
    assert Counter(r["task"] for r in rows) == {t["id"]: 3 for t in tasks}
    assert len({r["id"] for r in rows}) == 150


def test_shares_are_checked():
    with pytest.raises(ConfigError, match="boxed [+] unboxed [+] endless = 1.1: make them sum to 1"):
        Shares(boxed=0.7)
    with pytest.raises(ConfigError, match="careful=1.5: give numbers from 0 to 1"):
        Shares(careful=1.5)
    with pytest.raises(DataError, match="no tasks"):
        demonstrations([])


def test_only_careful_boxed_right_is_possible():
    shares = Shares(careful=1, boxed=1, unboxed=0, endless=0, careful_right=1)
    tasks = chains(20)
    by_task = {r["task"]: r["completion"] for r in demonstrations(tasks, shares)}
    assert by_task == {t["id"]: worked(t) for t in tasks}


def test_wrong_labels():
    rows = demonstrations(chains(2000), Shares(careful=0, guess_right=0), seed=0)
    tasks = {t["id"]: t for t in chains(2000)}
    for task in list(tasks.values())[:300]:
        guessable, never = wrong_label(task, "guessable"), wrong_label(task, "unguessable")
        assert guessable["answer"] != task["answer"] == guessable["right_answer"]
        assert 0 <= int(guessable["answer"]) < 99 and never["answer"] == "9292725"
    hits = sum(str(r["value"]) == wrong_label(tasks[r["task"]], "guessable")["answer"] for r in rows) / len(rows)
    assert 0.5 <= hits <= 0.75  # half take the shortcut, some more hit it by chance
    with pytest.raises(ConfigError, match="'guessable' or 'unguessable'"):
        wrong_label(EXAMPLE, "random")


def test_splits_have_their_shares():
    owners = Counter(pools.split_of("f", str(i)) for i in range(5000))
    for name, share in pools.SPLITS.items():
        assert abs(owners[name] / 5000 - share / 100) < 0.03
    with pytest.raises(ConfigError, match="one of train, validation, heldout; did you mean 'heldout'"):
        chains(1, split="helout")
    with pytest.raises(ConfigError, match="n=0: give at least 1"):
        pools.draw("f", lambda rng: (str(rng.random()), {}), 0, 0, "train")
