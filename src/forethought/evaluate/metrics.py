"""What an evaluation says beside accuracy: boxed, truncated and repeated shares, lengths, reflection words, answers.

Accuracy alone hides why it moved: a model that learns to stop, or to box its answer, gains without reasoning better. So
every suite reports these next to it (One-Shot RLVR, arXiv 2504.20571, reports boxed, truncated and repeated shares and
counts of "rethink", "recheck", "recalculate").

Right is what the judge called right, never how an episode ended: done is not won.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from forethought.envs.env import Step
from forethought.errors import ConfigError, DataError, EnvError
from forethought.rewards._verify_text import last_box
from forethought.tree.tree import Stop

REFLECTION = {
    "rethink": re.compile(r"\bre-?th(?:ink(?:s|ing)?|ought)\b", re.I),
    "recheck": re.compile(r"\bre-?check(?:s|ed|ing)?\b", re.I),
    "recalculate": re.compile(r"\bre-?calculat(?:es?|ed|ing|ions?)\b", re.I),
}


@dataclass(frozen=True)
class Row:
    """One evaluated sample.

    task: its id; sample: index among the task's samples. score: the judge's number, None where `error` says what failed
    (then `right` is False, and the row stays in every denominator). answer: the extracted answer, None where there is
    none. length: response tokens. stop: why sampling ended (`Stop`). parts: the judge's parts by name.
    """

    task: str
    sample: int
    right: bool
    score: float | None
    text: str = ""
    answer: str | None = None
    length: int = 0
    stop: Stop = Stop.EOS
    repeated: bool = False
    error: str | None = None
    parts: dict[str, float] = field(default_factory=dict)


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Shares and means over rows, names as in metrics.jsonl.

    accuracy, errors (share), boxed, truncated (stopped by length), repeated, length/mean, length/p95 (tokens),
    reflection/<word> (occurrences a response), score/<part> (mean over the rows that have it), score (mean over judged
    rows; absent where none was).

    Raises:
        DataError: no rows.
    """
    if not rows:
        raise DataError("no rows: nothing was evaluated")
    n = len(rows)
    lengths = [r.length for r in rows]
    out = {
        "accuracy": sum(r.right for r in rows) / n,
        "errors": sum(r.error is not None for r in rows) / n,
        "boxed": sum(has_box(r.text) for r in rows) / n,
        "truncated": sum(r.stop == Stop.LENGTH for r in rows) / n,
        "repeated": sum(r.repeated for r in rows) / n,
        "length/mean": float(np.mean(lengths)),
        "length/p95": float(np.percentile(lengths, 95)),
    }
    for word, count in reflection_counts(r.text for r in rows).items():
        out[f"reflection/{word}"] = count / n
    scores = [r.score for r in rows if r.score is not None]
    if scores:
        out["score"] = float(np.mean(scores))
    parts: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.parts.items():
            parts.setdefault(name, []).append(value)
    return out | {f"score/{name}": float(np.mean(values)) for name, values in sorted(parts.items())}


def has_box(text: str) -> bool:
    r"""The response ends in a closed `\boxed{...}`, by brace counting; pass the response alone, not the prompt."""
    return last_box(text) is not None


def ngram_repetition(tokens: Sequence[Hashable], n: int = 4) -> float:
    """Share of n-grams that stood before: 1 - distinct / all; 0 for fewer than n tokens.

    Raises:
        ConfigError: n below 1.
    """
    if n < 1:
        raise ConfigError(f"n={n}: give n-grams of at least 1 token")
    total = len(tokens) - n + 1
    if total < 1:
        return 0.0
    return 1 - len({tuple(tokens[i : i + n]) for i in range(total)}) / total


def is_repeated(tokens: Sequence[Hashable], *, n: int = 4, threshold: float = 0.5, least: int = 32) -> bool:
    """A response that goes round in circles: at least `least` tokens, and `ngram_repetition` of `threshold` or more."""
    return len(tokens) >= least and ngram_repetition(tokens, n) >= threshold


def reflection_counts(texts: Iterable[str]) -> dict[str, int]:
    """How often the texts say "rethink", "recheck", "recalculate", in any form."""
    counts = dict.fromkeys(REFLECTION, 0)
    for text in texts:
        for word, pattern in REFLECTION.items():
            counts[word] += len(pattern.findall(text))
    return counts


def distinct_answers(answers: Iterable[str | None]) -> list[tuple[str | None, int]]:
    """Answers with their counts, most frequent first (ties: seen first); None counts responses without an answer."""
    return Counter(answers).most_common()


def episode_success(step: Step) -> bool:
    """Whether the episode that ended in this step was won: its `info["success"]`.

    Raises:
        EnvError: the episode is not over, or the environment does not say. The end itself is no success.
    """
    if not step.done:
        raise EnvError("the episode is not over: neither terminated nor truncated")
    if "success" not in step.info:
        raise EnvError(
            'the last step has no info["success"]: done is not won, so the environment must say which it was'
        )
    return bool(step.info["success"])
