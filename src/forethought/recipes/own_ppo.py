"""`forethought train ppo`: PPO with a critic on the user's records with the user's reward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from forethought.errors import ConfigError
from forethought.learn.ppo import PPOConfig, PPOTrainer
from forethought.models.critic import Critic
from forethought.models.load import load_model
from forethought.models.policy import Policy
from forethought.recipes.inputs import Say
from forethought.recipes.own_grpo import RewardedJob, UserRewards, online
from forethought.recipes.own_job import Place
from forethought.recipes.session import Workbench


@dataclass(frozen=True, kw_only=True)
class PPOJob(PPOConfig, RewardedJob):
    """Settings of `forethought train ppo`."""

    method: Literal["ppo"] = "ppo"
    critic_model: str | None = None
    """Model that a separate critic begins with (same tokenizer); by default the policy itself."""
    save_every: int = 50  # a job is not to lose hours

    def __post_init__(self):
        super().__post_init__()
        self.check_timeout()
        if self.critic_model and self.critic != "separate":
            raise ConfigError(
                f"critic_model={self.critic_model!r}: a {self.critic} critic reads the policy itself; "
                "give critic=separate"
            )


class _PPOTrainer(UserRewards, PPOTrainer):
    pass


def ppo(job: PPOJob, at: Place, say: Say) -> Path:
    def make(bench: Workbench, *args: Any, **kwargs: Any) -> UserRewards:
        return _PPOTrainer(*args, critic=_critic(job, bench, say), **kwargs)

    return online(job, at, say, make)


def _critic(job: PPOJob, bench: Workbench, say: Say) -> Critic | None:
    """The critic that begins with a model of its own; None: what the trainer makes."""
    if not job.critic_model:
        return None
    policy = bench.policy
    model, tokenizer = load_model(job.critic_model, dtype=torch.float32, device=policy.device, say=say)
    trunk = Policy(model, tokenizer, layout=policy.layout, end_ids=policy.eos_ids)
    return Critic(policy, kind="separate", heads=job.heads, trunk=trunk)
