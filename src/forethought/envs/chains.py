r"""A procedural world of arithmetic chains: the miniature of verifiable-reward RL (One-Shot RLVR spec, Miniature).

A problem is a left-to-right chain of 2 to 4 operations, every result taken modulo m: `((4+9)*5-3)%10=`. Departure: m is
10 by default, so numbers have one digit (with two-digit numbers a model of this size needs pretraining of hours on a
laptop before its careful working is usually right); `modulus` up to 100 gives two digits. The main family has the operators + - *; the shifted family has two others (`#`: 2a+b, `@`: the larger
one), for transfer to what is never trained on. Pool, held-out and shifted problems are disjoint by construction.

`demonstrations` writes the text that a base model is pretrained on: a MIXTURE of careful worked steps (usually right) and
short guesses (usually wrong), each boxed, un-boxed or never-ending with fixed shares. This builds the premise in that the
ability is latent: reinforcement learning in this world tests elicitation, not new knowledge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forethought.config import derive_seed
from forethought.errors import ConfigError

MAIN, SHIFTED = "+-*", "#@"
CHARACTERS = "0123456789+-*#@()%=,.; \\{}boxedans"
Task = dict[str, Any]


def apply(operator: str, a: int, b: int, modulus: int) -> int:
    """One step of a chain."""
    value = {"+": a + b, "-": a - b, "*": a * b, "#": 2 * a + b, "@": max(a, b)}[operator]
    return value % modulus


@dataclass(frozen=True)
class Chain:
    """start, then (operator, operand) steps, all modulo `modulus`."""

    start: int
    steps: tuple[tuple[str, int], ...]
    modulus: int

    @property
    def prompt(self) -> str:
        text = str(self.start)
        for number, (operator, operand) in enumerate(self.steps):
            text = f"({text}{operator}{operand})" if number < len(self.steps) - 1 else f"{text}{operator}{operand}"
        return f"({text})%{self.modulus}="

    def values(self) -> list[int]:
        """Results after each step."""
        out, value = [], self.start
        for operator, operand in self.steps:
            value = apply(operator, value, operand, self.modulus)
            out.append(value)
        return out

    @property
    def answer(self) -> int:
        return self.values()[-1]

    def working(self, values: Sequence[int] | None = None) -> str:
        """`4+9=3,3*5=5,5-3=2`, with other results than the right ones if `values` says so."""
        values = self.values() if values is None else values
        lines, before = [], self.start
        for (operator, operand), value in zip(self.steps, values, strict=True):
            lines.append(f"{before}{operator}{operand}={value}")
            before = value
        return ",".join(lines)


@dataclass(frozen=True, kw_only=True)
class ChainConfig:
    """The world and the mixture that its base model is pretrained on."""

    modulus: int = 10
    min_steps: int = 2
    max_steps: int = 4
    careful: float = 0.55
    """Share of worked solutions; the others are bare guesses."""
    slip: float = 0.05
    """Chance of a wrong result in each worked step (it is carried on)."""
    lucky: float = 0.1
    """Chance that a guess is right."""
    boxed: float = 0.6
    """Share of demonstrations whose answer is boxed."""
    endless: float = 0.15
    """Share that repeats its answer without ever ending; the rest ends un-boxed."""

    def __post_init__(self):
        bad = []
        if not 2 <= self.modulus <= 100:
            bad.append(f"modulus={self.modulus}: give 2 to 100, so that numbers have one or two digits")
        if not 1 <= self.min_steps <= self.max_steps:
            bad.append(f"min_steps={self.min_steps}, max_steps={self.max_steps}: give 1 <= min_steps <= max_steps")
        for name in ("careful", "slip", "lucky", "boxed", "endless"):
            if not 0 <= getattr(self, name) <= 1:
                bad.append(f"{name}={getattr(self, name)}: a share lies in [0, 1]")
        if self.boxed + self.endless > 1:
            bad.append(f"boxed + endless = {self.boxed + self.endless}: give at most 1")
        if bad:
            raise ConfigError("chains: " + "; ".join(bad))


def chains(config: ChainConfig, operators: str, seed: int) -> Iterator[Chain]:
    """Endless random chains (with repetitions)."""
    rng = np.random.default_rng(derive_seed(seed, "chains", operators))
    while True:
        size = int(rng.integers(config.min_steps, config.max_steps + 1))
        steps = tuple(
            (operators[int(rng.integers(len(operators)))], int(rng.integers(1, config.modulus))) for _ in range(size)
        )
        yield Chain(int(rng.integers(0, config.modulus)), steps, config.modulus)


def tasks(config: ChainConfig, counts: dict[str, int], seed: int) -> dict[str, list[Task]]:
    """Disjoint splits of distinct problems, e.g. {"pool": 256, "heldout": 1000, "shifted": 250}.

    A split whose name begins with "shifted" uses the other operators. A task has id (stable: split and index), prompt,
    answer (a string), steps (how many) and chain.

    Raises:
        ConfigError: the world has not that many problems.
    """
    seen: set[str] = set()
    out: dict[str, list[Task]] = {}
    for split, count in counts.items():
        source = chains(config, SHIFTED if split.startswith("shifted") else MAIN, seed)
        out[split] = []
        tries = 0
        while len(out[split]) < count:
            tries += 1
            if tries > 100 * count + 10_000:
                raise ConfigError(f"split {split!r}: the world has not {count} further problems; give a larger modulus")
            chain = next(source)
            if chain.prompt in seen:
                continue
            seen.add(chain.prompt)
            number = len(out[split])
            out[split].append(
                {
                    "id": f"{split}-{number}",
                    "index": number,
                    "prompt": chain.prompt,
                    "answer": str(chain.answer),
                    "steps": len(chain.steps),
                    "chain": chain,
                }
            )
    return out


def demonstration(chain: Chain, config: ChainConfig, rng: np.random.Generator, longest: int = 64) -> tuple[str, bool]:
    """(response text, whether it ends) for one chain, drawn from the mixture."""
    m = config.modulus
    if rng.random() < config.careful:
        values, value = [], chain.start
        for operator, operand in chain.steps:
            value = apply(operator, value, operand, m)
            if rng.random() < config.slip:
                value = int(rng.integers(m))
            values.append(value)
        answer, working = values[-1], chain.working(values) + " "
    else:
        answer = chain.answer if rng.random() < config.lucky else int(rng.integers(m))
        working = ""
    form = rng.random()
    if form < config.boxed:
        return f"{working}\\boxed{{{answer}}}", True
    if form < config.boxed + config.endless:
        text = f"{working}ans {answer};"
        return (text + f" {answer};" * longest)[:longest], False
    return f"{working}ans {answer}.", True


def demonstrations(
    config: ChainConfig, seed: int, *, exclude: set[str], longest: int = 64
) -> Iterator[tuple[str, str, bool]]:
    """Endless (prompt, response, ends) triples, both families in turn; prompts in `exclude` never occur."""
    rng = np.random.default_rng(derive_seed(seed, "demonstrations"))
    sources = [chains(config, operators, derive_seed(seed, "pretrain")) for operators in (MAIN, SHIFTED)]
    while True:
        for source in sources:
            chain = next(source)
            if chain.prompt not in exclude:
                text, ends = demonstration(chain, config, rng, longest)
                yield chain.prompt, text, ends
