r"""Modular chain arithmetic: a start, k operations modulo a number, worked left to right; and a teacher that slips.

    7*3+5-2 mod 11:  ->  7*3=10;10+5=4;4-2=2;\boxed{2}

`questions` draws distinct ones by level (k operations) and split; a question's split follows from its text alone.
`rollout` is a rule teacher: it prints the steps in one of three styles, sometimes with a wrong attempt that it takes
back (a detour), and with a chance it slips in one step and goes on from the wrong value (a wrong rollout).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from forethought.config import derive_seed
from forethought.errors import ConfigError, DataError

Split = Literal["train", "validation", "test"]
_PHRASES = ("*", "+", "-", "=", ";", " mod ", ":", " is ", " gives ", " no ", ", ", "\\boxed{", "}")


@dataclass(frozen=True, kw_only=True)
class ModularConfig:
    """Which questions there are, and how the teacher answers."""

    modulus: int = 11
    min_level: int = 2
    max_level: int = 6
    operators: str = "+-*"
    detour: float = 0.1
    """Chance of a wrong attempt that is taken back, at every step."""
    slip: float = 0.25
    """Chance of a rollout with one wrong step."""
    loop: float = 0.02
    """Chance of a rollout that repeats a step until it is cut."""

    def __post_init__(self):
        bad = []
        if self.modulus < 2:
            bad.append(f"modulus={self.modulus}: give at least 2")
        if not 1 <= self.min_level <= self.max_level:
            bad.append(f"min_level={self.min_level}, max_level={self.max_level}: give 1 <= min_level <= max_level")
        if not self.operators or set(self.operators) - set("+-*"):
            bad.append(f"operators={self.operators!r}: give some of + - *")
        for name in ("detour", "slip", "loop"):
            if not 0 <= getattr(self, name) <= 1:
                bad.append(f"{name}={getattr(self, name)}: give a probability")
        if bad:
            raise ConfigError("modular: " + "; ".join(bad))


def pieces(config: ModularConfig) -> list[str]:
    """The tokens of this world: numbers and set phrases (see `models.tiny.piece_tokenizer`)."""
    return [*(str(n) for n in range(max(10, config.modulus + 1))), *_PHRASES]


def normalised(text: str) -> str:
    """The text by which two questions are the same: without blanks and case."""
    return "".join(text.split()).casefold()


def split_of(text: str) -> Split:
    """The split that a question belongs to, by its normalised text: 8 of 10 train, 1 validation, 1 test."""
    return ("test", "validation", *["train"] * 8)[derive_seed("modular split", normalised(text)) % 10]  # type: ignore[return-value]


def apply(value: int, operator: str, operand: int, modulus: int) -> int:
    """One step."""
    return {"+": value + operand, "-": value - operand, "*": value * operand}[operator] % modulus


def questions(
    n: int, seed: int, split: Split, *, levels: Sequence[int] | None = None, config: ModularConfig | None = None
) -> list[dict[str, Any]]:
    """n distinct questions of a split, the levels in turn: {"id", "prompt", "answer", "level", "chain"}.

    Raises:
        ConfigError: n below 1, or a level outside the config's range. DataError: a level has too few questions.
    """
    config = config or ModularConfig()
    levels = list(levels or range(config.min_level, config.max_level + 1))
    if n < 1 or not all(config.min_level <= k <= config.max_level for k in levels):
        raise ConfigError(f"n={n}, levels={levels}: give n >= 1 and levels {config.min_level} to {config.max_level}")
    generator = np.random.default_rng(derive_seed("modular", seed, split))
    seen: set[str] = set()
    out: list[dict[str, Any]] = []
    misses = 0
    while len(out) < n:
        level = levels[len(out) % len(levels)]
        start = int(generator.integers(0, config.modulus))
        steps = [
            (config.operators[int(generator.integers(len(config.operators)))], int(generator.integers(2, 10)))
            for _ in range(level)
        ]
        text = f"{start}" + "".join(f"{o}{v}" for o, v in steps) + f" mod {config.modulus}:"
        if text in seen or split_of(text) != split:
            misses += 1
            if misses > 1000 * (n + 10):
                raise DataError(f"level {level} has too few questions of split {split!r}: {len(out)} of {n} were found")
            continue
        seen.add(text)
        value = start
        for operator, operand in steps:
            value = apply(value, operator, operand, config.modulus)
        out.append(
            {
                "id": f"{split}-{seed}-{len(out)}",
                "prompt": text,
                "answer": str(value),
                "level": level,
                "chain": {"start": start, "steps": [list(s) for s in steps], "modulus": config.modulus},
            }
        )
    return out


def refuse_duplicates(*sets: Sequence[dict[str, Any]]) -> None:
    """Refuse questions that stand twice, within a set or across sets, by normalised text or by id.

    Raises:
        DataError: names both ids.
    """
    texts: dict[str, str] = {}
    ids: set[str] = set()
    for rows in sets:
        for row in rows:
            key = normalised(str(row["prompt"]))
            if key in texts or row["id"] in ids:
                raise DataError(
                    f"question {row['id']!r} stands twice (as {texts.get(key, row['id'])!r}): a question belongs to one "
                    "split, once"
                )
            texts[key] = row["id"]
            ids.add(row["id"])


def rollout(task: dict[str, Any], generator: np.random.Generator, config: ModularConfig) -> tuple[str, bool]:
    """One worked answer and whether it ended by itself (one that loops is cut)."""
    chain = task["chain"]
    modulus, steps = int(chain["modulus"]), chain["steps"]
    style = int(generator.integers(3))
    slip = int(generator.integers(len(steps))) if generator.random() < config.slip else -1
    loop = generator.random() < config.loop
    value, out = int(chain["start"]), []
    for number, (operator, operand) in enumerate(steps):
        right = apply(value, operator, int(operand), modulus)
        other = int((right + generator.integers(1, modulus)) % modulus)
        result = other if number == slip else right
        attempt = ""
        if number != slip and generator.random() < config.detour:
            attempt = f"{other} no "
        if style == 0:
            out.append(f"{value}{operator}{operand}={attempt}{result};")
        elif style == 1:
            out.append(f"{operator}{operand} is {attempt}{result};")
        else:
            out.append(f"{value}{operator}{operand} gives {attempt}{result}, ")
        value = result
        if loop:
            return "".join(out) + out[-1] * 12, False
    return "".join(out) + f"\\boxed{{{value}}}", True


def facts(n: int, seed: int, config: ModularConfig) -> list[dict[str, Any]]:
    """n single steps in the teacher's three phrasings, without a chain: {"id", "prompt", "completion"}."""
    generator = np.random.default_rng(derive_seed("modular facts", seed))
    out = []
    for number in range(n):
        operator = config.operators[int(generator.integers(len(config.operators)))]
        value, operand = int(generator.integers(0, config.modulus)), int(generator.integers(2, 10))
        result = apply(value, operator, operand, config.modulus)
        prompt, end = (
            (f"{value}{operator}{operand}=", ";"),
            (f"{value};{operator}{operand} is ", ";"),
            (f"{value}{operator}{operand} gives ", ", "),
        )[int(generator.integers(3))]
        out.append({"id": f"fact-{number}", "prompt": prompt, "completion": f"{result}{end}"})
    return out


_STEP = re.compile(r"(\d+)?([+*-])(\d+)(?:=| is | gives )(?:\d+ no )?(\d+)")


def faulty_steps(task: dict[str, Any], text: str) -> int:
    """How many printed steps are wrong, or missing, given the value that the text itself reached before."""
    modulus = int(task["chain"]["modulus"])
    value, wrong = int(task["chain"]["start"]), 0
    found = _STEP.findall(text)
    for (_, operator, operand, result), (want, number) in zip(found, task["chain"]["steps"], strict=False):
        wrong += operator != want or int(operand) != int(number)
        wrong += int(result) != apply(value, operator, int(operand), modulus)
        value = int(result)
    return wrong + abs(len(task["chain"]["steps"]) - len(found))
