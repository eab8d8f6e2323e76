"""Policies that learn in worlds with a known optimum; what is credited; settings that cannot be."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from corridor import Corridor, Faulty, make_policy

from forethought.envs.sokoban import Difficulty, SokobanEnv, sokoban_tasks
from forethought.errors import ConfigError, EnvError
from forethought.learn.episode_trainer import EpisodeConfig, EpisodeTrainer
from forethought.learn.episodes import Episode, Turn
from forethought.learn.optim import OptimConfig
from forethought.models.engine import Sampling
from forethought.models.torch_engine import TorchEngine
from forethought.tree.tree import TokenTree

FAST = dict(prompts_per_step=4, group_size=8, max_new_tokens=1, optim=OptimConfig(lr=0.01))


def make(make_env=Corridor, tasks=None, **settings):
    policy, renderer = make_policy(alphabet="0123lrx")
    config = EpisodeConfig(**{"steps": 20, **FAST, **settings})
    return EpisodeTrainer(policy, TorchEngine(policy), tasks or [{"id": "c"}], make_env, renderer, config)


@pytest.mark.parametrize(
    "switches",
    [
        {"invalid_penalty": 0.1},
        {"credit": "gigpo", "gamma": 0.5, "invalid_penalty": 0.1},
        {"history": 0, "statistics": "turns", "invalid_penalty": 0.1, "outcome": "success", "updates_per_rollout": 2},
    ],
)
def test_learns_the_shortest_way_through_the_corridor(switches):
    trainer = make(**switches)
    rows = [trainer.train_step()[0] for _ in range(20)]
    assert rows[0]["episodes/success"] < 0.2 and rows[0]["episodes/invalid"] > 0.5
    assert np.mean([r["episodes/success"] for r in rows[-3:]]) > 0.98
    assert rows[-1]["episodes/turns"] < 3.2 and rows[-1]["episodes/invalid"] < 0.03
    if "updates_per_rollout" not in switches:
        assert max(r["logprob_gap/max"] for r in rows) < 1e-4
    assert trainer.counts["env_steps"] == sum(r["env/steps"] for r in rows)
    if "credit" in switches:
        assert rows[-1]["credit/turns_that_met"] > 0.95


class CompactSokoban(SokobanEnv):
    """Real rooms, told in three letters: the room, the player's cell and the box's."""

    def __init__(self):
        super().__init__(size=5, min_moves=3, max_moves=4, max_steps=8, rules=False, success_reward=1, step_reward=0)

    def reset(self, task, seed=0):
        self.room = task["room"]
        return self.told(super().reset(task, seed))

    def step(self, action):
        return self.told(super().step(action))

    def told(self, step):
        return replace(step, observation=self.room + chr(97 + self.state.player) + chr(65 + self.state.boxes[0]))


def test_learns_the_shortest_solutions_of_sokoban_rooms():
    rooms = sokoban_tasks(3, 0, "train", Difficulty((5, 5), 1, 3, 4))
    tasks = [{**room, "room": str(i)} for i, room in enumerate(rooms)]
    letters = "012abcdefghijklmnopqrstuvwxyABCDEFGHIJKLMNOPQRSTUVWXY\n"
    policy, renderer = make_policy(alphabet=letters, init_std=0.3)
    settings = dict(
        credit="gigpo", gamma=0.7, history=0, max_new_tokens=1, entropy_coef=0.01, optim=OptimConfig(lr=0.005)
    )
    config = EpisodeConfig(steps=32, prompts_per_step=3, group_size=16, **settings)
    words = ("up", "down", "left", "right")
    trainer = EpisodeTrainer(
        policy,
        TorchEngine(policy),
        tasks,
        CompactSokoban,
        renderer,
        config,
        parse=lambda t: words[ord(t) % 4] if t else None,
    )
    rows = [trainer.train_step()[0] for _ in range(32)]
    assert rows[0]["episodes/success"] < 0.5
    played = trainer.players.play([(t, 1) for t in tasks], Sampling(max_tokens=1, temperature=0))
    assert [len(e.turns) for (e,) in played] == [t["moves"] for t in tasks] == [3, 3, 3]
    assert all(e.success for (e,) in played)


def episode(rewards, states, invalid=(), success=True, failed=False):
    tree = TokenTree()
    turns = [
        Turn(tree.add(0, [5], sampled=True, logprobs=[-1.0]), "r", s, reward=r, invalid=i in invalid)
        for i, (r, s) in enumerate(zip(rewards, states, strict=True))
    ]
    stop = "error" if failed else "won" if success else "truncated"
    return Episode({"id": "t"}, 0, tree, Corridor(), 0, turns=turns, stop=stop, success=success)


def test_gigpo_by_hand():
    """Returns 1 and 0: A^E is 0.5 and -0.5. In state A the discounted returns are 0.5 and 0: A^S is 0.25 and -0.25."""
    trainer = make(credit="gigpo", gamma=0.5, advantage_std="none", step_coef=2.0)
    found, met = trainer.advantages([episode([0, 1], "AB"), episode([0, 0], "AC", success=False)])
    assert found[0] == pytest.approx([1.0, 0.5]) and found[1] == pytest.approx([-1.0, -0.5]) and met == 0.5


@pytest.mark.parametrize(
    ("statistics", "want"),
    [("trajectories", [[-0.05, -0.05], [0.05]]), ("turns", [[-0.1 * 2 / 3, 0.1 / 3], [0.1 / 3]])],
)
def test_where_an_invalid_action_is_paid_for(statistics, want):
    trainer = make(statistics=statistics, advantage_std="none", invalid_penalty=0.1)
    found, _ = trainer.advantages(
        [episode([0, 1], "AB", invalid={0}), episode([1], "A"), episode([9], "A", failed=True)]
    )
    assert found[0] == pytest.approx(want[0]) and found[1] == pytest.approx(want[1]) and found[2] is None


def test_success_as_the_outcome():
    trainer = make(outcome="success")
    assert trainer.turn_rewards(episode([3, 3], "AB")) == [0, 1]
    assert trainer.turn_rewards(episode([3, 3], "AB", success=False)) == [0, 0]


def test_failed_episodes_get_no_credit_and_are_counted():
    tasks = [{"id": "bad", "fault": "raises"}, {"id": "good", "fault": "none"}]
    trainer = make(Faulty, tasks, prompts_per_step=2, group_size=4)
    metrics, groups = trainer.train_step()
    assert metrics["episodes/failed"] == 4 and metrics["stop/error"] == 0.5 and math.isfinite(metrics["reward/mean"])
    bad, good = sorted(groups, key=lambda g: g.task["id"])
    assert np.isnan(bad.rewards).all() and not bad.tree.weight.any()
    assert good.tree.weight.sum() == sum(int(good.tree.length[t.node]) for e in good.episodes for t in e.turns)
    assert {"KeyError" in e.error for e in bad.episodes} == {True}


def test_a_step_in_which_all_fails_changes_nothing_and_can_be_made_again():
    tasks = [{"id": str(i), "fault": "reset"} for i in range(4)]
    trainer = make(Faulty, tasks, prompts_per_step=2, group_size=2)
    before = trainer.sampler.state_dict()
    with pytest.raises(EnvError, match="every episode failed; the first: task '.', reset: OSError: no display"):
        trainer.train_step()
    assert trainer.step == 0 and trainer.sampler.state_dict() == before


def test_resumed_is_unbroken():
    whole, first, second = make(), make(), make()

    def lines(trainer, steps):
        rows = [trainer.train_step()[0] for _ in range(steps)]
        return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in rows]

    want = lines(whole, 3)
    lines(first, 1)
    second.load_state_dict(first.state_dict())
    assert lines(second, 2) == want[1:] and second.counts == whole.counts
    for a, b in zip(whole.policy.model.parameters(), second.policy.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_environment_that_does_not_know_of_success():
    class Blind(Corridor):
        limit = 2

        def step(self, action):
            step = super().step(action)
            return type(step)(step.observation, 0.0, step.done)

    with pytest.raises(ConfigError, match="without info.'success'.; give outcome=return"):
        make(Blind, outcome="success").train_step()
    assert math.isnan(make(Blind).train_step()[0]["episodes/success"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_by": "prompt"}, "group_by='prompt'"),
        ({"gamma": 1.5}, "gamma=1.5: give a number in"),
        ({"invalid_penalty": -1.0}, "invalid_penalty=-1.0: give 0 or more"),
        ({"max_turns": 0, "group_size": 1}, "group_size=1.*max_turns=0"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        EpisodeConfig(**settings)
