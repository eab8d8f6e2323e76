"""The engine protocol: sample continuations of token-tree leaves, and score tokens.

Kinds: `torch_engine.TorchEngine` (default), `openai_engine.OpenAIEngine` (HTTP, no training on it),
`scripted_engine.ScriptedEngine` (tests and demonstrations).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from forethought.errors import ConfigError
from forethought.tree.tree import TokenTree

Leaf = tuple[TokenTree, int]
"""A place to continue from: a tree and one of its nodes."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample.

    temperature 0 is greedy (ties: lowest id). top_k 0 and top_p 1 are off; they truncate the tempered distribution.
    stop: strings that end a row once its text contains one, also when it spans tokens; the text stays in the span.
    logprobs: which log-probs are stored. "tempered": log-softmax(logits / temperature) over the whole vocabulary,
    before top-k and top-p; what a ratio needs (greedy rows store temperature 1). "untempered": log-softmax(logits).
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    logprobs: Literal["tempered", "untempered"] = "tempered"
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self):
        problems = []
        if self.max_tokens < 1:
            problems.append(f"max_tokens={self.max_tokens}: give at least 1")
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature={self.temperature}: give 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p}: give a number in (0, 1]")
        if self.top_k < 0:
            problems.append(f"top_k={self.top_k}: give 0 (off) or a positive number")
        if isinstance(self.stop, str) or any(not s for s in self.stop):
            problems.append(f"stop={self.stop!r}: give a tuple of non-empty strings")
        if self.logprobs not in ("tempered", "untempered"):
            problems.append(f"logprobs={self.logprobs!r}: 'tempered' or 'untempered'")
        if problems:
            raise ConfigError("sampling: " + "; ".join(problems))


@dataclass
class EngineStats:
    """Counters since the engine was made (tokens, not padded)."""

    tokens_generated: int = 0
    tokens_prefilled: int = 0
    tokens_reused: int = 0  # prefix tokens whose keys and values were kept from earlier calls
    tokens_scored: int = 0
    decode_steps: int = 0
    requests: int = 0


class Engine(Protocol):
    """Samples and scores. `trainable` is False where log-probs are not available (then it says so when asked)."""

    trainable: bool
    stats: EngineStats

    def extend(
        self,
        leaves: Sequence[Leaf],
        n: int,
        sampling: Sampling,
        *,
        names: Sequence[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Sample `n` continuations of every leaf and add them to its tree as ASSISTANT nodes.

        Returns, per leaf, the n new node indices, in sample order. New nodes carry ids, behaviour log-probs and a stop
        reason. `names`: per leaf, what its rows are seeded from, in place of task, node and how many children the leaf
        has already; so a row can depend on nothing that happened elsewhere in its tree.
        `progress(done_rows, all_rows)` is called now and then. A leaf whose path leaves no room in the context
        gets an empty node with Stop.LENGTH.
        """
        ...

    def score(self, leaves: Sequence[Leaf], *, temperature: float = 1.0) -> list[np.ndarray]:
        """Log-prob [length of path] of every token on each root-to-node path (NaN for the first token)."""
        ...

    def load_weights(self, state: dict) -> None:
        """Replace the weights by a state dict of the same model."""
        ...


def row_seed(seed: int, task: str, leaf: int, index: int) -> int:
    """64-bit seed of one sampled row: depends on the run's seed, the task, the node and the sample's index only.

    So a row's sample does not depend on which rows it is batched with.
    """
    key = f"{seed}\x1f{task}\x1f{leaf}\x1f{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
