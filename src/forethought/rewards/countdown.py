"""Countdown: reach a target with given numbers, each used at most once (or exactly once), by + - * / and brackets.

The expression is parsed, checked node by node and evaluated with exact fractions; it is never executed. Both its value
and the numbers in it count: an expression with a number that was not given scores 0.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from forethought.errors import RewardError
from forethought.rewards._verify_text import last_box

MAX_LENGTH = 500  # characters of an expression
_SYMBOLS = {"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "\\times": "*", "\\cdot": "*", "\\div": "/"}


class CountdownScore(NamedTuple):
    """score 1.0 or 0.0, the value of the expression (None where it has none), and why."""

    score: float
    value: Fraction | None
    reason: str


def score_countdown(
    answer: str, numbers: Sequence[int | float], target: int | float, *, use_all: bool = False
) -> CountdownScore:
    r"""Score one answer.

    Args:
        answer: an expression such as `50 + 25 + 3`; a box around it and an "= 78" behind it are taken off (what stands
            behind "=" must be the expression's value).
        numbers: the given numbers, each usable as often as it is listed. target: the value to reach.
        use_all: every given number must be used.

    Raises:
        RewardError: a given number or the target is not finite, or no numbers are given.
    """
    if not numbers:
        raise RewardError("numbers=[]: give the numbers of the task")
    for name, value in [("target", target), *(("numbers", n) for n in numbers)]:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardError(f"{name}={value!r}: give finite numbers")
    if not isinstance(answer, str):
        return CountdownScore(0.0, None, "no text")
    box = last_box(answer)
    text = (answer if box is None else box).strip().strip("$").strip()
    if len(text) > MAX_LENGTH:
        return CountdownScore(0.0, None, f"limit: expression of {len(text)} characters (limit {MAX_LENGTH})")
    for symbol, operator in _SYMBOLS.items():
        text = text.replace(symbol, operator)
    expression, *claims = text.replace("\n", " ").split("=")
    used: Counter[Fraction] = Counter()
    try:
        value = _evaluate(expression, used)
        if any(_evaluate(claim, Counter()) != value for claim in claims):
            return CountdownScore(0.0, value, "what stands behind = is not the value")
    except ZeroDivisionError:
        return CountdownScore(0.0, None, "division by zero")
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return CountdownScore(0.0, None, f"not an arithmetic expression: {error}")
    given = Counter(Fraction(str(n)) for n in numbers)
    foreign = used - given
    if foreign:
        return CountdownScore(0.0, value, f"number not given, or used too often: {', '.join(map(str, foreign))}")
    if use_all and given - used:
        return CountdownScore(0.0, value, f"number not used: {', '.join(map(str, given - used))}")
    if value != Fraction(str(target)):
        return CountdownScore(0.0, value, f"value {value} is not the target {target}")
    return CountdownScore(1.0, value, "reaches the target with given numbers")


def _evaluate(text: str, used: Counter[Fraction]) -> Fraction:
    """Exact value; counts every number literal into `used`.

    Raises:
        ValueError, SyntaxError: anything but numbers, + - * / and brackets. ZeroDivisionError.
    """
    tree = ast.parse(text.strip(), mode="eval")
    return _node(tree.body, text.strip(), used)


def _node(node: ast.expr, text: str, used: Counter[Fraction]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        literal = ast.get_source_segment(text, node) or ""  # the digits as written: a float would round them
        if not literal.replace(".", "", 1).isdecimal():
            raise ValueError(f"number {literal!r}")
        value = Fraction(literal)
        used[value] += 1
        return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _node(node.operand, text, used)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp):
        left, right = _node(node.left, text, used), _node(node.right, text, used)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
        raise ValueError(f"operator {type(node.op).__name__}")
    raise ValueError(type(node).__name__)
