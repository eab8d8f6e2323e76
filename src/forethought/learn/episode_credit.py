"""Credit of multi-turn episodes: whole trajectories compared with one another, and turns taken in the same state.

`trajectory_advantages`: GRPO over trajectories (Shao et al., arXiv 2402.03300): every turn of an episode has the
episode's advantage. Over "trajectories" the statistics are those of the G returns; over "turns" each turn is a sample
with its episode's return (so long episodes weigh more), as agents are often trained.

`step_advantages`: the finer half of GiGPO (Feng et al., arXiv 2505.10978, section 4). Episodes of one group begin alike,
so their turns meet in the same states. With s_t the state in which turn t acts and R_t = sum_k>=t gamma^(k-t) r_k, turns
in equal states are one group: A^S = (R_t - mean) / F, F the standard deviation or 1, as the estimator has it. GiGPO's
advantage of a turn is A^E + w * A^S, with A^E the episode's.

An invalid action costs `invalid_penalty`: it is part of the turn's reward, so of R_t and of the trajectory's return; over
"turns" it is taken from that turn's own score instead, and the episode's other turns are not blamed.

Failed episodes are None: they leave every mean, and get no advantage. A state that one turn only met gives 0: there is
nothing to compare it with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np

from forethought.errors import DataError
from forethought.tree.credit import Numbers, turn_returns
from forethought.tree.tree import TokenTree

Over = Literal["trajectories", "turns"]
Estimator = Callable[[np.ndarray], np.ndarray]
"""Numbers of samples that are compared, [n] -> advantages [n]: `credit.group_normalised`, `credit.leave_one_out`."""


def trajectory_advantages(
    scores: Sequence[Sequence[float] | None], estimator: Estimator, *, over: Over = "trajectories"
) -> list[np.ndarray | None]:
    """Advantages [S] of the turns of each episode of a group.

    Args:
        scores: per episode the score of each of its turns (equal ones where the statistics are over trajectories: the
            return); None: it failed. An episode without turns has no say.
    """
    out: list[np.ndarray | None] = [None if s is None else np.zeros(len(s)) for s in scores]
    owners = [i for i, s in enumerate(scores) if s is not None and len(s)]
    if not owners:
        return out
    rows = [np.asarray(scores[i], np.float64) for i in owners]
    if over == "trajectories":
        found = estimator(np.array([float(r[0]) for r in rows]))
        for i, row, value in zip(owners, rows, found, strict=True):
            out[i] = np.full(len(row), value)
    else:
        flat = estimator(np.concatenate(rows))
        for i, part in zip(owners, np.split(flat, np.cumsum([len(r) for r in rows])[:-1]), strict=True):
            out[i] = part
    return out


def step_advantages(
    states: Sequence[Sequence[Hashable]],
    rewards: Sequence[Numbers | None],
    estimator: Estimator,
    *,
    gamma: float,
) -> tuple[list[np.ndarray | None], float]:
    """Advantages [S] of turns among those of the group that acted in an equal state, and the share of turns with company.

    Args:
        states: per episode the state of each turn. rewards: per episode the reward of each turn; None: it failed.

    Raises:
        DataError: lengths differ. ConfigError: gamma outside [0, 1].
    """
    out: list[np.ndarray | None] = []
    groups: dict[Hashable, list[tuple[int, int, float]]] = {}
    for i, (mine, earned) in enumerate(zip(states, rewards, strict=True)):
        out.append(None if earned is None else np.zeros(len(earned)))
        if earned is None:
            continue
        if len(mine) != len(earned):
            raise DataError(f"episode {i}: {len(mine)} states for {len(earned)} rewards")
        for t, (state, value) in enumerate(zip(mine, turn_returns(earned, gamma), strict=True)):
            groups.setdefault(state, []).append((i, t, float(value)))
    met = total = 0
    for members in groups.values():
        total += len(members)
        if len(members) < 2:
            continue
        met += len(members)
        found = estimator(np.array([value for _, _, value in members]))
        for (i, t, _), value in zip(members, found, strict=True):
            advantages = out[i]
            assert advantages is not None
            advantages[t] = value
    return out, met / total if total else 0.0


def assign_nodes(tree: TokenTree, nodes: Sequence[int], advantages: Numbers) -> int:
    """Train these sampled nodes, each with its own advantage: one more weight on their tokens; returns how many tokens.

    For the turns of an episode wherever they stand: on one path, or each on a branch of its own.

    Raises:
        DataError: a node was not sampled, an advantage is not finite, lengths differ.
    """
    values = np.asarray(advantages, np.float64)
    if len(nodes) != len(values):
        raise DataError(f"task {tree.task!r}: {len(values)} advantages for {len(nodes)} turns")
    if not np.isfinite(values).all():
        raise DataError(f"task {tree.task!r}: an advantage is not finite; leave the episode out instead")
    count = 0
    for node, value in zip(nodes, values, strict=True):
        if not tree.sampled[node]:
            raise DataError(f"task {tree.task!r}: node {node} was not sampled, so it cannot be trained")
        span = tree.span(node)
        before = tree.weight[span].astype(np.float64)
        old = np.where(before > 0, tree.advantage[span], 0.0)
        tree.advantage[span] = old + (value - old) / (before + 1)
        tree.weight[span] += 1
        count += span.stop - span.start
    return count
