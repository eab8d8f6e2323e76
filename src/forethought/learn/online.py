"""Online learning: rollout -> reward -> credit -> pack -> update, on token trees.

One tree a prompt and step: a prompt that is drawn for several groups stands once, is prefilled once and trained once,
and its groups are explicit lists of leaves (never inferred from equal text). The loss of a step is

    L = policy_coef * clipped policy loss + kl_coef * KL(policy, reference) - entropy_coef * entropy

with every mean global (see `losses.reduction_coefficients`). GRPO: Shao et al., arXiv 2402.03300; Dr. GRPO: Liu et al.,
arXiv 2503.20783; DAPO: Yu et al., arXiv 2503.14476. The switches are fields of `OnlineConfig`.
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
from forethought.data import BatchSampler
from forethought.errors import ConfigError, DataError, RewardError
from forethought.learn.learner import Learner, Loss, Targets
from forethought.learn.losses import LossOut, Reduction, entropy_bonus, kl_loss, policy_loss
from forethought.learn.optim import OptimConfig
from forethought.models.engine import Engine, Sampling
from forethought.models.policy import Policy
from forethought.rewards.reward import Reward
from forethought.tree import credit
from forethought.tree.pack import write_back
from forethought.tree.tree import Kind, Stop, TokenTree

Task = Mapping[str, Any]
Item = tuple[TokenTree, int, Task]
"""One trajectory to be judged: tree, leaf, task."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What every online method sets. Batch arithmetic: prompts_per_step groups x group_size samples a step."""

    method_name: ClassVar[str] = "rollout"

    steps: int = 100
    prompts_per_step: int = 8
    """Groups a step. With fewer tasks than that, tasks are repeated, each repetition a group of its own."""
    group_size: int = 8
    """Samples a group."""
    max_new_tokens: int = 64
    temperature: float = 1.0
    temperature_end: float | None = None
    """Anneal: the temperature falls linearly from `temperature` to this one; None keeps it constant."""
    temperature_anneal: float = 0.5
    """Share of the steps over which it falls; afterwards it stays."""
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    policy_coef: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    """Weight of the KL to the reference policy (the initial weights); 0 keeps no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0
    """Weight of the entropy bonus (positive raises entropy)."""
    reduction: Reduction = "token-mean"
    ratio: Literal["recompute", "behaviour"] = "recompute"
    """Old log-probs of the ratio: the learner's own before the first update, or those the sampler stored."""
    eval_every: int = 0
    """Steps between evaluations; 0: only where the caller asks."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end and on Ctrl-C."""
    store_groups: int = 1
    """Groups a step that are kept in the tree store, for the report."""
    micro_tokens: int = 4096
    """Packed tokens per forward of the learner."""
    seed: int = 0
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self):
        if bad := self.problems():
            raise ConfigError(f"{self.method_name}: " + "; ".join(bad))

    def problems(self) -> list[str]:
        """What is wrong with the settings, each with its fix."""
        bad = []
        for name in ("steps", "prompts_per_step", "group_size", "max_new_tokens", "micro_tokens"):
            if getattr(self, name) < 1:
                bad.append(f"{name}={getattr(self, name)}: give at least 1")
        if self.temperature <= 0:
            bad.append(f"temperature={self.temperature}: exploration needs samples, so give a positive number")
        if self.temperature_end is not None and not 0 < self.temperature_end < math.inf:
            bad.append(f"temperature_end={self.temperature_end}: give a positive number, or null")
        if not 0 < self.temperature_anneal <= 1:
            bad.append(f"temperature_anneal={self.temperature_anneal}: give a share of the steps, 0 < share <= 1")
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            bad.append(
                f"clip_low={self.clip_low}, clip_high={self.clip_high}: give 0 <= clip_low < 1 and clip_high >= 0"
            )
        if self.kl_coef < 0:
            bad.append(f"kl_coef={self.kl_coef}: give 0 or more")
        if self.top_p != 1 or self.top_k:
            # The stored log-prob is that of the full distribution, so a truncated sampler would make the ratio wrong.
            if not (0 < self.top_p <= 1 and self.top_k >= 0):
                bad.append(f"top_p={self.top_p}, top_k={self.top_k}: give 0 < top_p <= 1 and top_k >= 0")
        for name in ("policy_coef", "clip_low", "clip_high", "kl_coef", "entropy_coef", "temperature"):
            if not math.isfinite(getattr(self, name)):
                bad.append(f"{name}={getattr(self, name)}: give a finite number")
        return bad

    @property
    def updates(self) -> int:
        """Optimiser steps a rollout."""
        return 1

    @property
    def total_updates(self) -> int:
        """Optimiser steps of the whole run."""
        return self.steps * self.updates

    def samples_as_groups(self, nodes: list[int]) -> list[list[int]]:
        """The samples of one prompt, split into the groups that are compared."""
        return [nodes[begin : begin + self.group_size] for begin in range(0, len(nodes), self.group_size)]

    def temperature_at(self, step: int) -> float:
        """Temperature of this step's rollouts.

        >>> config = RolloutConfig(steps=100, temperature=1.0, temperature_end=0.6)
        >>> [round(config.temperature_at(s), 6) for s in (0, 25, 50, 75)]
        [1.0, 0.8, 0.6, 0.6]
        """
        if self.temperature_end is None:
            return self.temperature
        done = min(1.0, step / (self.temperature_anneal * self.steps))
        return self.temperature + done * (self.temperature_end - self.temperature)

    def sampling(self, seed: int, step: int) -> Sampling:
        return Sampling(
            max_tokens=self.max_new_tokens,
            temperature=self.temperature_at(step),
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(RolloutConfig):
    """Settings of the online loop with group advantages (GRPO and its relatives)."""

    method_name: ClassVar[str] = "online"

    group_by: Literal["row", "prompt"] = "row"
    """row: a prompt that is drawn several times a step has several groups; prompt: all its samples are one group."""
    updates_per_rollout: int = 1
    """Optimiser steps a rollout; the groups are split among them."""
    advantage: Literal["group", "leave-one-out"] = "group"
    advantage_std: Literal["sample", "population", "none"] = "sample"
    """What group advantages are divided by."""
    advantage_eps: float = 1e-6
    drop_zero_variance: bool = False
    """Leave groups without a signal out of the update (then a step of only such groups changes nothing)."""

    def problems(self) -> list[str]:
        bad = super().problems()
        if self.updates_per_rollout < 1:
            bad.append(f"updates_per_rollout={self.updates_per_rollout}: give at least 1")
        if self.group_size == 1:
            bad.append(f"group_size={self.group_size}: advantages compare the samples of a group, so give at least 2")
        if self.updates_per_rollout > self.prompts_per_step:
            bad.append(
                f"updates_per_rollout={self.updates_per_rollout} exceeds prompts_per_step={self.prompts_per_step}: "
                "an update needs at least one group"
            )
        if not math.isfinite(self.advantage_eps):
            bad.append(f"advantage_eps={self.advantage_eps}: give a finite number")
        if self.kl_coef and self.kl_estimator == "k1":
            bad.append("kl_estimator='k1' has no gradient of the KL as a loss: give 'k2' or 'k3'")
        return bad

    @property
    def updates(self) -> int:
        return self.updates_per_rollout

    def samples_as_groups(self, nodes: list[int]) -> list[list[int]]:
        return super().samples_as_groups(nodes) if self.group_by == "row" else [nodes]


@dataclass
class Group:
    """The samples that are compared with one another."""

    task: Task
    tree: TokenTree
    leaves: list[int]
    rewards: np.ndarray | None = None  # [G], NaN where failed or not applicable
    results: list[Reward | RewardError] = field(default_factory=list)
    advantages: np.ndarray | None = None  # [G]

    @property
    def zero_variance(self) -> bool:
        """No two valid rewards differ."""
        assert self.rewards is not None
        return credit.is_zero_variance(self.rewards)


@dataclass
class Experience:
    """What a step sampled: all groups as drawn (for the counts), those offered to `assign`, and seconds spent."""

    drawn: list[Group]
    kept: list[Group]
    rollout_s: float
    reward_s: float
    metrics: dict[str, float] = field(default_factory=dict)


Judge = Callable[[Sequence[Item]], Sequence[Reward | RewardError]]
"""Rewards of a batch of trajectories; a failed one is a RewardError in its place."""


def policy_terms(t: Targets, config: RolloutConfig, *, kl_coef: float) -> LossOut:
    """The loss at the head of this module, with this weight of the KL."""
    metrics: dict[str, float] = {}
    total = t.logp.sum() * 0.0
    if config.policy_coef:
        old = t.behaviour if config.ratio == "behaviour" else t.columns.get("old_logprob", t.logp.detach())
        out = policy_loss(
            t.logp,
            old,
            t.advantage,
            t.coef,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            metric_coef=t.share,
        )
        total = total + config.policy_coef * out.loss
        metrics |= out.metrics | {"loss/policy": float(out.loss.detach())}
    if kl_coef:
        reference = t.columns["ref_logprob"]
        total = total + kl_coef * kl_loss(t.logp, reference, t.coef, estimator=config.kl_estimator).loss
        metrics |= kl_loss(t.logp.detach(), reference, t.share, estimator=config.kl_estimator).metrics
    if t.entropy is not None:
        if config.entropy_coef:
            total = total + config.entropy_coef * entropy_bonus(t.entropy, t.coef).loss
        metrics |= entropy_bonus(t.entropy.detach(), t.share).metrics
    sampled = torch.isfinite(t.behaviour)
    gap = (t.logp.detach() - t.behaviour)[sampled].abs()
    metrics["logprob_gap/max"] = float(gap.max()) if len(gap) else 0.0
    metrics["logprob_gap/mean"] = float((gap * t.share[sampled]).sum())
    return LossOut(total, metrics)


def grpo_loss(config: OnlineConfig) -> Loss:
    """`policy_terms` as a function of `Targets` alone."""
    return lambda t: policy_terms(t, config, kl_coef=config.kl_coef)


class RolloutTrainer:
    """The loop that online methods share, step by step: `train_step()`, or `session.fit` for a whole run.

    A method says what is credited (`assign`) and how it is learnt from (`update`). What it needs to go on is in
    `state_dict()`.

    Args:
        policy, engine: what is trained and what samples it (the torch engine shares the policy's weights).
        tasks: dicts with "id" and whatever `encode` and `judge` read.
        encode: task -> prompt ids.
        judge: see `Judge`; `rewards.adapters.RewardRunner` makes one of any reward function.
        config: see `RolloutConfig` and the method's own.
        compute: dtype of forward and backward; masters are fp32.
        reference: policy of the KL term; by default a frozen copy of the initial weights, made only if kl_coef > 0.
        on_groups: called with (step, groups) after credit was assigned, before the update; what it returns joins the
            step's metrics.
    """

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        tasks: Sequence[Task],
        encode: Callable[[Task], Sequence[int]],
        judge: Judge,
        config: RolloutConfig,
        *,
        compute: torch.dtype = torch.float32,
        reference: Policy | None = None,
        on_groups: Callable[[int, list[Group]], Mapping[str, float] | None] | None = None,
    ):
        if not engine.trainable:
            raise ConfigError(f"{type(engine).__name__} gives no log-probs, so its samples cannot be trained on")
        if not tasks:
            raise DataError("no tasks: the data is empty")
        self.policy, self.engine, self.config, self.judge, self.encode = policy, engine, config, judge, encode
        self.tasks = list(tasks)
        self.prompts = self.encoded()
        self.learner = Learner(
            policy,
            config.optim,
            total_steps=config.total_updates,
            compute=compute,
            micro_tokens=config.micro_tokens,
        )
        if self.learner.distributed.world > 1:
            raise ConfigError(
                f"WORLD_SIZE={self.learner.distributed.world}: the online loop runs in one process; several processes "
                "share the steps of a Learner (see learn/distributed.py), not rollouts yet"
            )
        self.reference = reference
        if config.kl_coef and reference is None:
            self.reference = policy.frozen_copy()
        share = min(config.prompts_per_step, len(self.tasks))
        self.sampler = BatchSampler(len(self.tasks), share, derive_seed(config.seed, "tasks"))
        self.on_groups = on_groups
        self.step = 0
        self.counts = {"tokens_generated": 0, "tokens_trained": 0, "verifier_calls": 0}

    def encoded(self) -> list[list[int]]:
        """The ids of every task's prompt. Raises: DataError: a prompt is empty, or fills the context."""
        prompts = [list(self.encode(t)) for t in self.tasks]
        for task, ids in zip(self.tasks, prompts, strict=True):
            if not ids:
                raise DataError(f"task {task['id']!r}: its prompt has no tokens")
            if len(ids) + 1 > self.policy.context:
                raise DataError(
                    f"task {task['id']!r}: its prompt of {len(ids)} tokens leaves no room in the context of "
                    f"{self.policy.context}"
                )
        return prompts

    # -- one step --
    def draw(self) -> list[tuple[int, int]]:
        """(task index, groups) of the next step.

        Each task once an epoch (the last step of an epoch may have fewer groups); with fewer tasks than
        prompts_per_step they are repeated until there are that many groups.
        """
        want = self.config.prompts_per_step
        chosen = list(next(self.sampler))
        while len(self.tasks) < want and len(chosen) < want:
            chosen.extend(next(self.sampler)[: want - len(chosen)])
        groups: dict[int, int] = {}
        for index in chosen:
            groups[index] = groups.get(index, 0) + 1
        return list(groups.items())

    @property
    def temperature(self) -> float:
        """Temperature of the rollouts of the step at hand."""
        return self.config.temperature_at(self.step)

    def rollout(
        self, progress: Callable[[int, int], None] | None = None, drawn: Sequence[tuple[int, int]] | None = None
    ) -> list[Group]:
        """Samples of the tasks drawn, as (task index, groups); `draw()` says which if they are not given."""
        config = self.config
        drawn = self.draw() if drawn is None else drawn
        # New for every step, so that whatever is drawn from (task, seed, node) differs from step to step.
        episode = derive_seed(config.seed, "episode", self.step)
        trees = [
            TokenTree(self.prompts[i], kind=Kind.PROMPT, task=str(self.tasks[i]["id"]), seed=episode) for i, _ in drawn
        ]
        sampling = config.sampling(derive_seed(config.seed, "rollout", self.step), self.step)
        groups: list[Group] = []
        # Trees with equally many groups are sampled in one call.
        for count in sorted({c for _, c in drawn}):
            mine = [(tree, index) for tree, (index, c) in zip(trees, drawn, strict=True) if c == count]
            new = self.engine.extend(
                [(tree, 0) for tree, _ in mine], count * config.group_size, sampling, progress=progress
            )
            for (tree, index), nodes in zip(mine, new, strict=True):
                groups.extend(Group(self.tasks[index], tree, part) for part in config.samples_as_groups(nodes))
        return groups

    def judge_groups(self, groups: list[Group]) -> None:
        """Rewards onto the groups and their trees.

        Raises:
            RewardError: every sample failed (a single failure only marks its sample).
        """
        items: list[Item] = [(g.tree, leaf, g.task) for g in groups for leaf in g.leaves]
        results = list(self.judge(items))
        if len(results) != len(items):
            raise RewardError(f"the reward gave {len(results)} results for {len(items)} samples")
        failed = [r for r in results if isinstance(r, RewardError)]
        if len(failed) == len(items):
            raise RewardError(f"every sample's reward failed; the first: {failed[0]}") from failed[0]
        self.counts["verifier_calls"] += len(items)
        place = 0
        for group in groups:
            group.results = results[place : place + len(group.leaves)]
            place += len(group.leaves)
            group.rewards = np.array([math.nan if isinstance(r, RewardError) else r.value for r in group.results])
            for leaf, result in zip(group.leaves, group.results, strict=True):
                if isinstance(result, RewardError):
                    group.tree.meta[leaf]["error"] = str(result)
                else:
                    group.tree.reward[leaf] = result.value
                    if result.parts:
                        group.tree.meta[leaf]["parts"] = {k: float(v) for k, v in result.parts.items()}
                    if result.why:
                        group.tree.meta[leaf]["why"] = result.why

    def assign(self, groups: list[Group]) -> list[Group]:
        """Advantages onto the trees; returns the groups that are trained on."""
        raise NotImplementedError

    def update(self, groups: list[Group]) -> dict[str, float]:
        """All optimiser steps of one rollout; returns their metrics."""
        raise NotImplementedError

    def experience(self, progress: Callable[[int, int], None] | None = None) -> Experience:
        """Judged samples of one step."""
        began = time.perf_counter()
        groups = self.rollout(progress)
        sampled = time.perf_counter()
        self.judge_groups(groups)
        return Experience(groups, groups, sampled - began, time.perf_counter() - sampled)

    def train_step(self, progress: Callable[[int, int], None] | None = None) -> tuple[dict[str, float], list[Group]]:
        """One step; returns its metrics and groups."""
        began = time.perf_counter()
        found = self.experience(progress)
        groups = found.kept
        judged = time.perf_counter()
        trained = self.assign(groups)
        metrics = self._rollout_metrics(found.drawn) | found.metrics
        metrics["temperature"] = self.temperature
        if self.on_groups:
            metrics |= self.on_groups(self.step, groups) or {}
        credited = time.perf_counter()
        if trained:
            metrics |= self.update(trained)
        self.counts["tokens_trained"] = self.tokens_trained
        metrics |= {
            "time/rollout": found.rollout_s,
            "time/reward": found.reward_s,
            "time/credit": credited - judged,
            "time/step": time.perf_counter() - began,
        }
        self.step += 1
        return metrics, groups

    @property
    def tokens_trained(self) -> int:
        """Tokens that went forward and backward so far, in all models that are trained."""
        return self.learner.tokens_trained

    def score(self, trees: Sequence[TokenTree], policy: Policy, column: str) -> None:
        """Log-probs of the trained tokens under `policy`, at the temperature of the rollouts, into a token column."""
        for batch, values in policy.score_tokens(trees, temperature=self.temperature):
            write_back(trees, batch, column, values)

    def _rollout_metrics(self, groups: list[Group]) -> dict[str, float]:
        rewards = np.concatenate([g.rewards for g in groups if g.rewards is not None])
        lengths = np.array([int(g.tree.length[leaf]) for g in groups for leaf in g.leaves])
        stops = [int(g.tree.stop[leaf]) for g in groups for leaf in g.leaves]
        spreads = [_variation(g) for g in groups]
        self.counts["tokens_generated"] += int(lengths.sum())
        out = {
            "reward/mean": float(np.nanmean(rewards)) if not np.isnan(rewards).all() else math.nan,
            "reward/std": float(np.nanstd(rewards)) if not np.isnan(rewards).all() else math.nan,
            "reward/failed": float(sum(isinstance(r, RewardError) for g in groups for r in g.results)),
            "frac_reward_zero_std": float(np.mean([g.zero_variance for g in groups])),
            "completions/mean_length": float(lengths.mean()),
            "completions/std_length": float(lengths.std()),
            "completions/group_cv": float(np.mean(spreads)),
            "completions/p95_length": float(np.percentile(lengths, 95)),
            "completions/clipped_ratio": stops.count(Stop.LENGTH) / len(stops),
            "tokens/generated": float(lengths.sum()),
        }
        parts: dict[str, list[float]] = {}
        for group in groups:
            for result in group.results:
                if isinstance(result, Reward):
                    for name, value in result.parts.items():
                        parts.setdefault(name, []).append(value)
        out |= {f"reward/{name}": float(np.mean(values)) for name, values in parts.items()}
        out |= {f"stop/{s.name.lower()}": stops.count(s) / len(stops) for s in Stop if s in stops}
        return out

    # -- resume --
    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "learner": self.learner.state_dict(),
            "sampler": self.sampler.state_dict(),
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.learner.load_state_dict(state["learner"])
        self.sampler.load_state_dict(state["sampler"])
        self.counts = dict(state["counts"])


class OnlineTrainer(RolloutTrainer):
    """Group advantages and the loss at the head of this module; see `RolloutTrainer` for the arguments."""

    config: OnlineConfig

    def assign(self, groups: list[Group]) -> list[Group]:
        """Advantages onto the trees; returns the groups that are trained on."""
        config = self.config
        trained = []
        for group in groups:
            assert group.rewards is not None
            if config.advantage == "group":
                std = None if config.advantage_std == "none" else config.advantage_std
                group.advantages = credit.group_normalised(group.rewards, std=std, eps=config.advantage_eps)
            else:
                group.advantages = credit.leave_one_out(group.rewards)
            if (config.drop_zero_variance and group.zero_variance) or np.isnan(group.rewards).all():
                continue
            trained.append(group)
            for leaf, advantage, reward in zip(group.leaves, group.advantages, group.rewards, strict=True):
                if not math.isnan(reward):
                    credit.assign(group.tree, leaf, float(advantage))
        return trained

    def update(self, groups: list[Group]) -> dict[str, float]:
        """All optimiser steps of one rollout."""
        config = self.config
        trees = distinct_trees(groups)
        columns: list[str] = []
        if config.kl_coef:
            assert self.reference is not None
            self.score(trees, self.reference, "ref_logprob")
            columns.append("ref_logprob")
        if config.ratio == "recompute" and config.updates_per_rollout > 1:
            self.score(trees, self.policy, "old_logprob")
            columns.append("old_logprob")
        # A tree with groups in several updates counts only its own in each.
        split = config.updates_per_rollout > 1 and len(trees) < len(groups)
        metrics: list[dict[str, float]] = []
        for part in split_groups(groups, config.updates_per_rollout):
            mine = distinct_trees(part)
            metrics.append(
                self.learner.update(
                    mine,
                    grpo_loss(config),
                    weights=weights_of(mine, part) if split else None,
                    reduction=config.reduction,
                    max_length=config.max_new_tokens,
                    columns=columns,
                    temperature=self.temperature,
                    entropy=True,
                )
            )
        given = np.concatenate([g.advantages for g in groups if g.advantages is not None])
        return merge_metrics(metrics) | {"advantage/mean": float(np.nanmean(given))}


def _variation(group: Group) -> float:
    """Population std over mean of the lengths of a group's answers."""
    lengths = np.array([int(group.tree.length[leaf]) for leaf in group.leaves], np.float64)
    return float(lengths.std() / lengths.mean()) if lengths.mean() > 0 else 0.0


def distinct_trees(groups: Sequence[Group]) -> list[TokenTree]:
    return list({id(g.tree): g.tree for g in groups}.values())


def split_groups(groups: list[Group], parts: int) -> list[list[Group]]:
    """Near-equal consecutive parts, none empty."""
    parts = min(parts, len(groups))
    edges = [round(i * len(groups) / parts) for i in range(parts + 1)]
    return [groups[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def weights_of(trees: list[TokenTree], groups: list[Group]) -> list[np.ndarray]:
    """Token weights that count only the leaves of these groups."""
    out = {id(t): np.zeros(t.n_tokens, np.float32) for t in trees}
    for group in groups:
        for leaf in group.leaves:
            span = group.tree.span(leaf)
            out[id(group.tree)][span] = group.tree.weight[span]
    return [out[id(t)] for t in trees]


def merge_metrics(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean over the updates of a rollout; counts and times add up, maxima stay maxima."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [r[name] for r in rows if name in r]
        if name.endswith("/max"):
            out[name] = max(values)
        elif name.startswith(("time/", "tokens/")):
            out[name] = sum(values)
        else:
            out[name] = sum(values) / len(values)
    return out
