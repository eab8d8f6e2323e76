"""From the cleaned text of an answer to its trees: words, clock times and based numbers first, then the parser."""

from __future__ import annotations

import re

from forethought.rewards._verify_lex import EMPTY, FUNCTIONS, TEXT_COMMANDS, WORDS, Node
from forethought.rewards._verify_parse import Parser
from forethought.rewards._verify_text import MAX_ANSWER, Limit, Unreadable, too_deep

# -- whole answers -----------------------------------------------------------------------------------------------

_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?(?::(\d{2}))?\s*(?:([ap])\.?\s*m\.?)?", re.I)
_BASED = re.compile(r"(-?)([0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)_\{?(?:\\text\{)?([a-z]+|\d{1,2})\}?\}?")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "twelve": 12, "sixteen": 16}  # fmt: skip
_PLAIN = re.compile(r"\\(?:" + TEXT_COMMANDS + r")\s*\{([^{}]*)\}")
_NONE = frozenset(
    ["no solution", "no solutions", "no real solution", "no real solutions", "none", "does not exist", "empty set"]
)
_REALS = frozenset(["all real numbers", "all reals", "real numbers", "all real number"])
_EULER = re.compile(r"(?<![\d.])\d+e[+-]\d+")
_LETTER_UNIT = re.compile(r"[\d})]\s+[A-Za-z](?![A-Za-z])")
_OUTWARD = re.compile(r"\]([^\[\]()]+),([^\[\]()]+)\[")


MAX_TREE = 120  # levels of a tree


def readings(text: str) -> list[Node]:
    """The trees of a cleaned answer, the likeliest first (at most three).

    Raises:
        Limit: the answer is too long, too deep, or holds too long a number. Unreadable: it is outside the grammar.
    """
    if len(text) > MAX_ANSWER:
        raise Limit(f"answer of {len(text)} characters (limit {MAX_ANSWER})")
    if too_deep(text):
        raise Limit("answer nests too deeply")
    if not text:
        raise Unreadable("empty answer")
    plain = _PLAIN.sub(r" \1 ", text).strip()
    plain = re.sub(r"\s+", " ", plain)
    word = _as_words(plain, text)
    if word is not None:
        return word
    clock = _CLOCK.fullmatch(plain)
    if clock and (clock[2] or clock[4]):
        node = _clock(*clock.groups())
        if node is not None:
            return [node]
    based = _BASED.fullmatch(re.sub(r"(?<=\d)\s(?=_)|\s(?=_)", "", text))
    if based:
        base = int(based[3]) if based[3].isdigit() else _BASES.get(based[3], 0)
        if 2 <= base <= 16 and all(int(d, 16) < base for d in based[2].replace(".", "")):
            return [Node("based", (based[1] + based[2].upper(), base))]
    outward = _OUTWARD.fullmatch(text.strip())
    if outward:
        text = f"({outward[1]},{outward[2]})"
    texts = [text]
    if _EULER.search(text):  # 2e-1 is 0.2, or twice e less 1
        texts.append(_EULER.sub(lambda m: m.group().replace("e", "{e}"), text))
    try:
        out = [Parser(t).answer() for t in texts]
        if _LETTER_UNIT.search(text):
            out.append(Parser(text, units=True).answer())
    except RecursionError as error:  # the caller's own stack was nearly used up
        raise Limit("answer nests too deeply") from error
    if any(_depth(node) > MAX_TREE for node in out):
        raise Limit("answer nests too deeply")
    return out


def _depth(node: Node) -> int:
    """Levels of a tree, without recursion: 1+1+1 is flat, 2!!! and a long product are not."""
    depth, level = 0, [node]
    while level and depth <= MAX_TREE:
        level = [child for parent in level for child in parent.args if isinstance(child, Node)]
        depth += 1
    return depth


def _as_words(plain: str, text: str) -> list[Node] | None:
    """The reading of an answer that is nothing but words, or None."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z' -]*", plain):
        return None
    low = plain.lower()
    if low in _NONE:
        return [EMPTY]
    if low in _REALS:
        return [Node("world", ("R",))]
    runs = re.findall(r"[A-Za-z]+", plain)
    marked = plain != text.strip()
    known = any(r in WORDS or r in FUNCTIONS for r in runs if r.lower() not in ("or", "and", "in"))
    if known and not marked or max(map(len, runs)) < 2:
        return None
    if marked or max(map(len, runs)) > 4 or low in _SHORT_WORDS:
        return [Node("text", (low,))]
    return None


_SHORT_WORDS = frozenset(
    "yes no odd even true not one two four five six nine ten zero red blue east west mon tue wed thu fri sat sun line "
    "ray none both man men only once pink gray cone cube".split()
)
NUMBER_WORDS = {
    w: n for n, w in enumerate("zero one two three four five six seven eight nine ten eleven twelve".split())
}


def _clock(hours: str, minutes: str | None, seconds: str | None, mark: str | None) -> Node | None:
    h, m, s = int(hours), int(minutes or 0), int(seconds or 0)
    if m > 59 or s > 59 or h > 24 or (mark and not 1 <= h <= 12):
        return None
    if mark:
        h = h % 12 + (12 if mark.lower() == "p" else 0)
    return Node("clock", (h * 3600 + m * 60 + s, bool(mark)))
