"""PPO on token trees: rollout -> reward -> values -> GAE -> several clipped updates of actor and critic.

Schulman et al., arXiv 1707.06347, as used on language models (Ziegler et al., arXiv 1909.08593; Ouyang et al., arXiv
2203.02155). A step is a rollout. Per token of a response

    r_t = -kl_coef * KL_t + [t is the last token] * clip(R, -reward_clip, reward_clip)

with the KL in the reward (`kl_placement`), advantages by GAE on the path of each sample, whitened over the whole rollout,
and in each of `ppo_epochs` x `minibatches` updates

    L = policy_coef * clipped policy loss + value_coef * clipped value loss + kl_coef * KL (in the loss) - entropy_coef * H.

A shared critic steps with the actor (one forward, one backward, two optimisers), a separate one in a pass of its own.

Several reward parts (`parts`) have a value head, a return and an advantage each: A = sum_k w_k * whiten(A_k), the KL goes
to the first part, the value losses add up. With one part of weight 1 this is the scalar case, exactly.

A failed or missing reward leaves its sample out of everything, the whitening included; it is counted, and never a 0.

Departures: the reductions are global over the minibatch; the reference's packed mean and mean of sequence means are
`reduction="token-mean"` and "sequence-mean". Minibatches are split by groups, so that a shared prompt is trained once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from forethought.config import derive_seed
from forethought.errors import ConfigError, DataError, RewardError
from forethought.learn.learner import Learner, Targets
from forethought.learn.losses import LossOut, kl, value_loss
from forethought.learn.online import (
    Group,
    Judge,
    RolloutConfig,
    RolloutTrainer,
    Task,
    distinct_trees,
    merge_metrics,
    policy_terms,
    split_groups,
)
from forethought.learn.optim import OptimConfig
from forethought.models.critic import Critic
from forethought.models.engine import Engine
from forethought.models.policy import Policy
from forethought.rewards.reward import Reward
from forethought.tree import credit
from forethought.tree.pack import Batch
from forethought.tree.tree import Stop, TokenTree

TokenRewards = Callable[[Group, int], Mapping[str, np.ndarray] | np.ndarray]
"""(group, leaf) -> further rewards [P] of the policy tokens on the leaf's path, by part or for the first one."""


@dataclass(frozen=True, kw_only=True)
class PartConfig:
    """A part of the reward with an advantage of its own."""

    name: str
    """Key in `Reward.parts`."""
    weight: float = 1.0
    """Factor of its whitened advantage."""
    lam: float | None = None
    """lambda of its GAE; null: that of the others."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RolloutConfig):
    """Settings of PPO. A rollout is prompts_per_step x group_size samples."""

    method_name: ClassVar[str] = "ppo"

    prompts_per_step: int = 64
    group_size: int = 1
    ppo_epochs: int = 1
    """Passes over a rollout."""
    minibatches: int = 1
    """Optimiser steps a pass; the groups are shuffled and split among them."""
    kl_coef: float = 0.05
    """Weight of the KL to the reference policy (the initial weights); 0 keeps no reference."""
    kl_placement: Literal["reward", "loss", "both"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Of the KL where `kl_placement` puts it; with "both" this is the loss's, and the reward's is k1."""
    kl_target: float | None = None
    """Adapt kl_coef towards this mean KL per token (by the same estimator); null keeps it fixed."""
    kl_horizon: int = 10_000
    """Samples over which kl_coef adapts."""
    gamma: float = 1.0
    lam: float = 0.95
    return_lam: float | None = None
    """lambda of the critic's targets; null: that of the advantages; 1: returns as they came."""
    bootstrap_truncated: bool = False
    """Value of the last state in place of what a response that hit its length limit would still have earned."""
    reward_clip: float = 10.0
    """Rewards are cut to this size, each part by itself; 0 is off."""
    whiten: bool = True
    """Advantages to mean 0 and variance 1 over the rollout."""
    parts: tuple[PartConfig, ...] = ()
    """Reward parts with separate advantages; empty: the reward is one number."""
    critic: Literal["shared", "detached", "separate"] = "shared"
    """shared: a head on the policy's trunk; detached: the same, and the value loss does not move the trunk; separate: a
    model of its own that begins with the policy's weights."""
    value_coef: float = 1.0
    value_clip: float = 0.2
    """A value moves at most this far from that of the rollout; 0 is off."""
    critic_warmup: int = 0
    """Rollouts at the beginning on which only the critic is trained."""
    critic_optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-4))

    def problems(self) -> list[str]:
        bad = super().problems()
        for name in ("ppo_epochs", "minibatches", "kl_horizon"):
            if getattr(self, name) < 1:
                bad.append(f"{name}={getattr(self, name)}: give at least 1")
        if self.minibatches > self.prompts_per_step:
            bad.append(
                f"minibatches={self.minibatches} exceeds prompts_per_step={self.prompts_per_step}: "
                "an update needs at least one group"
            )
        lams = {f"parts {p.name!r} lam": p.lam for p in self.parts}
        for name, value in {"gamma": self.gamma, "lam": self.lam, "return_lam": self.return_lam, **lams}.items():
            if value is not None and not 0 <= value <= 1:
                bad.append(f"{name}={value}: give a number in [0, 1]")
        for name in ("reward_clip", "value_clip", "value_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                bad.append(f"{name}={getattr(self, name)}: give 0 or more")
        if self.value_coef == 0:
            bad.append("value_coef=0: the critic would never learn; give a positive number")
        if self.kl_coef and self.kl_placement != "reward" and self.kl_estimator == "k1":
            bad.append(
                f"kl_placement={self.kl_placement!r} with kl_estimator='k1', which has no gradient of the KL as a "
                "loss: give 'k2' or 'k3'"
            )
        if self.kl_target is not None and not (0 < self.kl_target < math.inf and self.kl_coef):
            bad.append(f"kl_target={self.kl_target}, kl_coef={self.kl_coef}: adapting needs both positive")
        if self.kl_target is not None and self.prompts_per_step * self.group_size > 2 * self.kl_horizon:
            bad.append(f"kl_horizon={self.kl_horizon}: give at least half the samples of a rollout")
        if not 0 <= self.critic_warmup < self.steps:
            bad.append(f"critic_warmup={self.critic_warmup}: give 0 or more, and fewer than steps={self.steps}")
        names = [p.name for p in self.parts]
        if len(set(names)) < len(names) or not all(names):
            bad.append(f"parts={names}: name each part once")
        bad += [
            f"parts {p.name!r} weight={p.weight}: give a finite number"
            for p in self.parts
            if not math.isfinite(p.weight)
        ]
        return bad

    @property
    def updates(self) -> int:
        return self.ppo_epochs * self.minibatches

    @property
    def total_updates(self) -> int:
        """Of the actor; the critic has those of the warm-up, too."""
        return (self.steps - self.critic_warmup) * self.updates

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the critic's values."""
        return tuple(p.name for p in self.parts) or ("value",)


def adapted_kl_coef(coef: float, kl: float, *, target: float, horizon: int, samples: int) -> float:
    """Ziegler et al., arXiv 1909.08593: coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)."""
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon)


def shaped_rewards(outcome: np.ndarray, penalty: np.ndarray, *, kl_coef: float, clip: float = 0.0) -> np.ndarray:
    """Per-token rewards [P]: outcome [P], cut to [-clip, clip] (0: as it is), minus kl_coef * penalty [P].

    Raises:
        DataError: an outcome is not finite (a cut would hide it).
    """
    outcome = np.asarray(outcome, np.float64)
    if not np.isfinite(outcome).all():
        raise DataError(f"a reward is {outcome[~np.isfinite(outcome)][0]}: give a finite number, or a RewardError")
    return (np.clip(outcome, -clip, clip) if clip else outcome) - kl_coef * np.asarray(penalty, np.float64)


class CriticLearner(Learner):
    """Trains a critic by itself: the heads alone where the trunk is the policy's, which is then left as it is."""

    def __init__(self, critic: Critic, config: OptimConfig, **settings: Any):
        super().__init__(critic.trunk, config, model=critic.model, **settings)
        self.critic = critic

    def forward(
        self, batch: Batch, temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Hidden states only; no log-prob is computed."""
        with torch.set_grad_enabled(self.critic.kind == "separate"):
            hidden = self.policy.hidden(batch).index_select(0, batch.predecessors)
        return hidden.new_zeros(len(hidden), dtype=torch.float32), None, hidden


@dataclass
class _Sample:
    """A judged response: its leaf, its policy tokens [P], and the outcome of each part (of none: the tree's rewards)."""

    leaf: int
    where: np.ndarray
    parts: list[float]


class PPOTrainer(RolloutTrainer):
    """PPO, step by step; see `RolloutTrainer` for policy, engine, tasks, encode, judge, compute, reference, on_groups.

    Args:
        critic: by default a new one, as the config says.
        token_rewards: dense rewards beside the KL and the outcome; see `TokenRewards`.
        part_weights: step (0-based) -> weights of the parts by name, in place of those of the config (a schedule).

    After `assign` the trees hold the columns "value" and "return" (with parts: "value/<part>", "return/<part>" and
    "advantage/<part>", the latter before whitening), and "old_logprob", "ref_logprob" where they are needed.

    Raises:
        ConfigError: the critic is of another kind or has other heads than the config says.
    """

    config: PPOConfig

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        tasks: Sequence[Task],
        encode: Callable[[Task], Sequence[int]],
        judge: Judge,
        config: PPOConfig,
        *,
        critic: Critic | None = None,
        reference: Policy | None = None,
        compute: torch.dtype = torch.float32,
        token_rewards: TokenRewards | None = None,
        part_weights: Callable[[int], Mapping[str, float]] | None = None,
        on_groups: Callable[[int, list[Group]], Mapping[str, float] | None] | None = None,
    ):
        kind = "separate" if config.critic == "separate" else "shared"
        if critic is None:  # before the policy's weights are cast: its masters are fp32 too
            critic = Critic(policy, kind=kind, heads=config.heads, trunk_gradient=config.critic == "shared")
        elif critic.kind != kind or critic.heads != config.heads or (kind == "shared" and critic.trunk is not policy):
            raise ConfigError(
                f"the critic is {critic.kind} with heads {critic.heads}, the settings say {kind} with heads "
                f"{config.heads}"
                + ("; a shared critic is made of this very policy" if critic.kind == kind == "shared" else "")
            )
        self.critic = critic
        super().__init__(
            policy,
            engine,
            tasks,
            encode,
            judge,
            config,
            compute=compute,
            reference=reference,
            on_groups=on_groups,
        )
        self.critic_learner = CriticLearner(
            critic,
            config.critic_optim,
            total_steps=config.steps * config.updates,
            compute=compute if kind == "separate" else torch.float32,
            micro_tokens=config.micro_tokens,
        )
        self.learner.saves.append(
            lambda folder: critic.save(folder, masters=self.critic_learner.optimizer.master_state())
        )
        self.token_rewards, self.part_weights = token_rewards, part_weights
        self.kl_coef = config.kl_coef
        self._numbers: dict[str, float] = {}  # of the rollout in hand
        self._samples: dict[int, list[_Sample]] = {}  # of its groups, by id

    @property
    def warming_up(self) -> bool:
        """Only the critic is trained by the next update."""
        return self.step < self.config.critic_warmup

    @property
    def tokens_trained(self) -> int:
        return self.learner.tokens_trained + self.critic_learner.tokens_trained

    # -- credit --
    def assign(self, groups: list[Group]) -> list[Group]:
        """Values, returns and advantages onto the trees; returns the groups that have a sample to train on."""
        config = self.config
        began = time.perf_counter()
        self._samples = self._judged(groups)
        trained = [g for g in groups if self._samples[id(g)]]
        trees = distinct_trees(trained)
        pairs = [(g, s) for g in trained for s in self._samples[id(g)]]
        self._numbers = {"reward/missing": float(sum(len(g.leaves) for g in groups) - len(pairs))}
        if not trained:
            return []
        for group, sample in pairs:
            group.tree.weight[sample.where] += 1
        last = self._score(pairs, trees)
        self._numbers["time/score"] = time.perf_counter() - began
        place = {id(t): i for i, t in enumerate(trees)}
        shape = [(len(config.heads), t.n_tokens) for t in trees]
        advantages, returns = [np.zeros(s) for s in shape], [np.zeros(s) for s in shape]
        penalty_sum, clipped = 0.0, 0
        for group, sample in pairs:
            tree, i, where = group.tree, place[id(group.tree)], sample.where
            penalty = self._penalty(tree, where)
            penalty_sum += float(penalty.sum())
            ends = last[i].get(sample.leaf, np.zeros(len(config.heads)))
            for k, (rewards, cut) in enumerate(self._rewards(group, sample, penalty)):
                clipped += cut
                values = tree.column(self.critic.value_columns[k])[where].astype(np.float64)
                own = config.parts[k].lam if config.parts else None
                lam = config.lam if own is None else own
                end = float(ends[k])
                found = credit.gae_values(rewards, values, gamma=config.gamma, lam=lam, bootstrap=end)
                target = found
                if config.return_lam is not None and config.return_lam != lam:
                    target = credit.gae_values(
                        rewards, values, gamma=config.gamma, lam=config.return_lam, bootstrap=end
                    )
                advantages[i][k, where] += found
                returns[i][k, where] += target + values
        self._write(trees, advantages, returns)
        self._numbers["reward/clipped"] = clipped / len(pairs)
        if config.kl_coef and config.kl_placement != "loss":
            self._numbers["kl/reward"] = penalty_sum / sum(len(s.where) for _, s in pairs)
        return trained

    def _judged(self, groups: list[Group]) -> dict[int, list[_Sample]]:
        """By id of the group, the samples that wrote something and have all rewards; the others' become NaN.

        Raises:
            RewardError: no sample has some part: it is misspelt, or the reward does not give it.
        """
        names = [p.name for p in self.config.parts]
        out: dict[int, list[_Sample]] = {}
        seen: set[str] = set()
        for group in groups:
            assert group.rewards is not None
            mine = out.setdefault(id(group), [])
            for i, (leaf, result) in enumerate(zip(group.leaves, group.results, strict=True)):
                given = result.parts if isinstance(result, Reward) else {}
                seen |= set(given)
                parts = [float(given.get(n, math.nan)) for n in names]
                if any(math.isnan(p) for p in parts):
                    group.rewards[i] = math.nan
                where = credit.policy_tokens(group.tree, leaf)
                if len(where) and not math.isnan(group.rewards[i]):
                    mine.append(_Sample(leaf, where, parts))
        if absent := [n for n in names if n not in seen]:
            raise RewardError(
                f"no reward has the part {absent[0]!r}; its parts are: {', '.join(sorted(seen)) or 'none'}"
            )
        return out

    def _score(self, pairs: list[tuple[Group, _Sample]], trees: list[TokenTree]) -> list[dict[int, np.ndarray]]:
        """Old log-probs where needed, reference log-probs, values; returns the values of cut ends by tree and leaf."""
        config = self.config
        ends: list[list[int]] = [[] for _ in trees]
        if config.bootstrap_truncated:
            place = {id(t): i for i, t in enumerate(trees)}
            for group, sample in pairs:
                if group.tree.stop[sample.leaf] == Stop.LENGTH:
                    ends[place[id(group.tree)]].append(sample.leaf)
        penalised = bool(config.kl_coef) and config.kl_placement != "loss"
        old = config.ratio == "recompute" and (penalised or config.updates > 1)
        shared = self.critic.kind == "shared"
        last = self.critic.score(
            trees,
            ends,
            logprob_column="old_logprob" if old and shared else None,
            temperature=self.temperature,
            max_tokens=config.micro_tokens,
        )
        if old and not shared:
            self.score(trees, self.policy, "old_logprob")
        if config.kl_coef:
            assert self.reference is not None
            self.score(trees, self.reference, "ref_logprob")
        for tree, values in zip(trees, last, strict=True):
            for leaf, row in values.items():
                tree.value[leaf] = row[0]
        return last

    def _penalty(self, tree: TokenTree, where: np.ndarray) -> np.ndarray:
        """KL estimate [P] of each token, for the reward; zeros if there is none."""
        config = self.config
        if not config.kl_coef or config.kl_placement == "loss":
            return np.zeros(len(where))
        name = "logprob" if config.ratio == "behaviour" else "old_logprob"
        logp, reference = (torch.from_numpy(tree.column(n)[where]) for n in (name, "ref_logprob"))
        estimator = "k1" if config.kl_placement == "both" else config.kl_estimator
        return kl(logp, reference, estimator).double().numpy()

    def _rewards(self, group: Group, sample: _Sample, penalty: np.ndarray) -> list[tuple[np.ndarray, bool]]:
        """Token rewards [P] of each part, and whether they were cut."""
        config, clip = self.config, self.config.reward_clip
        if config.parts:
            raw = [np.zeros(len(penalty)) for _ in config.parts]
            for rewards, value in zip(raw, sample.parts, strict=True):
                rewards[-1] = value
        else:
            raw = [credit.path_rewards(group.tree, sample.leaf)]
        out = [
            shaped_rewards(rewards, penalty, kl_coef=0.0 if k else self.kl_coef, clip=clip)
            for k, rewards in enumerate(raw)
        ]
        cut = [bool(clip) and bool((np.abs(rewards) > clip).any()) for rewards in raw]
        if self.token_rewards is not None:
            given = self.token_rewards(group, sample.leaf)
            dense = dict(given) if isinstance(given, Mapping) else {config.heads[0]: given}
            for name, values in dense.items():
                values = np.asarray(values, np.float64)
                if name not in config.heads or values.shape != penalty.shape:
                    raise RewardError(
                        f"token_rewards gave {values.shape} for the part {name!r}; the parts are {config.heads}, and the "
                        f"response has {len(penalty)} policy tokens"
                    )
                out[config.heads.index(name)] = out[config.heads.index(name)] + values
        return list(zip(out, cut, strict=True))

    def _write(self, trees: list[TokenTree], advantages: list[np.ndarray], returns: list[np.ndarray]) -> None:
        """Means over the paths of a token into the columns, whitening, and the numbers to log."""
        config = self.config
        at = [np.flatnonzero(t.weight) for t in trees]
        weight = np.concatenate([t.weight[w] for t, w in zip(trees, at, strict=True)]).astype(np.float64)
        edges = np.cumsum([len(w) for w in at])[:-1]
        total = np.zeros(len(weight))
        scheduled = dict(self.part_weights(self.step)) if self.part_weights else {}
        for k, name in enumerate(config.heads):
            mean_advantage = np.concatenate([a[k, w] for a, w in zip(advantages, at, strict=True)]) / weight
            mean_return = np.concatenate([r[k, w] for r, w in zip(returns, at, strict=True)]) / weight
            value = np.concatenate([t.column(self.critic.value_columns[k])[w] for t, w in zip(trees, at, strict=True)])
            white = credit.batch_whitened(mean_advantage, weight=weight) if config.whiten else mean_advantage
            factor = scheduled.get(name, config.parts[k].weight if config.parts else 1.0)
            total += factor * white
            columns = {self.critic.return_columns[k]: mean_return}
            if config.parts:
                columns[f"advantage/{name}"] = mean_advantage
            for column, numbers in columns.items():
                for tree, where, part in zip(trees, at, np.split(numbers, edges), strict=True):
                    tree.column(column)[where] = part
            end = f"/{name}" if config.parts else ""
            self._numbers |= {
                f"value/mean{end}": float(np.average(value, weights=weight)),
                f"return/mean{end}": float(np.average(mean_return, weights=weight)),
                f"advantage/std{end}": _variance(mean_advantage, weight) ** 0.5,
            }
            spread = _variance(mean_return, weight)
            if spread > 0:  # the share is not defined where all returns are equal
                explained = 1 - _variance(mean_return - value, weight) / spread
                self._numbers[f"value/explained_variance{end}"] = explained
            if config.parts:
                self._numbers[f"weight/{name}"] = float(factor)
        for tree, where, part in zip(trees, at, np.split(total, edges), strict=True):
            tree.advantage[where] = part

    def _rollout_metrics(self, groups: list[Group]) -> dict[str, float]:
        out = super()._rollout_metrics(groups) | self._numbers
        if self.config.group_size == 1:
            del out["frac_reward_zero_std"]  # of groups of one it says nothing
        return out

    # -- update --
    def update(self, groups: list[Group]) -> dict[str, float]:
        """All optimiser steps of one rollout, and the KL coefficient of the next."""
        config = self.config
        rows = []
        for epoch in range(config.ppo_epochs):
            order = list(range(len(groups)))
            if config.minibatches > 1:
                seed = derive_seed(config.seed, "minibatches", self.step, epoch)
                order = np.random.default_rng(seed).permutation(len(groups)).tolist()
            for part in split_groups([groups[i] for i in order], config.minibatches):
                rows.append(self._minibatch(part))
        metrics = merge_metrics(rows)
        if config.kl_coef:
            metrics["kl/coef"] = self.kl_coef
            measured = self._numbers.get("kl/reward", metrics.get("kl"))
            if (
                config.kl_target is not None and measured is not None and not self.warming_up
            ):  # a frozen actor has no KL
                self.kl_coef = adapted_kl_coef(
                    self.kl_coef,
                    measured,
                    target=config.kl_target,
                    horizon=config.kl_horizon,
                    samples=sum(len(self._samples[id(g)]) for g in groups),
                )
        return metrics

    def _minibatch(self, groups: list[Group]) -> dict[str, float]:
        config = self.config
        trees = distinct_trees(groups)
        weights = {id(t): np.zeros(t.n_tokens, np.float32) for t in trees}
        for group in groups:
            for sample in self._samples[id(group)]:
                weights[id(group.tree)][sample.where] += 1
        shared: dict[str, Any] = {
            "weights": [weights[id(t)] for t in trees],
            "reduction": config.reduction,
            "max_length": config.max_new_tokens,
        }
        values = [*self.critic.value_columns, *self.critic.return_columns]
        together = self.critic.kind == "shared"
        out: dict[str, float] = {}
        if self.warming_up or not together:
            found = self.critic_learner.update(trees, self._value_objective, columns=values, **shared)
            names = {"grad_norm": "critic/grad_norm", "lr": "critic/lr", "tokens/trained": "tokens/critic"}
            names |= {"time/update": "time/critic", "tokens/packed": "tokens/critic_packed"}
            out = {names.get(n, n): v for n, v in found.items() if n not in ("loss", "time/pack")}
        if self.warming_up:
            return out
        columns = list(values) if together else []
        columns += [n for n in ("old_logprob", "ref_logprob") if all(n in t.columns for t in trees)]
        found = self.learner.update(
            trees,
            self._objective,
            columns=columns,
            temperature=self.temperature,
            entropy=True,
            others={"critic": self.critic_learner.optimizer} if together else {},
            **shared,
        )
        return out | found

    def _value_objective(self, t: Targets) -> LossOut:
        return self._value_terms(t, t.hidden)

    def _value_terms(self, t: Targets, hidden: torch.Tensor) -> LossOut:
        """value_coef * sum over the parts of their value losses."""
        values = self.critic.read(hidden)
        total = values.sum() * 0.0
        metrics: dict[str, float] = {}
        columns = zip(self.critic.value_columns, self.critic.return_columns, self.config.heads, strict=True)
        for k, (old, target, name) in enumerate(columns):
            out = value_loss(
                values[:, k],
                t.columns[old],
                t.columns[target],
                t.coef,
                clip=self.config.value_clip or None,
                metric_coef=t.share,
            )
            total = total + out.loss
            end = f"/{name}" if self.config.parts else ""
            metrics |= {f"{key}{end}": value for key, value in out.metrics.items()}
        metrics["loss/value"] = float(total.detach())
        return LossOut(self.config.value_coef * total, metrics)

    def _objective(self, t: Targets) -> LossOut:
        out = policy_terms(t, self.config, kl_coef=0.0 if self.config.kl_placement == "reward" else self.kl_coef)
        if self.critic.kind == "separate":
            return out
        more = self._value_terms(t, t.hidden if self.critic.trunk_gradient else t.hidden.detach())
        return LossOut(out.loss + more.loss, out.metrics | more.metrics)

    # -- resume --
    def state_dict(self) -> dict[str, Any]:
        own = {"critic": self.critic_learner.state_dict(), "kl_coef": self.kl_coef}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.critic_learner.load_state_dict(state["critic"])
        self.kl_coef = state["kl_coef"]


def _variance(x: np.ndarray, weight: np.ndarray) -> float:
    mean = np.average(x, weights=weight)
    return float(np.average((x - mean) ** 2, weights=weight))
