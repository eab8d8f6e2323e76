"""Keys and values that an engine keeps between calls, so that a search prefills each token once.

One arena a tree holds a column for every token of the `TokenTree`, by the token's own index: a path is gathered with one
index a layer, and a node may branch anywhere. Columns come from prefills and from decoding (all but the last token of a
row, which was never fed). What is missing on a path is computed in one forward over the suffixes of many leaves
(`SuffixContext`). Trees are dropped whole, least recently used first; a dropped tree is prefilled again.

Shapes: G leaves, H heads, K key-value heads, P cached and S new tokens (padded), d head size.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch

from forethought.models import attention
from forethought.models.engine import EngineStats
from forethought.models.policy import Policy
from forethought.tree.tree import TokenTree

KV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, [K, tokens, d] each."""


@dataclass
class _Arena:
    tree: TokenTree
    have: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    layers: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def grow(self, tokens: int) -> None:
        old = len(self.have)
        if tokens <= old:
            return
        new = max(tokens, 2 * old, 64)
        self.have = np.concatenate([self.have, np.zeros(new - old, bool)])
        for pair in self.layers.values():
            for which, buffer in enumerate(pair):
                bigger = buffer.new_empty(buffer.shape[0], new, buffer.shape[2])
                bigger[:, :old] = buffer
                pair[which] = bigger


class PrefixCache:
    """Arenas of many trees, of at most `max_tokens` columns together (those of a call in progress may exceed it)."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self._arenas: OrderedDict[int, _Arena] = OrderedDict()

    def _arena(self, tree: TokenTree) -> _Arena:
        arena = self._arenas.get(id(tree))
        if arena is None:
            arena = self._arenas[id(tree)] = _Arena(tree)
        self._arenas.move_to_end(id(tree))
        return arena

    def known(self, tree: TokenTree, tokens: np.ndarray) -> int:
        """How many of a path's tokens, from its beginning, are here; the last one never counts (its output is needed)."""
        arena = self._arenas.get(id(tree))
        if arena is None or not len(arena.have):
            return 0
        inside = tokens < len(arena.have)
        have = np.zeros(len(tokens), bool)
        have[inside] = arena.have[tokens[inside]]
        missing = np.flatnonzero(~have)
        return min(int(missing[0]) if len(missing) else len(tokens), len(tokens) - 1)

    def put(self, tree: TokenTree, tokens: np.ndarray, layers: dict[int, KV]) -> None:
        """Columns of these tokens, by layer."""
        if not len(tokens) or not layers:
            return
        arena = self._arena(tree)
        arena.grow(int(tokens.max()) + 1)
        run = slice(int(tokens[0]), int(tokens[-1]) + 1) if tokens[-1] - tokens[0] == len(tokens) - 1 else None
        where = torch.from_numpy(tokens)
        for layer, pair in layers.items():
            if layer not in arena.layers:
                arena.layers[layer] = [new.new_empty(new.shape[0], len(arena.have), new.shape[2]) for new in pair]
            for buffer, new in zip(arena.layers[layer], pair, strict=True):
                if run is not None:
                    buffer[:, run] = new
                else:
                    buffer.index_copy_(1, where.to(buffer.device), new)
        arena.have[tokens] = True

    def gather(self, tree: TokenTree, tokens: np.ndarray, layer: int, out: torch.Tensor, which: int) -> None:
        """Keys (which 0) or values (1) of these tokens into `out` [K, >= tokens, d]."""
        buffer = self._arenas[id(tree)].layers[layer][which]
        out[:, : len(tokens)] = buffer.index_select(1, torch.from_numpy(tokens).to(buffer.device))

    def layers_of(self, tree: TokenTree) -> dict[int, list[torch.Tensor]]:
        self._arenas.move_to_end(id(tree))
        return self._arenas[id(tree)].layers

    def trim(self) -> None:
        """Drop the least recently used trees above the limit."""
        total = sum(len(a.have) for a in self._arenas.values())
        while total > self.max_tokens and self._arenas:
            _, dropped = self._arenas.popitem(last=False)
            total -= len(dropped.have)

    def clear(self) -> None:
        self._arenas.clear()

    def __len__(self) -> int:
        """Columns that are filled."""
        return sum(int(a.have.sum()) for a in self._arenas.values())


class SuffixContext:
    """Attention of G suffixes over their cached prefixes; keeps the keys and values of both.

    Args:
        prefix: per layer keys and values [G, K, P + S, d]; the first `cached[g]` columns are filled, and the new ones
            are written behind them.
        cached, fresh: [G] numbers of cached and new tokens.
    """

    def __init__(self, prefix: dict[int, list[torch.Tensor]], cached: torch.Tensor, fresh: torch.Tensor):
        self.prefix, self.cached, self.fresh = prefix, cached, fresh
        self.size = int(fresh.max())
        device = cached.device
        self._row = torch.arange(len(cached), device=device)[:, None].expand(-1, self.size)
        place = torch.arange(self.size, device=device)
        self._column = cached[:, None] + place
        self._masks: dict[int | None, torch.Tensor] = {}

    def _mask(self, window: int | None, columns: int) -> torch.Tensor:
        """[G, 1, S, columns]: a token sees all before it in its row, and itself. Padded ones see what stands there."""
        if window not in self._masks:
            place = torch.arange(columns, device=self.cached.device)
            distance = self._column[:, :, None] - place
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            self._masks[window] = seen[:, None]
        return self._masks[window]

    def attend(self, layer, q, k, v, *, scaling, window, softcap) -> torch.Tensor:
        """See `attention.AttentionContext`."""
        for buffer, new in zip(self.prefix[layer], (k, v), strict=True):
            buffer[self._row, :, self._column] = new.transpose(1, 2)
        keys, values = self.prefix[layer]
        out = attention.masked_attention(
            q, keys, values, self._mask(window, keys.shape[2]), scaling=scaling, softcap=softcap
        )
        return out.transpose(1, 2)


Layers = dict[int, torch.Tensor]


@torch.inference_mode()
def prefill_ends(
    policy: Policy, cache: PrefixCache, stats: EngineStats, paths: list[tuple[TokenTree, np.ndarray, int]]
) -> list[tuple[Layers, Layers, torch.Tensor]]:
    """Run what is missing at the ends of paths, all in one forward, and keep it.

    Args:
        paths: tree, its tokens on the path, and how many of them from the beginning are in the cache (at least 1, and
            not all).

    Returns:
        Per path keys and values of all its tokens by layer, [K, path, d], and the logits [V] after the last.
    """
    device = policy.device
    cached = np.array([known for _, _, known in paths])
    fresh = np.array([len(tokens) for _, tokens, _ in paths]) - cached
    size = int(fresh.max())
    buffers: dict[int, list[torch.Tensor]] = {}
    ids = np.zeros((len(paths), size), np.int64)
    for row, (tree, tokens, known) in enumerate(paths):
        for layer, pair in cache.layers_of(tree).items():
            if layer not in buffers:
                shape = (len(paths), pair[0].shape[0], int(cached.max()) + size, pair[0].shape[2])
                buffers[layer] = [pair[0].new_zeros(shape), pair[1].new_zeros(shape)]
            for side, buffer in enumerate(buffers[layer]):
                cache.gather(tree, tokens[:known], layer, buffer[row], side)
        ids[row, : fresh[row]] = tree.ids[tokens[known:]]
    places = torch.from_numpy(cached[:, None] + np.arange(size)).to(device)
    last = torch.from_numpy(fresh - 1).to(device)
    context = SuffixContext(buffers, torch.from_numpy(cached).to(device), torch.from_numpy(fresh).to(device))
    with attention.using(policy.configs, context):
        hidden = policy.decoder(
            input_ids=torch.from_numpy(ids).to(device), position_ids=places, use_cache=False
        ).last_hidden_state
    stats.tokens_prefilled += int(fresh.sum())
    stats.tokens_reused += int(cached.sum())
    logits = policy.logits(hidden[torch.arange(len(paths), device=device), last])
    out = []
    for row, (tree, tokens, known) in enumerate(paths):
        end = len(tokens)
        new: dict[int, KV] = {n: (k[row, :, known:end], v[row, :, known:end]) for n, (k, v) in buffers.items()}
        cache.put(tree, tokens[known:], new)
        keys, values = ({n: pair[side][row, :, :end] for n, pair in buffers.items()} for side in (0, 1))
        out.append((keys, values, logits[row]))
    return out
