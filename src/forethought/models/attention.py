"""One attention function for token trees, plugged into a model's own modules.

transformers lets a model's attention be chosen by name. Inside `using(model, context)` every attention layer of the
model calls the active context with its projected, normalised and rotated q, k, v; everything else of the forward stays
the model's own code, so no family is copied. Contexts: `TreeContext` (training, scoring, prefill over packed trees) and
`torch_engine.LaneContext` (decoding). Outside the scope the model runs its usual attention.

Shapes: B batch (always 1 for packed trees), H heads, K key-value heads, T tokens, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from forethought.errors import ModelError
from forethought.tree.pack import Batch, Segment

NAME = "forethought"


class AttentionContext(Protocol):
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """q [B, H, T, d], k and v [B, K, T, d] -> [B, T, H, d]."""
        ...


_active: ContextVar[AttentionContext | None] = ContextVar("forethought_attention", default=None)


def _attention(module: nn.Module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    context = _active.get()
    if context is None:
        raise ModelError("the tree attention was called outside its scope; use forethought.models.policy.Policy")
    if dropout:
        raise ModelError("attention dropout is not supported with token trees: set attention_dropout=0 in the config")
    out = context.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query,
        key,
        value,
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )
    return out, None


AttentionInterface.register(NAME, _attention)


def configs_of(model: nn.Module) -> list:
    """The distinct config objects that the model's modules read."""
    seen: dict[int, object] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            seen.setdefault(id(config), config)
    return list(seen.values())


@contextmanager
def using(configs: list, context: AttentionContext) -> Iterator[None]:
    """Route the attention of the modules that read `configs` through `context`."""
    before = [c._attn_implementation_internal for c in configs]
    token = _active.set(context)
    for c in configs:
        c._attn_implementation_internal = NAME
    try:
        yield
    finally:
        for c, name in zip(configs, before, strict=True):
            c._attn_implementation_internal = name
        _active.reset(token)


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
    causal: bool = False,
) -> torch.Tensor:
    """Grouped-query attention with a boolean mask; q [B, H, T, d], k and v [B, K, S, d] -> [B, H, T, d]."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, is_causal=causal)
    scores = torch.tanh(q @ k.transpose(-1, -2) * (scaling / softcap)) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril_()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.float().softmax(-1).to(q.dtype) @ v


class _Family:
    """The children of one span, attended together: each sees the path to their parent and, causally, itself.

    Costs (children x child tokens x path tokens), where the dense mask of the whole tree costs tokens squared.
    """

    def __init__(self, segment: Segment, parent: int, children: list[int], device: torch.device):
        spans = segment.spans
        path = [torch.arange(spans[i].start, spans[i].stop) for i in segment.path(parent)] if parent >= 0 else []
        prefix = torch.cat(path) if path else torch.zeros(0, dtype=torch.long)
        longest = max(spans[c].stop - spans[c].start for c in children)
        own = torch.zeros(len(children), longest, dtype=torch.long)
        real = torch.zeros(len(children), longest, dtype=torch.bool)
        for row, c in enumerate(children):
            size = spans[c].stop - spans[c].start
            own[row, :size] = torch.arange(spans[c].start, spans[c].stop)
            real[row, :size] = True
        self.prefix_len, self.longest, self.count = len(prefix), longest, len(children)
        self.prefix, self.own, self.queries = prefix.to(device), own.to(device), own[real].to(device)
        self.real = None if bool(real.all()) else real.flatten().nonzero().squeeze(1).to(device)
        contiguous = len(prefix) == 0 or bool(
            (prefix == torch.arange(int(prefix[0]), int(prefix[0]) + len(prefix))).all()
        )
        self.prefix_slice = slice(int(prefix[0]), int(prefix[0]) + len(prefix)) if contiguous and len(prefix) else None
        self.causal = self.prefix_len == 0
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def mask(self, window: int | None) -> torch.Tensor | None:
        if window not in self._masks:
            q = torch.arange(self.longest, device=self.own.device)[:, None] + self.prefix_len
            k = torch.arange(self.prefix_len + self.longest, device=self.own.device)[None]
            seen = k <= q
            if window is not None:
                seen &= q - k < window
            self._masks[window] = seen
        return self._masks[window]

    def attend(self, q, k, v, *, scaling, window, softcap) -> torch.Tensor:
        """-> [queries, H, d]"""
        heads, size = q.shape[1], q.shape[-1]

        def rows(x: torch.Tensor) -> torch.Tensor:  # [1, C, N, d] -> [children, C, longest, d]
            return (
                x[0]
                .index_select(1, self.own.flatten())
                .view(x.shape[1], self.count, self.longest, size)
                .transpose(0, 1)
            )

        def with_prefix(x: torch.Tensor) -> torch.Tensor:
            mine = rows(x)
            if not self.prefix_len:
                return mine
            above = x[0, :, self.prefix_slice] if self.prefix_slice else x[0].index_select(1, self.prefix)
            return torch.cat([above.expand(self.count, -1, -1, -1), mine], 2)

        causal = self.causal and window is None
        out = masked_attention(
            rows(q),
            with_prefix(k),
            with_prefix(v),
            None if causal else self.mask(window),
            scaling=scaling,
            softcap=softcap,
            causal=causal,
        )
        out = out.transpose(1, 2).reshape(self.count * self.longest, heads, size)
        return out if self.real is None else out.index_select(0, self.real)


class _Dense:
    """A whole segment under its boolean ancestor mask: the reference, and cheaper for small bushy trees."""

    def __init__(self, batch: Batch, segment: Segment, device: torch.device):
        self.slice = slice(segment.start, segment.stop)
        self.queries = torch.arange(segment.start, segment.stop, device=device)
        self._seen = batch.visible(segment).to(device)
        self._depth = batch.positions[self.slice].to(device)
        self._masks: dict[int | None, torch.Tensor] = {None: self._seen}

    def attend(self, q, k, v, *, scaling, window, softcap) -> torch.Tensor:
        if window not in self._masks:
            self._masks[window] = self._seen & (self._depth[:, None] - self._depth[None] < window)
        s = self.slice
        out = masked_attention(
            q[:, :, s], k[:, :, s], v[:, :, s], self._masks[window], scaling=scaling, softcap=softcap
        )
        return out[0].transpose(0, 1)


@dataclass
class _Row:
    """Queries that share one list of keys: a small segment under its mask, or one child span under its path."""

    queries: torch.Tensor
    keys: torch.Tensor
    seen: torch.Tensor  # [queries, keys]


class _Rows:
    """Many small rows in one call, padded to a common size, which saves batches of short trees thousands of calls."""

    def __init__(self, rows: list[_Row], positions: torch.Tensor):
        device = positions.device
        m, s = max(len(r.queries) for r in rows), max(len(r.keys) for r in rows)
        q = torch.zeros(len(rows), m, dtype=torch.long)
        k = torch.zeros(len(rows), s, dtype=torch.long)
        seen = torch.zeros(len(rows), m, s, dtype=torch.bool)
        real = torch.zeros(len(rows), m, dtype=torch.bool)
        for i, row in enumerate(rows):
            q[i, : len(row.queries)] = row.queries
            k[i, : len(row.keys)] = row.keys
            seen[i, : len(row.queries), : len(row.keys)] = row.seen
            real[i, : len(row.queries)] = True
        seen[~real] = True  # a padded query sees something, so that its softmax stays finite; it is dropped below
        self.shape = q.shape, k.shape
        self.queries = q[real].to(device)
        self.real = None if bool(real.all()) else real.flatten().nonzero().squeeze(1).to(device)
        self.q, self.k = q.flatten().to(device), k.flatten().to(device)
        self._depth = positions[self.q].view(q.shape), positions[self.k].view(k.shape)
        self._masks: dict[int | None, torch.Tensor] = {None: seen[:, None].to(device)}

    def attend(self, q, k, v, *, scaling, window, softcap) -> torch.Tensor:
        if window not in self._masks:
            near = self._depth[0][:, :, None] - self._depth[1][:, None] < window
            self._masks[window] = self._masks[None] & near[:, None]
        heads, size = q.shape[1], q.shape[-1]
        (rows, m), (_, s) = self.shape

        def pick(x: torch.Tensor, index: torch.Tensor, length: int) -> torch.Tensor:
            return x[0].index_select(1, index).view(x.shape[1], rows, length, size).transpose(0, 1)

        out = masked_attention(
            pick(q, self.q, m),
            pick(k, self.k, s),
            pick(v, self.k, s),
            self._masks[window],
            scaling=scaling,
            softcap=softcap,
        )
        out = out.transpose(1, 2).reshape(rows * m, heads, size)
        return out if self.real is None else out.index_select(0, self.real)


def _buckets(rows: list[_Row]) -> Iterator[list[_Row]]:
    """Rows of like size together, as long as padding costs less than a further call."""
    rows = sorted(rows, key=lambda r: (len(r.keys), len(r.queries)))
    bucket: list[_Row] = []
    true, m = 0, 0
    for row in rows:
        cost = len(row.queries) * len(row.keys)
        widest = max(m, len(row.queries))
        padded = (len(bucket) + 1) * widest * len(row.keys)
        if bucket and padded > 2 * (true + cost) + _CALL_COST:
            yield bucket
            bucket, true, widest = [], 0, len(row.queries)
        bucket.append(row)
        true, m = true + cost, widest
    if bucket:
        yield bucket


# Cost of one more attention call, in units of (query, key) pairs; measured on 2 CPU cores, where a call costs about
# as much as 20,000 pairs. It only decides between two exact ways of computing the same thing.
_CALL_COST = 20_000
# Segments and families below this many pairs are gathered into padded rows; above it, one call each costs less than the
# copies that gathering makes.
_SMALL = 60_000


class TreeContext:
    """Attention over packed trees: every token sees its ancestors and itself.

    `capture`: keep k and v of every layer ([K, N, d] each) for an engine's prefill.
    `dense`: True or False forces one of the two exact ways for all, None chooses the cheaper for each segment.
    """

    def __init__(self, batch: Batch, *, capture: bool = False, dense: bool | None = None):
        device = batch.ids.device
        self.keys: dict[int, torch.Tensor] | None = {} if capture else None
        self.values: dict[int, torch.Tensor] | None = {} if capture else None
        self._parts: list[_Family | _Dense | _Rows] = []
        small: list[_Row] = []
        for segment in batch.segments:
            families: dict[int, list[int]] = {}
            for index, span in enumerate(segment.spans):
                if span.stop > span.start:
                    families.setdefault(span.parent, []).append(index)
            if dense is None:
                whole = (segment.stop - segment.start) ** 2 + _CALL_COST
                split = sum(self._cost(segment, p, c) + _CALL_COST for p, c in families.items())
                use_dense = whole < split
            else:
                use_dense = dense
            if use_dense:
                if dense is None and (segment.stop - segment.start) ** 2 < _SMALL:
                    tokens = torch.arange(segment.start, segment.stop)
                    small.append(_Row(tokens, tokens, batch.visible(segment)))
                else:
                    self._parts.append(_Dense(batch, segment, device))
                continue
            for parent, children in families.items():
                if dense is None and self._cost(segment, parent, children) < _SMALL:
                    small.extend(self._row(segment, child) for child in children)
                else:
                    self._parts.append(_Family(segment, parent, children, device))
        self._parts.extend(_Rows(bucket, batch.positions) for bucket in _buckets(small))
        order = torch.cat([p.queries for p in self._parts])
        self._inverse: torch.Tensor | None = None
        if not bool((order == torch.arange(len(order), device=device)).all()):
            self._inverse = torch.empty_like(order)
            self._inverse[order] = torch.arange(len(order), device=device)

    @staticmethod
    def _row(segment: Segment, child: int) -> _Row:
        spans = segment.spans
        keys = torch.cat([torch.arange(spans[i].start, spans[i].stop) for i in segment.path(child)])
        size = spans[child].stop - spans[child].start
        seen = torch.ones(size, len(keys), dtype=torch.bool).tril_(len(keys) - size)
        return _Row(keys[len(keys) - size :], keys, seen)

    @staticmethod
    def _cost(segment: Segment, parent: int, children: list[int]) -> int:
        spans = segment.spans
        prefix = sum(spans[i].stop - spans[i].start for i in segment.path(parent))
        longest = max(spans[c].stop - spans[c].start for c in children)
        return len(children) * longest * (prefix + longest)

    def attend(self, layer, q, k, v, *, scaling, window, softcap) -> torch.Tensor:
        if self.keys is not None and self.values is not None:
            self.keys[layer], self.values[layer] = k[0], v[0]
        out = [p.attend(q, k, v, scaling=scaling, window=window, softcap=softcap) for p in self._parts]
        flat = out[0] if len(out) == 1 else torch.cat(out)
        if self._inverse is not None:
            flat = flat.index_select(0, self._inverse)
        return flat[None]
