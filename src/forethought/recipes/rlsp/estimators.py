"""Policy gradients without a critic, for the estimator switch: RLOO and REINFORCE with a whitened return.

RLOO (Ahmadian et al., arXiv 2402.14740) is the online loop with leave-one-out advantages. REINFORCE compares a sample
with all samples of the rollout, so that one sample a prompt is enough (REINFORCE++, arXiv 2501.03262). In both the KL to
the reference is a term of the loss (k3), where the released code takes it out of the reward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import numpy as np

from forethought.learn.online import Group, OnlineConfig, OnlineTrainer, RolloutConfig
from forethought.learn.ppo import PPOConfig
from forethought.tree import credit

Estimator = Literal["ppo", "reinforce", "rloo"]


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig(OnlineConfig):
    """`OnlineConfig` whose groups may be of one sample."""

    method_name: ClassVar[str] = "reinforce"

    def problems(self) -> list[str]:
        return [p for p in super().problems() if not p.startswith("group_size=1:")]


class ReinforceTrainer(OnlineTrainer):
    """Advantages: the rewards of the whole rollout, whitened."""

    def assign(self, groups: list[Group]) -> list[Group]:
        rewards = np.concatenate([g.rewards for g in groups if g.rewards is not None])
        advantages = credit.batch_whitened(rewards)
        place, trained = 0, []
        for group in groups:
            assert group.rewards is not None
            group.advantages = advantages[place : place + len(group.leaves)]
            place += len(group.leaves)
            kept = [i for i, reward in enumerate(group.rewards) if not math.isnan(reward)]
            for i in kept:
                credit.assign(group.tree, group.leaves[i], float(group.advantages[i]))
            if kept:
                trained.append(group)
        return trained


def online_config(ppo: PPOConfig, estimator: Literal["reinforce", "rloo"], samples: int) -> OnlineConfig:
    """The same rollouts, updates and coefficients without a critic. samples: per prompt."""
    shared = {f.name: getattr(ppo, f.name) for f in fields(RolloutConfig)}
    shared |= {"kl_estimator": "k3", "updates_per_rollout": ppo.minibatches, "group_size": samples}
    shared["prompts_per_step"] = max(ppo.minibatches, ppo.prompts_per_step * ppo.group_size // samples)
    if estimator == "rloo":
        return OnlineConfig(advantage="leave-one-out", **shared)
    return ReinforceConfig(**shared)
