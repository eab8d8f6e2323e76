"""Small task families in plain English for a pretrained chat model: arithmetic, comparing, sequences, stories.

Each family is a generator `f(n, seed=0, split="train", *, instruction="") -> list[task]`; `families()` lists them by
name. Splits share no problem (see `pools.py`), whatever the wording: numbers, operations and a story's template decide.
A task has id, prompt (one user message), problem (its text without the instruction), answer (text), family, split.

All of this is written for this project; nothing is taken from a data set.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from forethought.envs._stories import NAMES, ONE_STEP, THINGS, TWO_STEP
from forethought.envs.pools import draw

BOXED_INSTRUCTION = "Think step by step and put the final answer in \\boxed{}."
"""The prompt's ending in the One-Shot RLVR setting; pass it as `instruction`."""


class Generator(Protocol):
    def __call__(
        self, n: int, seed: int = 0, split: str = "train", *, instruction: str = ""
    ) -> list[dict[str, Any]]: ...


Problem = tuple[str, str, int]
"""Canonical key, text, answer."""

_SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


def _operands(rng: random.Random, op: str, largest: int = 99) -> tuple[int, int]:
    """Numbers of at most two digits whose result is a whole number, not negative."""
    if op == "+":
        return rng.randint(1, largest), rng.randint(1, largest)
    if op == "-":
        a, b = rng.randint(1, largest), rng.randint(1, largest)
        return max(a, b), min(a, b)
    if op == "*":
        return rng.randint(2, 19), rng.randint(2, 12)
    divisor, quotient = rng.randint(2, 12), rng.randint(2, 19)
    return divisor * quotient, divisor


def _pair_key(a: int, op: str, b: int) -> str:
    return f"{min(a, b)}{op}{max(a, b)}" if op in "+*" else f"{a}{op}{b}"


_ASK = ("What is {}?", "Calculate {}.", "How much is {}?", "Work out {}.")


def _ask(rng: random.Random, expression: str) -> str:
    return rng.choice(_ASK).format(expression)


def _one_operation(ops: str) -> Callable[[random.Random], Problem]:
    def make(rng: random.Random) -> Problem:
        op = rng.choice(ops)
        a, b = _operands(rng, op)
        return _pair_key(a, op, b), _ask(rng, f"{a} {op} {b}"), _SIGNS[op](a, b)

    return make


def _small_operation(rng: random.Random) -> Problem:
    """Numbers of 1 to 12: what a model of 135M parameters can half do."""
    op = rng.choice("+-*")
    a, b = rng.randint(1 if op != "*" else 2, 12), rng.randint(1 if op != "*" else 2, 12)
    if op == "-" and a < b:
        a, b = b, a
    return _pair_key(a, op, b), f"What is {a} {op} {b}?", _SIGNS[op](a, b)


def _two_steps(rng: random.Random) -> Problem:
    while True:
        first, second = rng.choice("+-*"), rng.choice("+-*")
        a, b = _operands(rng, first, 30)
        middle = _SIGNS[first](a, b)
        c = rng.randint(2, 9 if second == "*" else 30)
        if middle <= 99 and not (second == "-" and c > middle):
            break
    text = f"({a} {first} {b}) {second} {c}"
    return f"{_pair_key(a, first, b)}{second}{c}", _ask(rng, text), _SIGNS[second](middle, c)


def _compare(rng: random.Random) -> Problem:
    numbers = rng.sample(range(1, 1000 if rng.random() < 0.3 else 100), rng.randint(2, 4))
    largest = rng.random() < 0.5
    shown = f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
    word = rng.choice(("largest", "greatest") if largest else ("smallest", "least"))
    if len(numbers) == 2:
        word = "larger" if largest else "smaller"
    answer = max(numbers) if largest else min(numbers)
    return f"{largest}:{sorted(numbers)}", f"Which number is the {word}: {shown}?", answer


def _sequence(rng: random.Random) -> Problem:
    step = rng.choice([s for s in range(-10, 16) if s])
    count = rng.randint(4, 5)
    start = rng.randint(1, 60) - min(0, step * count)
    terms = [start + step * i for i in range(count + 1)]
    shown = ", ".join(map(str, terms[:-1]))
    text = rng.choice(("What is the next number: {}, ...?", "Continue the sequence with one number: {}, ..."))
    return f"{start}+{step}*{count}", text.format(shown), terms[-1]


def _missing(rng: random.Random) -> Problem:
    op = rng.choice("+-")
    a, b = _operands(rng, op)
    total = _SIGNS[op](a, b)
    if op == "+":
        return f"{a}+?={total}", f"What number must be added to {a} to get {total}?", b
    return f"?-{b}={total}", f"Some number minus {b} is {total}. What is the number?", a


def _double_half(rng: random.Random) -> Problem:
    share = rng.random() < 0.4
    name, factor = rng.choice((("half of", 2), ("a third of", 3)) if share else (("double", 2), ("three times", 3)))
    small = rng.randint(2, 250)
    number, answer = (small * factor, small) if share else (small, small * factor)
    return f"{name}:{number}", f"What is {name} {'' if share else 'the number '}{number}?", answer


def _story_numbers(rng: random.Random, op: str) -> tuple[int, int]:
    if op == "add":
        return rng.randint(2, 60), rng.randint(2, 40)
    if op == "sub":
        y = rng.randint(2, 40)
        return y + rng.randint(2, 50), y
    if op == "mul":
        return rng.randint(2, 12), rng.randint(2, 12)
    y = rng.randint(2, 12)
    return y * rng.randint(2, 12), y


_STORY_SIGN = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def _tell(rng: random.Random, template: str, **numbers: int) -> str:
    a, b = rng.sample(NAMES, 2)
    return template.format(A=a, B=b, things=rng.choice(THINGS), **numbers)


def _one_step_story(rng: random.Random) -> Problem:
    op = rng.choice(list(ONE_STEP))
    place = rng.randrange(len(ONE_STEP[op]))
    x, y = _story_numbers(rng, op)
    text = _tell(rng, ONE_STEP[op][place], x=x, y=y)
    return f"{op}{place}:{x},{y}", text, _SIGNS[_STORY_SIGN[op]](x, y)


def _two_step_story(rng: random.Random) -> Problem:
    kind = rng.choice(list(TWO_STEP))
    place = rng.randrange(len(TWO_STEP[kind]))
    first, second = kind.split()
    x, y = _story_numbers(rng, first)
    middle = _SIGNS[_STORY_SIGN[first]](x, y)
    if kind == "sub sub" and middle < 4:
        x, middle = x + 4, middle + 4
    z = rng.randint(2, middle - 2 if second == "sub" and middle > 4 else min(30, max(2, middle - 1)))
    text = _tell(rng, TWO_STEP[kind][place], x=x, y=y, z=z)
    return f"{kind}{place}:{x},{y},{z}", text, _SIGNS[_STORY_SIGN[second]](middle, z)


_MAKERS: dict[str, Callable[[random.Random], Problem]] = {
    "add-sub": _one_operation("+-"),
    "one-operation": _one_operation("+-*/"),
    "small-operation": _small_operation,
    "two-step": _two_steps,
    "compare": _compare,
    "sequence": _sequence,
    "missing-number": _missing,
    "double-half": _double_half,
    "story-one-step": _one_step_story,
    "story-two-step": _two_step_story,
}


def families() -> dict[str, Generator]:
    """Generators by family name.

    add-sub: sums and differences of numbers of 1-2 digits; one-operation: with multiplication and exact division, too;
    small-operation: one of + - * on numbers of 1 to 12; two-step: `(a + b) * c` and the like; compare: the largest or
    smallest of 2 to 4 numbers; sequence: the next term of an arithmetic sequence; missing-number; double-half;
    story-one-step and story-two-step: word problems.
    """
    return {name: _generator(name, make) for name, make in _MAKERS.items()}


def _generator(name: str, make: Callable[[random.Random], Problem]) -> Generator:
    def generate(n: int, seed: int = 0, split: str = "train", *, instruction: str = "") -> list[dict[str, Any]]:
        def row(rng: random.Random) -> tuple[str, dict[str, Any]]:
            key, text, answer = make(rng)
            content = f"{text} {instruction}" if instruction else text
            columns = {"prompt": [{"role": "user", "content": content}], "problem": text, "answer": str(answer)}
            return key, columns

        return draw(name, row, n, seed, split)

    generate.__name__ = name.replace("-", "_")
    return generate
