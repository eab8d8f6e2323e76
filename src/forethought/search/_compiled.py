"""The compiled part of `kernels`; importing it takes numba and about a second.

Arguments come in tuples of the forest's arrays; the order of operations is that of `rules` and `forest`, without fast
mathematics, so that every number is the same.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from forethought.search.rules import TINY

NONE = -1


@njit(cache=True, error_model="numpy")
def descend(rows, following):
    out = np.empty_like(rows)
    for i in range(len(rows)):
        row = rows[i]
        while following[row] != row:
            row = following[row]
        out[i] = row
    return out


@njit(inline="always")
def _refresh(row, base, nodes, edges, choice, rule):
    _, _, _, visits, own, total, raw, _, _, count, _ = nodes
    child, n, _, q, prior, _, _, is_open = edges
    best, following = choice
    puct, c, factor, by_edges, scale_by, fill, unvisited, table = rule
    size = count[row]
    low, offset, scale, rest = 0.0, 0.0, 1.0, unvisited
    if scale_by == 1 or fill > 0:
        value = total[row] / visits[row] if visits[row] > 0 else 0.0 if np.isnan(raw[row]) else raw[row]
        low, high = value, value
        for a in range(size):
            known = q[row, a] if n[row, a] > 0 else value
            low = known if known < low else low
            high = known if known > high else high
        if scale_by == 1:
            offset, scale = low, max(high - low, TINY)
        if fill == 1:
            rest = (value - offset) / scale
        elif fill == 2:
            rest = (low - offset) / scale
    here = int(visits[row] - own[row]) if by_edges else int(visits[row])
    weight = table[here] if puct else factor * table[here]
    top, choose = -np.inf, NONE
    for a in range(size):
        times = n[row, a]
        known = (q[row, a] - offset) / scale
        known = known if times > 0 else rest
        if puct:
            score = weight * prior[row, a] / (1.0 + times) + known
        elif times > 0:
            score = known + np.sqrt(weight / times) * c
        else:
            score = known
        better = is_open[row, a] and (score > top or choose == NONE)
        top = score if better else top
        choose = a if better else choose
    best[row] = choose
    following[row] = row
    if choose >= 0:
        below = child[row, choose]
        following[row] = base + below if below >= 0 else row


@njit(cache=True, error_model="numpy")
def settle(work, sizes, nodes, edges, choice, rule):
    trees, last, new, rewards, values, ends, players, priors, leaves = work
    capacity, gamma, size, roots = sizes
    parent, slot, depth, visits, own, total, raw, player, ended, count, allowed = nodes
    child, n, w, q, prior, reward, discount, is_open = edges
    best, _ = choice
    for i in range(len(trees)):
        tree, row = trees[i], last[i]
        base = tree * capacity
        value = values[i]
        if new[i]:
            a = best[row]
            node = size[tree]
            size[tree] += 1
            leaf = base + node
            child[row, a] = node
            parent[leaf], slot[leaf], depth[leaf] = row - base, a, depth[row] + 1
            raw[leaf], player[leaf], ended[leaf] = value, players[i], ends[i]
            reward[row, a] = rewards[i]
            discount[row, a] = gamma if player[row] == players[i] else -gamma
            if not ends[i]:
                count[leaf] = allowed[leaf] = priors.shape[1]
                for b in range(priors.shape[1]):
                    prior[leaf, b] = priors[i, b]
                    is_open[leaf, b] = True
        else:
            leaf = row
            value = 0.0 if np.isnan(raw[row]) else raw[row]
        leaves[i] = leaf
        own[leaf] += 1
        visits[leaf] += 1
        total[leaf] += value
        _refresh(leaf, base, nodes, edges, choice, rule)
        root = base + roots[tree]
        row = leaf
        while row != root:
            a = slot[row]
            row = base + parent[row]
            value = reward[row, a] + discount[row, a] * value
            n[row, a] += 1
            w[row, a] += value
            q[row, a] = w[row, a] / n[row, a]
            visits[row] += 1
            total[row] += value
            _refresh(row, base, nodes, edges, choice, rule)
