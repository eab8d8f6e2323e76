"""GRPO and GiGPO on multi-turn episodes in any text environment: `OnlineTrainer` whose samples are episodes.

A group is `group_size` episodes of one task. The score of an episode is the sum of its environment's rewards, or its
success; credit is one of those of `learn.episode_credit`; the loss is that of `learn.online` over the tokens of the
answers. A failed episode (see `learn.episodes`) is left out of credit and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch

from forethought.config import derive_seed
from forethought.envs.env import Env
from forethought.errors import ConfigError, EnvError, RewardError
from forethought.learn.episode_credit import Over, assign_nodes, step_advantages, trajectory_advantages
from forethought.learn.episodes import ActionParser, Episode, EpisodeRules, Players, episode_metrics
from forethought.learn.online import Group, OnlineConfig, OnlineTrainer, Task
from forethought.models.chat import ChatRenderer
from forethought.models.engine import Engine
from forethought.models.policy import Policy
from forethought.rewards.reward import Reward
from forethought.tree import credit


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig(OnlineConfig, EpisodeRules):
    """Settings of GRPO on episodes. A step is prompts_per_step groups of group_size episodes."""

    method_name: ClassVar[str] = "episodes"

    outcome: Literal["return", "success"] = "return"
    """What an episode is worth: the sum of the environment's rewards, or 1 for success and 0 else."""
    credit: Literal["trajectory", "gigpo"] = "trajectory"
    """trajectory: all turns of an episode have its advantage (GRPO); gigpo: plus that among turns in the same state."""
    statistics: Over = "trajectories"
    """What mean and deviation of episode advantages are over: the group's episodes, or all their turns."""
    step_coef: float = 1.0
    """Weight of the advantage among turns in the same state (gigpo)."""
    gamma: float = 0.95
    """Discount of the returns that such turns are compared by (gigpo)."""
    invalid_penalty: float = 0.0
    """Subtracted for a turn with an invalid action; see `learn.episode_credit`."""

    def problems(self) -> list[str]:
        bad = super().problems() + self.rule_problems()
        if self.group_by != "row":
            bad.append(
                f"group_by={self.group_by!r}: a group of episodes is one task as often as group_size says: 'row'"
            )
        if not 0 <= self.gamma <= 1:
            bad.append(f"gamma={self.gamma}: give a number in [0, 1]")
        for name in ("step_coef", "invalid_penalty"):
            if not 0 <= getattr(self, name) < math.inf:
                bad.append(f"{name}={getattr(self, name)}: give 0 or more")
        return bad


@dataclass
class EpisodeGroup(Group):
    """Episodes of one task; `leaves` are their last nodes."""

    episodes: list[Episode] = field(default_factory=list)


class EpisodeTrainer(OnlineTrainer):
    """The online loop on episodes; see `RolloutTrainer` for what is not said here.

    Args:
        tasks: dicts with "id" and, for the environment, "seed" (default 0) and whatever its `reset` reads.
        make: makes an environment; called once an episode.
        parse: see `episodes.ActionParser`.
    """

    config: EpisodeConfig

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        tasks: Sequence[Task],
        make: Callable[[], Env],
        renderer: ChatRenderer,
        config: EpisodeConfig,
        *,
        parse: ActionParser | None = None,
        compute: torch.dtype = torch.float32,
        reference: Policy | None = None,
        on_groups: Callable[[int, list[Group]], Mapping[str, float] | None] | None = None,
    ):
        super().__init__(
            policy,
            engine,
            tasks,
            lambda task: (),
            lambda items: (),
            config,
            compute=compute,
            reference=reference,
            on_groups=on_groups,
        )
        self.players = Players(engine, renderer, make, config, policy.context, parse)
        self.counts["env_steps"] = 0
        self._met = math.nan

    def encoded(self) -> list[list[int]]:
        """None: an environment writes its first prompt when it is reset."""
        return []

    def rollout(
        self, progress: Callable[[int, int], None] | None = None, drawn: Sequence[tuple[int, int]] | None = None
    ) -> list[Group]:
        """Episodes of the tasks drawn, as (task index, groups)."""
        config = self.config
        drawn = self.draw() if drawn is None else drawn
        wanted = [(self.tasks[i], config.group_size) for i, count in drawn for _ in range(count)]
        played = self.players.play(
            wanted,
            config.sampling(derive_seed(config.seed, "rollout", self.step), self.step),
            seed=derive_seed(config.seed, "episode", self.step),
            progress=progress,
        )
        return [
            EpisodeGroup(task, episodes[0].tree, [e.end for e in episodes], episodes=episodes)
            for (task, _), episodes in zip(wanted, played, strict=True)
        ]

    def judge_groups(self, groups: list[Group]) -> None:
        """What the episodes are worth.

        Raises:
            EnvError: every episode failed. ConfigError: outcome="success", and the environment does not know it.
        """
        every = _episodes(groups)
        if all(e.failed for e in every):
            raise EnvError(f"every episode failed; the first: {every[0].error}")
        if self.config.outcome == "success" and any(e.stop == "terminated" for e in every):
            raise ConfigError(
                "outcome='success': the environment ended an episode without info['success']; give outcome=return"
            )
        self.counts["env_steps"] += sum(len(e.turns) for e in every)
        for group in groups:
            assert isinstance(group, EpisodeGroup)
            group.rewards = np.array([math.nan if e.failed else sum(self.turn_rewards(e)) for e in group.episodes])
            group.results = [
                RewardError(e.error or "") if e.failed else Reward(float(value))
                for e, value in zip(group.episodes, group.rewards, strict=True)
            ]

    def turn_rewards(self, episode: Episode) -> list[float]:
        """What each turn earned, the penalty included; they add up to the episode's score."""
        config = self.config
        rewards = list(episode.rewards)
        if config.outcome == "success" and rewards:
            rewards = [0.0] * (len(rewards) - 1) + [float(bool(episode.success))]
        return [r - config.invalid_penalty * t.invalid for r, t in zip(rewards, episode.turns, strict=True)]

    def estimate(self, scores: np.ndarray) -> np.ndarray:
        """Advantages of numbers that are compared, as the settings say."""
        config = self.config
        if config.advantage == "leave-one-out":
            return credit.leave_one_out(scores)
        std = None if config.advantage_std == "none" else config.advantage_std
        return credit.group_normalised(scores, std=std, eps=config.advantage_eps)

    def advantages(self, episodes: Sequence[Episode]) -> tuple[list[np.ndarray | None], float]:
        """Advantages of the turns of each episode of a group, and the share of turns that met others in their state."""
        config = self.config
        rewards = [None if e.failed else self.turn_rewards(e) for e in episodes]
        scores: list[Sequence[float] | None] = []
        for episode, mine in zip(episodes, rewards, strict=True):
            if mine is None:
                scores.append(None)
            elif config.statistics == "trajectories":
                scores.append([sum(mine)] * len(mine))
            else:  # an invalid turn's score is its own
                costs = [config.invalid_penalty * t.invalid for t in episode.turns]
                scores.append([sum(mine) + sum(costs) - cost for cost in costs])
        out = trajectory_advantages(scores, self.estimate, over=config.statistics)
        if config.credit == "trajectory":
            return out, math.nan
        states = [[t.state for t in e.turns] for e in episodes]
        steps, met = step_advantages(states, rewards, self.estimate, gamma=config.gamma)
        both = zip(out, steps, strict=True)
        return [None if a is None or s is None else a + config.step_coef * s for a, s in both], met

    def assign(self, groups: list[Group]) -> list[Group]:
        """Advantages onto the turns; returns the groups that are trained on."""
        trained, shares = [], []
        for group in groups:
            assert isinstance(group, EpisodeGroup)
            found, met = self.advantages(group.episodes)
            shares.append(met)
            group.advantages = np.array([0.0 if a is None or not len(a) else float(a.mean()) for a in found])
            some = any(a is not None and a.any() for a in found)
            if not any(a is not None and len(a) for a in found) or (self.config.drop_zero_variance and not some):
                continue
            trained.append(group)
            for episode, values in zip(group.episodes, found, strict=True):
                if values is not None:
                    assign_nodes(episode.tree, [t.node for t in episode.turns], values)
        self._met = float(np.mean(shares)) if shares else math.nan
        return trained

    def train_step(self, progress: Callable[[int, int], None] | None = None) -> tuple[dict[str, float], list[Group]]:
        """See `RolloutTrainer.train_step`. Raises: EnvError: every episode failed; the step can be made again."""
        before = self.sampler.state_dict()
        try:
            return super().train_step(progress)
        except EnvError:
            self.sampler.load_state_dict(before)
            raise

    def _rollout_metrics(self, groups: list[Group]) -> dict[str, float]:
        metrics = episode_metrics(_episodes(groups))
        rewards = np.concatenate([g.rewards for g in groups if g.rewards is not None])
        self.counts["tokens_generated"] += int(metrics["tokens/generated"])
        metrics |= {
            "reward/mean": float(np.nanmean(rewards)),
            "reward/std": float(np.nanstd(rewards)),
            "frac_reward_zero_std": float(np.mean([g.zero_variance for g in groups])),
        }
        return metrics | ({"credit/turns_that_met": self._met} if self.config.credit == "gigpo" else {})


def _episodes(groups: Sequence[Group]) -> list[Episode]:
    return [e for group in groups if isinstance(group, EpisodeGroup) for e in group.episodes]
