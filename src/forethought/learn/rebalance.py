"""Steadier groups for online learning: uniform prompt lengths, over-sampling with rebalancing.

Source: Phi-4-Mini-Reasoning (arXiv 2504.21233), the first two of its three fixes of plain GRPO (the third, temperature
annealing, is `RolloutConfig.temperature_end`). The paper gives neither the measure of uniformity nor the sizes; the
defaults here are choices.

- Prompts (`length_uniform`, `probe_prompts`): keep those whose sampled answers have about the same length.
- Groups (`Rebalancer`): sample a hard prompt until it has enough right answers, drop prompts that are too easy or give
  none, then train on all right answers and as many wrong ones drawn at random. The accuracy is that of ALL samples,
  before the balance (afterwards it is always one half). With |right| = |wrong| and population spread every advantage is
  +1 or -1: a sign-weighted policy gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forethought.config import derive_seed
from forethought.errors import ConfigError, DataError
from forethought.learn.online import Experience, Group, OnlineTrainer, RolloutTrainer
from forethought.tree.tree import Stop


@dataclass(frozen=True, kw_only=True)
class RebalanceConfig:
    """Settings of over-sampling and the balance. The first samples of a prompt are the loop's `group_size`."""

    enough: int = 2
    """Right answers (k_min) below which a prompt is sampled further."""
    most: int = 32
    """Samples (G_max) at which over-sampling ends."""
    accuracy_max: float = 0.5
    """A prompt whose accuracy over all its samples lies above this is dropped as too easy."""
    balance: bool = True
    """Train on equally many right and wrong answers; off: on all samples of the kept prompts."""

    def __post_init__(self):
        bad = []
        if self.enough < 1:
            bad.append(f"enough={self.enough}: give at least 1 right answer")
        if self.most < 2:
            bad.append(f"most={self.most}: give at least 2 samples")
        if not 0 < self.accuracy_max <= 1:
            bad.append(f"accuracy_max={self.accuracy_max}: give a share in (0, 1]")
        if self.balance and self.accuracy_max > 0.5:
            bad.append(
                f"accuracy_max={self.accuracy_max} with balance: above 0.5 there are fewer wrong answers than right ones"
            )
        if bad:
            raise ConfigError("rebalance: " + "; ".join(bad))


def right_answers(group: Group) -> np.ndarray:
    """Which samples are right: reward above 0 (a pair of rewards +1/-1 or 1/0); failed ones are not. [G] bool."""
    assert group.rewards is not None
    return np.nan_to_num(group.rewards, nan=-1.0) > 0


def balanced(right: np.ndarray, judged: np.ndarray, seed: int) -> np.ndarray:
    """Indices, ascending, of all right samples and as many wrong ones drawn without replacement.

    Args:
        right, judged: [G] bool; a sample that was not judged (failed reward) is never drawn.

    Raises:
        DataError: more right than wrong samples.
    """
    yes, no = np.flatnonzero(right), np.flatnonzero(~right & judged)
    if len(yes) > len(no):
        raise DataError(f"{len(yes)} right and {len(no)} wrong samples: a balance needs at least as many wrong ones")
    drawn = np.random.default_rng(seed).choice(no, len(yes), replace=False)
    return np.sort(np.concatenate([yes, drawn]))


class RebalancedTrainer(OnlineTrainer):
    """Group advantages over rebalanced groups; arguments as `OnlineTrainer`, and `rebalance`.

    Logged for every step, as shares of the prompts drawn: `rebalance/too_easy`, `/none_right`, `/capped` (too few right
    answers at `most`, none among them); `rebalance/accuracy`, before the balance; samples for each prompt drawn and for
    each one kept.

    A step samples prompts until `prompts_per_step` are kept, at most once through the pool: if it finds fewer, it trains
    on those (on none, it changes nothing). Prompts that were drawn and not needed wait for the next step.

    Raises:
        ConfigError: `most` below `group_size`.
    """

    def __init__(self, *args: Any, rebalance: RebalanceConfig, **settings: Any):
        super().__init__(*args, **settings)
        if rebalance.most < self.config.group_size:
            raise ConfigError(
                f"rebalance: most={rebalance.most} lies below group_size={self.config.group_size}, the first samples"
            )
        self.rebalance = rebalance
        self.waiting: list[int] = []

    def _next(self, count: int) -> list[int]:
        while len(self.waiting) < count:
            self.waiting.extend(next(self.sampler))
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def experience(self, progress: Callable[[int, int], None] | None = None) -> Experience:
        config, rule = self.config, self.rebalance
        drawn: list[Group] = []
        kept: list[Group] = []
        seconds = {"rollout": 0.0, "reward": 0.0}
        reasons = {"too_easy": 0, "none_right": 0}
        accuracies: list[float] = []
        budget = len(self.tasks)
        while len(kept) < config.prompts_per_step and budget > 0:
            want = min(config.prompts_per_step - len(kept), budget)
            budget -= want
            counts: dict[int, int] = {}
            for index in self._next(want):
                counts[index] = counts.get(index, 0) + 1
            began = time.perf_counter()
            groups = self.rollout(progress, list(counts.items()))
            seconds["rollout"] += time.perf_counter() - began
            began = time.perf_counter()
            self.judge_groups(groups)
            seconds["reward"] += time.perf_counter() - began
            self._oversample(groups, seconds)
            drawn.extend(groups)
            for group in groups:
                right = right_answers(group)
                accuracy = float(right.mean())
                accuracies.append(accuracy)
                if not right.any():
                    reasons["none_right"] += 1
                elif accuracy > rule.accuracy_max:
                    reasons["too_easy"] += 1
                else:
                    kept.append(self._balance(group, right) if rule.balance else group)
        sampled = sum(len(g.leaves) for g in drawn)
        capped = [len(g.leaves) >= rule.most and right_answers(g).sum() < rule.enough for g in drawn]
        metrics = {
            "rebalance/accuracy": float(np.mean(accuracies)),
            "rebalance/kept": float(len(kept)),
            "rebalance/samples_per_prompt": sampled / len(drawn),
            "rebalance/samples_per_kept": sampled / len(kept) if kept else math.nan,
            "rebalance/capped": float(np.mean(capped)),
            **{f"rebalance/{name}": count / len(drawn) for name, count in reasons.items()},
        }
        return Experience(drawn, kept, seconds["rollout"], seconds["reward"], metrics)

    def _oversample(self, groups: list[Group], seconds: dict[str, float]) -> None:
        """Further samples for prompts with too few right answers, in rounds of the first group's size."""
        config, rule = self.config, self.rebalance
        for turn in range(1, -(-rule.most // config.group_size)):
            hard = [g for g in groups if right_answers(g).sum() < rule.enough and len(g.leaves) < rule.most]
            if not hard:
                return
            sampling = config.sampling(derive_seed(config.seed, "rollout", self.step, turn), self.step)
            by_size: dict[int, list[Group]] = {}
            for group in hard:
                by_size.setdefault(min(config.group_size, rule.most - len(group.leaves)), []).append(group)
            for size, mine in by_size.items():
                began = time.perf_counter()
                new = self.engine.extend([(g.tree, 0) for g in mine], size, sampling)
                extra = [Group(g.task, g.tree, nodes) for g, nodes in zip(mine, new, strict=True)]
                seconds["rollout"] += time.perf_counter() - began
                began = time.perf_counter()
                self.judge_groups(extra)
                seconds["reward"] += time.perf_counter() - began
                for group, more in zip(mine, extra, strict=True):
                    assert group.rewards is not None and more.rewards is not None
                    group.leaves = [*group.leaves, *more.leaves]
                    group.results = [*group.results, *more.results]
                    group.rewards = np.concatenate([group.rewards, more.rewards])

    def _balance(self, group: Group, right: np.ndarray) -> Group:
        assert group.rewards is not None
        seed = derive_seed(self.config.seed, "balance", self.step, group.task["id"], group.leaves[0])
        chosen = balanced(right, ~np.isnan(group.rewards), seed)
        return Group(
            group.task,
            group.tree,
            [group.leaves[i] for i in chosen],
            group.rewards[chosen],
            [group.results[i] for i in chosen],
        )

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"waiting": list(self.waiting)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.waiting = list(state["waiting"])


# -- prompts --
def length_uniform(lengths: Sequence[int], truncated: Sequence[bool], c: float = 0.25) -> bool:
    """Do the answers of one prompt have about the same length: population std / mean <= c, and none was cut.

    >>> length_uniform([100, 110, 90, 100], [False] * 4)
    True
    >>> length_uniform([50, 150, 100, 100], [False] * 4)
    False

    Raises:
        DataError: fewer than two answers. ConfigError: c negative.
    """
    if not c >= 0:
        raise ConfigError(f"c={c}: give 0 or more")
    if len(lengths) < 2 or len(truncated) != len(lengths):
        raise DataError(f"{len(lengths)} lengths and {len(truncated)} flags: give at least two answers, one flag each")
    values = np.asarray(lengths, np.float64)
    return not any(truncated) and bool(values.std() <= c * values.mean())


@dataclass
class Probe:
    """What probing found. kept, dropped: task indices; accuracy_kept, accuracy_dropped: means (NaN where none);
    variation: std / mean of the lengths of each prompt; truncated: prompts dropped for a cut answer."""

    kept: list[int]
    dropped: list[int]
    accuracy_kept: float
    accuracy_dropped: float
    truncated: int
    tokens: int
    variation: list[float] = field(default_factory=list)


def probe_prompts(trainer: RolloutTrainer, *, c: float = 0.25, samples: int | None = None, batch: int = 64) -> Probe:
    """Sample every task of a trainer before its first step and say which have uniform answer lengths.

    The samples and verifier calls are counted in `trainer.counts`, like all others. A filter by length may keep only
    easy or only hopeless prompts: compare the two accuracies.

    Args:
        samples: answers a prompt; by default the trainer's group size.

    Raises:
        DataError: no prompt is uniform; says what removed them.
    """
    size = trainer.config.group_size
    groups_each = max(1, -(-(samples or size) // size))
    probe = Probe([], [], float("nan"), float("nan"), 0, 0)
    right: dict[int, float] = {}
    for begin in range(0, len(trainer.tasks), batch):
        indices = range(begin, min(begin + batch, len(trainer.tasks)))
        groups = trainer.rollout(drawn=[(i, groups_each) for i in indices])
        trainer.judge_groups(groups)
        by_tree: dict[int, list[Group]] = {}
        for group in groups:
            by_tree.setdefault(id(group.tree), []).append(group)
        for index, mine in zip(indices, by_tree.values(), strict=True):
            lengths = [int(g.tree.length[leaf]) for g in mine for leaf in g.leaves]
            cut = [g.tree.stop[leaf] == Stop.LENGTH for g in mine for leaf in g.leaves]
            right[index] = float(np.mean(np.concatenate([right_answers(g) for g in mine])))
            probe.variation.append(float(np.std(lengths) / max(np.mean(lengths), 1e-9)))
            probe.tokens += sum(lengths)
            probe.truncated += any(cut)
            (probe.kept if length_uniform(lengths, cut, c) else probe.dropped).append(index)
    trainer.counts["tokens_generated"] += probe.tokens
    if not probe.kept:
        raise DataError(
            f"the length filter left none of {len(trainer.tasks)} prompts: {probe.truncated} had an answer cut at "
            f"max_new_tokens={trainer.config.max_new_tokens}, the others vary by more than c={c} (smallest std / mean "
            f"{min(probe.variation):.2f}): raise c or max_new_tokens"
        )
    probe.accuracy_kept = float(np.mean([right[i] for i in probe.kept]))
    if probe.dropped:
        probe.accuracy_dropped = float(np.mean([right[i] for i in probe.dropped]))
    return probe
