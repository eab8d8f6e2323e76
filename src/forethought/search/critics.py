"""Critics: what a state is worth before anybody has been there. Several parts on one scale, rollouts, and their reading.

A critic is any function from a list of states (or of text leaves) to as many numbers, lists of numbers (averaged),
`Judgement`s or exceptions. An exception means "cannot judge": the node is not made, no statistic changes, and the
failure is counted. A number outside the critic's stated scale is a mistake of the caller and ends the search.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from forethought.config import derive_seed
from forethought.errors import ConfigError, RewardError
from forethought.search.mcts import Answers, Status

if TYPE_CHECKING:
    from forethought.search.env_world import State

Scale = tuple[float, float]


@dataclass(frozen=True)
class Judgement:
    """A value, and the named parts that it was made of (kept as node columns where the critic lists them)."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


def check_scale(scale: Scale | None, name: str = "scale") -> None:
    """
    Raises:
        ConfigError: not (lowest, highest).
    """
    if scale is not None and not (len(scale) == 2 and math.isfinite(sum(scale)) and scale[0] < scale[1]):
        raise ConfigError(f"{name}={scale!r}: give (lowest, highest)")


def read_judgements(
    answers: Answers, index: Sequence[int], results: Sequence[Any], names: Sequence[str], scale: Scale | None
) -> None:
    """Put a critic's results for the answers at `index` into them.

    Raises:
        RewardError: a value outside the scale, or not a number at all.
    """
    for i, result, name in zip(index, results, names, strict=True):
        if isinstance(result, Exception):
            answers.status[i] = Status.FAILED
            continue
        if isinstance(result, list | tuple | np.ndarray) and len(result):  # several tries: their mean
            result = float(np.mean(result))
        judged: Judgement = result if isinstance(result, Judgement) else Judgement(result)  # type: ignore[arg-type]
        if not isinstance(judged.value, int | float | np.floating | np.integer) or not math.isfinite(judged.value):
            raise RewardError(
                f"task {name!r}: the critic gave {judged.value!r}; give a finite number, or a RewardError where it "
                "cannot judge"
            )
        if scale is not None and not scale[0] <= judged.value <= scale[1]:
            raise RewardError(
                f"task {name!r}: the critic gave {judged.value:g}, outside its scale {scale[0]:g} to {scale[1]:g}; "
                "correct the scale or the critic"
            )
        answers.value[i] = judged.value
        for part, number in judged.parts.items():
            if part in answers.columns:
                answers.columns[part][i] = number


@dataclass(frozen=True)
class Part:
    """One critic of several: a function from items to numbers (lists of numbers are averaged) or exceptions."""

    critic: Callable[[Sequence[Any]], Sequence[Any]]
    weight: float = 1.0
    scale: Scale | None = None


class Combined:
    """The weighted sum of several critics; the parts stay readable as node columns of their names.

    A part of weight 0 is not called. A part that is missing (NaN or an exception) makes the whole a failure, or with
    missing="skip" is left out, the others' weights standing in for it; all missing is always a failure.

    Args:
        parts: by name.
        scale: every part is mapped from its own scale onto this one before it is weighted (each part then needs one);
            None: numbers are added up as they are.

    Raises:
        ConfigError: no part, a weight that is negative, all weights 0, a scale missing.
    """

    def __init__(
        self, parts: Mapping[str, Part], *, scale: Scale | None = None, missing: Literal["fail", "skip"] = "fail"
    ):
        for name, part in parts.items():
            if not (math.isfinite(part.weight) and part.weight >= 0):
                raise ConfigError(f"critic {name!r}: weight={part.weight!r}: give 0 or more")
            check_scale(part.scale, f"critic {name!r}: scale")
            if scale is not None and part.scale is None:
                raise ConfigError(f"critic {name!r} has no scale, but all are to be mapped onto {scale}; give one")
        if not any(part.weight for part in parts.values()):
            raise ConfigError("critic: all weights are 0, or there is no part; give one that counts")
        check_scale(scale)
        if missing not in ("fail", "skip"):
            raise ConfigError(f"missing={missing!r}: give 'fail' or 'skip'")
        self.parts, self.scale, self.missing = dict(parts), scale, missing
        self.columns = tuple(name for name, part in self.parts.items() if part.weight)

    @property
    def most_tokens(self) -> int:
        """Tokens that its rollouts may generate for one item."""
        return sum(getattr(self.parts[name].critic, "most_tokens", 0) for name in self.columns)

    def attach(self, names: Sequence[str], counts: defaultdict[str, np.ndarray]) -> None:
        """Let the parts count in a search's accounts."""
        for name in self.columns:
            join = getattr(self.parts[name].critic, "attach", None)
            if join is not None:
                join(names, counts)

    def __call__(self, items: Sequence[Any]) -> list[Judgement | Exception]:
        found = {}
        for name in self.columns:
            try:
                found[name] = self.parts[name].critic(items)
            except ConfigError:
                raise
            except Exception as err:
                found[name] = [err] * len(items)
        return [self._one({name: self._number(name, found[name][i]) for name in found}) for i in range(len(items))]

    def _number(self, name: str, result: Any) -> float | Exception:
        if isinstance(result, Exception):
            return result
        numbers = np.atleast_1d(np.asarray(result, np.float64))
        value = float(numbers.mean()) if len(numbers) else math.nan
        scale = self.parts[name].scale
        if scale is None or math.isnan(value):
            return value
        if not scale[0] <= numbers.min() <= numbers.max() <= scale[1]:
            raise ConfigError(f"critic {name!r} gave {result!r}, outside its scale {scale}; correct one of them")
        if self.scale is not None:
            value = self.scale[0] + (value - scale[0]) / (scale[1] - scale[0]) * (self.scale[1] - self.scale[0])
        return value

    def _one(self, values: dict[str, float | Exception]) -> Judgement | Exception:
        there = {k: v for k, v in values.items() if not isinstance(v, Exception) and not math.isnan(v)}
        lost = [k for k in values if k not in there]
        if not there or lost and self.missing == "fail":
            why = next((v for v in values.values() if isinstance(v, Exception)), None)
            return RewardError(f"no value of {', '.join(lost)}" + (f": {why}" if why else ""))
        total = sum(self.parts[k].weight * v for k, v in there.items())
        if lost:
            total *= sum(self.parts[k].weight for k in values) / sum(self.parts[k].weight for k in there)
        return Judgement(total, there)


class Rollouts:
    """Mean return of random play from a state to the end of the episode (or `steps`, worth 0 from there).

    Args:
        actions: the actions of a state; default `info["actions"]`.
        n: episodes a state. gamma: discount a step. seed: of the play; it depends on the state's actions only, not on
            what else is searched.
        choose: (rng, actions, observation) -> action; default: any, equally likely.
    """

    def __init__(
        self,
        actions: Callable[[Any], Sequence[str]] | None = None,
        *,
        n: int = 1,
        steps: int = 200,
        gamma: float = 1.0,
        seed: int = 0,
        choose: Callable[[np.random.Generator, Sequence[str], str], str] | None = None,
    ):
        if n < 1 or steps < 1:
            raise ConfigError(f"rollouts: n={n}, steps={steps}: give at least 1 of each")
        self.actions, self.n, self.steps, self.gamma, self.seed = actions, n, steps, gamma, seed
        self.choose = choose or (lambda rng, listed, _: listed[int(rng.integers(len(listed)))])
        self._counts: defaultdict[str, np.ndarray] | None = None
        self._place: dict[str, int] = {}

    def attach(self, names: Sequence[str], counts: defaultdict[str, np.ndarray]) -> None:
        """Count the steps of rollouts in a search's accounts."""
        self._counts, self._place = counts, {name: i for i, name in enumerate(names)}

    def __call__(self, states: Sequence[State]) -> list[float | Exception]:
        return [self._value(state) for state in states]

    def _value(self, state: State) -> float:
        rng = np.random.default_rng(derive_seed("rollout", self.seed, state.tree, *state.actions))
        total = 0.0
        for _ in range(self.n):
            env, step, me, weight = state.env(), state.step, state.player, 1.0
            for _ in range(self.steps):
                if step.done:
                    break
                listed = self.actions(step) if self.actions else step.info.get("actions")
                if not listed:
                    raise ConfigError("rollouts: a Step has no info['actions']; give Rollouts(actions=...)")
                mover = int(step.info.get("player", 0))
                step = env.step(self.choose(rng, listed, step.observation))
                total += weight * step.reward * (1 if mover == me else -1)
                weight *= self.gamma
                if self._counts is not None:
                    self._counts["rollout_steps"][self._place[state.tree]] += 1
        return total / self.n
