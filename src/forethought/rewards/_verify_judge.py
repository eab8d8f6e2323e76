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
    if mode == "train-strict":
        texts = _millions(texts[0]), _millions(texts[1])
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
    if mode == "train-strict":
        golds, answers = [_without_marks(g) for g in golds], [_without_marks(a) for a in answers]
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
    """Strict mode reads values, words and tuples of values in like brackets; all else must be written alike."""
    if {g.kind, a.kind} <= _SCALARS or g.kind == a.kind == "text":
        return True
    if g.kind != a.kind or g.kind != "tuple":
        return False
    return len(g.args) == len(a.args) and all(
        _plain_enough(x, y) if isinstance(x, Node) else x == y for x, y in zip(g.args, a.args, strict=True)
    )


def _without_marks(node: Node) -> Node:
    """Strict mode's normalisation: "x =" in front, units, dollar, percent and degree signs go, letters are small.

    A bare list becomes a tuple without brackets: its order counts, and it is not (1, 2).
    """
    if node.kind == "rel" and node.args[0] == ("=",) and node.args[1].kind == "name" and len(node.args[1].args[0]) <= 2:
        node = node.args[2]
    return _stripped(node)


def _stripped(node: Node) -> Node:
    while node.kind in ("qty", "pct", "deg"):
        node = node.args[0]
    if node.kind == "sym" and len(node.args[0]) == 1:
        return Node("sym", (node.args[0].lower(), *node.args[1:]))
    args = tuple(_stripped(x) if isinstance(x, Node) else x for x in node.args)
    return Node("tuple", ("", "", *args[1:])) if node.kind == "list" else Node(node.kind, args)


_SCALES = {"million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(
    r"(?<![\w.^{])(\d{1,3}(?:,\d{3})+|\d{1,30})(\.\d{1,30})?(\s*(?:\\(?:text|mathrm)\s*\{)?)\s*(million|billion|trillion)s?\b"
)


def _millions(text: str) -> str:
    """5 million as the whole number that it is, which a product would not be in strict mode."""

    def number(match: re.Match[str]) -> str:
        power, part = _SCALES[match[4]], (match[2] or ".")[1:]
        digits = match[1].replace(",", "") + part[:power].ljust(power, "0")
        return digits + (f".{part[power:]}" if part[power:] else "") + match[3]

    return re.sub(r"\\(?:text|mathrm)\s*\{\s*\}", "", _SCALED.sub(number, text))


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
