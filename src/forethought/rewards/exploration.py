r"""The signals of RLSP (Ye et al., arXiv 2502.06773): correctness from the answer alone, exploration from the trajectory
alone.

- `Correctness`: 1 right, 0 wrong, -0.5 without a boxed answer (which takes the place of the verdict, as in the newer of
  the released servers, or is added to it, as in the older one).
- `Length`: -c / L (the published form: longer thinking pays, with decreasing returns), min(L, cap) / cap, or
  log(1 + min(L, cap)) / log(1 + cap).
- `Creativity`: variety of what was tried, by a rule that counts different tries.
- `GradedCreativity`: the same by a language model that grades effort, not correctness.

Departures from the released servers: no division by zero where a box opens the response (it raised, and the handler's 0.0
beat a correct answer of 500 tokens at c = 1000); the last box and the whole reasoning count unless the splitter says
otherwise; answer and gold are compared strictly and in this order; a grader's failure is missing, not 0.5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, get_args

from forethought.errors import ConfigError, RewardError
from forethought.rewards.parts import Access, AnswerView, Missing, RewardPart, Score, TrajectoryView
from forethought.rewards.split import Scope, Split
from forethought.rewards.verify import MODES, Mode, check

Unit = Literal["tokens", "characters", "steps"]
Form = Literal["inverse", "linear", "log"]
NoBox = Literal["replace", "subtract"]

CHARACTERS_PER_TOKEN = 4


class Correctness(RewardPart):
    """Is the final answer right? Reads the answer and the gold, nothing else.

    Args:
        mode: of the verifier; see `verify`. The default is its strict mode: 0.5 is not 50, 1/3 is not 0.3333.
        right, wrong: scores. no_box: what a response without a boxed answer gets.
        rule: "replace": that number alone; "subtract": it is added to the verdict on the answer that the splitter's
            fallback found (wrong where it found none).
        timeout: seconds for an answer that needs symbolic algebra. Running over counts as wrong and in `limits`; a
            verifier process that dies is a fault.

    Raises:
        ConfigError: an unknown mode or rule, or a number that is not finite.
    """

    name = "correctness"
    access: Access = "answer"
    required = True

    def __init__(
        self,
        *,
        mode: Mode = "train-strict",
        right: float = 1.0,
        wrong: float = 0.0,
        no_box: float = -0.5,
        rule: NoBox = "replace",
        timeout: float = 2.0,
    ):
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r}: one of {', '.join(MODES)}")
        if rule not in get_args(NoBox):
            raise ConfigError(f"rule={rule!r}: 'replace' or 'subtract'")
        for name, value in (("right", right), ("wrong", wrong), ("no_box", no_box)):
            if not math.isfinite(value):
                raise ConfigError(f"{name}={value}: give a finite number")
        self.mode: Mode = mode
        self.right, self.wrong, self.no_box, self.rule, self.timeout = right, wrong, no_box, rule, timeout
        self._told = 0, 0
        self.calls = 0
        self.limits = 0
        """Checks that a time or memory limit decided (as wrong)."""

    def score(self, view: AnswerView) -> Score:
        if not view.boxed and self.rule == "replace":
            return self.no_box
        penalty = 0.0 if view.boxed else self.no_box
        if view.answer is None:
            return self.wrong + penalty
        self.calls += 1
        verdict = check(view.answer, view.gold, self.mode, form="final", timeout=self.timeout)
        if verdict.reason.startswith("worker process ended"):
            return Missing("died", f"the verifier's {verdict.reason} on answer {view.answer[:60]!r}")
        self.limits += verdict.reason.startswith("limit")
        return (self.right if verdict.correct else self.wrong) + penalty

    def metrics(self) -> dict[str, float]:
        calls, limits = self._told
        self._told = self.calls, self.limits
        return {"verifier/calls": float(self.calls - calls), "verifier/limits": float(self.limits - limits)}


class Length(RewardPart):
    """Length of the reasoning, whatever it says and whether it is right.

    Args:
        form: see the head of this module. c: strength of the inverse form, in units.
        cap: longest length that is paid. The linear and the log form need one. Choose it below the limit of generation:
            otherwise a response that never ends is worth more than a wrong answer.
        floor: of the inverse form: shorter counts as this long, so that no length is divided by 0; above 0.
        unit: "tokens" of the policy, as it wrote them, "characters" / 4, or "steps": occurrences of `step_mark`, or
            without one non-empty lines. Characters pay for digits, blanks and markup.
        scope: which text counts; see `Split.reasoning`.
        step_mark: regular expression that begins a step.

    Raises:
        ConfigError: a number outside its range, or an unknown choice.
    """

    name = "length"
    access: Access = "trajectory"

    def __init__(
        self,
        form: Form = "inverse",
        *,
        c: float = 1000.0,
        cap: float | None = None,
        floor: float = 1.0,
        unit: Unit = "characters",
        scope: Scope = "all",
        step_mark: str | None = None,
    ):
        bad = [
            f"{name}={value!r}: one of {', '.join(get_args(known))}"
            for name, value, known in (("form", form, Form), ("unit", unit, Unit), ("scope", scope, Scope))
            if value not in get_args(known)
        ]
        if not 0 <= c < math.inf:
            bad.append(f"c={c}: give 0 or more")
        if not 0 < floor < math.inf:
            bad.append(f"floor={floor}: give a positive length, so that an empty reasoning is not divided by")
        if cap is not None and not 0 < cap < math.inf:
            bad.append(f"cap={cap}: give a positive length, or none")
        if cap is None and form != "inverse":
            bad.append(f"form={form!r} needs a cap: give the longest length that is paid")
        if cap is not None and form == "inverse" and cap < floor:
            bad.append(f"cap={cap} is below floor={floor}")
        if bad:
            raise ConfigError("length: " + "; ".join(bad))
        self.form, self.c, self.cap, self.floor, self.unit = form, c, cap, floor, unit
        self.scope: Scope = scope
        self.needs_tokens = unit == "tokens"
        self.step_mark = re.compile(step_mark) if step_mark else None

    def measure(self, split: Split) -> float:
        """L of a response, in units."""
        if self.unit == "tokens":
            return float(split.tokens(self.scope))
        text = split.reasoning(self.scope)
        if self.unit == "characters":
            return len(text) / CHARACTERS_PER_TOKEN
        if self.step_mark is not None:
            return float(len(self.step_mark.findall(text)))
        return float(sum(bool(line.strip()) for line in text.splitlines()))

    def value(self, length: float) -> float:
        """The score of a length."""
        paid = length if self.cap is None else min(length, self.cap)
        if self.form == "inverse":
            return -self.c / max(paid, self.floor)
        assert self.cap is not None
        return paid / self.cap if self.form == "linear" else math.log1p(paid) / math.log1p(self.cap)

    def score(self, view: TrajectoryView) -> Score:
        return self.value(self.measure(view.split))


class Creativity(RewardPart):
    """min(different tries, cap) / cap: a share of the variety that is asked for; the same try twice earns nothing.

    Args:
        count: (problem, response) -> number of different things tried. cap: enough of them.

    Raises:
        ConfigError: cap below 1.
    """

    name = "creativity"
    access: Access = "trajectory"

    def __init__(self, count: Callable[[str, str], int], *, cap: int = 5):
        if cap < 1:
            raise ConfigError(f"cap={cap}: give at least 1 try")
        self.count, self.cap = count, cap

    def score(self, view: TrajectoryView) -> Score:
        return min(self.count(view.problem, view.response), self.cap) / self.cap


class Grades(Protocol):
    """What grades: `judge.Grader`, or anything with this method."""

    def grade(self, items: Sequence[tuple[dict[str, Any], str]]) -> Sequence[float | RewardError]: ...


RUBRIC = (
    "You rate how much thinking effort a solution shows. Whether its result is right is no concern of yours and must not "
    "move the number.\n"
    "Look at four things: how many different strategies are tried; how far each is taken; how unusual the ideas are; and "
    "whether the solver goes on after a setback.\n"
    "Scale: 0 no effort, an answer without work. 0.2 to 0.4 one strategy. 0.5 to 0.7 two or so, with some depth. 0.8 to 0.9 "
    "several, revised after they failed. 1 a wide and stubborn search. Length and praise of itself are not effort."
)
"""Our wording of what the published grader is asked: effort in four dimensions on an anchored scale, not correctness."""


class GradedCreativity(RewardPart):
    """A grader's number in [0, 1] for the effort that a trajectory shows; it is never shown the gold.

    A grade that fails is missing: the published default of 0.5 pays for answers that break the grader. Cache, budget,
    audit and what is done about instructions in the answer are the grader's (`judge.Grader`); use `RUBRIC`.

    Args:
        counts: further numbers to log (calls, audit).
    """

    name = "creativity"
    access: Access = "trajectory"
    costly = True

    def __init__(self, grader: Grades, counts: Callable[[], dict[str, float]] = dict):
        self.grader, self.metrics = grader, counts

    def score_many(self, views: Sequence[TrajectoryView]) -> list[Score]:
        try:
            grades = list(self.grader.grade([({"prompt": v.problem}, v.response) for v in views]))
        except Exception as err:
            return [Missing("exception", f"part {self.name!r}: {type(err).__name__}: {err}") for _ in views]
        out: list[Score] = []
        for grade in grades:
            if isinstance(grade, RewardError):
                out.append(Missing("no grade", str(grade)))
            elif not 0 <= grade <= 1:
                out.append(Missing("no grade", f"the grade is {grade}, not a number from 0 to 1"))
            else:
                out.append(float(grade))
        return out
