"""Countdown: reach a target with given numbers, each used at most once, by + - * /.

The scorer reads the expression with a grammar of its own and computes in exact fractions; nothing of a response is ever
evaluated as code. Numbers that were not given, used twice, or written in another form (3.0, 0x3, 1_0) score 0.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from forethought.envs.pools import draw
from forethought.errors import ConfigError
from forethought.rewards.reward import Reward

MAX_CHARACTERS = 500
_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])")
_SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-"})
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
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
    return score_expression(text, task["numbers"], task["target"])


def score_expression(text: str, numbers: Sequence[int], target: int, *, use_all: bool = False) -> Reward:
    """1 where `text` is an expression that uses given numbers only, each at most once, and equals the target.

    A closing "= target" is allowed. use_all: every number must be used.
    """
    if len(text) > MAX_CHARACTERS:
        return Reward(0.0, why=f"longer than {MAX_CHARACTERS} characters")
    body, equals, right = text.translate(_SIGNS).strip().partition("=")
    if equals and right.strip() != str(target):
        return Reward(0.0, why=f"what stands after = is not {target}")
    try:
        value, used = _evaluate(body)
    except (ValueError, ZeroDivisionError) as err:
        return Reward(0.0, why=str(err))
    extra = Counter(used) - Counter(numbers)
    if extra:
        return Reward(0.0, why=f"numbers that were not given (as often): {sorted(extra.elements())}")
    if use_all and Counter(used) != Counter(numbers):
        return Reward(0.0, why="not every number is used")
    return Reward(1.0) if value == target else Reward(0.0, why=f"equals {value}, not {target}")


def _apply(op: str, a: Fraction, b: Fraction) -> Fraction:
    if op == "/" and b == 0:
        raise ZeroDivisionError("division by zero")
    return a + b if op == "+" else a - b if op == "-" else a * b if op == "*" else a / b


def _evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Value and numbers of an infix expression (shunting-yard, no recursion). Raises: ValueError, ZeroDivisionError."""
    values: list[Fraction] = []
    pending: list[str] = []
    used: list[int] = []

    def reduce() -> None:
        b, a = values.pop(), values.pop()
        values.append(_apply(pending.pop(), a, b))

    text, at, operand_next = text.rstrip(), 0, True
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{text[at:].strip()[:20]!r} is not allowed in an expression")
        token, at = match.group(1), match.end()
        if operand_next != (token.isdigit() or token == "("):
            raise ValueError(f"{token!r} is out of place")
        if token.isdigit():
            used.append(int(token))
            values.append(Fraction(int(token)))
            operand_next = False
        elif token == "(":
            pending.append(token)
        elif token == ")":
            while pending and pending[-1] != "(":
                reduce()
            if not pending:
                raise ValueError("a bracket is not opened")
            pending.pop()
        else:
            while pending and pending[-1] != "(" and _PRECEDENCE[pending[-1]] >= _PRECEDENCE[token]:
                reduce()
            pending.append(token)
            operand_next = True
    if operand_next:
        raise ValueError("no expression" if not used else "the expression is not complete")
    while pending:
        if pending[-1] == "(":
            raise ValueError("a bracket is not closed")
        reduce()
    return values[0], used
