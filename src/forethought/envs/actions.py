"""The executable action inside a policy's text, by one strict rule for all text worlds.

A response may think first. What counts is the text after the last `</think>`: either exactly one
`<action>...</action>`, or, without such a tag, the whole text. Nothing is searched for in free text, so "I will not go
up" is no "up".
"""

from __future__ import annotations

import json

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


TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"


def read_tool_call(text: str) -> tuple[str, dict] | str | None:
    """The tool call in a policy's text, `{"name": ..., "arguments": {...}}` in <tool_call></tool_call> or alone.

    What stands before the last `</think>` is left out. A call is read only where the text wants one: it holds the tag,
    or is a JSON object with a name.

    Returns:
        (name, arguments); a text that says what is wrong with the call; None where there is none (a message).
    """
    text = text.rpartition(THOUGHT)[2].strip()
    if TOOL_OPEN in text or TOOL_CLOSE in text:
        _, _, inside = text.partition(TOOL_OPEN)
        inside, closed, rest = inside.partition(TOOL_CLOSE)
        if not closed or TOOL_OPEN in inside:
            return f"the tool call is not closed; write {TOOL_OPEN}{{...}}{TOOL_CLOSE}"
        if TOOL_OPEN in rest or TOOL_CLOSE in rest:
            return "one tool call at a time"
        return _call(inside)
    if text.startswith("{") and '"name"' in text:
        return _call(text)
    return None


def _call(text: str) -> tuple[str, dict] | str:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return "the tool call is not valid JSON"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 'the tool call has no name; write {"name": ..., "arguments": {...}}'
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return f"the arguments of {call['name']} are no object"
    return call["name"], arguments
