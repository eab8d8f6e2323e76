"""Outcome, format, random and fixed-label rewards: the response only, counted calls, batches."""

import numpy as np
import pytest

from forethought.errors import ConfigError, RewardError
from forethought.rewards.math_rewards import FixedLabelReward, FormatReward, OutcomeReward, RandomReward, response_text
from forethought.rewards.verify import Verifier
from forethought.tree.tree import Kind, TokenTree


def encode(text):
    return list(text.encode())


def decode(ids):
    return bytes(ids).decode()


def episode(prompt, *responses, task="t", seed=0):
    tree = TokenTree(encode(prompt), task=task, seed=seed)
    return tree, [tree.add(0, encode(r), sampled=True) for r in responses]


TASK = {"id": "a", "prompt": "p", "answer": "12"}


def test_outcome_of_each_leaf():
    tree, (right, wrong, none) = episode("What?", r"\boxed{12.0}", r"\boxed{13}", "twelve")
    reward = OutcomeReward(decode)
    rewards = reward.judge_many([(tree, n, TASK) for n in (right, wrong, none)])
    assert [r.value for r in rewards] == [1.0, 0.0, 0.0]
    assert rewards[0].parts == {"outcome": 1.0, "extracted": 1.0, "timed_out": 0.0}
    assert rewards[2].parts["extracted"] == 0.0 and "no closed" in rewards[2].why
    assert reward.verifier_calls == 3 and [v.answer for v in reward.last_verdicts] == ["12.0", "13", None]
    assert reward(tree, right, TASK).value == 1.0 and reward.verifier_calls == 4


def test_prompt_with_a_box_pays_nothing():
    """Acceptance check 9: the prompt holds a box, even the right one, and the response has none."""
    tree, (leaf,) = episode(r"Put the answer in \boxed{}. Example: \boxed{12}", "I do not know")
    assert OutcomeReward(decode)(tree, leaf, TASK).value == 0.0
    assert FormatReward(decode)(tree, leaf, TASK).value == 0.0


def test_only_sampled_nodes_are_the_response():
    tree = TokenTree(encode("q"))
    first = tree.add(0, encode("think "), sampled=True)
    seen = tree.add(first, encode(r"tool says \boxed{12} "), kind=Kind.OBSERVATION)
    last = tree.add(seen, encode(r"so \boxed{13}"), sampled=True)
    assert response_text(tree, last, decode) == r"think so \boxed{13}"
    assert response_text(tree, seen, decode) == "think "
    assert OutcomeReward(decode)(tree, seen, TASK).value == 0.0


def test_empty_response_is_judged_not_indexed():
    """Pitfall 16: an empty response has no last token; it gets 0 and nothing else changes."""
    tree, (empty, full) = episode("q", "", r"\boxed{12}")
    rewards = OutcomeReward(decode).judge_many([(tree, empty, TASK), (tree, full, TASK)])
    assert [r.value for r in rewards] == [0.0, 1.0]
    assert response_text(tree, 0, decode) == ""


def test_format_reward_looks_at_extraction_only():
    """Acceptance check 11: boxed wrong answer 1, no box 0."""
    tree, (wrong, none, open_box) = episode("q", r"\boxed{999}", "12", r"\boxed{12")
    reward = FormatReward(decode)
    assert [r.value for r in reward.judge_many([(tree, n, {"id": "a"}) for n in (wrong, none, open_box)])] == [1, 0, 0]
    assert reward.verifier_calls == 0
    assert FormatReward(decode, extract="last_number")(tree, none, {}).value == 1.0
    with pytest.raises(ConfigError, match="extract='boxes'"):
        FormatReward(decode, extract="boxes")


def test_random_reward_is_fair_and_blind_to_the_response():
    values = []
    for seed in range(500):
        one, leaves = episode("q", *["x"] * 4, seed=seed)
        other, _ = episode("q", *[r"\boxed{12}"] * 4, seed=seed)
        reward = RandomReward(seed=3)
        mine = [r.value for r in reward.judge_many([(one, n, TASK) for n in leaves])]
        assert mine == [r.value for r in reward.judge_many([(other, n, TASK) for n in leaves])]
        values += mine
    assert abs(np.mean(values) - 0.5) < 0.04  # 2,000 draws: 3.6 standard errors
    slots = np.array(values).reshape(500, 4)
    assert np.abs(np.corrcoef(slots.T) - np.eye(4)).max() < 0.2
    tree, leaves = episode("q", "x", "y")
    assert RandomReward(1.0)(tree, 1, TASK).value == 1.0 and RandomReward(0.0)(tree, 1, TASK).value == 0.0
    with pytest.raises(ConfigError, match="p=1.5"):
        RandomReward(1.5)


def test_random_reward_depends_on_run_seed_and_task():
    tree, leaves = episode("q", *["x"] * 64)
    draws = {
        tuple(r.value for r in RandomReward(seed=s).judge_many([(tree, n, {"id": t}) for n in leaves]))
        for s in (0, 1)
        for t in ("a", "b")
    }
    assert len(draws) == 4


def test_fixed_label_pays_the_label_and_not_the_answer():
    tree, (right, label) = episode("q", r"\boxed{12}", r"\boxed{4}")
    reward = FixedLabelReward(decode, 4)
    assert [reward(tree, n, TASK).value for n in (right, label)] == [0.0, 1.0]
    assert reward(tree, label, {"id": "no answer column"}).value == 1.0
    with pytest.raises(RewardError, match="empty"):
        FixedLabelReward(decode, "")


def test_batch_through_the_pool_counts_its_calls():
    tree, leaves = episode("q", *[rf"\boxed{{{i}}}" for i in range(20)])
    with Verifier(workers=1, mode="train-strict") as verifier:
        reward = OutcomeReward(decode, verifier)
        rewards = reward.judge_many([(tree, n, TASK) for n in leaves])
    assert [r.value for r in rewards] == [float(i == 12) for i in range(20)]
    assert reward.verifier_calls == verifier.calls == 20
    with pytest.raises(ConfigError, match="mode, timeout: set on the Verifier"):
        OutcomeReward(decode, verifier, mode="eval-qwen", timeout=1.0)


def test_mode_and_reader_of_the_reward():
    tree, (leaf,) = episode("q", "it is 24/2")
    assert OutcomeReward(decode, extract="last_number")(tree, leaf, TASK).value == 1.0
    assert OutcomeReward(decode, extract="last_number", mode="train-strict")(tree, leaf, TASK).value == 0.0


def test_gold_columns():
    tree, (leaf,) = episode("q", r"\boxed{12}")
    nested = {"id": "a", "reward_model": {"ground_truth": "12", "style": "rule"}}
    assert OutcomeReward(decode, answer_column="reward_model.ground_truth")(tree, leaf, nested).value == 1.0
    dotted = {"id": "a", "reward_model.ground_truth": 12}
    assert OutcomeReward(decode, answer_column="reward_model.ground_truth")(tree, leaf, dotted).value == 1.0
    assert OutcomeReward(decode)(tree, leaf, {"id": "a", "answer": [11, 12]}).value == 1.0
    with pytest.raises(
        RewardError, match=r"task 'a' has no column 'answer' for the gold answer \(it has id, reward_model\)"
    ):
        OutcomeReward(decode)(tree, leaf, nested)
    with pytest.raises(RewardError, match="empty"):
        OutcomeReward(decode)(tree, leaf, {"id": "a", "answer": ""})
