r"""How a response searches: marks of free text, and exact counts where the text is a trace that can be parsed.

Counting words alone is weak evidence: a base model writes "wait" and "let me check" already, and a policy that is paid
for them learns to write them. So these numbers are to be compared with those of the base model, at equal accuracy or
equal length, on problems whose first attempt was wrong; and where a world has a trace grammar, its counts are exact.

RLSP (Ye et al., arXiv 2502.06773) reports backtracking, exploring several ideas and self-verification; its own protocol
was not found, so the marks below are ours.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from forethought.envs.congruence import Puzzle, parse_trace
from forethought.errors import DataError
from forethought.evaluate.metrics import ngram_repetition
from forethought.rewards.split import Splitter

MARKS: dict[str, re.Pattern[str]] = {
    "backtrack": re.compile(
        r"\bwait\b|\bhold on\b|\b(?:go|going|step) back\b|\bback ?track\w*|\bscratch that\b|\bstart(?:ing)? over\b"
        r"|\bth(?:at|is)(?:'s| is| was) (?:wrong|not right|incorrect|a mistake)\b"
        r"|\bth(?:at|is) (?:cannot be|can't be|isn't) right\b"
        r"|\bI made (?:a|an) (?:mistake|error)\b|\bon second thought\b",
        re.I,
    ),
    "another way": re.compile(
        r"\balternativ(?:e|ely)\b|\banother (?:way|approach|method|idea)\b|\ba different (?:way|approach|method|idea)\b"
        r"|\blet(?:'s| me| us) (?:instead )?try\b|\binstead,? (?:let|we|I)\b",
        re.I,
    ),
    "verification": re.compile(
        r"\b(?:double[- ]?|re-?)check\w*|\bverif(?:y|ies|ied|ying|ication)\b|\bsubstitut\w+ (?:this |it |that )?back\b"
        r"|\bplug\w* (?:this |it |that )?(?:back )?in(?:to)?\b|\blet(?:'s| me| us) check\b|\bsanity check\b|\bto check\b",
        re.I,
    ),
}
"""Marks of English text by kind; a mark counts each time it stands there."""


def text_behaviour(text: str, splitter: Splitter | None = None) -> dict[str, float]:
    """Numbers of one free-text response: counts of each kind of `MARKS`, boxes, words; share of repeated 4-grams of
    words; compression (compressed by original size; low: it repeats itself)."""
    words = text.split()
    out = {name: float(len(pattern.findall(text))) for name, pattern in MARKS.items()}
    split = (splitter or Splitter())(text)
    return out | {
        "boxes": float(len(split.boxes)),
        "words": float(len(words)),
        "repetition": ngram_repetition(words),
        "compression": len(zlib.compress(text.encode())) / max(1, len(text.encode())),
    }


def trace_behaviour(
    text: str, puzzle: Puzzle, tokens: Sequence[int] | None = None, splitter: Splitter | None = None
) -> dict[str, float]:
    """Exact counts of one trace over a puzzle.

    tries, distinct tries, malformed tries, false arithmetic, false yes, false no: counts. failed first, recovered: 0 or
    1. repetition: share of repeated 4-grams of `tokens` (of words without them). first right, final right: is the first
    tentative answer (the first try, else the first box) a solution, and is the final one.
    """
    trace = parse_trace(text, puzzle)
    split = (splitter or Splitter())(text)
    box = split.boxes[0] if split.boxes else None
    first = trace.attempts[0].x if trace.attempts else (box.content if box else None)
    return {
        "tries": float(trace.tries),
        "distinct tries": float(trace.distinct),
        "malformed tries": float(trace.malformed),
        "false arithmetic": float(trace.false_arithmetic),
        "false yes": float(trace.false_yes),
        "false no": float(trace.false_no),
        "failed first": float(trace.failed_first),
        "recovered": float(trace.recovered),
        "repetition": ngram_repetition(text.split() if tokens is None else tokens),
        "first right": float(_solves(first, puzzle)),
        "final right": float(_solves(split.answer, puzzle)),
    }


def _solves(answer: str | int | None, puzzle: Puzzle) -> bool:
    text = str(answer).strip() if answer is not None else ""
    return text.isdecimal() and len(text) < 10 and puzzle.solves(int(text))


def mean_behaviour(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Means over responses; for traces also "recovered of failed" (share of those whose first try failed) and "gain
    from revision" (final right minus first right).

    Raises:
        DataError: no rows.
    """
    many = list(rows)
    if not many:
        raise DataError("no responses: nothing to count")
    out = {name: float(np.mean([row[name] for row in many])) for name in many[0]}
    if "first right" in out:
        out["gain from revision"] = out["final right"] - out["first right"]
        failed = [row["recovered"] for row in many if row["failed first"]]
        if failed:
            out["recovered of failed"] = float(np.mean(failed))
    return out


def at_equal_length(
    ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]], edges: Sequence[float]
) -> tuple[float, float] | None:
    """Means of a number for two policies at equal length: (length, number) pairs, compared within bins of length.

    Each bin that both have counts by the smaller of their numbers of responses. None where they share no bin.

    Raises:
        DataError: fewer than two edges, or edges that do not rise.
    """
    if len(edges) < 2 or any(a >= b for a, b in zip(edges, edges[1:], strict=False)):
        raise DataError(f"edges={list(edges)}: give at least two rising numbers")
    weights, pairs = [], []
    for low, high in zip(edges, edges[1:], strict=False):
        mine, other = ([n for length, n in rows if low <= length < high] for rows in (ours, theirs))
        if mine and other:
            weights.append(min(len(mine), len(other)))
            pairs.append((float(np.mean(mine)), float(np.mean(other))))
    if not weights:
        return None
    return tuple(float(np.average([p[i] for p in pairs], weights=weights)) for i in (0, 1))  # type: ignore[return-value]
