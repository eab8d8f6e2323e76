"""Reward parts put together: weights with schedules, clipping, standardisation, and what a missing part means.

    R = clip(sum over terms t of w_t * (sum of t's parts), low, high)

A term is one part, or several that share a weight: RLSP's runs (Ye et al., arXiv 2502.06773) use R = correctness, R =
correctness + length, and R = 0.8 * (correctness + length) + 0.2 * creativity. Every part is logged as it came, and its
contributions ("weighted/<part>", and "weighted/clip" for what clipping changed) sum to R.

Extensions of the paper: schedules other than constant, standardisation, renormalising.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from forethought.errors import ConfigError, RewardError
from forethought.rewards.judge import prompt_text
from forethought.rewards.math_rewards import Decode, Item, _column
from forethought.rewards.parts import Missing, RewardPart, Score, view
from forethought.rewards.reward import Reward
from forethought.rewards.split import Split, Splitter, token_ends
from forethought.tree.tree import TokenTree

MissingPolicy = Literal["drop", "renormalise", "constant"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A weight over the iterations of a run.

    constant: `weight`. linear, cosine: from `weight` to `end` within `steps` iterations, then `end`. plateau: `weight`
    until the accuracy has not gained `min_gain` for `patience` iterations, from there on as linear. All but constant are
    extensions of the paper.
    """

    kind: Literal["constant", "linear", "cosine", "plateau"] = "constant"
    weight: float = 1.0
    end: float = 0.0
    steps: int = 100
    patience: int = 20
    min_gain: float = 0.01

    def __post_init__(self):
        bad = []
        if self.kind not in ("constant", "linear", "cosine", "plateau"):
            bad.append(f"kind={self.kind!r}: 'constant', 'linear', 'cosine' or 'plateau'")
        for name in ("weight", "end", "min_gain"):
            if not math.isfinite(getattr(self, name)):
                bad.append(f"{name}={getattr(self, name)}: give a finite number")
        for name in ("steps", "patience"):
            if getattr(self, name) < 1:
                bad.append(f"{name}={getattr(self, name)}: give at least 1")
        if bad:
            raise ConfigError("schedule: " + "; ".join(bad))

    def at(self, step: int, began: int | None = 0) -> float:
        """The weight at 0-based iteration `step` of a decay that began at iteration `began` (None: not yet)."""
        if self.kind == "constant" or began is None or step <= began:
            return self.weight
        done = min(1.0, (step - began) / self.steps)
        if self.kind == "cosine":
            done = 0.5 * (1 - math.cos(math.pi * done))
        return self.weight + (self.end - self.weight) * done


@dataclass(frozen=True)
class Term:
    """Parts that share a weight."""

    parts: tuple[RewardPart, ...]
    schedule: Schedule = Schedule()


class Combiner:
    """Scores of parts -> one reward a sample.

    Args:
        terms: see `Term`; names of parts are distinct.
        clip: ends that R is cut to, or None.
        standardise: bring each part to mean 0 and standard deviation 1 over the batch before weighting, so that the
            scale of one cannot drown the other.
        missing: a sample with a part missing (of weight 0: it does not count) "drop": has no reward; "renormalise":
            the weights of the terms that are there grow to the sum of all; "constant": gets `constants[part]`, which
            for creativity at 0.5 is what the released server does. A part that is `required` is never made up for.

    Raises:
        ConfigError: no terms, equal names, an unknown policy, a constant that is lacking or of no part, a bad clip.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        *,
        clip: tuple[float, float] | None = (-10.0, 10.0),
        standardise: bool = False,
        missing: MissingPolicy = "drop",
        constants: Mapping[str, float] | None = None,
    ):
        self.terms, self.clip, self.standardise, self.missing = tuple(terms), clip, standardise, missing
        self.constants = dict(constants or {})
        self.parts = [p for t in self.terms for p in t.parts]
        names = [p.name for p in self.parts]
        if not names or any(not t.parts for t in self.terms):
            raise ConfigError("combiner: no parts; give each term at least one")
        if len(set(names)) < len(names):
            raise ConfigError(f"combiner: parts {names}: name each once")
        if missing not in get_args(MissingPolicy):
            raise ConfigError(f"missing={missing!r}: one of {', '.join(get_args(MissingPolicy))}")
        if unknown := sorted(set(self.constants) - set(names)):
            raise ConfigError(f"constants: {unknown[0]!r} is no part; the parts are {', '.join(names)}")
        lacking = [p.name for p in self.parts if not p.required and p.name not in self.constants]
        if missing == "constant" and lacking:
            raise ConfigError(f"missing='constant' needs a constant for {', '.join(lacking)}")
        if clip is not None and not (math.isfinite(clip[0]) and math.isfinite(clip[1]) and clip[0] < clip[1]):
            raise ConfigError(f"clip={clip}: give (low, high) with low < high, or none")
        self.step = 0
        self._best: list[tuple[float, int] | None] = [None for _ in self.terms]  # (accuracy, iteration) of each plateau
        self._began: list[int | None] = [None if t.schedule.kind == "plateau" else 0 for t in self.terms]

    # -- weights --
    def weights(self) -> dict[str, float]:
        """Weight of each part at this iteration."""
        return {p.name: w for t, w in zip(self.terms, self._weights(), strict=True) for p in t.parts}

    def _weights(self) -> list[float]:
        return [t.schedule.at(self.step, began) for t, began in zip(self.terms, self._began, strict=True)]

    def advance(self, accuracy: float | None = None) -> None:
        """The next iteration begins; `accuracy` of the one that ended is what a plateau is told by."""
        self.step += 1
        for i, term in enumerate(self.terms):
            if term.schedule.kind != "plateau" or self._began[i] is not None or accuracy is None:
                continue
            best = self._best[i]
            if best is None or accuracy >= best[0] + term.schedule.min_gain:
                self._best[i] = (accuracy, self.step)
            elif self.step - best[1] >= term.schedule.patience:
                self._began[i] = self.step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "best": list(self._best), "began": list(self._began)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self._best, self._began = state["step"], list(state["best"]), list(state["began"])

    # -- rewards --
    def combine(self, scores: Mapping[str, Sequence[Score]]) -> list[Reward | RewardError]:
        """Scores by part, each [n] -> rewards [n]; a sample without one has a `RewardError` in its place.

        `scores` may lack a part of weight 0 that was not asked.
        """
        weights = self._weights()
        n = len(next(iter(scores.values())))
        spread = {name: _moments(column) for name, column in scores.items()} if self.standardise else {}
        return [self._one({name: column[i] for name, column in scores.items()}, weights, spread) for i in range(n)]

    def _one(
        self, scores: Mapping[str, Score], weights: Sequence[float], spread: Mapping[str, tuple[float, float]]
    ) -> Reward | RewardError:
        used: list[tuple[float, list[tuple[str, float]]]] = []
        raw: dict[str, float] = {}
        lost: list[str] = []
        for term, weight in zip(self.terms, weights, strict=True):
            values: list[tuple[str, float]] = []
            whole = True
            for part in term.parts:
                score = scores.get(part.name)
                if isinstance(score, Missing) and weight:
                    lost.append(f"part {part.name!r} is missing ({score.tag}): {score.reason}")
                    if part.required:
                        return RewardError(lost[-1])
                    if self.missing == "constant":
                        score = self.constants[part.name]
                if isinstance(score, float):
                    raw[part.name] = score
                    mean, std = spread.get(part.name, (0.0, 1.0))
                    values.append((part.name, (score - mean) / std))
                else:
                    whole = False
            if whole:
                used.append((weight, values))
            elif weight and self.missing == "drop":
                return RewardError(lost[-1])
        total = sum(w for w in weights if w)
        present = sum(w for w, _ in used if w)
        if present == 0 and total != 0:
            return RewardError("; ".join(lost))
        grow = total / present if present != total else 1.0
        reward = 0.0
        parts = dict(raw)
        for weight, values in used:
            for name, value in values:
                contribution = weight * grow * value if weight else 0.0
                parts[f"weighted/{name}"] = contribution
                reward += contribution
        if self.clip is not None:
            cut = min(max(reward, self.clip[0]), self.clip[1])
            parts["weighted/clip"] = cut - reward
            reward = cut
        return Reward(reward, parts, "; ".join(lost))


def _moments(column: Sequence[Score]) -> tuple[float, float]:
    """Mean and standard deviation of the scores that are there; (mean, 1) where they do not differ."""
    values = np.array([s for s in column if isinstance(s, float)])
    if not len(values):
        return 0.0, 1.0
    std = float(values.std())
    return float(values.mean()), std if std > 0 else 1.0


class FaultWatch:
    """Watches the share of samples with a missing part among the last `window` of them.

    Above `alert` it warns (once, until the share has been below again); above `stop` it ends the run. Neither before
    `least` samples were seen.

    Raises:
        ConfigError: not 0 <= alert <= stop <= 1, or a window below `least`.
    """

    def __init__(self, alert: float = 0.01, stop: float = 0.1, *, window: int = 1000, least: int = 50):
        if not 0 <= alert <= stop <= 1:
            raise ConfigError(f"alert={alert}, stop={stop}: give shares with 0 <= alert <= stop <= 1")
        if not 1 <= least <= window:
            raise ConfigError(f"least={least}, window={window}: give 1 <= least <= window")
        self.alert, self.stop, self.least = alert, stop, least
        self._seen: deque[str] = deque(maxlen=window)
        self._warned = False

    @property
    def share(self) -> float:
        return sum(bool(tag) for tag in self._seen) / len(self._seen) if self._seen else 0.0

    def see(self, tags: Sequence[str]) -> None:
        """One entry per sample: what kind of fault, or "" for none.

        Raises:
            RewardError: the share of faults is above `stop`.
        """
        self._seen.extend(tags)
        if len(self._seen) < self.least:
            return
        share = self.share
        kinds = ", ".join(f"{tag} {count}" for tag, count in Counter(t for t in self._seen if t).most_common())
        message = f"{share:.1%} of the last {len(self._seen)} samples have a reward part missing ({kinds})"
        if share > self.stop:
            raise RewardError(f"{message}, more than the limit of {self.stop:.1%}: mend the scorer, or raise the limit")
        if share > self.alert and not self._warned:
            _log.warning("%s, more than %.1f%%", message, 100 * self.alert)
        self._warned = share > self.alert

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self._seen), "warned": self._warned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen.clear()
        self._seen.extend(state["seen"])
        self._warned = state["warned"]


class PartsReward:
    """The judge of an online loop: splits responses, hands each part its view, combines the scores.

    Args:
        combiner: parts and weights. decode: ids -> text. splitter: one for all parts. answer_column: of the gold.
        watch: see `FaultWatch`; None watches nothing.

    `metrics` has the numbers of the latest batch: mean and standard deviation of each raw part, weights, share of
    clipped and of missing rewards, faults by kind. The gold rides with its record, never looked up by text.

    Raises:
        RewardError: a task without a gold; too many faults.
    """

    def __init__(
        self,
        combiner: Combiner,
        decode: Decode,
        *,
        splitter: Splitter | None = None,
        answer_column: str = "answer",
        watch: FaultWatch | None = None,
    ):
        self.combiner, self.decode, self.splitter = combiner, decode, splitter or Splitter()
        self.answer_column, self.watch = answer_column, watch
        self.metrics: dict[str, float] = {}
        self._needs_tokens = any(p.needs_tokens for p in combiner.parts)
        self._lengths: dict[int, int] = {}

    def judge_many(self, items: Sequence[Item]) -> list[Reward | RewardError]:
        """Rewards of many leaves."""
        rows = [
            (prompt_text(task), self._split(tree, leaf), _column(task, self.answer_column))
            for tree, leaf, task in items
        ]
        weights = self.combiner.weights()
        scores: dict[str, list[Score]] = {}
        for part in self.combiner.parts:
            if part.costly and not weights[part.name]:
                continue
            scores[part.name] = part.judge([view(part.access, *row) for row in rows])
        rewards = self.combiner.combine(scores)
        self._note(scores, rewards, weights)
        self.metrics["boxed"] = sum(split.boxed for _, split, _ in rows) / len(rows) if rows else 0.0
        if self.watch is not None:
            self.watch.see([_fault({n: c[i] for n, c in scores.items()}) for i in range(len(items))])
            self.metrics["faults/share"] = self.watch.share
        return rewards

    def _split(self, tree: TokenTree, leaf: int) -> Split:
        ids = [i for node in tree.path(leaf) if tree.sampled[node] for i in tree.node_ids(node)]
        ends = token_ends(ids, self.decode, self._lengths) if self._needs_tokens else None
        return self.splitter(self.decode(ids) if ids else "", ends)

    def _note(
        self, scores: Mapping[str, Sequence[Score]], rewards: Sequence[Any], weights: Mapping[str, float]
    ) -> None:
        out = {f"weight/{name}": weight for name, weight in weights.items()}
        for name, column in scores.items():
            values = [s for s in column if isinstance(s, float)]
            if values:
                out |= {f"part/{name}/mean": float(np.mean(values)), f"part/{name}/std": float(np.std(values))}
            for tag, count in Counter(s.tag for s in column if isinstance(s, Missing)).items():
                out[f"faults/{name}/{tag}"] = count / len(column)
        made = [r for r in rewards if isinstance(r, Reward)]
        out["faults/dropped"] = 1 - len(made) / len(rewards) if rewards else 0.0
        if made:
            out["reward/clipped_share"] = float(np.mean([bool(r.parts.get("weighted/clip")) for r in made]))
        for part in self.combiner.parts:
            out |= part.metrics()
        self.metrics = out

    def state_dict(self) -> dict[str, Any]:
        return {"combiner": self.combiner.state_dict(), "watch": self.watch.state_dict() if self.watch else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.combiner.load_state_dict(state["combiner"])
        if self.watch is not None and state["watch"] is not None:
            self.watch.load_state_dict(state["watch"])

    def close(self) -> None:
        """Let the parts go."""
        for part in self.combiner.parts:
            part.close()


def _fault(scores: Mapping[str, Score]) -> str:
    return next((f"{name}: {s.tag}" for name, s in scores.items() if isinstance(s, Missing)), "")
