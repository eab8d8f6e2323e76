"""Modular chains: values, splits, and what the teacher's rollouts say."""

import numpy as np
import pytest

from forethought.envs.modular import (
    ModularConfig,
    apply,
    facts,
    faulty_steps,
    normalised,
    pieces,
    questions,
    refuse_duplicates,
    rollout,
    split_of,
)
from forethought.errors import ConfigError, DataError
from forethought.models.tiny import piece_tokenizer

TASK = {
    "id": "a",
    "prompt": "7*3+5-2 mod 11:",
    "answer": "2",
    "chain": {"start": 7, "steps": [["*", 3], ["+", 5], ["-", 2]], "modulus": 11},
}


def test_a_chain_by_hand():
    assert [apply(7, "*", 3, 11), apply(10, "+", 5, 11), apply(4, "-", 2, 11), apply(1, "-", 3, 11)] == [10, 4, 2, 9]
    assert faulty_steps(TASK, "7*3=10;10+5=4;4-2=2;\\boxed{2}") == 0
    assert faulty_steps(TASK, "*3 is 9 no 10;+5 is 4;-2 is 2;\\boxed{2}") == 0
    assert faulty_steps(TASK, "7*3 gives 9, 9+5 gives 3, 3-2 gives 1, \\boxed{1}") == 1  # one slip, then consistent
    assert faulty_steps(TASK, "\\boxed{2}") == 3


def test_questions_are_distinct_and_belong_to_one_split():
    sets = {s: questions(60, 0, s) for s in ("train", "validation", "test")}
    refuse_duplicates(*sets.values())
    for split, rows in sets.items():
        assert all(split_of(r["prompt"]) == split for r in rows)
        assert [r["level"] for r in rows[:5]] == [2, 3, 4, 5, 6]
    assert questions(60, 0, "test") == sets["test"] != questions(60, 1, "test")


def test_duplicates_are_refused_by_normalised_text():
    other = {**TASK, "id": "b", "prompt": "7 * 3+5-2 MOD 11:"}
    assert normalised(other["prompt"]) == normalised(TASK["prompt"])
    with pytest.raises(DataError, match="question 'b' stands twice .as 'a'."):
        refuse_duplicates([TASK], [other])
    with pytest.raises(DataError, match="stands twice"):
        refuse_duplicates([TASK], [{**TASK, "prompt": "1+2 mod 11:"}])


def test_the_teacher_slips_as_often_as_told():
    generator = np.random.default_rng(0)
    config = ModularConfig(slip=0.25, loop=0.0)
    faults = [faulty_steps(TASK, rollout(TASK, generator, config)[0]) for _ in range(2000)]
    assert set(faults) == {0, 1} and 0.22 < np.mean(faults) < 0.28
    clean = ModularConfig(slip=0.0, loop=0.0)
    assert all(rollout(TASK, generator, clean)[0].endswith("\\boxed{2}") for _ in range(50))
    styles = {rollout(TASK, generator, ModularConfig(slip=0, loop=0, detour=0))[0] for _ in range(50)}
    assert styles == {
        "7*3=10;10+5=4;4-2=2;\\boxed{2}",
        "*3 is 10;+5 is 4;-2 is 2;\\boxed{2}",
        "7*3 gives 10, 10+5 gives 4, 4-2 gives 2, \\boxed{2}",
    }


def test_a_loop_is_cut():
    text, ended = rollout(TASK, np.random.default_rng(0), ModularConfig(loop=1.0))
    assert not ended and "boxed" not in text


def test_every_text_of_the_world_is_made_of_pieces():
    config = ModularConfig(modulus=11)
    tokenizer = piece_tokenizer(pieces(config))
    generator = np.random.default_rng(0)
    for row in facts(20, 0, config):
        assert (
            tokenizer.decode(tokenizer(row["prompt"] + row["completion"])["input_ids"])
            == row["prompt"] + row["completion"]
        )
    for task in questions(50, 0, "train", config=config):
        for text in (task["prompt"], rollout(task, generator, config)[0]):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == text and all(i > 2 for i in ids)
    assert len(tokenizer("10+5 mod 11:")["input_ids"]) == 6


def test_bad_settings_are_named():
    with pytest.raises(ConfigError, match="modulus=1.*operators='/'.*slip=2"):
        ModularConfig(modulus=1, operators="/", slip=2)
    with pytest.raises(ConfigError, match="levels=.9."):
        questions(3, 0, "train", levels=[9])
    with pytest.raises(DataError, match="too few questions"):
        questions(500, 0, "test", levels=[1], config=ModularConfig(modulus=3, min_level=1, operators="+"))
