r"""The math verifier: is the final answer of a response equal to the gold answer?

`check` reads the answer out of a response and decides it tier by tier, cheapest first: literal, normalised literal,
exact rational, decimal within tolerance, structure (sets, tuples, intervals, matrices, equations, inequalities, units)
and exact algebra in process, without sympy and without evaluating anything; what is left goes to a symbolic test in a
killable child process. The tier that said yes is part of the verdict, and so are time-outs and limits, which count as
wrong. `Verifier` does the same for batches in a pool of persistent processes.

Modes (never mix them in one table):
- "math-verify": the general one, named after huggingface/Math-Verify, whose known wrong verdicts it avoids;
- "train-strict": like the training check of the One-Shot RLVR code (deepscaler): two fractions must be written alike
  (2/4 is not 1/2), a whole number equals only a whole number (2+2 is not 4), no structures but tuples, item by item and
  in order; units, dollar, percent and degree signs and a "v =" in front are taken off, and nothing equals its rounding;
- "eval-qwen": like the Qwen2.5-Math grader: 1e-4 relative tolerance, x = 100 x% = x/100, brackets and choice letters
  read leniently. More generous than training: the two accuracies are not on one scale.

Departures from Math-Verify: power towers and huge exponents are compared as formal expressions, not evaluated; letters
are formal, so sqrt(1/n) = 1/sqrt(n); no SIGALRM, so it works in any thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from forethought.errors import ConfigError, RewardError, nearest
from forethought.rewards._verify_judge import judge
from forethought.rewards._verify_text import any_answer, bare_number, last_box, last_number
from forethought.rewards.workers import JobResult, WorkerPool, paused

Mode = Literal["math-verify", "train-strict", "eval-qwen"]
Extract = Literal["box", "last_number", "bare", "any"]
Form = Literal["response", "final"]
Gold = str | int | float | Fraction

MODES = ("math-verify", "train-strict", "eval-qwen")
EXTRACTS = {
    "box": (last_box, r"no closed \boxed{}"),
    "last_number": (last_number, "no number"),
    "bare": (bare_number, "not a bare number"),
    "any": (any_answer, "no answer found"),
}
_log = logging.getLogger(__name__)
_HANDLER = "forethought.rewards.verify:_handle"


@dataclass(frozen=True)
class Verdict:
    """What the verifier found.

    extracted: an answer was found in the response (all that a format reward may look at). tier: which tier said yes,
    None where none did. seconds: time for this check. reason: why; "limit: ..." where a bound decided. answer: the
    text that was read as the answer.
    """

    extracted: bool
    correct: bool
    tier: str | None = None
    seconds: float = 0.0
    timed_out: bool = False
    reason: str = ""
    answer: str | None = None


def check(
    response: str,
    golds: Gold | Sequence[Gold],
    mode: Mode = "math-verify",
    *,
    thinking_end: str | None = None,
    form: Form = "response",
    extract: Extract = "box",
    timeout: float = 2.0,
) -> Verdict:
    r"""Check one response against one gold answer or several acceptable ones.

    Args:
        response: what the model wrote, never the prompt.
        golds: the right answer: text or number, or a list of acceptable ones. A gold text may carry a box or "####".
        mode: see the module. thinking_end: for thinking models, the mark that closes the thoughts; only what follows it
            is read, and a response without it counts as not extracted.
        form: "response" (find the answer in it) or "final" (it is the answer).
        extract: how to find the answer in a response: "box" (last \boxed{}), "last_number" (last number of the text),
            "bare" (the response is a number and nothing else), "any" (box, else "answer is", formula, bold, number).
        timeout: wall-clock seconds for the symbolic tier; running over counts as wrong, is logged, and says timed_out.

    Raises:
        ConfigError: an unknown mode, form or extract. RewardError: the response is no text, or a gold is empty, NaN or
            of another type.
    """
    _validate(mode, form, extract, timeout)
    begin = time.perf_counter()
    answer, problem = _extract(response, thinking_end, form, extract)
    texts = gold_texts(golds)
    if answer is None:
        return Verdict(False, False, None, time.perf_counter() - begin, False, problem)
    decided, left = _judge_all(texts, answer, mode)
    if decided is not None:
        correct, tier, reason = decided
        return _verdict(correct, tier, time.perf_counter() - begin, reason, answer)
    result = _shared_pool().map([[left, answer, mode, True]], timeout=timeout)[0]
    return _from_job(result, answer, time.perf_counter() - begin)


def extract_answer(
    response: str, *, thinking_end: str | None = None, form: Form = "response", extract: Extract = "box"
) -> str | None:
    """The text that `check` would read as the answer, or None."""
    _validate("math-verify", form, extract, 1.0)
    return _extract(response, thinking_end, form, extract)[0]


def gold_texts(golds: Gold | Sequence[Gold]) -> list[str]:
    r"""Golds as a list of texts; a gold that is a whole solution is cut to its box or to what follows "####".

    Raises:
        RewardError: there is no gold, or one is empty, NaN, or neither text nor number.
    """
    many: list[Any] = list(golds) if isinstance(golds, list | tuple) else [golds]
    if not many:
        raise RewardError("golds=[]: give at least one right answer")
    out = []
    for gold in many:
        item = getattr(gold, "item", None)  # a numpy number
        gold = item() if callable(item) else gold
        if isinstance(gold, bool) or not isinstance(gold, str | int | float | Fraction):
            raise RewardError(f"gold={gold!r}: give text or a number, or a list of them")
        if isinstance(gold, float):
            if not math.isfinite(gold):
                raise RewardError(f"gold={gold!r}: not a finite number")
            gold = str(int(gold)) if gold.is_integer() and abs(gold) < 1e16 else repr(float(gold))
        text = str(gold)
        if "####" in text:
            text = text.rpartition("####")[2]
        box = last_box(text)
        text = text if box is None else box
        if not text.strip():
            raise RewardError(f"gold={gold!r}: the right answer is empty")
        out.append(text)
    return out


def _validate(mode: str, form: str, extract: str, timeout: float) -> None:
    for name, value, known in (
        ("mode", mode, MODES),
        ("form", form, ("response", "final")),
        ("extract", extract, EXTRACTS),
    ):
        if value not in known:
            raise ConfigError(f"{name}={value!r}: one of {', '.join(known)}{nearest(str(value), known)}")
    if not timeout > 0:
        raise ConfigError(f"timeout={timeout}: give seconds above 0")


def _extract(response: str, thinking_end: str | None, form: str, extract: str) -> tuple[str | None, str]:
    """(answer, "") or (None, why there is none)."""
    if not isinstance(response, str):
        raise RewardError(f"response={response!r:.80}: give text")
    if thinking_end:
        _, mark, response = response.rpartition(thinking_end)
        if not mark:
            return None, f"the closing thinking mark {thinking_end!r} is missing"
    if form == "final":
        return (response, "") if response.strip() else (None, "empty answer")
    reader, problem = EXTRACTS[extract]
    answer = reader(response)
    return (answer, "") if answer is not None and answer.strip() else (None, problem)


def _judge_all(golds: list[str], answer: str, mode: str) -> tuple[tuple[bool, str | None, str] | None, list[str]]:
    """In-process verdict against all golds, or None and the golds that only the symbolic tier can decide."""
    left, reason = [], "not equal"
    for gold in golds:
        outcome = judge(gold, answer, mode)
        if outcome.equal:
            return (True, outcome.tier, outcome.reason), []
        if outcome.equal is None:
            left.append(gold)
        elif outcome.reason != "not equal":
            reason = outcome.reason
    return (None, left) if left else ((False, None, reason), [])


def _handle(item: list) -> list:
    """A worker's job: [golds, answer, mode, symbolic only] -> [correct, tier, reason, seconds]."""
    golds, answer, mode, symbolic = item
    begin = time.perf_counter()
    decided, left = (None, golds) if symbolic else _judge_all(golds, answer, mode)
    if decided is None:
        with paused():
            from forethought.rewards import _verify_symbolic

            _verify_symbolic.warm([*left, answer])
        begin = time.perf_counter()
        decided = (False, None, "not equal")
        for gold in left:
            outcome = _verify_symbolic.resolve(gold, answer, mode)
            decided = (bool(outcome.equal), outcome.tier, outcome.reason)
            if outcome.equal:
                break
    return [*decided, time.perf_counter() - begin]


def _verdict(correct: bool, tier: str | None, seconds: float, reason: str, answer: str) -> Verdict:
    if reason.startswith("limit"):
        _log.info("verifier: %s (answer %.60r)", reason, answer)
    return Verdict(True, correct, tier, seconds, False, reason, answer)


def _from_job(result: JobResult, answer: str, seconds: float) -> Verdict:
    if result.status == "ok":
        correct, tier, reason, took = result.value
        return _verdict(correct, tier, max(seconds, took), reason, answer)
    if result.status == "error":
        raise RewardError(f"the verifier failed on answer {answer[:60]!r}: {result.detail}")
    _log.warning("verifier: %s after %.2f s (answer %.60r)", result.detail, result.seconds, answer)
    late = result.status == "timeout"
    return Verdict(True, False, None, max(seconds, result.seconds), late, result.detail, answer)


_pool: WorkerPool | None = None
_pool_lock = threading.Lock()


def _shared_pool() -> WorkerPool:
    """One worker for the single checks of this process, started when first needed."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = WorkerPool(_HANDLER, 1)
        return _pool


class Verifier:
    """Checks in a pool of persistent worker processes; a hanging check costs its own time limit only.

    Use it as a context manager, or call `close`. Thread-safe. Counters since it was made: `calls`, `timeouts`,
    `limits`, and `tiers` (tier -> verdicts; None: wrong; "none": nothing extracted).

    Args:
        workers: processes. timeout: wall-clock seconds per check. mode, extract, form, thinking_end: as in `check`.
        memory_mb: address space per worker beyond its base.

    Raises:
        ConfigError: a setting that `check` would refuse.
    """

    def __init__(
        self,
        workers: int = 2,
        timeout: float = 2.0,
        mode: Mode = "math-verify",
        *,
        extract: Extract = "box",
        form: Form = "response",
        thinking_end: str | None = None,
        memory_mb: int = 512,
    ):
        _validate(mode, form, extract, timeout)
        self.timeout, self.mode, self.extract, self.form = timeout, mode, extract, form
        self.thinking_end = thinking_end
        self.calls = self.timeouts = self.limits = 0
        self.tiers: Counter[str | None] = Counter()
        self._lock = threading.Lock()
        self._pool = WorkerPool(_HANDLER, workers, memory_mb=memory_mb)

    def check(self, response: str, golds: Gold | Sequence[Gold]) -> Verdict:
        """One check through the pool."""
        return self.check_many([(response, golds)])[0]

    def check_many(self, pairs: Iterable[tuple[str, Gold | Sequence[Gold]]]) -> list[Verdict]:
        """Verdicts of (response, golds) pairs, in order. Answers are read here, in linear time; comparing is the
        workers' job.

        Raises:
            RewardError: as `check`; or the pool is closed or cannot start.
        """
        out: list[Verdict | None] = []
        jobs, where = [], []
        for i, (response, golds) in enumerate(pairs):
            begin = time.perf_counter()
            answer, problem = _extract(response, self.thinking_end, self.form, self.extract)
            texts = gold_texts(golds)
            if answer is None:
                out.append(Verdict(False, False, None, time.perf_counter() - begin, False, problem))
            else:
                out.append(None)
                jobs.append([texts, answer, self.mode, False])
                where.append(i)
        for i, job, result in zip(where, jobs, self._pool.map(jobs, timeout=self.timeout), strict=True):
            seconds = result.value[3] if result.status == "ok" else result.seconds
            out[i] = _from_job(result, job[1], seconds)
        verdicts = [v for v in out if v is not None]
        with self._lock:
            self.calls += len(verdicts)
            self.timeouts += sum(v.timed_out for v in verdicts)
            self.limits += sum(v.reason.startswith("limit") for v in verdicts)
            self.tiers.update(v.tier if v.extracted else "none" for v in verdicts)
        return verdicts

    def close(self) -> None:
        """Stop all workers; nothing is left running."""
        self._pool.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


__all__ = ["MODES", "Verdict", "Verifier", "check", "extract_answer", "gold_texts", "last_box", "last_number"]
