r"""Congruence puzzles whose solution needs trying: the miniature world of RLSP (Ye et al., arXiv 2502.06773).

A puzzle: `find x in 0..11: (1*x*x+3*x+4) mod 17=14`, with exactly one solution in the range; the answer belongs in
`\boxed{}`. One check is cheap, and there is no short way to the solution, so a solver tries, checks and goes on:

    try 7: 74 mod 17=6 no. try 4: 32 mod 17=15 no. try 2: 14 mod 17=14 yes. \boxed{2}

The sum may be written out in front of its value (`try 7: 1*49+3*7+4=74 mod 17=6 no.`), and free text may stand between
the tries. `parse_trace` is strict about the tries themselves and needs the puzzle's text only, never its answer.

`mixture` writes what the base model is pretrained on (mostly direct guesses, some one-try traces, few multi-try traces,
arithmetic facts), `search_traces` the demonstrations of search for supervised fine-tuning.

Splits share no puzzle: the split follows from a hash of the puzzle's normal form, coefficients modulo p and the right
side brought to the left, so a puzzle that only moves a constant from one side to the other is the same puzzle.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from forethought.envs.pools import MAX_MISSES, SPLITS, split_of, task_id
from forethought.errors import ConfigError, DataError, nearest

Task = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PuzzleConfig:
    """Sizes: x in 0..`top`, a in 1..`max_a`, b in 0..`max_b`, c in 0..`max_c`, moduli `min_p`..`max_p`.

    max_a 0: the puzzles are linear, (b*x+c) mod p, with b in 1..`max_b`.
    """

    top: int = 11
    max_a: int = 1
    max_b: int = 4
    max_c: int = 4
    min_p: int = 13
    max_p: int = 47

    def __post_init__(self):
        bad = []
        if self.top < 1:
            bad.append(f"top={self.top}: give at least 1, so that there is something to find")
        for name, least in (("max_a", 0), ("max_b", 0 if self.max_a else 1), ("max_c", 0)):
            if getattr(self, name) < least:
                bad.append(f"{name}={getattr(self, name)}: give at least {least}")
        if not self.top < self.min_p <= self.max_p:
            bad.append(f"min_p={self.min_p}, max_p={self.max_p}, top={self.top}: give top < min_p <= max_p")
        if bad:
            raise ConfigError("puzzles: " + "; ".join(bad))

    @property
    def max_value(self) -> int:
        """The largest value that a*x*x+b*x+c takes."""
        return self.max_a * self.top**2 + self.max_b * self.top + self.max_c


@dataclass(frozen=True)
class Puzzle:
    """Find x in 0..top with (a*x*x + b*x + c) mod p = r."""

    a: int
    b: int
    c: int
    p: int
    r: int
    top: int

    @property
    def expression(self) -> str:
        square = f"{self.a}*x*x+" if self.a else ""
        return f"({square}{self.b}*x+{self.c}) mod {self.p}"

    @property
    def text(self) -> str:
        return f"find x in 0..{self.top}: {self.expression}={self.r}\n"

    @property
    def key(self) -> str:
        """The same for puzzles that are the same congruence over the same range."""
        p = self.p
        return f"{self.a % p},{self.b % p},{(self.c - self.r) % p},{p},{self.top}"

    def value(self, x: int) -> int:
        return self.a * x * x + self.b * x + self.c

    def residue(self, x: int) -> int:
        return self.value(x) % self.p

    def solves(self, x: int) -> bool:
        return 0 <= x <= self.top and self.residue(x) == self.r

    def solutions(self) -> list[int]:
        return [x for x in range(self.top + 1) if self.solves(x)]


_PUZZLE = re.compile(r"find x in 0\.\.(\d+): \((?:(\d+)\*x\*x\+)?(\d+)\*x\+(\d+)\) mod (\d+)=(\d+)")


def parse_puzzle(text: str) -> Puzzle:
    """The puzzle that a prompt states.

    Raises:
        DataError: it states none.
    """
    found = _PUZZLE.search(text)
    if found is None:
        raise DataError(f"no puzzle of the form 'find x in 0..T: (a*x*x+b*x+c) mod p=r' in {text[:80]!r}")
    top, a, b, c, p, r = (int(n or 0) for n in found.groups())
    if p < 1:
        raise DataError(f"modulus {p} in {text[:80]!r}: give at least 1")
    return Puzzle(a, b, c, p, r, top)


def puzzles(n: int, seed: int = 0, split: str = "train", *, config: PuzzleConfig | None = None) -> list[dict[str, Any]]:
    """`n` different puzzles: id, prompt (a line), answer (the only solution), family, split.

    Raises:
        ConfigError: no such split, n below 1. DataError: the split has fewer puzzles than n.
    """
    config = config or PuzzleConfig()
    if split not in SPLITS:
        raise ConfigError(f"split={split!r}: one of {', '.join(SPLITS)}{nearest(split, SPLITS)}")
    if n < 1:
        raise ConfigError(f"n={n}: give at least 1")
    sizes = "-".join(str(getattr(config, f.name)) for f in fields(config))
    family = "congruence" if config == PuzzleConfig() else f"congruence:{sizes}"
    rng = random.Random(f"{family}/{split}/{seed}")
    rows: dict[str, dict[str, Any]] = {}
    misses = 0
    while len(rows) < n:
        puzzle = _draw(config, rng)
        solutions = puzzle.solutions()
        # The normal form owns the split, the wording makes the row: one form may have several wordings, in one split.
        if len(solutions) != 1 or puzzle.text in rows or split_of(family, puzzle.key) != split:
            misses += 1
            if misses >= MAX_MISSES:
                raise DataError(f"family {family!r}, split {split!r}: n={n}, but only {len(rows)} puzzles were found")
            continue
        misses = 0
        columns = {"prompt": puzzle.text, "answer": str(solutions[0])}
        rows[puzzle.text] = {"id": task_id(family, puzzle.text), "family": family, "split": split, **columns}
    return list(rows.values())


def _draw(config: PuzzleConfig, rng: random.Random) -> Puzzle:
    """A puzzle that has a solution, maybe several."""
    x, p = rng.randint(0, config.top), rng.randint(config.min_p, config.max_p)
    a = rng.randint(1, config.max_a) if config.max_a else 0
    b, c = rng.randint(0 if a else 1, config.max_b), rng.randint(0, config.max_c)
    return Puzzle(a, b, c, p, (a * x * x + b * x + c) % p, config.top)


def pieces(config: PuzzleConfig) -> list[str]:
    """What texts of this world are made of, longest first within each kind: words, then every number that occurs.

    A tokenizer with one token per piece reads them without a rest (`recipes.rlsp.world`).
    """
    words = ["find x in 0..", "check ", "try ", "*x*x+", "*x+", ") mod ", " mod ", " yes. ", " no. ", "\\boxed{", ": "]
    return (
        words + ["}", "(", "=", "+", "*", " ", "\n"] + [str(n) for n in range(max(config.max_value, config.max_p) + 1)]
    )


# -- traces ------------------------------------------------------------------------------------------------------------


def attempt(puzzle: Puzzle, x: int, *, spelled: bool = False) -> str:
    """One true try. `spelled`: with the sum written out."""
    square = f"{puzzle.a}*{x * x}+" if puzzle.a else ""
    working = f"{square}{puzzle.b}*{x}+{puzzle.c}=" if spelled else ""
    verdict = "yes" if puzzle.solves(x) else "no"
    return f"try {x}: {working}{puzzle.value(x)} mod {puzzle.p}={puzzle.residue(x)} {verdict}. "


def search_trace(puzzle: Puzzle, tries: int, rng: random.Random, *, repeats: float = 0.0, spelled: bool = False) -> str:
    """Try until one holds, at most `tries` times, then box it, or a number that was not tried.

    repeats: share of the tries that are drawn from all numbers, those already tried included.
    """
    left = list(range(puzzle.top + 1))
    rng.shuffle(left)
    every, text = list(left), ""
    for _ in range(tries):
        if not left:
            break
        x = rng.choice(every) if rng.random() < repeats else left[-1]
        if x in left:
            left.remove(x)
        text += attempt(puzzle, x, spelled=spelled)
        if puzzle.solves(x):
            return f"{text}\\boxed{{{x}}}"
    return f"{text}\\boxed{{{rng.choice(left or every)}}}"


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Shares of the pretraining mixture, of 1, and the sizes of its parts.

    direct: a random number in a box. one_try: one try, then a box. multi_try: 2 to `max_tries` tries, of which
    `repeats` do not look at what was tried. facts: 1 to `checks` checks of different numbers in a row, in words of their own, so
    that arithmetic is learnt without trying being learnt; `checks_right` of these rows end in the solution and its box.
    """

    direct: float = 0.14
    one_try: float = 0.06
    multi_try: float = 0.05
    facts: float = 0.75
    max_tries: int = 12
    repeats: float = 0.3
    checks: int = 3
    checks_right: float = 0.75

    def __post_init__(self):
        shares = ("direct", "one_try", "multi_try", "facts")
        bad = [f"{n}={getattr(self, n)}: give a share from 0 to 1" for n in (*shares, "repeats", "checks_right")
               if not 0 <= getattr(self, n) <= 1]  # fmt: skip
        total = sum(getattr(self, n) for n in shares)
        if abs(total - 1) > 1e-6:
            bad.append(f"{' + '.join(shares)} = {total:g}: make them sum to 1")
        for name, least in (("max_tries", 2), ("checks", 1)):
            if getattr(self, name) < least:
                bad.append(f"{name}={getattr(self, name)}: give at least {least}")
        if bad:
            raise ConfigError("mix: " + "; ".join(bad))


def mixture(
    tasks: Sequence[Task], mix: Mix | None = None, seed: int = 0, *, n: int | None = None, spelled: bool = False
) -> list[dict[str, Any]]:
    """The pretraining mixture: `n` rows (by default one a task), tasks in turn, kinds in exact shares up to rounding.

    Returns:
        Rows: prompt, completion, kind (direct | one_try | multi_try | facts).

    Raises:
        DataError: no tasks.
    """
    mix = mix or Mix()
    if not tasks:
        raise DataError("mixture: no tasks: the data is empty")
    n = len(tasks) if n is None else n
    rng = random.Random(f"mixture/{seed}")
    edges = [
        round(n * share) for share in (mix.direct, mix.direct + mix.one_try, mix.direct + mix.one_try + mix.multi_try)
    ]
    kinds = ["direct"] * edges[0] + ["one_try"] * (edges[1] - edges[0]) + ["multi_try"] * (edges[2] - edges[1])
    kinds += ["facts"] * (n - edges[2])
    rng.shuffle(kinds)
    return [_row(tasks[i % len(tasks)], kind, mix, rng, spelled) for i, kind in enumerate(kinds)]


def _row(task: Task, kind: str, mix: Mix, rng: random.Random, spelled: bool) -> dict[str, Any]:
    puzzle, prompt = parse_puzzle(task["prompt"]), task["prompt"]
    if kind == "direct":
        completion = f"\\boxed{{{rng.randint(0, puzzle.top)}}}"
    elif kind == "one_try":
        completion = search_trace(puzzle, 1, rng, spelled=spelled)
    elif kind == "multi_try":
        tries = rng.randint(2, mix.max_tries)
        completion = search_trace(puzzle, tries, rng, repeats=mix.repeats, spelled=spelled)
    else:
        solution = puzzle.solutions()[0]
        wrong = [x for x in range(puzzle.top + 1) if x != solution]
        xs = rng.sample(wrong, min(len(wrong), rng.randint(1, mix.checks)))
        box = ""
        if rng.random() < mix.checks_right:
            xs[-1], box = solution, f"\\boxed{{{solution}}}"
        prompt = f"check {puzzle.expression}={puzzle.r}\n"
        completion = "".join(attempt(puzzle, x, spelled=spelled).removeprefix("try ") for x in xs) + box
    return {"prompt": prompt, "completion": completion, "kind": kind}


def search_traces(
    tasks: Sequence[Task], *, min_tries: int, max_tries: int, seed: int = 0, spelled: bool = False
) -> list[dict[str, Any]]:
    """Demonstrations of search, one a task: all numbers tried are different, `min_tries` to `max_tries` of them at most.

    Raises:
        ConfigError: not 1 <= min_tries <= max_tries. DataError: no tasks.
    """
    if not 1 <= min_tries <= max_tries:
        raise ConfigError(f"min_tries={min_tries}, max_tries={max_tries}: give 1 <= min_tries <= max_tries")
    if not tasks:
        raise DataError("search traces: no tasks: the data is empty")
    rng = random.Random(f"search/{seed}")
    out = []
    for task in tasks:
        trace = search_trace(parse_puzzle(task["prompt"]), rng.randint(min_tries, max_tries), rng, spelled=spelled)
        out.append({"id": task["id"], "prompt": task["prompt"], "completion": trace, "kind": "search"})
    return out


# -- the strict parser -------------------------------------------------------------------------------------------------

_TRY = re.compile(r"\btry\b\s*(\d+)\s*:\s*(?:([\d*+ ]+)=\s*)?(\d+)\s*mod\s*(\d+)\s*=\s*(\d+)\s*(yes|no)\b\s*\.?")
_MARK = re.compile(r"\btry\b")
_MAX_DIGITS = 18  # longer numbers are no arithmetic of this world


@dataclass(frozen=True)
class Try:
    """One try as it was written, and what is true of it."""

    x: int
    claims_yes: bool
    solves: bool
    sound: bool
    """Every equality that is written in it is true, of this puzzle and this x."""


@dataclass(frozen=True)
class Trace:
    """What the parser found. Counts: `tries` (well formed), `distinct` (different numbers of the range among them),
    `malformed` ("try" marks that are no try), `false_arithmetic`, `false_yes`, `false_no` (tries with a wrong
    equality, a wrong yes, a wrong no)."""

    attempts: tuple[Try, ...]
    malformed: int
    top: int

    @property
    def tries(self) -> int:
        return len(self.attempts)

    @property
    def distinct(self) -> int:
        return len({t.x for t in self.attempts if t.x <= self.top})

    @property
    def false_arithmetic(self) -> int:
        return sum(not t.sound for t in self.attempts)

    @property
    def false_yes(self) -> int:
        return sum(t.claims_yes and not t.solves for t in self.attempts)

    @property
    def false_no(self) -> int:
        return sum(t.solves and not t.claims_yes for t in self.attempts)

    @property
    def failed_first(self) -> bool:
        """The first try was of a number that does not solve the puzzle."""
        return bool(self.attempts) and not self.attempts[0].solves

    @property
    def recovered(self) -> bool:
        """A failed try was followed by one that solves the puzzle and says so."""
        failed = False
        for one in self.attempts:
            if one.solves and one.claims_yes and failed:
                return True
            failed = failed or not one.solves
        return False


def parse_trace(text: str, puzzle: Puzzle) -> Trace:
    """Read the tries of a response; see the module for the grammar. Needs the puzzle, not its answer."""
    found = []
    for match in _TRY.finditer(text):
        x, working, value, p, r = match.group(1, 2, 3, 4, 5)
        if any(len(n) > _MAX_DIGITS for n in (x, value, p, r)):
            continue
        number, said = int(x), int(value)
        sound = said == puzzle.value(number) and int(p) == puzzle.p and int(r) == said % puzzle.p
        if working is not None:
            sound = sound and _sum(working) == said
        found.append(Try(number, match[6] == "yes", puzzle.solves(number), sound))
    return Trace(tuple(found), len(_MARK.findall(text)) - len(found), puzzle.top)


def _sum(text: str) -> int | None:
    """Value of a sum of products of whole numbers, None where it is none."""
    total = 0
    for term in text.replace(" ", "").split("+"):
        product = 1
        for factor in term.split("*"):
            if not factor.isdigit() or len(factor) > _MAX_DIGITS:
                return None
            product *= int(factor)
        total += product
    return total


__all__ = [
    "Mix",
    "Puzzle",
    "PuzzleConfig",
    "Trace",
    "Try",
    "attempt",
    "mixture",
    "parse_puzzle",
    "parse_trace",
    "pieces",
    "puzzles",
    "search_trace",
    "search_traces",
]
