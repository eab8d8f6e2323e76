"""Simulated users for tool domains: who they are, what they say, and how they leave.

A user is a function (conversation, scenario, seed) -> text. The conversation is what the user sees: messages with role
"assistant" (the agent's texts), "user" (the user's own) and "tool" (results of the user's own tools), content as text.
The scenario is what tau2 tells its user: reason_for_call, known_info, unknown_info, task_instructions, persona. A marker
of `MARKERS` anywhere in the reply ends the conversation; `split_marker` takes it off, so that it never reaches the agent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, str]
User = Callable[[Sequence[Message], Mapping[str, Any], int], str]

MARKERS = {"###STOP###": "user_stop", "###TRANSFER###": "user_transfer", "###OUT-OF-SCOPE###": "user_out_of_scope"}
"""tau2's markers and the stop reasons that they stand for."""
_MARKERS = re.compile("(?:" + "|".join(map(re.escape, MARKERS)) + ")")
GREETING = "Hi! How can I help you today?"
PATIENCE = 12
"""Messages of the agent after which the scripted user leaves."""


def split_marker(reply: str) -> tuple[str, str]:
    """A user's reply without markers, and the stop reason of the first one (empty: none)."""
    found = _MARKERS.findall(reply)
    text = re.sub(rf"(?:\s*{_MARKERS.pattern}\s*)+", " ", reply) if found else reply
    return text.strip(), MARKERS[found[0]] if found else ""


def scripted_user(conversation: Sequence[Message], scenario: Mapping[str, Any], seed: int) -> str:
    """Says all it knows and wants at once, agrees to whatever it is asked, and leaves after an answer without a question.

    No model is needed. What it cannot do: negotiate, choose between offers, or use tools of its own (telecom).
    """
    said = [m for m in conversation if m["role"] == "user"]
    if not said:
        return request(scenario)
    last = next((m["content"] for m in reversed(conversation) if m["role"] == "assistant"), "")
    if len(said) > PATIENCE or "?" not in last:
        return "###STOP###"
    return "Yes, please go ahead."


def request(scenario: Mapping[str, Any]) -> str:
    """The scenario in the first person: who I am, why I call, what else I want."""
    parts = [scenario.get(key) for key in ("known_info", "reason_for_call", "task_instructions")]
    return first_person(" ".join(str(part).strip() for part in parts if part))


_PERSON = {
    "you are": "I am",
    "you're": "I'm",
    "you were": "I was",
    "you've": "I've",
    "you'd": "I'd",
    "you'll": "I'll",
    "yourself": "myself",
    "your": "my",
    "yours": "mine",
    "you": "I",
}
_WORDS = re.compile(
    rf"\b(?:to|for|with|at|of) you\b|\b(?:{'|'.join(sorted(_PERSON, key=len, reverse=True))})\b", re.IGNORECASE
)


def first_person(text: str) -> str:
    """ "You want your order" -> "I want my order"."""

    def replace(match: re.Match) -> str:
        words = match.group()
        if " " in words and words.lower().endswith(" you"):
            return f"{words[:-4]} me"
        new = _PERSON[words.lower()]
        return new[0].upper() + new[1:] if words[0].isupper() else new

    return _WORDS.sub(replace, text)


class PolicyUser:
    """A user that a language model plays, with tau2's own guidelines for it.

    Args:
        chat: messages ({"role", "content"}, first a system message) and a seed -> the reply.
        guidelines: the text above the scenario; None: the package's.
    """

    def __init__(self, chat: Callable[[list[dict[str, str]], int], str], guidelines: str | None = None):
        self.chat, self.guidelines = chat, guidelines

    def __call__(self, conversation: Sequence[Message], scenario: Mapping[str, Any], seed: int) -> str:
        return self.chat(self.messages(conversation, scenario), seed)

    def messages(self, conversation: Sequence[Message], scenario: Mapping[str, Any]) -> list[dict[str, str]]:
        """What the model is shown: the roles are turned round, since the model speaks as the user."""
        told = "\n".join(f"{key}: {value}" for key, value in scenario.items() if value)
        guidelines = self.guidelines if self.guidelines is not None else _guidelines()
        messages = [{"role": "system", "content": f"{guidelines}\n\n<scenario>\n{told}\n</scenario>"}]
        messages.append({"role": "user", "content": GREETING})
        turned = {"assistant": "user", "user": "assistant", "tool": "user"}
        return messages + [{"role": turned[m["role"]], "content": m["content"]} for m in conversation]


def _guidelines() -> str:
    from tau2.utils import DATA_DIR

    return (DATA_DIR / "tau2" / "user_simulator" / "simulation_guidelines.md").read_text()
