"""Over-sampling with rebalancing, the length filter and temperature annealing (Phi-4-Mini-Reasoning, checks 7-10)."""

import math
import pickle

import numpy as np
import pytest
import torch

from forethought.errors import ConfigError, DataError
from forethought.learn.online import OnlineConfig, OnlineTrainer
from forethought.learn.optim import OptimConfig
from forethought.learn.rebalance import RebalanceConfig, RebalancedTrainer, balanced, length_uniform, probe_prompts
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine
from forethought.rewards.reward import Reward
from forethought.tree import credit
from tinymodels import IntTokenizer, tiny

TASKS = [{"id": str(i), "prompt": [5 + i, 6, 7]} for i in range(4)]


class Script:
    """Right or wrong by order: task id -> verdicts of its samples, in the order in which they are judged."""

    def __init__(self, verdicts):
        self.verdicts = {k: iter(v) for k, v in verdicts.items()}

    def __call__(self, items):
        return [Reward(1.0 if next(self.verdicts[t["id"]]) else -1.0) for _, _, t in items]


def make(config, judge, rebalance=None, tasks=TASKS):
    policy = Policy(tiny("llama", 0), IntTokenizer())
    args = (policy, TorchEngine(policy), tasks, lambda t: t["prompt"], judge, config)
    return OnlineTrainer(*args) if rebalance is None else RebalancedTrainer(*args, rebalance=rebalance)


def settings(**more):
    given = dict(steps=4, prompts_per_step=4, group_size=16, max_new_tokens=3, advantage_std="population")
    return OnlineConfig(**{**given, "advantage_eps": 0.0, "optim": OptimConfig(lr=1e-3), **more})


def verdicts(right, total):
    return [i < right for i in range(total)]


def test_rebalance_by_hand():
    """2 of 16 -> 2 + 2, advantages +-1; 9 of 16 -> dropped; 8 of 16 -> 8 + 8; 0 of 16 -> to the cap, then skipped."""
    script = {"0": verdicts(2, 16), "1": verdicts(9, 16), "2": verdicts(8, 16), "3": [False] * 64}
    trainer = make(settings(), Script(script), RebalanceConfig(enough=2, most=64))
    metrics, groups = trainer.train_step()
    by_task = {g.task["id"]: g for g in groups}
    assert set(by_task) == {"0", "2"}
    assert sorted(by_task["0"].rewards) == [-1, -1, 1, 1] and len(by_task["2"].leaves) == 16
    for group in groups:
        np.testing.assert_allclose(np.abs(group.advantages), 1.0, atol=1e-12)
        assert abs(group.advantages.sum()) < 1e-12
        trained = {n for n in group.tree.leaves() if group.tree.weight[group.tree.span(n)].any()}
        assert trained == set(group.leaves)  # the negatives left out have no weight
    assert metrics["rebalance/too_easy"] == metrics["rebalance/none_right"] == metrics["rebalance/capped"] == 1 / 4
    assert metrics["rebalance/samples_per_kept"] == 112 / 2 and metrics["advantage/mean"] == 0
    assert metrics["rebalance/accuracy"] == pytest.approx((2 / 16 + 9 / 16 + 8 / 16 + 0) / 4)
    assert metrics["rebalance/samples_per_prompt"] == (16 * 3 + 64) / 4
    assert trainer.counts["verifier_calls"] == 16 * 3 + 64
    drawn = sum(int(t.length[n]) for t in {id(g.tree): g.tree for g in groups}.values() for n in t.leaves())
    assert (
        trainer.counts["tokens_generated"] == metrics["tokens/generated"] > drawn
    )  # dropped samples were paid for too


def test_a_hard_prompt_is_sampled_until_it_has_enough():
    script = {"0": [False] * 20 + [True] * 12, "1": [False] * 15 + [True] + [False] * 16}
    trainer = make(settings(prompts_per_step=2), Script(script), RebalanceConfig(enough=1, most=40), tasks=TASKS[:2])
    metrics, groups = trainer.train_step()
    sizes = {g.task["id"]: len(g.leaves) for g in groups}
    assert sizes == {"0": 24, "1": 2}  # 12 right of 32; 1 right of 16
    assert metrics["rebalance/samples_per_prompt"] == 24


def test_the_cap_is_met_exactly_and_nothing_is_trained_without_a_right_answer():
    trainer = make(
        settings(prompts_per_step=1, group_size=6), Script({"0": [False] * 20}), RebalanceConfig(most=20), TASKS[:1]
    )
    before = [p.detach().clone() for p in trainer.policy.model.parameters()]
    metrics, groups = trainer.train_step()
    assert groups == [] and trainer.counts["verifier_calls"] == 20 and metrics["rebalance/kept"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.model.parameters(), strict=True))


def test_accuracy_is_taken_before_the_balance():
    """9 of 16 would be 1/2 after it: the ceiling then drops nothing."""
    trainer = make(settings(prompts_per_step=1), Script({"0": verdicts(9, 16)}), RebalanceConfig(), TASKS[:1])
    assert trainer.train_step()[1] == []


@pytest.mark.parametrize("std, want", [("population", (1.732051, -0.577350)), ("sample", (1.5, -0.5))])
def test_advantages_before_the_balance(std, want):
    got = credit.group_normalised([1, -1, -1, -1], std=std, eps=0)
    np.testing.assert_allclose(got, [want[0]] + [want[1]] * 3, atol=1e-6)
    equal = credit.group_normalised([1, 1, -1, -1], std="population", eps=0)
    np.testing.assert_allclose(equal, [1, 1, -1, -1])


def test_the_same_negatives_in_a_rerun():
    right, judged = np.array([True, False, True, False, False, True, False, False]), np.array([True] * 7 + [False])
    assert balanced(right, judged, 5).tolist() == balanced(right, judged, 5).tolist()
    assert 7 not in {i for seed in range(50) for i in balanced(np.array([True] + [False] * 7), judged, seed)}
    drawn = {i for seed in range(200) for i in balanced(np.array([True] + [False] * 7), judged, seed)}
    assert drawn == {0, 1, 2, 3, 4, 5, 6}
    with pytest.raises(DataError, match="2 right and 1 wrong"):
        balanced(np.array([True, True, False]), np.ones(3, bool), 0)


def ten(items):
    return [Reward(1.0 if 10 in tree.ids[tree.span(leaf)] else -1.0) for tree, leaf, _ in items]


def test_resume_equals_an_unbroken_run():
    config, rule = settings(group_size=4, prompts_per_step=3, steps=6), RebalanceConfig(enough=1, most=12)
    whole = make(config, ten, rule)
    rows = [whole.train_step()[0] for _ in range(6)]
    first = make(config, ten, rule)
    for _ in range(3):
        first.train_step()
    state = pickle.loads(pickle.dumps(first.state_dict()))
    again = make(config, ten, rule)
    again.load_state_dict(state)
    for want in rows[3:]:
        got = again.train_step()[0]
        assert {k: v for k, v in got.items() if "time" not in k} == {k: v for k, v in want.items() if "time" not in k}


def test_it_learns():
    trainer = make(
        settings(group_size=8, steps=30, optim=OptimConfig(lr=0.01)), ten, RebalanceConfig(enough=2, most=32)
    )
    rows = [trainer.train_step()[0] for _ in range(30)]
    start = np.mean([r["rebalance/accuracy"] for r in rows[:2]])
    assert start < 0.4 and max(r["rebalance/accuracy"] for r in rows) > 0.8  # then prompts are too easy and dropped


# -- temperature --
def test_annealing_and_on_policy_ratios_at_every_temperature():
    config = settings(steps=100, temperature_end=0.6, group_size=4, updates_per_rollout=2)
    assert [round(config.temperature_at(s), 9) for s in (0, 25, 50, 75)] == [1.0, 0.8, 0.6, 0.6]
    trainer = make(config, ten)
    for step in (0, 25, 60):
        trainer.step = step
        metrics, groups = trainer.train_step()
        assert metrics["temperature"] == config.temperature_at(step)
        for group in groups:
            old = group.tree.column("old_logprob")
            where = group.tree.weight > 0
            np.testing.assert_allclose(old[where], group.tree.logprob[where], atol=1e-5)  # ratio 1 at the first update


def test_what_is_logged_of_lengths_and_temperature():
    trainer = make(settings(group_size=4), ten)
    trainer.policy.eos_ids = (10,)
    trainer.engine = TorchEngine(trainer.policy)
    metrics, groups = trainer.train_step()
    lengths = [[int(g.tree.length[n]) for n in g.leaves] for g in groups]
    assert metrics["completions/std_length"] == pytest.approx(np.std(lengths))
    assert metrics["completions/group_cv"] == pytest.approx(np.mean([np.std(row) / np.mean(row) for row in lengths]))
    assert metrics["temperature"] == 1.0 and abs(metrics["advantage/mean"]) < 1e-9


def test_equal_rewards_give_no_gradient():
    trainer = make(settings(group_size=4), lambda items: [Reward(1.0)] * len(items))
    metrics, _ = trainer.train_step()
    assert metrics["grad_norm"] == 0


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(temperature_end=0.0), "temperature_end=0.0"),
        (dict(temperature_anneal=0.0), "temperature_anneal=0.0"),
        (dict(steps=0), "steps=0"),
        (dict(group_size=1), "group_size=1"),
    ],
)
def test_bad_settings(given, message):
    with pytest.raises(ConfigError, match=message):
        settings(**given)


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5, math.nan])
def test_the_ceiling_is_a_share(value):
    with pytest.raises(ConfigError, match="accuracy_max"):
        RebalanceConfig(accuracy_max=value)


def test_a_balance_needs_a_ceiling_of_one_half():
    with pytest.raises(ConfigError, match="fewer wrong answers"):
        RebalanceConfig(accuracy_max=0.7)
    assert RebalanceConfig(accuracy_max=0.7, balance=False).accuracy_max == 0.7


def test_the_cap_covers_the_first_samples():
    with pytest.raises(ConfigError, match="most=8 lies below group_size=16"):
        make(settings(), ten, RebalanceConfig(most=8))


# -- prompts of uniform length --
def test_length_filter_by_hand():
    assert np.std([100, 110, 90, 100]) / 100 == pytest.approx(0.0707, abs=1e-4)
    assert np.std([50, 150, 100, 100]) / 100 == pytest.approx(0.3536, abs=1e-4)
    assert length_uniform([100, 110, 90, 100], [False] * 4, 0.25)
    assert not length_uniform([50, 150, 100, 100], [False] * 4, 0.25)
    assert not length_uniform([100, 100], [False, True], 0.25)
    with pytest.raises(DataError, match="at least two"):
        length_uniform([3], [False])
    with pytest.raises(ConfigError, match="c=-1"):
        length_uniform([3, 4], [False, False], -1)


def test_probing_keeps_uniform_prompts_and_counts_its_cost():
    trainer = make(settings(group_size=4, max_new_tokens=5), ten)
    trainer.policy.eos_ids = (10,)
    trainer.engine = TorchEngine(trainer.policy)
    try:
        probe = probe_prompts(trainer, c=10.0, samples=8)
    except DataError as err:  # all were cut: random models seldom end
        assert "max_new_tokens=5" in str(err)
    else:
        assert sorted(probe.kept + probe.dropped) == [0, 1, 2, 3]
        assert trainer.counts["tokens_generated"] == probe.tokens and trainer.counts["verifier_calls"] == 32


def test_an_empty_pool_says_what_removed_it():
    trainer = make(settings(group_size=4), ten)
    with pytest.raises(DataError, match=r"none of 4 prompts: 4 had an answer cut at max_new_tokens=3"):
        probe_prompts(trainer)
