"""The executable action inside a policy's text, by one strict rule for all text worlds.

A response may think first. What counts is the text after the last `</think>`: either exactly one
`<action>...</action>`, or, without such a tag, the whole text. Nothing is searched for in free text, so "I will not go
up" is no "up".
"""

from __future__ import annotations

OPEN, CLOSE, THINK, THOUGHT = "<action>", "</action>", "<think>", "</think>"


def read_action(text: str) -> str | None:
    """The action's words with single spaces between them, in lower case; None where there is no single action.

    None: a `<think>` that never closes, an `<action>` that never closes, several actions, nothing at all.
    """
    if "<" in text:
        thought, closed, rest = text.rpartition(THOUGHT)
        if closed:
            text = rest
        elif THINK in text:
            return None
        if OPEN in text or CLOSE in text:
            _, _, inside = text.partition(OPEN)
            inside, closed, rest = inside.partition(CLOSE)
            if not closed or OPEN in inside or OPEN in rest or CLOSE in rest:
                return None
            text = inside
    return " ".join(text.lower().split()) or None
