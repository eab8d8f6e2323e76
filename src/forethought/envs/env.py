"""The environment protocol: text in, text out, with exact snapshots.

The five values are Gymnasium's, with strings. Objects are single use and made by a factory with a seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Step:
    """What an environment answers.

    terminated: the episode reached an end of its own (won, lost); truncated: it was cut (step limit). Success is
    `info["success"]` where an environment knows it: done is not won.
    """

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


@runtime_checkable
class Env(Protocol):
    """A text environment. `reset` once, then `step` until done; a new episode is a new object."""

    def reset(self, task: Any = None, seed: int = 0) -> Step:
        """Start the episode of `task`; the first observation is what the policy sees."""
        ...

    def step(self, action: str) -> Step:
        """Apply an action (any string; a malformed one is answered, never raised on)."""
        ...

    def snapshot(self) -> Any:
        """The full state. After `restore` of it, the same action gives the same Step."""
        ...

    def restore(self, snapshot: Any) -> None: ...

    def state_key(self) -> str | None:
        """A text that is equal for equal states, or None where there is none."""
        ...
