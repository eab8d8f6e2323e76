r"""Arithmetic chains: the miniature world of One-Shot RLVR (Wang et al., arXiv 2504.20571), and demonstrations of it.

A problem is a chain of 2 to 4 operations on numbers of one or two digits whose last one is a remainder, such as
`((7+5)*3-8) mod 9`; the answer belongs in `\boxed{}`. A second family with other operators (`#` the larger, `&` the
smaller, `~` the distance of two numbers) serves for transfer between categories. Every intermediate result has at most
two digits, so that a character model of 1-4M parameters can learn the single steps.

`demonstrations` writes the pretraining mixture that builds the paper's premise in: careful worked steps (usually right)
and short guesses (usually wrong), each boxed, unboxed or never ending, in fixed shares. A model trained on it has the
ability, uses it now and then, and often forgets the box; so the miniature tests elicitation, not new knowledge.

Plain-English families for a pretrained chat model are in `families.py`; `families()` is at hand here, too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from forethought.envs.families import families
from forethought.envs.pools import draw
from forethought.errors import ConfigError, DataError

Task = Mapping[str, Any]
Family = Literal["chain", "chain-shifted"]

_APPLY = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    " mod ": lambda a, b: a % b,
    "#": max,
    "&": min,
    "~": lambda a, b: abs(a - b),
}
_COMMUTES = ("+", "*", "#", "&", "~")
UNGUESSABLE = "9292725"
"""A label that no model of this world ever writes (the paper's own, row 13 of its table 5)."""


@dataclass(frozen=True, kw_only=True)
class ChainConfig:
    """Sizes of a chain. `min_steps` to `max_steps` operations, the remainder included; operands up to `max_number`, no
    intermediate result above `max_value`; remainders by 3 to `max_modulus`."""

    min_steps: int = 2
    max_steps: int = 4
    max_number: int = 20
    max_value: int = 99
    max_modulus: int = 12

    def __post_init__(self):
        bad = []
        if not 2 <= self.min_steps <= self.max_steps:
            bad.append(f"min_steps={self.min_steps}, max_steps={self.max_steps}: give 2 <= min_steps <= max_steps")
        if not 2 <= self.max_number <= self.max_value <= 999:
            bad.append(
                f"max_number={self.max_number}, max_value={self.max_value}: give 2 <= max_number <= max_value <= 999"
            )
        if self.max_modulus < 3:
            bad.append(f"max_modulus={self.max_modulus}: give at least 3")
        if bad:
            raise ConfigError("chains: " + "; ".join(bad))


def chains(
    n: int,
    seed: int = 0,
    split: str = "train",
    *,
    family: Family = "chain",
    config: ChainConfig | None = None,
) -> list[dict[str, Any]]:
    """`n` different problems: id, prompt (`((7+5)*3-8) mod 9 = ?` and a line end), answer, chain, family, split.

    `chain` holds [first number, [operator, operand], ...]. Splits share no problem (see `pools.py`); problems that
    differ only in the order of the first two operands count as one.

    Raises:
        ConfigError: no such family or split. DataError: the split has fewer problems than n.
    """
    config = config or ChainConfig()
    if family not in ("chain", "chain-shifted"):
        raise ConfigError(f"family={family!r}: 'chain' or 'chain-shifted'")

    def make(rng: random.Random) -> tuple[str, dict[str, Any]]:
        chain = (_chain if family == "chain" else _shifted)(rng, config)
        text = expression(chain)
        columns = {"prompt": f"{text} = ?\n", "answer": str(_results(chain)[-1]), "chain": chain}
        return _key(chain), columns

    sizes = "-".join(str(getattr(config, f.name)) for f in fields(config))
    name = family if config == ChainConfig() else f"{family}:{sizes}"
    return [row | {"family": family} for row in draw(name, make, n, seed, split)]


def _chain(rng: random.Random, config: ChainConfig) -> list[Any]:
    value = rng.randint(1, config.max_number)
    chain: list[Any] = [value]
    for _ in range(rng.randint(config.min_steps, config.max_steps) - 1):
        limits = {
            "+": min(config.max_number, config.max_value - value),
            "-": min(config.max_number, value),
            "*": min(9, config.max_value // value) if value else 0,
        }
        op = rng.choice([o for o, high in limits.items() if high >= (2 if o == "*" else 1)])
        operand = rng.randint(2 if op == "*" else 1, limits[op])
        chain.append([op, operand])
        value = _APPLY[op](value, operand)
    chain.append([" mod ", rng.randint(3, config.max_modulus)])
    return chain


def _shifted(rng: random.Random, config: ChainConfig) -> list[Any]:
    steps = rng.randint(config.min_steps, config.max_steps)
    return [
        rng.randint(1, config.max_value),
        *([rng.choice("#&~"), rng.randint(1, config.max_value)] for _ in range(steps)),
    ]


def expression(chain: Sequence[Any]) -> str:
    """A chain as text, with the brackets that its order of evaluation needs."""
    text, loose = str(chain[0]), False  # loose: a sum or a difference stands at the top
    for i, (op, operand) in enumerate(chain[1:]):
        tight = op not in ("+", "-")
        shifted = op in ("#", "&", "~")
        if i and (shifted or op == " mod " or (tight and loose)):
            text = f"({text})"
        elif op == " mod ":
            text = f"({text})"
        text = f"{text}{op}{operand}"
        loose = op in ("+", "-")
    return text


def _results(chain: Sequence[Any], slips: Mapping[int, int] | None = None) -> list[int]:
    """Results after each step; `slips` adds an error to the result of a step, which later steps then use."""
    value, out = chain[0], []
    for i, (op, operand) in enumerate(chain[1:]):
        value = _APPLY[op](value, operand) + (slips or {}).get(i, 0)
        out.append(value)
    return out


def _key(chain: Sequence[Any]) -> str:
    first, (op, second), *rest = chain
    pair = sorted((first, second)) if op in _COMMUTES else [first, second]
    return f"{pair[0]}{op}{pair[1]}" + "".join(f"{o}{x}" for o, x in rest)


def _working(chain: Sequence[Any], results: Sequence[int]) -> list[str]:
    starts = [chain[0], *results[:-1]]
    return [f"{a}{op}{b}={r}" for a, (op, b), r in zip(starts, chain[1:], results, strict=True)]


def worked(task: Task) -> str:
    r"""The careful right solution, e.g. `7+5=12;12*3=36;36-8=28;28 mod 9=1;\boxed{1}`."""
    results = _results(task["chain"])
    return ";".join([*_working(task["chain"], results), f"\\boxed{{{results[-1]}}}"])


def shortcut(task: Task) -> int:
    """The answer of someone who looks at the last two numbers only; never the right one."""
    chain, answer = task["chain"], int(task["answer"])
    previous = chain[-2][1] if len(chain) > 2 else chain[0]
    value = _APPLY[chain[-1][0]](previous, chain[-1][1])
    return value if value != answer else (answer + 1) % _range(chain)


def _range(chain: Sequence[Any]) -> int:
    """One more than the largest answer that looks possible."""
    op, operand = chain[-1]
    return operand if op == " mod " else max(10, operand + 1)


def wrong_label(task: Task, kind: Literal["guessable", "unguessable"]) -> dict[str, Any]:
    """The task with a wrong answer: the one that short guesses name most often, or one that nothing ever names.

    With an unguessable label a problem is never solved: the control for reward without information.
    """
    if kind not in ("guessable", "unguessable"):
        raise ConfigError(f"kind={kind!r}: 'guessable' or 'unguessable'")
    answer = str(shortcut(task)) if kind == "guessable" else UNGUESSABLE
    return {**task, "answer": answer, "right_answer": task["answer"]}


# -- demonstrations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the mixture, of 1. The defaults make about 35% of all demonstrations boxed and right, 60% boxed.

    careful: worked steps, the rest are guesses. boxed, unboxed, endless: forms, which sum to 1. careful_right,
    guess_right: right answers among the careful ones and among the guesses.
    """

    careful: float = 0.55
    boxed: float = 0.6
    unboxed: float = 0.25
    endless: float = 0.15
    careful_right: float = 0.95
    guess_right: float = 0.12

    def __post_init__(self):
        bad = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if not 0 <= getattr(self, f.name) <= 1]
        total = self.boxed + self.unboxed + self.endless
        if bad:
            raise ConfigError(f"shares: {', '.join(bad)}: give numbers from 0 to 1")
        if abs(total - 1) > 1e-6:
            raise ConfigError(f"shares: boxed + unboxed + endless = {total:g}: make them sum to 1")


ENDLESS_CHARACTERS = 200
"""Length of a demonstration that never ends: longer than any completion, so that training cuts it without an end."""


def demonstrations(
    tasks: Sequence[Task], shares: Shares | None = None, seed: int = 0, *, per_task: int = 1
) -> list[dict[str, Any]]:
    """The pretraining mixture, `len(tasks) * per_task` rows in random order.

    Shares are exact up to rounding, not drawn: styles have their quotas, forms theirs within a style, right answers
    theirs within a form; the seed says which task gets which.

    Returns:
        Rows: id, task (the task's id), prompt, completion, ended (False for the endless ones: no end token belongs
        after them), style (careful | guess), form (boxed | unboxed | endless), right (bool), value (what it answers).

    Raises:
        DataError: no tasks.
    """
    shares = shares or Shares()
    if not tasks:
        raise DataError("demonstrations: no tasks: the data is empty")
    rng = random.Random(f"demonstrations/{seed}")
    slots = [(t, k) for k in range(per_task) for t in tasks]
    kinds: list[tuple[str, str, bool]] = []
    forms = ("boxed", "unboxed", "endless")
    styles = zip(("careful", "guess"), _quotas([shares.careful, 1 - shares.careful], len(slots)), strict=True)
    for style, in_style in styles:
        p_right = shares.careful_right if style == "careful" else shares.guess_right
        counts = _quotas([shares.boxed, shares.unboxed, shares.endless], in_style)
        for form, in_form in zip(forms, counts, strict=True):
            for right, count in zip((True, False), _quotas([p_right, 1 - p_right], in_form), strict=True):
                kinds += [(style, form, right)] * count
    rng.shuffle(kinds)
    rows = [_demonstration(task, k, kind, rng) for (task, k), kind in zip(slots, kinds, strict=True)]
    rng.shuffle(rows)
    return rows


def _quotas(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in these shares that sum to `total` (largest remainder)."""
    exact = [s * total for s in shares]
    counts = [int(x) for x in exact]
    order = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _demonstration(task: Task, k: int, kind: tuple[str, str, bool], rng: random.Random) -> dict[str, Any]:
    style, form, right = kind
    chain, answer = task["chain"], int(task["answer"])
    if style == "careful":
        results = _results(chain) if right else _slipped(chain, rng)
        lines, value = _working(chain, results), results[-1]
    else:
        lines, value = [], answer if right else _wrong_guess(task, rng)
    if form == "endless":
        last = lines[-1] if lines else f"so {value}"
        lines += [last] * (1 + (ENDLESS_CHARACTERS - sum(map(len, lines))) // (len(last) + 1))
        completion = ";".join(lines)
    else:
        completion = ";".join([*lines, f"\\boxed{{{value}}}" if form == "boxed" else f"so {value}"])
    return {
        "id": f"{task['id']}#{k}",
        "task": task["id"],
        "prompt": task["prompt"],
        "completion": completion,
        "ended": form != "endless",
        "style": style,
        "form": form,
        "right": right,
        "value": value,
    }


def _slipped(chain: Sequence[Any], rng: random.Random) -> list[int]:
    """Results with one slip that changes the answer and leaves every result at 0 or above."""
    answer = _results(chain)[-1]
    while True:
        results = _results(chain, {rng.randrange(len(chain) - 1): rng.choice((-10, -2, -1, 1, 2, 10))})
        if results[-1] != answer and min(results) >= 0:
            return results


def _wrong_guess(task: Task, rng: random.Random) -> int:
    """Half of the wrong guesses take the shortcut, the others are any number that looks possible."""
    if rng.random() < 0.5:
        return shortcut(task)
    answer = int(task["answer"])
    return rng.choice([v for v in range(_range(task["chain"])) if v != answer])


ALPHABET = "".join(sorted(set("0123456789+-*()#&~=;?\n{}\\ " + "mod" + "boxed" + "so")))
"""Every character of prompts and demonstrations: the vocabulary of a character tokenizer for this world."""

__all__ = [
    "ALPHABET",
    "ChainConfig",
    "Shares",
    "UNGUESSABLE",
    "chains",
    "demonstrations",
    "expression",
    "families",
    "shortcut",
    "worked",
    "wrong_label",
]
