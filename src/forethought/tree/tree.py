"""TokenTree: experience as a tree of tokens, a struct of arrays.

Group samples share a prompt, turns share a history, search nodes share a path. Each shared token is generated
once, stored once and trained once. Node 0 is the root and holds the prompt (it may be empty).

Invariants (property-tested):
- the ids on a root-to-node path are exactly the ids that the model saw and produced; nothing is re-rendered from text;
- adding a node never changes an existing span, and a node may be given further children at any time.

Shapes: N nodes, T tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np


class Kind(IntEnum):
    """Who wrote a span."""

    PROMPT = 0  # raw text or a whole rendered conversation
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    OBSERVATION = 4
    THOUGHT = 5
    TOOL = 6


class Stop(IntEnum):
    """Why a sampled span ended. NONE: not sampled, or still open."""

    NONE = 0
    EOS = 1  # the model wrote an end token (which is part of the span)
    STRING = 2  # a stop string was completed (its text is part of the span)
    LENGTH = 3  # max_tokens or the context was reached
    ENV_DONE = 4  # the environment ended the episode
    ERROR = 5  # something failed; see the node's meta["error"]


NO_PARENT = -1

_NODE_COLUMNS: dict[str, tuple[type, float]] = {
    "parent": (np.int32, NO_PARENT),
    "start": (np.int64, 0),
    "length": (np.int64, 0),
    "kind": (np.int8, Kind.PROMPT),
    "sampled": (np.bool_, False),
    "stop": (np.int8, Stop.NONE),
    "reward": (np.float64, math.nan),
    "value": (np.float64, math.nan),
    "visits": (np.int64, 0),
    "prior": (np.float64, math.nan),
}
_TOKEN_COLUMNS: dict[str, tuple[type, float]] = {
    "ids": (np.int32, 0),
    "logprob": (np.float32, math.nan),
    "weight": (np.float32, 0.0),
    "advantage": (np.float32, 0.0),
}


class _Columns:
    """Named arrays of one growing length (amortised doubling)."""

    def __init__(self, spec: dict[str, tuple[type, float]]):
        self.size = 0
        self._spec = dict(spec)
        self._data = {name: np.full(8, fill, dtype) for name, (dtype, fill) in spec.items()}

    def grow(self, count: int) -> slice:
        need = self.size + count
        for name, array in self._data.items():
            if need > len(array):
                dtype, fill = self._spec[name]
                bigger = np.full(max(need, 2 * len(array)), fill, dtype)
                bigger[: self.size] = array[: self.size]
                self._data[name] = bigger
        span = slice(self.size, need)
        self.size = need
        return span

    def view(self, name: str) -> np.ndarray:
        return self._data[name][: self.size]

    def ensure(self, name: str, dtype: type, fill: float) -> None:
        if name not in self._data:
            self._spec[name] = (dtype, fill)
            self._data[name] = np.full(max(8, self.size), fill, dtype)

    @property
    def names(self) -> list[str]:
        return list(self._data)


class TokenTree:
    """A tree of token spans.

    Node arrays [N]: parent, start, length, kind (`Kind`), sampled (bool), stop (`Stop`), reward, value, visits, prior;
    `meta` is a list of N small JSON-serialisable dicts. Token arrays [T]: ids, logprob (behaviour log-prob, natural
    log; NaN where not sampled), weight (how many trained paths count this token), advantage. Further float32 token
    columns (reference log-probs, values ...) come from `column(name)` and start as NaN.

    Args:
        ids: the root's token ids.
        kind: kind of the root.
        task: stable id of the task; part of every row's sampling seed.
        seed: seed of the episode.
        meta: meta dict of the root.
    """

    def __init__(
        self,
        ids: Iterable[int] = (),
        *,
        kind: Kind = Kind.PROMPT,
        task: str = "",
        seed: int = 0,
        meta: dict[str, Any] | None = None,
    ):
        self._nodes = _Columns(_NODE_COLUMNS)
        self._tokens = _Columns(_TOKEN_COLUMNS)
        self._children: list[list[int]] = []
        self.meta: list[dict[str, Any]] = []
        self.task = task
        self.seed = seed
        self._append(NO_PARENT, ids, kind, False, None, Stop.NONE, meta)

    # -- node and token columns: live views, never copies --
    parent = property(lambda self: self._nodes.view("parent"), doc="[N] index of the parent, -1 at the root")
    start = property(lambda self: self._nodes.view("start"), doc="[N] first token of the span")
    length = property(lambda self: self._nodes.view("length"), doc="[N] tokens in the span")
    kind = property(lambda self: self._nodes.view("kind"), doc="[N] `Kind`")
    sampled = property(lambda self: self._nodes.view("sampled"), doc="[N] written by a policy")
    stop = property(lambda self: self._nodes.view("stop"), doc="[N] `Stop`")
    reward = property(lambda self: self._nodes.view("reward"), doc="[N] NaN where there is none")
    value = property(lambda self: self._nodes.view("value"), doc="[N] NaN where there is none")
    visits = property(lambda self: self._nodes.view("visits"), doc="[N]")
    prior = property(lambda self: self._nodes.view("prior"), doc="[N] NaN where there is none")
    ids = property(lambda self: self._tokens.view("ids"), doc="[T]")
    logprob = property(lambda self: self._tokens.view("logprob"), doc="[T] NaN where not sampled")
    weight = property(lambda self: self._tokens.view("weight"), doc="[T] 0 where not trained")
    advantage = property(lambda self: self._tokens.view("advantage"), doc="[T]")

    @property
    def n_nodes(self) -> int:
        return self._nodes.size

    @property
    def n_tokens(self) -> int:
        return self._tokens.size

    def column(self, name: str) -> np.ndarray:
        """A float32 token column [T] (live view), made on first use and filled with NaN."""
        self._tokens.ensure(name, np.float32, math.nan)
        return self._tokens.view(name)

    @property
    def columns(self) -> list[str]:
        """Names of the token columns that exist."""
        return self._tokens.names

    def _append(self, parent, ids, kind, sampled, logprobs, stop, meta) -> int:
        ids = np.fromiter(ids, np.int64) if not isinstance(ids, np.ndarray) else ids
        if len(ids) and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
            raise ValueError(f"token ids must lie in [0, 2^31): got {ids.min()} .. {ids.max()}")
        if logprobs is not None and len(logprobs) != len(ids):
            raise ValueError(f"{len(logprobs)} log-probs for {len(ids)} ids: give one per token")
        row = self._nodes.grow(1).start
        span = self._tokens.grow(len(ids))
        self.parent[row] = parent
        self.start[row], self.length[row] = span.start, len(ids)
        self.kind[row], self.sampled[row], self.stop[row] = kind, sampled, stop
        self.ids[span] = ids
        if logprobs is not None:
            self.logprob[span] = logprobs
        self._children.append([])
        self.meta.append(dict(meta or {}))
        if parent >= 0:
            self._children[parent].append(row)
        return row

    def add(
        self,
        parent: int,
        ids: Iterable[int],
        *,
        kind: Kind = Kind.ASSISTANT,
        sampled: bool = False,
        logprobs: Sequence[float] | np.ndarray | None = None,
        stop: Stop = Stop.NONE,
        reward: float = math.nan,
        meta: dict[str, Any] | None = None,
    ) -> int:
        """Append a node below `parent`; returns its index. Existing spans never change.

        Raises:
            IndexError: no such parent. ValueError: log-probs and ids differ in length, or an id is negative.
        """
        if not 0 <= parent < self.n_nodes:
            raise IndexError(f"parent {parent} is not a node of this tree (it has {self.n_nodes})")
        node = self._append(parent, ids, kind, sampled, logprobs, stop, meta)
        self.reward[node] = reward
        return node

    # -- structure --
    def children(self, node: int) -> list[int]:
        return list(self._children[node])

    def leaves(self, below: int = 0) -> list[int]:
        """Nodes without children at or below `below`, in depth-first order."""
        return [n for n in self.walk(below) if not self._children[n]]

    def walk(self, below: int = 0) -> Iterable[int]:
        """Nodes at or below `below`, depth first, children in the order in which they were added."""
        stack = [below]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(self._children[node]))

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        out = []
        while node != NO_PARENT:
            out.append(node)
            node = int(self.parent[node])
        return out[::-1]

    def span(self, node: int) -> slice:
        """The node's tokens as a slice of the token arrays."""
        start = int(self.start[node])
        return slice(start, start + int(self.length[node]))

    def node_ids(self, node: int) -> list[int]:
        return self.ids[self.span(node)].tolist()

    def path_tokens(self, node: int) -> np.ndarray:
        """Indices into the token arrays of the root-to-node path, in order."""
        return np.concatenate([np.arange(self.span(n).start, self.span(n).stop) for n in self.path(node)])

    def path_ids(self, node: int) -> list[int]:
        """Exactly the ids that the model saw and produced on the way to the end of `node`."""
        return self.ids[self.path_tokens(node)].tolist()

    def path_length(self, node: int) -> int:
        return sum(int(self.length[n]) for n in self.path(node))

    def outcome(self, leaf: int) -> float:
        """What the sample that ends here earned in all: its meta's "return" (an episode with a reward at each turn),
        else the node's own reward; NaN where there is none."""
        return float(self.meta[leaf].get("return", self.reward[leaf]))

    def nbytes(self) -> int:
        return sum(self._nodes.view(n).nbytes for n in self._nodes.names) + sum(
            self._tokens.view(n).nbytes for n in self._tokens.names
        )

    # -- (de)serialisation: arrays as they are, metadata as strict JSON --
    def to_arrays(self) -> dict[str, np.ndarray]:
        """All columns as copies, keys `node/<name>` and `token/<name>`, and `meta` as UTF-8 JSON bytes (uint8).

        Raises:
            ValueError: a meta dict holds NaN or infinity, or something that is not JSON.
        """
        out = {f"node/{n}": self._nodes.view(n).copy() for n in self._nodes.names}
        out |= {f"token/{n}": self._tokens.view(n).copy() for n in self._tokens.names}
        text = json.dumps({"task": self.task, "seed": self.seed, "meta": self.meta}, allow_nan=False)
        out["meta"] = np.frombuffer(text.encode(), np.uint8)
        return out

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> TokenTree:
        """Inverse of `to_arrays`."""
        head = json.loads(arrays["meta"].tobytes().decode())
        tree = cls(task=head["task"], seed=head["seed"])
        for store, prefix in ((tree._nodes, "node/"), (tree._tokens, "token/")):
            mine = {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
            size = len(next(iter(mine.values())))
            for name, array in mine.items():
                store.ensure(name, array.dtype.type, math.nan)
                store._data[name] = array.copy() if len(array) else np.zeros(0, array.dtype)
            store.size = size
        tree.meta = head["meta"]
        tree._children = [[] for _ in range(tree.n_nodes)]
        for node, parent in enumerate(tree.parent.tolist()):
            if parent != NO_PARENT:
                tree._children[parent].append(node)
        return tree

    def __repr__(self) -> str:
        return (
            f"TokenTree(task={self.task!r}, nodes={self.n_nodes}, tokens={self.n_tokens}, leaves={len(self.leaves())})"
        )
