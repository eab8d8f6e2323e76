"""Countdown tasks: reach a target with given numbers, each used at most once, by + - * /.

Answers are judged by `rewards.countdown`, which never executes any part of a response.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from forethought.envs.pools import draw
from forethought.errors import ConfigError
from forethought.rewards.countdown import score_countdown
from forethought.rewards.reward import Reward

_PROMPT = (
    "Use the numbers {numbers} to make {target}. Use each number at most once, with + - * / and brackets. "
    "Give the expression in <answer></answer>."
)


def countdown_tasks(
    n: int, seed: int = 0, split: str = "train", *, count: int = 4, largest: int = 50, largest_target: int = 99
) -> list[dict[str, Any]]:
    """`n` solvable tasks: id, prompt, numbers, target, and one solution as `answer`.

    Args:
        count: numbers a task (2 to 6).
        largest: the largest number. largest_target: the largest target.

    Raises:
        ConfigError: count out of range. DataError: the split has fewer tasks than n.
    """
    if not 2 <= count <= 6:
        raise ConfigError(f"count={count}: give 2 to 6 numbers")

    def make(rng: random.Random) -> tuple[str, dict[str, Any]]:
        while True:
            numbers = [rng.randint(1, largest) for _ in range(count)]
            parts = [(Fraction(x), str(x)) for x in rng.sample(numbers, rng.randint(2, count))]
            while len(parts) > 1:
                (a, left), (b, right) = parts.pop(), parts.pop()
                op = rng.choice("+-*/" if b else "+-*")
                parts.append((_apply(op, a, b), f"({left}{op}{right})"))
            value, text = parts[0]
            if value.denominator == 1 and 1 <= value <= largest_target and value not in numbers:
                break
        numbers.sort()
        shown = ", ".join(map(str, numbers))
        columns = {
            "prompt": _PROMPT.format(numbers=shown, target=int(value)),
            "answer": text[1:-1],
            "numbers": numbers,
            "target": int(value),
        }
        return f"{shown}={value}", columns

    return draw(f"countdown-{count}-{largest}", make, n, seed, split)


def countdown_score(response: str, task: Mapping[str, Any]) -> Reward:
    """1 where the response's expression is right, else 0 with the reason; for `ProblemEnv` and as a reward.

    The expression is what stands in the last <answer></answer>, else the last line that is not empty.
    """
    tagged = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    lines = [line for line in response.splitlines() if line.strip()]
    text = tagged[-1] if tagged else lines[-1] if lines else ""
    judged = score_countdown(text, task["numbers"], task["target"])
    return Reward(judged.score, why="" if judged.score else judged.reason)


def _apply(op: str, a: Fraction, b: Fraction) -> Fraction:
    return a + b if op == "+" else a - b if op == "-" else a * b if op == "*" else a / b
