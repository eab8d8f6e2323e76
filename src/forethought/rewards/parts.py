"""Reward parts with declared access: what a part may read is what it is handed, so decoupling is a fact, not a promise.

RLSP (Ye et al., arXiv 2502.06773) pays two signals that must not see each other: whether the answer is right (the
answer alone) and how much was explored (the trajectory alone). A part declares its access and gets a view of that kind:

- "answer": the final answer and the gold; the reasoning field is there and always empty;
- "trajectory": problem, response and boxes; there is no gold (reading it is an AttributeError);
- "both": everything.

A part that fails gives `Missing` with a tag, never a number: a default such as 0 or 0.5 lies above most rewards and
would pay for breaking the scorer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from forethought.errors import ConfigError, RewardError
from forethought.rewards.isolate import Worker, WorkerDied, WorkerHung
from forethought.rewards.loading import absolute_spec, describe, load_object
from forethought.rewards.split import Split

Access = Literal["answer", "trajectory", "both"]


@dataclass(frozen=True, slots=True)
class Missing:
    """No score. tag: what kind of fault (exception, not finite, timeout, died, no grade); reason: in words."""

    tag: str
    reason: str


Score = float | Missing


@dataclass(frozen=True, slots=True)
class AnswerView:
    """What an answer-only part sees. answer: None where the response gives none; boxed: a box gave it."""

    answer: str | None
    boxed: bool
    gold: Any
    reasoning: str = ""
    """Always empty: how the answer was found is not this part's business."""


@dataclass(frozen=True, slots=True)
class TrajectoryView:
    """What a trajectory-only part sees. problem: the prompt's text."""

    problem: str
    split: Split

    @property
    def response(self) -> str:
        return self.split.response

    @property
    def reasoning(self) -> str:
        return self.split.reasoning()


@dataclass(frozen=True, slots=True)
class FullView:
    """What a part with access to both sees."""

    problem: str
    split: Split
    gold: Any

    @property
    def answer(self) -> str | None:
        return self.split.answer

    @property
    def boxed(self) -> bool:
        return self.split.boxed

    @property
    def response(self) -> str:
        return self.split.response

    @property
    def reasoning(self) -> str:
        return self.split.reasoning()


View = AnswerView | TrajectoryView | FullView


def view(access: Access, problem: str, split: Split, gold: Any) -> View:
    """The view that a part with this access is handed."""
    if access == "answer":
        return AnswerView(split.answer, split.boxed, gold)
    if access == "trajectory":
        return TrajectoryView(problem, split)
    return FullView(problem, split, gold)


class RewardPart:
    """One signal. Subclasses set `name` and `access` and give `score` (or `score_many`, where a batch is cheaper).

    needs_tokens: it counts the policy's tokens (`Split.tokens`).
    costly: not asked while its weight is 0 (the others are, so that they are logged).
    required: where it is missing the sample has no reward, whatever the policy for missing parts: exploration without
    the verifier's word would be paid for anything.
    """

    name: str
    access: Access
    needs_tokens: bool = False
    costly: bool = False
    required: bool = False

    def score(self, view: Any) -> Score:
        """The score of one sample; an exception is a fault."""
        raise NotImplementedError

    def score_many(self, views: Sequence[Any]) -> list[Score]:
        """One score per view, in order."""
        out: list[Score] = []
        for one in views:
            try:
                out.append(self.score(one))
            except Exception as err:
                out.append(Missing("exception", f"part {self.name!r}: {describe(err)}"))
        return out

    def judge(self, views: Sequence[Any]) -> list[Score]:
        """Scores that are finite numbers or `Missing`, one per view.

        Raises:
            RewardError: `score_many` gave another number of scores.
        """
        scores = self.score_many(views)
        if len(scores) != len(views):
            raise RewardError(f"part {self.name!r} gave {len(scores)} scores for {len(views)} samples")
        out: list[Score] = []
        for score in scores:
            if isinstance(score, Missing):
                out.append(score)
            elif (number := _finite(score)) is None:
                out.append(
                    Missing("not finite", f"part {self.name!r} gave {score!r:.80}; it must give a finite number")
                )
            else:
                out.append(number)
        return out

    def metrics(self) -> dict[str, float]:
        """Further numbers to log, of what was judged since they were asked for last (so that a resumed run has them)."""
        return {}

    def close(self) -> None:
        """Let go of processes and connections."""


class FunctionPart(RewardPart):
    """A Python function of a view.

    Raises:
        ConfigError: an unknown access, or no name.
    """

    def __init__(self, name: str, access: Access, function: Callable[[Any], float], *, costly: bool = False):
        self.name, self.access, self.costly = _named(name), _checked(access), costly
        self.function = function

    def score(self, view: Any) -> Score:
        return self.function(view)


class IsolatedPart(RewardPart):
    """A function of the user's own file, in a child process that is killed when it hangs.

    A call that takes longer than `timeout` seconds is Missing("timeout"), one that ends the process Missing("died");
    the child is started again for the next sample.

    Args:
        spec: `file.py:NAME` or `package.module:NAME`, a function of a view.

    Raises:
        ConfigError: a bad name, access or timeout, or nothing of that name.
    """

    def __init__(self, name: str, access: Access, spec: str, *, timeout: float = 10.0, costly: bool = False):
        if not 0 < timeout < float("inf"):
            raise ConfigError(f"part {name!r}: timeout={timeout}: give a positive number of seconds")
        load_object(spec, f"reward part {name!r}")
        self.name, self.access, self.costly = _named(name), _checked(access), costly
        self.spec, self.timeout = absolute_spec(spec), timeout
        self._worker: Worker | None = None

    def score(self, view: Any) -> Score:
        try:
            if self._worker is None:
                self._worker = Worker("forethought.rewards.parts:_serve", self.spec, self.name)
                self._worker.receive(120.0)  # its import of the file
            self._worker.send(view)
            value, problem = self._worker.receive(self.timeout)
        except WorkerHung:
            self._worker = None
            return Missing("timeout", f"part {self.name!r} did not answer within {self.timeout:g} s")
        except WorkerDied as err:
            self._worker = None
            return Missing("died", f"part {self.name!r}: {err}")
        except BaseException:
            self.close()  # an answer that still comes would be taken for that of the next sample
            raise
        return Missing("exception", f"part {self.name!r}: {problem}") if problem else value

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _serve(connection: Any, spec: str, name: str) -> None:
    """The child's side of `IsolatedPart`."""
    function = load_object(spec, f"reward part {name!r}")
    connection.send("ready")
    while True:
        given = connection.recv()
        try:
            connection.send((function(given), ""))
        except Exception as err:
            connection.send((None, describe(err)))


def _finite(value: Any) -> float | None:
    """A finite number (also one of numpy or a tensor) as a float, else None."""
    if not isinstance(value, bool | int | float) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, bool | int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _named(name: str) -> str:
    if not name or "/" in name:
        raise ConfigError(f"part name={name!r}: give a name without '/'")
    return name


def _checked(access: Access) -> Access:
    if access not in get_args(Access):
        raise ConfigError(f"access={access!r}: one of {', '.join(get_args(Access))}")
    return access
