"""The reward protocol: `f(tree, leaf, task) -> Reward`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from forethought.tree.tree import TokenTree


@dataclass(frozen=True)
class Reward:
    """A judgement of one trajectory: the number that is trained on, its named parts, and why.

    value NaN means "not applicable"; a failure raises `RewardError` instead and marks the sample as failed: it never
    turns silently into 0.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


class RewardFn(Protocol):
    def __call__(self, tree: TokenTree, leaf: int, task: Mapping[str, Any]) -> Reward: ...
