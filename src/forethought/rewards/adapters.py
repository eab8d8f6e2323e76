"""Reward functions of other libraries, as they are: TRL's, verl's, or our own `f(tree, leaf, task)`.

    reward = load_reward("my.py:score", decode=decode)      # style detected by its parameters
    reward = combine([("right", from_trl(f, decode=decode), 0.8), ("short", g, 0.2)], decode=decode)
    with RewardRunner(reward, timeout=30) as judge:
        judge.check(tasks)                                   # before compute
        outcomes = judge([(tree, leaf, task), ...])          # list[Reward | RewardError]

The calling conventions, and what becomes of what a function returns, are described in `scorers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from forethought.errors import ConfigError
from forethought.rewards.runner import RewardRunner
from forethought.rewards.scorers import (
    Call,
    Combined,
    Decode,
    Item,
    NativeReward,
    Outcome,
    RewardLogs,
    Scorer,
    TrainerState,
    TRLReward,
    VerlBatchReward,
    VerlReward,
    adapt,
    load_reward,
    parameters_of,
    response_messages,
    response_nodes,
    response_text,
    style_of,
)

__all__ = [
    "Call",
    "Combined",
    "Decode",
    "Item",
    "NativeReward",
    "Outcome",
    "RewardLogs",
    "RewardRunner",
    "Scorer",
    "TRLReward",
    "TrainerState",
    "VerlBatchReward",
    "VerlReward",
    "adapt",
    "combine",
    "from_trl",
    "from_verl",
    "load_reward",
    "response_messages",
    "response_nodes",
    "response_text",
    "style_of",
]

RESERVED_PARTS = ("mean", "std", "failed")
"""Part names that would collide with metrics of the same group (`reward/mean` ...)."""


def from_trl(fn: Callable[..., Any], *, decode: Decode | None = None, name: str | None = None) -> TRLReward:
    """A TRL reward function. Raises: ConfigError for one that cannot be called by keyword."""
    return TRLReward(fn, decode=decode, name=name)


def from_verl(fn: Callable[..., Any], *, decode: Decode | None = None, name: str | None = None) -> VerlReward:
    """A verl `compute_score`, single (`solution_str`) or batched (`solution_strs`)."""
    kind = VerlBatchReward if "solution_strs" in parameters_of(fn)[0] else VerlReward
    return kind(fn, decode=decode, name=name)


def combine(parts: Sequence[tuple[str, Callable[..., Any], float]], *, decode: Decode | None = None) -> Combined:
    """Several rewards as one: value = sum of weight * value over the parts that apply to a sample.

    That sum is the reward that is trained on, so it is what a log calls the reward. Parts are kept by name, unweighted;
    a part that does not apply to a sample is absent from its parts. One failed part fails the sample.

    Args:
        parts: (name, function or Scorer, weight). A weight of 0 logs a part without training on it.

    Raises:
        ConfigError: no parts, a name twice or reserved, a weight that is not a finite number.
    """
    bad = []
    names = [name for name, _, _ in parts]
    if not parts:
        bad.append("no parts: give at least one (name, function, weight)")
    bad += [f"part {name!r} stands twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    bad += [f"part name {name!r} is reserved for a metric; choose another" for name in names if name in RESERVED_PARTS]
    for name, _, weight in parts:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            bad.append(f"weight of part {name!r} is {weight!r}: give a finite number")
    if bad:
        raise ConfigError("combine: " + "; ".join(bad))
    return Combined([(name, adapt(fn, decode=decode, name=None), float(weight)) for name, fn, weight in parts])
