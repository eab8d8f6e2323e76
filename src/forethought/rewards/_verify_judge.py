"""One answer against one gold: the tiers in their order, in process and without sympy."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from forethought.rewards._verify_answer import readings
from forethought.rewards._verify_compare import Comparison
from forethought.rewards._verify_lex import Node
from forethought.rewards._verify_text import MAX_ANSWER, Limit, Unreadable, clean, literal_form

CALCULUS = ("\\sum", "\\prod", "\\int", "\\lim", "\\frac{d", "\\partial", "\\begin{vmatrix}", "\\det")
"""Notation that only the symbolic tier's parser reads."""


class Outcome(NamedTuple):
    """equal None: only the symbolic tier can tell."""

    equal: bool | None
    tier: str | None
    reason: str


def judge(gold: str, answer: str, mode: str, mp: Any = None) -> Outcome:
    """Decide one pair of final answers.

    Args:
        gold, answer: final answers as text (a box around them is taken off).
        mode: "math-verify", "train-strict" or "eval-qwen". mp: an mpmath context in the symbolic tier, else None.
    """
    if gold.strip() == answer.strip():
        return Outcome(True, "literal", "written alike")
    if max(len(gold), len(answer)) > 2 * MAX_ANSWER:
        return Outcome(False, None, f"limit: answer of {len(answer)} characters (limit {2 * MAX_ANSWER})")
    texts = clean(gold), clean(answer)
    if not texts[1]:
        return Outcome(False, None, "empty answer")
    if literal_form(texts[0]) == literal_form(texts[1]):
        return Outcome(True, "normalised", "written alike but for spacing and style")
    if mode == "eval-qwen" and (choice := _choice(*texts)) is not None:
        return Outcome(choice, "normalised" if choice else None, "multiple choice")
    if (words := _words(texts[0])) and words == _words(texts[1]) and (len(words) > 3 or _TEXT.search(texts[0])):
        return Outcome(True, "normalised", "the same words")
    try:
        golds, answers = (readings(t) for t in texts)
    except Limit as limit:
        return Outcome(False, None, f"limit: {limit}")
    except Unreadable as error:
        if mp is None and any(word in t for t in texts for word in CALCULUS):
            return Outcome(None, None, "")
        return Outcome(False, None, f"cannot be read: {error}")
    try:
        return _compare(golds, answers, mode, mp)
    except RecursionError:  # the caller's own stack was nearly used up
        return Outcome(False, None, "limit: answer nests too deeply")


def _compare(golds: list[Node], answers: list[Node], mode: str, mp: Any) -> Outcome:
    undecided, notes = False, []
    for g in golds:
        for a in answers:
            comparison = Comparison(mode, mp)
            try:
                if mode == "train-strict" and not _plain_enough(g, a):
                    continue
                result = comparison.equal(g, a)
            except Limit as limit:
                notes.append(f"limit: {limit}")
                continue
            except Unreadable as error:
                notes.append(f"cannot be read: {error}")
                continue
            notes += comparison.notes
            if result:
                structured = g.kind not in _SCALARS or a.kind not in _SCALARS
                tier = "structural" if structured and comparison.tier != "symbolic" else comparison.tier
                return Outcome(True, tier, "; ".join(notes) or "equal")
            undecided |= result is None
    if undecided:
        return Outcome(None, None, "; ".join(notes))
    return Outcome(False, None, "; ".join(dict.fromkeys(notes)) or "not equal")


_SCALARS = frozenset({"num", "sym", "const", "add", "mul", "div", "pow", "fn"})


def _plain_enough(g: Node, a: Node) -> bool:
    """Strict mode reads values and tuples of values in like brackets; all else must be written alike."""
    if {g.kind, a.kind} <= _SCALARS:
        return True
    if g.kind != a.kind or g.kind not in ("tuple", "list"):
        return False
    return len(g.args) == len(a.args) and all(
        _plain_enough(x, y) if isinstance(x, Node) else x == y for x, y in zip(g.args, a.args, strict=True)
    )


_TEXT = re.compile(r"\\(?:text|mbox|textbf|textrm|mathrm)\s*\{([^{}]*)\}")


def _words(text: str) -> str:
    """The words of an answer that is nothing but words in a text command, or written out; else nothing."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).replace("-", " ").lower().split())
    return plain if len(plain) > 1 and plain.replace(" ", "").isalpha() and " " not in plain[:2] else ""


def _choice(gold: str, answer: str) -> bool | None:
    """Multiple choice, leniently: the last lone capital A-E of the answer."""
    gold = gold.replace("\\text", "").strip("(){}. ")
    if len(gold) != 1 or gold not in "ABCDE":
        return None
    words = "".join(c if c.isalnum() else " " for c in answer.replace("\\text", " ")).split()
    letters = [w for w in words if len(w) == 1 and w in "ABCDE"]
    return bool(letters) and letters[-1] == gold
