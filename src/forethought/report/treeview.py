"""Sampled rollouts and the tree they stand in, as HTML.

What the model said is shown token by token, as it was sampled: coloured by advantage (by reward where a tree has no
advantages) or by behaviour log-prob. Everything has a limit that keeps the page small, and says what it left out.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forethought.report.text import esc, script_json, show_number, truncate, visible
from forethought.report.tokens import Pieces
from forethought.tree.store import TreeRow
from forethought.tree.tree import Kind, Stop, TokenTree

SAMPLES = 8  # of one tree
PAGE_TOKENS = 7_000  # token boxes on the page
PAGE_NODES = 2_500  # nodes in the page's tree views
PROMPT_CHARS = 3_000
TURN_CHARS = 1_500
NODE_CHARS = 160
_SPECIAL = re.compile(r"<[^<>\s]{1,40}>|\[[A-Z]{2,12}\]")
_LOGPROB_STEPS = (-0.1, -0.7, -1.6, -3.0)  # probabilities of about 0.9, 0.5, 0.2, 0.05


@dataclass(frozen=True)
class Budget:
    """How much of one tree is shown."""

    tokens: int
    nodes: int


def budget(trees: Sequence[tuple[TreeRow, TokenTree]]) -> Budget:
    samples = sum(min(SAMPLES, len(tree.leaves())) for _, tree in trees)
    return Budget(
        tokens=min(400, max(40, PAGE_TOKENS // max(1, samples))), nodes=max(100, PAGE_NODES // max(1, len(trees)))
    )


# -- samples ---------------------------------------------------------------------------------------------------------


def pick_leaves(tree: TokenTree, limit: int = SAMPLES) -> list[int]:
    """Leaves to show: all where they are few, else spread evenly from the best to the worst reward."""
    leaves = tree.leaves()
    if len(leaves) <= limit:
        return leaves
    rewards = [tree.outcome(leaf) for leaf in leaves]
    order = sorted(
        range(len(leaves)), key=lambda i: (math.isnan(rewards[i]), -rewards[i] if rewards[i] == rewards[i] else 0, i)
    )
    return [leaves[order[round(k * (len(order) - 1) / (limit - 1))]] for k in range(limit)]


def shared_path(tree: TokenTree, leaves: Sequence[int]) -> list[int]:
    """Nodes that stand on the path to every one of these leaves; never a leaf itself, but always the root."""
    paths = [tree.path(leaf)[:-1] or [0] for leaf in leaves]
    out = []
    for nodes in zip(*paths, strict=False):
        if len(set(nodes)) > 1:
            break
        out.append(nodes[0])
    return out or [0]


def node_text(tree: TokenTree, node: int, pieces: Pieces, most: int = 4_000) -> tuple[str, int]:
    """(text of a node, its tokens that were left out at the end); a node without tokens may have a text in its meta."""
    ids = tree.node_ids(node)
    if not ids:
        return str(tree.meta[node].get("text", "")), 0
    return "".join(pieces(ids[:most])), max(0, len(ids) - most)


def has_advantages(tree: TokenTree) -> bool:
    return bool(np.any(tree.advantage != 0))


def _level(value: float, most: float) -> str:
    """Class of a signal: p1 ... p4 above zero, n1 ... n4 below, none at zero."""
    if not most or not math.isfinite(value) or value == 0:
        return ""
    return f"{'p' if value > 0 else 'n'}{min(4, max(1, math.ceil(4 * abs(value) / most - 1e-6)))}"


def _logprob_level(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return f"l{sum(value < step for step in _LOGPROB_STEPS)}"


def token_boxes(
    tree: TokenTree, node: int, pieces: Pieces, *, most: float, limit: int, reward: float | None = None
) -> str:
    """One box per token of a sampled node. Its data-v is "place id logprob advantage", "-" where there is none.

    Args:
        most: size of the signal that gets the strongest colour. limit: boxes at most.
        reward: the signal that colours all tokens; by default each token's advantage does.
    """
    span = tree.span(node)
    ids = tree.node_ids(node)
    tail = limit // 4 if len(ids) > limit else 0
    parts = [(0, ids[: limit - tail])] if tail else [(0, ids)]
    if tail:
        parts.append((len(ids) - tail, ids[-tail:]))
    before = tree.path_ids(int(tree.parent[node]))[-1:] if node else []
    out = []
    for begin, part in parts:
        context = ids[begin - 1 : begin] if begin else before
        if begin:
            hidden = len(ids) - limit
            out.append(f'<span class="cut">… {hidden:,} tokens not shown …</span>')
        for k, text in enumerate(pieces([*context, *part])[len(context) :]):
            at = span.start + begin + k
            logprob, advantage = float(tree.logprob[at]), float(tree.advantage[at])
            classes = " ".join(
                filter(None, ("t", _level(advantage if reward is None else reward, most), _logprob_level(logprob)))
            )
            facts = f"{begin + k + 1} {part[k]} {_fact(logprob)} {_fact(advantage)}"
            out.append(f'<span class="{classes}" data-v="{facts}">{_piece(text)}</span>')
    return "".join(out)


def _fact(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "-"


def _piece(text: str) -> str:
    """A token's text with its line ends made visible, and a sign where it has none of its own."""
    if not text:
        return '<i class="w">·</i>'
    if _SPECIAL.fullmatch(text):
        return f'<i class="w">{esc(text)}</i>'
    return esc(text).replace("\n", '<i class="w">↵</i>\n')


def _plain(text: str, limit: int, hidden_tokens: int = 0) -> str:
    """Text of a prompt or an observation: special tokens muted, cut with a count."""
    short, hidden = truncate(visible(text), limit)
    out = []
    at = 0
    for match in _SPECIAL.finditer(short):
        out += [esc(short[at : match.start()]), f'<i class="w">{esc(match.group())}</i>']
        at = match.end()
    out.append(esc(short[at:]))
    if hidden:
        out.append(f' <span class="cut">({hidden:,} characters not shown)</span>')
    if hidden_tokens:
        out.append(f' <span class="cut">(and {hidden_tokens:,} tokens)</span>')
    return "".join(out)


def _parts(meta: dict[str, Any]) -> str:
    parts = meta.get("parts")
    if not isinstance(parts, dict) or not parts:
        return ""
    chips = "".join(
        f'<span class="chip">{esc(name)} <b data-value="{esc(json.dumps(value))}">{show_number(value)}</b></span>'
        for name, value in parts.items()
    )
    return f'<span class="parts">{chips}</span>'


def _reward_chip(value: float) -> str:
    if math.isnan(value):
        return '<span class="chip none">no reward</span>'
    sign = "good" if value > 0 else "bad" if value < 0 else "zero"
    return f'<span class="chip reward {sign}">reward <b data-value="{value!r}">{show_number(value)}</b></span>'


def _sample(tree: TokenTree, leaf: int, place: int, skip: set[int], pieces: Pieces, most: float, limit: int) -> str:
    meta = tree.meta[leaf]
    reward = None if has_advantages(tree) else tree.outcome(leaf)
    stop = Stop(int(tree.stop[leaf]))
    nodes = [n for n in tree.path(leaf) if n not in skip]
    tokens = sum(int(tree.length[n]) for n in nodes if tree.sampled[n])
    chips = [_reward_chip(tree.outcome(leaf)), _parts(meta)]
    facts = []
    advantages = np.unique(tree.advantage[tree.span(leaf)])
    if len(advantages) == 1 and advantages[0]:
        value = float(advantages[0])
        facts.append(f'advantage <b data-value="{value!r}">{value:+.3g}</b>')
    if stop is not Stop.NONE:
        facts.append(f"stop {_stop(stop)}")
    facts.append(f"{tokens:,} tokens")
    body = []
    for node in nodes:
        if tree.sampled[node]:
            boxes = token_boxes(tree, node, pieces, most=most, limit=limit, reward=reward)
            empty = "" if boxes else '<span class="cut">(empty)</span>'
            body.append(
                f'<div class="toks" tabindex="0" role="group" aria-label="tokens of sample {place}">'
                f"{boxes}{empty}</div>"
            )
        elif tree.length[node] or "text" in tree.meta[node]:
            text, hidden = node_text(tree, node, pieces)
            name = Kind(int(tree.kind[node])).name.lower()
            body.append(f'<div class="turn"><span class="kind">{name}</span>{_plain(text, TURN_CHARS, hidden)}</div>')
    why = "".join(
        f'<p class="why"><b>{label}</b> {_plain(str(meta[key]), 500)}</p>'
        for key, label in (("why", "why"), ("error", "failed"))
        if meta.get(key)
    )
    return (
        f'<article class="sample"><header><span class="no">{place}</span>{"".join(chips)}'
        f'<span class="more-facts">{" · ".join(facts)}</span></header>{"".join(body)}{why}</article>'
    )


# -- the tree --------------------------------------------------------------------------------------------------------


def pick_nodes(tree: TokenTree, limit: int) -> list[int]:
    """At most `limit` nodes that hang together from the root: the most visited first, then by depth and order."""
    heap = [(0, 0, 0)]
    out: list[int] = []
    while heap and len(out) < limit:
        _, depth, node = heapq.heappop(heap)
        out.append(node)
        for child in tree.children(node):
            heapq.heappush(heap, (-int(tree.visits[child]), depth + 1, child))
    return sorted(out)


def tree_data(tree: TokenTree, pieces: Pieces, limit: int) -> dict[str, Any]:
    """What the tree view needs, columns as lists; `hidden[i]` children of node i are not on the page.

    Numbers are rounded to 4 digits, null where there is none.
    """
    nodes = pick_nodes(tree, limit)
    place = {node: i for i, node in enumerate(nodes)}
    texts = []
    for node in nodes:
        text, hidden_tokens = node_text(tree, node, pieces, most=4 * NODE_CHARS)
        short, hidden = truncate(visible(text), NODE_CHARS)
        texts.append([short, hidden, hidden_tokens])
    return {
        "id": nodes,
        "parent": [place[int(tree.parent[n])] if n else -1 for n in nodes],
        "kind": [Kind(int(tree.kind[n])).name.lower() for n in nodes],
        "sampled": [int(tree.sampled[n]) for n in nodes],
        "tokens": [int(tree.length[n]) for n in nodes],
        "stop": [_stop(Stop(int(tree.stop[n]))) for n in nodes],
        "visits": [int(tree.visits[n]) for n in nodes],
        **{name: [_round(float(getattr(tree, name)[n])) for n in nodes] for name in ("reward", "value", "prior")},
        "text": texts,
        "meta": [_meta(tree.meta[n]) for n in nodes],
        "hidden": [sum(c not in place for c in tree.children(n)) for n in nodes],
        "all": tree.n_nodes,
    }


def _meta(meta: dict[str, Any]) -> str:
    """A node's remarks in one line: reward parts and numbers of a search by name, then the rest; not its text."""
    named = {key: meta[key] for key in ("parts", "search") if isinstance(meta.get(key), dict)}
    items = [f"{k} {show_number(v)}" for numbers in named.values() for k, v in numbers.items()]
    for key, value in meta.items():
        if key not in named and key != "text":
            items.append(f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    return truncate(visible(" · ".join(items)), 300)[0]


def _stop(stop: Stop) -> str:
    return stop.name.lower().replace("_", " ")


def _round(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


# -- a panel: one stored tree ----------------------------------------------------------------------------------------


def label(row: TreeRow) -> str:
    """Name of a stored tree in the chooser."""
    reward = "" if row.reward is None else f", mean reward {show_number(row.reward)}"
    return f"{row.arm or 'run'} · step {row.step} · {row.kind} · task {truncate(row.task, 24)[0]}{reward}"


def panel(row: TreeRow, tree: TokenTree, number: int, pieces: Pieces, limits: Budget) -> str:
    """Prompt, samples and tree view of one stored tree."""
    leaves = pick_leaves(tree)
    shared = shared_path(tree, leaves)
    name, signal = ("advantage", tree.advantage) if has_advantages(tree) else ("reward", tree.reward)
    most = float(np.abs(signal[np.isfinite(signal)]).max(initial=0))
    prompt = []
    for node in shared:
        text, hidden = node_text(tree, node, pieces)
        kind = Kind(int(tree.kind[node])).name.lower()
        if text:
            prompt.append(
                f'<div class="turn"><span class="kind">{kind}</span>{_plain(text, PROMPT_CHARS, hidden)}</div>'
            )
    samples = "".join(
        _sample(tree, leaf, i, set(shared), pieces, most, limits.tokens)
        for i, leaf in enumerate(leaves, 1)
        if leaf not in shared
    )
    total = len(tree.leaves())
    note = (
        ""
        if total <= len(leaves)
        else f'<p class="note">{len(leaves)} of {total:,} samples, spread evenly from the best to the worst reward.</p>'
    )
    facts = [("task", truncate(row.task, 80)[0]), ("seed", str(row.seed)), ("samples", f"{total:,}")]
    facts.append(("tokens", f"{row.tokens:,}"))
    chips = "".join(f'<span class="chip">{k} <b>{esc(v)}</b></span>' for k, v in facts)
    if row.reward is not None:
        shown = f'<b data-value="{row.reward!r}">{show_number(row.reward)}</b>'
        chips += f'<span class="chip">mean reward {shown}</span>'
    return (
        f'<div class="panel" id="tree-{number}" data-label="{esc(label(row))}" data-signal="{name}">'
        f'<h3>{esc(label(row))}</h3><p class="facts">{chips}</p><div class="prompt">{"".join(prompt)}</div>'
        f'{note}<div class="samples">{samples}</div>'
        '<details class="treebox"><summary>Tree of this group '
        f"<small>{tree.n_nodes:,} nodes, {tree.n_tokens:,} tokens</small></summary>"
        f'<div class="tree" data-source="tree-data-{number}">'
        '<p class="note">The tree view needs a script; this viewer runs none.</p></div>'
        f'<script type="application/json" id="tree-data-{number}">'
        f"{script_json(tree_data(tree, pieces, limits.nodes))}</script></details></div>"
    )
