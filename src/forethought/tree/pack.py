"""Packing: token trees -> batches under a token budget, in two layouts.

`layout="tree"`: every distinct token of a tree stands once, depth first; its position is its depth in tokens; it sees
its ancestors and itself. The last token of a node predicts the first token of each of its children, so targets are
(predecessor, token) pairs and hidden states are gathered at the predecessors.

`layout="linear"`: one causal row per leaf, the reference, and the fallback for models that take no arbitrary mask.

Both give the same loss and the same gradient. A token on k trained paths counts as k tokens: its `weight` in the tree
is k, the tree layout trains it once with weight k, the linear layout trains it in every row that holds it, with the
weight shared out over those rows. Its advantage and behaviour log-prob are one number, whichever row it stands in.

Only nodes on the way to a trained token are packed. N: packed tokens, M: targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from forethought.errors import DataError
from forethought.tree.tree import NO_PARENT, TokenTree

Layout = Literal["tree", "linear"]


@dataclass(frozen=True)
class Span:
    """A node inside a segment: packed tokens [start, stop), the local index of its parent (-1: none)."""

    start: int
    stop: int
    parent: int


@dataclass(frozen=True)
class Segment:
    """One tree (or one linear row) inside a batch: packed tokens [start, stop) and its spans, parents first."""

    start: int
    stop: int
    spans: tuple[Span, ...]

    def path(self, span: int) -> list[int]:
        """Local span indices from the top to `span`, both included."""
        out = []
        while span >= 0:
            out.append(span)
            span = self.spans[span].parent
        return out[::-1]


@dataclass
class Batch:
    """A packed micro-batch.

    ids, positions: int64 [N]. predecessors: [M] index of the packed token that predicts the target. targets: [M] id.
    weight, advantage: float32 [M]. columns: further float32 [M] token columns, "logprob" always among them.
    sequence: int64 [M], equal for targets of one trained sequence; unique over all batches of one `pack` call.
    tree, token: int64 [M], where the target came from: index into the packed trees and token index in that tree.
    places: (tree index, node) -> packed tokens [start, stop) of the node (of its last row in the linear layout).
    """

    ids: torch.Tensor
    positions: torch.Tensor
    segments: list[Segment]
    predecessors: torch.Tensor
    targets: torch.Tensor
    weight: torch.Tensor
    advantage: torch.Tensor
    columns: dict[str, torch.Tensor]
    sequence: torch.Tensor
    tree: torch.Tensor
    token: torch.Tensor
    places: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def n_targets(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> Batch:
        if torch.device(device).type == self.ids.device.type:
            return self
        names = ("ids", "positions", "predecessors", "targets", "weight", "advantage", "sequence", "tree", "token")
        moved = {name: getattr(self, name).to(device) for name in names}
        return Batch(
            segments=self.segments,
            columns={k: v.to(device) for k, v in self.columns.items()},
            places=self.places,
            **moved,
        )

    def visible(self, segment: Segment) -> torch.Tensor:
        """Boolean [T, T] of one segment: query (row) sees key (column) = ancestor or self."""
        size = segment.stop - segment.start
        owner = torch.empty(size, dtype=torch.long)
        above = torch.zeros(len(segment.spans), len(segment.spans), dtype=torch.bool)
        for index, span in enumerate(segment.spans):
            owner[span.start - segment.start : span.stop - segment.start] = index
            if span.parent >= 0:
                above[index] = above[span.parent]
            above[index, index] = True
        return above[owner][:, owner].tril_()

    def padded(self, pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows for models that only know causal rows: ids [B, T], attention mask [B, T], flat index [N] of each token.

        Raises:
            ValueError: a segment is a real tree (pack with layout="linear").
        """
        if any(len(s.spans) > 1 for s in self.segments):
            raise ValueError("a branching segment has no row form: pack with layout='linear'")
        longest = max(s.stop - s.start for s in self.segments)
        ids = torch.full((len(self.segments), longest), pad_id, dtype=torch.long, device=self.ids.device)
        mask = torch.zeros_like(ids)
        flat = torch.empty_like(self.ids)
        for row, s in enumerate(self.segments):
            size = s.stop - s.start
            ids[row, :size] = self.ids[s.start : s.stop]
            mask[row, :size] = 1
            flat[s.start : s.stop] = torch.arange(size, device=ids.device) + row * longest
        return ids, mask, flat


@dataclass
class _Piece:
    """A part of a tree that becomes one segment: nodes in depth-first order and which of them are trained here."""

    tree: int
    nodes: list[int]
    trained: set[int]
    kept: set[int]  # all packed nodes of the tree, whatever piece they stand in
    share: dict[int, int] | None = None  # linear: how many rows hold the node


def pack(
    trees: Sequence[TokenTree],
    *,
    layout: Layout = "tree",
    max_tokens: int | None = None,
    columns: Iterable[str] = (),
    keep: Sequence[Iterable[int]] | None = None,
    weights: Sequence[np.ndarray] | None = None,
) -> list[Batch]:
    """Pack every token with weight > 0 of every tree, in order, into batches of at most `max_tokens` tokens.

    A tree that is larger than the budget is split by its leaves (its prefix is repeated, each target stays in one
    piece); a single path that is longer than the budget has a batch of its own. Trees without a target take no room.

    Args:
        columns: extra token columns to carry to the batch.
        keep: per tree, nodes to pack even where nothing is trained (prefill).
        weights: per tree, token weights [T] that stand in for `tree.weight` (scoring).

    Raises:
        DataError: a weight stands on a token that nothing predicts, or is NaN, infinite or negative.
    """
    if layout not in ("tree", "linear"):
        raise ValueError(f"layout={layout!r}: 'tree' or 'linear'")
    weights = [t.weight for t in trees] if weights is None else weights
    pieces: list[_Piece] = []
    for index, tree in enumerate(trees):
        trained = _trained_nodes(tree, weights[index])
        pieces.extend(_pieces(index, tree, trained, layout, max_tokens, list(keep[index]) if keep else []))
    groups: list[list[_Piece]] = []
    room = 0
    for piece in pieces:
        size = sum(int(trees[piece.tree].length[n]) for n in piece.nodes)
        if not groups or (max_tokens is not None and room + size > max_tokens):
            groups.append([])
            room = 0
        groups[-1].append(piece)
        room += size
    return [_build(trees, weights, group, layout, ["logprob", *columns]) for group in groups]


def _trained_nodes(tree: TokenTree, weight: np.ndarray) -> list[int]:
    if not np.isfinite(weight).all() or (weight < 0).any():
        raise DataError(f"task {tree.task!r}: a token weight is NaN, infinite or negative; weights count trained paths")
    return [n for n in range(tree.n_nodes) if weight[tree.span(n)].any()]


def _pieces(
    index: int, tree: TokenTree, trained: list[int], layout: Layout, max_tokens: int | None, extra: list[int]
) -> list[_Piece]:
    kept: set[int] = set()
    for node in [*trained, *extra]:
        while node != NO_PARENT and node not in kept:
            kept.add(node)
            node = int(tree.parent[node])
    if not kept:
        return []
    ends = [n for n in tree.walk() if n in kept and not any(c in kept for c in tree.children(n))]
    wanted = set(trained) | set(extra)
    if layout == "linear":
        share: dict[int, int] = {}
        for end in ends:
            for node in tree.path(end):
                share[node] = share.get(node, 0) + 1
        out = [_Piece(index, tree.path(end), wanted & set(tree.path(end)), kept, share) for end in ends]
    else:
        out = [
            _Piece(index, [n for n in tree.walk() if n in part], mine, kept)
            for part, mine in _split(tree, ends, wanted, max_tokens)
        ]
    return out


def _split(
    tree: TokenTree, ends: list[int], wanted: set[int], max_tokens: int | None
) -> list[tuple[set[int], set[int]]]:
    """Leaf groups that fit the budget; each wanted node is trained in the first group that holds it."""
    parts: list[tuple[set[int], set[int]]] = []
    left = set(wanted)
    size = 0
    for end in ends:
        path = tree.path(end)
        new = [n for n in path if not parts or n not in parts[-1][0]]
        cost = sum(int(tree.length[n]) for n in new)
        if not parts or (max_tokens is not None and size + cost > max_tokens):
            parts.append((set(), set()))
            new, size = path, 0
            cost = sum(int(tree.length[n]) for n in new)
        parts[-1][0].update(new)
        parts[-1][1].update(n for n in new if n in left)
        left.difference_update(new)
        size += cost
    return parts


def _sequence_key(tree: TokenTree, node: int, inside: set[int]) -> int:
    """The sequence of a node: follow only children, so the turns of one unbranched trajectory are one sequence."""
    while True:
        below = [c for c in tree.children(node) if c in inside]
        if len(below) != 1:
            return node
        node = below[0]


def _build(
    trees: Sequence[TokenTree], weights: Sequence[np.ndarray], pieces: list[_Piece], layout: Layout, columns: list[str]
) -> Batch:
    ids, positions, segments = [], [], []
    pred, tok, tree_of, weight, sequence = [], [], [], [], []
    places: dict[tuple[int, int], tuple[int, int]] = {}
    offset = 0
    for piece in pieces:
        tree = trees[piece.tree]
        local: dict[int, int] = {}
        depth_end: dict[int, int] = {}  # node -> depth in tokens of its end
        last: dict[int, int] = {}  # node -> packed index of the last token on its path, -1 if none
        spans: list[Span] = []
        begin = offset
        for node in piece.nodes:
            parent = int(tree.parent[node])
            above = depth_end.get(parent, 0)
            before = last.get(parent, -1)
            span = tree.span(node)
            size = span.stop - span.start
            places[(piece.tree, node)] = (offset, offset + size)
            local[node] = len(spans)
            if layout == "linear" and spans:  # a row is one causal span
                spans[0] = Span(begin, offset + size, -1)
            else:
                spans.append(Span(offset, offset + size, local.get(parent, -1) if layout == "tree" else -1))
            ids.append(tree.ids[span])
            positions.append(np.arange(above, above + size))
            depth_end[node] = above + size
            last[node] = offset + size - 1 if size else before
            if node in piece.trained:
                w = weights[piece.tree][span]
                hit = np.flatnonzero(w)
                if len(hit):
                    where = hit + offset - 1
                    if hit[0] == 0:
                        if before < 0:
                            raise DataError(
                                f"task {tree.task!r}: node {node} trains its first token, but nothing precedes it; "
                                "set its weight to 0 or begin with a prompt or a beginning token"
                            )
                        where[0] = before
                    pred.append(where)
                    tok.append(hit + span.start)
                    tree_of.append(np.full(len(hit), piece.tree))
                    weight.append(w[hit] / (piece.share[node] if piece.share else 1))
                    sequence.append(np.full(len(hit), piece.tree * 2**32 + _sequence_key(tree, node, piece.kept)))
            offset += size
        segments.append(Segment(begin, offset, tuple(spans)))

    def join(parts: list[np.ndarray], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype))

    token, source = join(tok, np.int64), join(tree_of, np.int64)
    by_tree = [(i, source.numpy() == i) for i in np.unique(source.numpy())]

    def gather(get: Callable[[TokenTree], np.ndarray]) -> torch.Tensor:
        out = np.full(len(token), np.nan, np.float32)
        for i, mine in by_tree:
            out[mine] = get(trees[i])[token.numpy()[mine]]
        return torch.from_numpy(out)

    target = torch.zeros(len(token), dtype=torch.long)
    for i, mine in by_tree:
        target[torch.from_numpy(mine)] = torch.from_numpy(trees[i].ids[token.numpy()[mine]].astype(np.int64))
    return Batch(
        ids=join(ids, np.int64),
        positions=join(positions, np.int64),
        segments=segments,
        predecessors=join(pred, np.int64),
        targets=target,
        weight=join(weight, np.float32),
        advantage=gather(lambda t: t.advantage),
        columns={name: gather(lambda t, name=name: t.column(name)) for name in columns},
        sequence=join(sequence, np.int64),
        tree=source,
        token=token,
        places=places,
    )


def write_back(trees: Sequence[TokenTree], batch: Batch, column: str, values: torch.Tensor) -> None:
    """Store per-target values [M] (log-probs of a reference, values ...) in a token column of their trees."""
    flat = values.detach().float().cpu().numpy()
    source, token = batch.tree.cpu().numpy(), batch.token.cpu().numpy()
    for i in np.unique(source):
        mine = source == i
        trees[i].column(column)[token[mine]] = flat[mine]
