r"""A response split into its reasoning, its boxes and its answer: one reader for rewards, verifier and counters.

Boxes are found by brace counting (`\boxed{\frac{\sqrt{3}}{2}}` is one box). As in `verify`, a box inside a box is part
of the outer one, and a last box that is not closed means that there is no answer. By default the last box is the answer and
everything outside of the boxes is reasoning, so that a tentative answer that is corrected later is neither graded nor
ends what is paid; RLSP's released servers grade the first box and pay what stands before it (`answer="first"`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from forethought.errors import ConfigError, RewardError, nearest
from forethought.rewards._verify_text import _BRACE
from forethought.rewards.verify import EXTRACTS, Extract, extract_answer

Scope = Literal["all", "before first box", "before last box"]
"""Which text is reasoning: everything outside of the boxes, or what stands before the first or the last of them."""
Which = Literal["last", "first"]


@dataclass(frozen=True)
class Box:
    """A closed box: text[start:end] is all of it, `content` what stands in it."""

    start: int
    end: int
    content: str


def find_boxes(text: str) -> tuple[list[Box], int | None]:
    r"""The closed boxes that are in no other closed box, in order; and where the last box begins if it is not closed.

    One linear pass.
    """
    open_at: list[tuple[int, int, bool]] = []  # (start of the mark, start of the content, is it a box)
    found: list[Box] = []
    last: tuple[int, bool] | None = None  # start of the box that was opened last, and whether it was closed
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "}":
            if open_at:
                mark, content, is_box = open_at.pop()
                if is_box:
                    while found and found[-1].start > mark:
                        found.pop()
                    found.append(Box(mark, match.end(), text[content : match.start()]))
                    if last is not None and mark == last[0]:
                        last = (mark, True)
        elif token == "{":
            open_at.append((match.start(), match.end(), False))
        elif len(token) > 2:  # a box; two characters are an escaped one
            open_at.append((match.start(), match.end(), True))
            last = (match.start(), False)
    return found, last[0] if last is not None and not last[1] else None


@dataclass(frozen=True)
class Split:
    """A response and its parts. answer: the text that is graded, None where there is none. open_box: where the last
    box begins if it is not closed. token_ends: where in the text each of the policy's tokens ends, if that is known."""

    response: str
    boxes: tuple[Box, ...]
    open_box: int | None
    answer: str | None
    token_ends: tuple[int, ...] | None = None

    @property
    def boxed(self) -> bool:
        """A box gives the answer."""
        return bool(self.boxes) and self.open_box is None

    def spans(self, scope: Scope = "all") -> list[tuple[int, int]]:
        """Where the reasoning stands in the text; without a box it is all of it."""
        starts = [b.start for b in self.boxes] + ([] if self.open_box is None else [self.open_box])
        if not starts:
            return [(0, len(self.response))]
        if scope != "all":
            return [(0, min(starts) if scope == "before first box" else max(starts))]
        out, at = [], 0
        for box in self.boxes:
            out.append((at, box.start))
            at = box.end
        return [*out, (at, len(self.response) if self.open_box is None else max(at, self.open_box))]

    def reasoning(self, scope: Scope = "all") -> str:
        """The text that counts as reasoning."""
        return "".join(self.response[a:b] for a, b in self.spans(scope))

    def tokens(self, scope: Scope = "all") -> int:
        """Number of the policy's tokens that end within the reasoning.

        Raises:
            RewardError: the tokens are not known.
        """
        if self.token_ends is None:
            raise RewardError("the tokens of this response are not known: give token_ends to the splitter")
        return sum(bisect_right(self.token_ends, b) - bisect_right(self.token_ends, a) for a, b in self.spans(scope))


def token_ends(ids: Sequence[int], decode: Callable[[list[int]], str], known: dict[int, int]) -> tuple[int, ...]:
    """Where each token ends in the text, by decoding each by itself; tokens without text (end tokens) are left out.

    Exact where a token is a piece of the text, as in byte-level tokenizers on ASCII; near where a character takes several
    tokens. `known` keeps the lengths of tokens between calls.
    """
    ends, at = [], 0
    for token in ids:
        if token not in known:
            known[token] = len(decode([token]))
        if known[token]:
            at += known[token]
            ends.append(at)
    return tuple(ends)


class Splitter:
    """Splits responses.

    Args:
        answer: which box is graded.
        fallback: how to read an answer where no box gives one (see `verify.check`); None reads none.
        thinking_end: of models that think: the mark that closes the thoughts. Only boxes behind it are boxes; a response
            without it has no answer.

    Raises:
        ConfigError: an unknown choice.
    """

    def __init__(self, answer: Which = "last", *, fallback: Extract | None = None, thinking_end: str | None = None):
        if answer not in get_args(Which):
            raise ConfigError(f"answer={answer!r}: 'last' or 'first'")
        if fallback is not None and fallback not in EXTRACTS:
            raise ConfigError(
                f"fallback={fallback!r}: one of {', '.join(EXTRACTS)}, or None{nearest(fallback, EXTRACTS)}"
            )
        self.answer: Which = answer
        self.fallback: Extract | None = fallback
        self.thinking_end = thinking_end

    def __call__(self, response: str, token_ends: tuple[int, ...] | None = None) -> Split:
        boxes, open_box = find_boxes(response)
        visible = response
        if self.thinking_end:
            head, mark, visible = response.rpartition(self.thinking_end)
            if not mark:
                return Split(response, (), open_box, None, token_ends)
            boxes = [b for b in boxes if b.start >= len(head) + len(mark)]
        if self.answer == "first" and boxes:
            answer: str | None = boxes[0].content
            answer = answer if answer.strip() else None
        else:
            answer = extract_answer(visible)
        if answer is None and self.fallback is not None:
            answer = extract_answer(visible, extract=self.fallback)
        return Split(response, tuple(boxes), open_box, answer, token_ends)
