"""Preference oracles by name, as `forethought pairs` and the preference games of `forethought train` take them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forethought.errors import RewardError
from forethought.recipes.inputs import Judge, Say, Task
from forethought.recipes.preference_job import JudgeSettings
from forethought.rewards.judge import Budget, ChatJudge
from forethought.rewards.oracles import (
    BETTER,
    BothOrders,
    BradleyTerry,
    JudgeOracle,
    Oracle,
    check_oracle,
    load_oracle,
)


def open_oracle(
    spec: str,
    *,
    reward: Judge | None,
    judge: JudgeSettings,
    scale: float,
    both_orders: bool,
    timeout: float,
    seed: int,
    cache: Path | None,
) -> Oracle:
    """`reward` (Bradley-Terry on the reward), `judge` (a chat model), or FILE.py:NAME.

    Args:
        both_orders: ask a function both ways round and average (a judge always is).
        cache: file of the judge's replies.

    Raises:
        ConfigError: no such oracle, or wrong settings.
    """
    if spec == "reward":
        return BradleyTerry(reward, scale=scale)
    if spec == "judge":
        chat = ChatJudge(
            judge.url,
            judge.model,
            max_tokens=judge.max_tokens,
            temperature=judge.temperature,
            seed=seed,
            logprobs=judge.logprobs,
            budget=Budget(calls=judge.calls),
            parallel=judge.parallel,
            cache=cache,
        )
        return JudgeOracle(chat, samples=judge.samples, criteria=judge.criteria or BETTER)
    oracle = load_oracle(spec, timeout=timeout)
    return BothOrders(oracle) if both_orders else oracle


def inner(oracle: Oracle) -> Oracle:
    """What is asked once, where `BothOrders` asks twice."""
    return oracle.oracle if isinstance(oracle, BothOrders) else oracle


def close_oracle(oracle: Oracle | None) -> None:
    """End its processes."""
    close = getattr(inner(oracle), "close", None) if oracle is not None else None
    if callable(close):
        close()


def trial(oracle: Oracle, tasks: Sequence[Task], say: Say) -> None:
    """A question both ways round before compute.

    Raises:
        RewardError: the oracle cannot be used; one that raises on a trial answer is only told.
    """
    task = tasks[0]
    try:
        check_oracle(inner(oracle), [(task, "0", str(task.get("answer", "yes")))])
    except RewardError as err:
        if " raised " not in str(err):
            raise
        say(f"{err}; pairs on which it fails are left out")
