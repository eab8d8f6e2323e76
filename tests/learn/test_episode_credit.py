"""Worked values of multi-turn credit."""

import functools
import math

import numpy as np
import pytest

from forethought.errors import DataError
from forethought.learn.episode_credit import assign_nodes, step_advantages, trajectory_advantages
from forethought.tree import credit
from forethought.tree.tree import Kind, TokenTree


def by(std):
    return functools.partial(credit.group_normalised, std=std, eps=0)


def test_grpo_over_trajectories():
    """Dyna-Mind's returns: solved at step 6 and at step 8, two that fail at 30 (mean 3.25, sample std 7.1015)."""
    returns, lengths = [9.5, 9.3, -2.9, -2.9], [6, 8, 30, 30]
    found = trajectory_advantages([[r] * n for r, n in zip(returns, lengths, strict=True)], by("sample"))
    mean = 3.25
    spread = math.sqrt(sum((r - mean) ** 2 for r in returns) / 3)
    assert [len(a) for a in found] == lengths
    for advantage, r in zip(found, returns, strict=True):
        assert advantage == pytest.approx((r - mean) / spread)


def test_statistics_over_turns_weigh_long_episodes():
    """One turn with 1, three turns with 0: mean 1/4, biased std sqrt(3)/4."""
    found = trajectory_advantages([[1.0], [0.0] * 3], by("population"), over="turns")
    assert found[0] == pytest.approx([math.sqrt(3)]) and found[1] == pytest.approx([-1 / math.sqrt(3)] * 3)
    by_trajectory = trajectory_advantages([[1.0], [0.0] * 3], by("population"))
    assert by_trajectory[0] == pytest.approx([1]) and by_trajectory[1] == pytest.approx([-1] * 3)


def test_a_penalty_on_one_turn_blames_that_turn():
    found = trajectory_advantages([[1.0, 0.9], [1.0, 1.0]], by(None), over="turns")
    assert found[0] == pytest.approx([0.025, -0.075]) and found[1] == pytest.approx([0.025, 0.025])


def test_failed_episodes_leave_every_mean():
    found = trajectory_advantages([[1.0], None, [0.0, 0.0]], by(None))
    assert found[1] is None and found[0] == pytest.approx([0.5]) and found[2] == pytest.approx([-0.5, -0.5])
    alone = trajectory_advantages([[1.0, 1.0], None], by("sample"))
    assert alone[0].tolist() == [0, 0]
    assert trajectory_advantages([None, []], by(None))[1].tolist() == []


def test_gigpo_steps_by_hand():
    """Two episodes from A, gamma 0.9. One: A -> B, then the end with 1. Two: A -> A (wasted) -> B, then the end with 1.

    R: one (0.9, 1), two (0.81, 0.9, 1). In A: 0.9, 0.81, 0.9 with mean 0.87; in B: 1 and 1.
    """
    states, rewards = [["A", "B"], ["A", "A", "B"]], [[0, 1], [0, 0, 1]]
    (one, two), met = step_advantages(states, rewards, by(None), gamma=0.9)
    assert one == pytest.approx([0.03, 0]) and two == pytest.approx([-0.06, 0.03, 0]) and met == 1
    (one, two), _ = step_advantages(states, rewards, by("population"), gamma=0.9)
    spread = math.sqrt((2 * 0.03**2 + 0.06**2) / 3)
    assert one == pytest.approx([0.03 / spread, 0]) and two == pytest.approx([-0.06 / spread, 0.03 / spread, 0])


def test_states_met_once_and_failed_episodes_compare_with_nothing():
    found, met = step_advantages([["A", "X"], ["A", "Y"], ["A"]], [[0, 1], [0, 0], None], by(None), gamma=1)
    assert found[0] == pytest.approx([0.5, 0]) and found[1] == pytest.approx([-0.5, 0]) and found[2] is None
    assert met == 0.5
    with pytest.raises(DataError, match="episode 0: 1 states for 2 rewards"):
        step_advantages([["A"]], [[0, 1]], by(None), gamma=1)


def dialogue():
    """a1 o1 a2 o2, two tokens each; the reward stands on the turns."""
    tree = TokenTree()
    a1 = tree.add(tree.add(0, [5], kind=Kind.PROMPT), [6, 7], sampled=True, logprobs=[-1.0, -1.0], reward=0)
    a2 = tree.add(tree.add(a1, [8], kind=Kind.OBSERVATION), [9, 3], sampled=True, logprobs=[-1.0, -1.0], reward=1)
    return tree, a1, a2, tree.add(a2, [4], kind=Kind.OBSERVATION)


def test_turns_are_credited_by_themselves_and_observations_never():
    tree, a1, a2, _ = dialogue()
    assert assign_nodes(tree, [a1, a2], [0.9, 1.0]) == 4
    assert tree.advantage.tolist() == pytest.approx([0, 0.9, 0.9, 0, 1, 1, 0])
    assert tree.weight.tolist() == [0, 1, 1, 0, 1, 1, 0]
    assign_nodes(tree, [a1], [0.1])
    assert tree.advantage[tree.span(a1)] == pytest.approx([0.5, 0.5]) and tree.weight[1] == 2
    for nodes, values, message in (
        ([1], [1.0], "node 1 was not sampled"),
        ([a1], [math.nan], "not finite"),
        ([a1, a2], [1.0], "1 advantages for 2 turns"),
    ):
        with pytest.raises(DataError, match=message):
            assign_nodes(tree, nodes, values)


@pytest.mark.parametrize(("gamma", "want"), [(0.9, [0.9**3, 0.81, 0.9, 1]), (0.0, [0, 0, 0, 1])])
def test_h06_a_reward_does_not_decay_across_observations(gamma, want):
    tree, *_, end = dialogue()
    tree.column("value")[:] = 0
    assert credit.gae(tree, end, gamma=gamma, lam=1) == pytest.approx(want)


def test_h19_only_the_truncated_episode_bootstraps():
    tree, _, _, end = dialogue()
    tree.column("value")[:] = 0
    tree.value[end] = 2.0  # what the critic says of the last state
    assert credit.gae(tree, end, gamma=0.5, lam=1, truncated=True)[-1] == pytest.approx(1 + 0.5 * 2)
    credit.clear([tree])
    assert credit.gae(tree, end, gamma=0.5, lam=1)[-1] == pytest.approx(1)
    assert np.isnan(tree.outcome(end)) and tree.outcome(2) == 0
    tree.meta[end]["return"] = 1.5
    assert tree.outcome(end) == 1.5
