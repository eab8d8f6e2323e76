"""Credit: rewards on trees -> advantages and weights on tokens.

Two halves. Estimators turn numbers into advantages: `group_normalised` (GRPO, Shao et al., arXiv 2402.03300),
`leave_one_out` (RLOO, Ahmadian et al., arXiv 2402.14740), `batch_whitened` (PPO as in verl; REINFORCE++, arXiv
2501.03262), `gae_values` (Schulman et al., arXiv 1506.02438), turn returns, sibling differences. Writers put them onto
token columns: `assign` and what is built on it.

The group is always an explicit argument: the samples that are compared with one another. It is never inferred from
equal text, so 128 groups of one prompt stay 128 groups.

Rejected samples (`rejected`, or a NaN reward) leave mean and spread and have advantage 0; writers give them no weight.

Weights count trained paths: a token on k of them has weight k and the mean of their advantages, so weight * advantage
is the sum over the paths. Writers add to what is there; `clear` starts afresh.

Departures: an observation token is no step of GAE (the recursion runs over policy tokens only), so a reward does not
decay across text that the environment wrote. A group in which one sample is left has advantage 0 (there is nothing to
compare it with), where some frameworks pass its reward through.

G samples of a group, N nodes, T tokens, P policy tokens of a path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forethought.errors import ConfigError, DataError
from forethought.tree.tree import TokenTree

Leaf = tuple[TokenTree, int]
"""One sample: a tree and the node that its path ends in."""

Spread = Literal["sample", "population"]
Numbers = Sequence[float] | np.ndarray
Flags = Sequence[bool] | np.ndarray


# -- estimators: numbers in, numbers out --
def group_normalised(
    rewards: Numbers, *, std: Spread | None = "sample", eps: float = 1e-6, rejected: Flags | None = None
) -> np.ndarray:
    """(reward - mean) / (std + eps) within one group, [G] -> float64 [G].

    Args:
        std: "sample" divides by the unbiased standard deviation (n - 1; GRPO as implemented in verl and TRL),
            "population" by the biased one (n), None not at all (Dr. GRPO).
        rejected: [G] samples that do not count; those with a NaN reward never do.

    All rewards equal, or one sample left: zeros, exactly.

    Raises:
        DataError: empty group, infinite reward. ConfigError: unknown std, negative eps.
    """
    if std not in ("sample", "population", None):
        raise ConfigError(f"std={std!r}: give 'sample', 'population' or None")
    if not eps >= 0:
        raise ConfigError(f"eps={eps}: give 0 or more")
    values, kept = _accepted(rewards, rejected)
    out = np.zeros(len(values))
    x = values[kept]
    if is_zero_variance(x):
        return out
    centred = x - x.mean()
    if std is not None:
        centred /= x.std(ddof=1 if std == "sample" else 0) + eps
    out[kept] = centred
    return out


def leave_one_out(rewards: Numbers, *, rejected: Flags | None = None) -> np.ndarray:
    """reward - mean of the other samples' rewards within one group, [G] -> float64 [G]; see `group_normalised`."""
    values, kept = _accepted(rewards, rejected)
    out = np.zeros(len(values))
    x = values[kept]
    if not is_zero_variance(x):
        out[kept] = (x - x.mean()) * (len(x) / (len(x) - 1))
    return out


def batch_whitened(
    values: Numbers,
    *,
    weight: Numbers | None = None,
    eps: float = 1e-8,
    rejected: Flags | None = None,
) -> np.ndarray:
    """(value - mean) / sqrt(variance + eps) over a whole batch, [n] -> float64 [n].

    Args:
        weight: [n] counts: a value with weight k stands for k equal ones. The variance is unbiased (sum of weights less
            one).

    Raises:
        DataError: no values, infinite ones. ConfigError: eps not positive.
    """
    if not eps > 0:
        raise ConfigError(f"eps={eps}: give a positive number")
    x, kept = _accepted(values, rejected)
    w = np.where(kept, np.ones(len(x)) if weight is None else np.asarray(weight, np.float64), 0.0)
    out = np.zeros(len(x))
    total = w.sum()
    if total <= 0 or is_zero_variance(x[w > 0]):  # else the mean's rounding error would be divided by sqrt(eps)
        return out
    mean = (w[kept] * x[kept]).sum() / total
    variance = (w[kept] * (x[kept] - mean) ** 2).sum() / (total - 1) if total > 1 else 0.0
    out[kept] = (x[kept] - mean) / math.sqrt(variance + eps)
    return out


def gae_values(rewards: Numbers, values: Numbers, *, gamma: float, lam: float, bootstrap: float = 0.0) -> np.ndarray:
    """Generalised advantage estimates over the policy's steps, [P] -> float64 [P].

    A_t = delta_t + gamma * lam * A_(t+1), delta_t = r_t + gamma * V_(t+1) - V_t.

    Args:
        rewards: [P] earned from step t until the policy's next step.
        values: [P] value of the state in which step t is taken.
        bootstrap: value of the state after the last step: V(s_P) where the episode was truncated, 0 where it
            terminated.

    Raises:
        ConfigError: gamma or lam outside [0, 1]. DataError: lengths differ; something is not finite.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ConfigError(f"{name}={number}: give a number in [0, 1]")
    r, v = np.asarray(rewards, np.float64), np.append(np.asarray(values, np.float64), bootstrap)
    if len(r) != len(v) - 1:
        raise DataError(f"{len(r)} rewards for {len(v) - 1} values: give one of each per step of the policy")
    for name, numbers in (("reward", r), ("value", v)):
        bad = np.flatnonzero(~np.isfinite(numbers))
        if len(bad):
            raise DataError(f"{name} {numbers[bad[0]]} at step {bad[0]} of {len(r)}: give a finite number")
    out = np.zeros(len(r))
    running = 0.0
    for t in range(len(r) - 1, -1, -1):
        running = r[t] + gamma * v[t + 1] - v[t] + gamma * lam * running
        out[t] = running
    return out


def is_zero_variance(rewards: Numbers) -> bool:
    """No two valid (not NaN) rewards differ: the group has no signal."""
    x = np.asarray(rewards, np.float64)
    x = x[~np.isnan(x)]
    return len(x) < 2 or bool((x == x[0]).all())


def _accepted(rewards: Numbers, rejected: Flags | None) -> tuple[np.ndarray, np.ndarray]:
    """float64 [G], and which samples count [G].

    Raises:
        DataError: see the callers.
    """
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1 or not len(values):
        raise DataError(f"rewards of shape {values.shape}: give one number per sample of the group, at least one")
    kept = ~np.isnan(values)
    if rejected is not None:
        out = np.asarray(rejected, bool)
        if out.shape != values.shape:
            raise DataError(f"{out.size} rejected flags for {len(values)} rewards: give one per sample")
        kept &= ~out
    bad = kept & np.isinf(values)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise DataError(f"reward of sample {i} is {values[i]}: give a finite number, or NaN to leave the sample out")
    return values, kept


# -- writers --
def clear(trees: Iterable[TokenTree]) -> None:
    """Take all weights and advantages off, before credit is assigned anew."""
    for tree in trees:
        tree.weight[:] = 0
        tree.advantage[:] = 0


def policy_tokens(tree: TokenTree, leaf: int, from_node: int | None = None) -> np.ndarray:
    """Token indices [P] of the sampled spans on the path to `leaf`, in order; only those below `from_node` if given.

    Raises:
        DataError: `from_node` is not on the path.
    """
    spans = [np.arange(tree.span(n).start, tree.span(n).stop) for n in _below(tree, leaf, from_node) if tree.sampled[n]]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)


def _below(tree: TokenTree, leaf: int, from_node: int | None) -> list[int]:
    path = tree.path(leaf)
    if from_node is None:
        return path
    if from_node not in path:
        raise DataError(f"task {tree.task!r}: node {from_node} is not on the path to node {leaf}: {path}")
    return path[path.index(from_node) + 1 :]


def assign(tree: TokenTree, leaf: int, advantage: float | np.ndarray, *, from_node: int | None = None) -> int:
    """Train the path to `leaf`: its policy tokens get one more weight and this advantage; returns how many tokens.

    Args:
        advantage: one number for all, or [P] one per token of `policy_tokens(tree, leaf, from_node)`.
        from_node: only tokens below this node of the path (what stands above it was not decided by this sample).

    Raises:
        DataError: advantage not finite or of another length, `from_node` not on the path.
    """
    where = policy_tokens(tree, leaf, from_node)
    values = np.asarray(advantage, np.float64)
    if values.ndim and values.shape != where.shape:
        raise DataError(
            f"task {tree.task!r}: {values.size} advantages for the {len(where)} policy tokens on the way to node {leaf}"
        )
    if not np.isfinite(values).all():
        raise DataError(f"task {tree.task!r}: the advantage of node {leaf} is not finite; reject the sample instead")
    _add_mean(tree.advantage, tree.weight, where, values)
    tree.weight[where] += 1
    return len(where)


def _add_mean(column: np.ndarray, weight: np.ndarray, where: np.ndarray, values: np.ndarray) -> None:
    """One more path's values into a column that holds the mean over the paths counted by `weight` (not yet raised)."""
    before = weight[where].astype(np.float64)
    old = np.where(before > 0, column[where], 0.0)
    column[where] = old + (values - old) / (before + 1)


def rewards_of(group: Sequence[Leaf]) -> np.ndarray:
    """Rewards [G] that stand on the samples' end nodes (NaN where there is none)."""
    return np.array([float(tree.reward[leaf]) for tree, leaf in group])


def assign_groups(
    groups: Sequence[Sequence[Leaf]],
    estimator: Callable[[np.ndarray], np.ndarray] = group_normalised,
    *,
    from_nodes: Sequence[int | None] | None = None,
) -> list[np.ndarray]:
    """Advantages of every group by `estimator` (rewards [G] -> [G]), written with `assign`.

    Samples with a NaN reward are rejected: advantage 0 and no weight. `from_nodes`: per group, see `assign`; give the
    node that the group branches from where anything above it was sampled too.

    Returns:
        The advantages [G] of each group.
    """
    starts = [None] * len(groups) if from_nodes is None else list(from_nodes)
    out = []
    for group, start in zip(groups, starts, strict=True):
        rewards = rewards_of(group)
        advantages = estimator(rewards)
        for (tree, leaf), advantage, reward in zip(group, advantages, rewards, strict=True):
            if not math.isnan(reward):
                assign(tree, leaf, float(advantage), from_node=start)
        out.append(advantages)
    return out


def split_zero_variance(groups: Sequence[Sequence[Leaf]]) -> tuple[list[Sequence[Leaf]], list[Sequence[Leaf]]]:
    """(groups with a signal, groups without): dynamic sampling. A run on one saturated problem must not drop them."""
    kept = [g for g in groups if not is_zero_variance(rewards_of(g))]
    dropped = [g for g in groups if is_zero_variance(rewards_of(g))]
    return kept, dropped


def zero_variance_share(groups: Sequence[Sequence[Leaf]]) -> float:
    """Share of groups in which no two valid rewards differ.

    Raises:
        DataError: no groups.
    """
    if not groups:
        raise DataError("no groups: a share needs at least one")
    return len(split_zero_variance(groups)[1]) / len(groups)


def whiten(trees: Sequence[TokenTree], *, eps: float = 1e-8) -> None:
    """`batch_whitened` over the advantages of all trained tokens of these trees, in place (PPO)."""
    where = [np.flatnonzero(tree.weight) for tree in trees]
    values = np.concatenate([tree.advantage[w] for tree, w in zip(trees, where, strict=True)])
    if not len(values):
        raise DataError("nothing to whiten: no token has a weight above 0")
    counts = np.concatenate([tree.weight[w] for tree, w in zip(trees, where, strict=True)])
    white = batch_whitened(values, weight=counts, eps=eps)
    for tree, part, at in zip(trees, np.split(white, np.cumsum([len(w) for w in where])[:-1]), where, strict=True):
        tree.advantage[at] = part


def path_rewards(tree: TokenTree, leaf: int, *, from_node: int | None = None) -> np.ndarray:
    """Rewards [P] of the policy tokens on the path to `leaf`: a node's reward belongs to the last policy token until then.

    Raises:
        DataError: a reward before the first policy token; `from_node` is not on the path.
    """
    rewards = np.zeros(len(policy_tokens(tree, leaf, from_node)))
    end = 0  # policy tokens until here
    for node in _below(tree, leaf, from_node):
        end += int(tree.length[node]) if tree.sampled[node] else 0
        reward = _reward(tree, node)
        if reward and len(rewards):  # without a policy token (an empty answer) there is nothing to credit
            if not end:
                raise DataError(f"task {tree.task!r}: node {node} has a reward, but no policy token precedes it")
            rewards[end - 1] += reward
    return rewards


def gae(
    tree: TokenTree,
    leaf: int,
    *,
    gamma: float,
    lam: float,
    truncated: bool = False,
    from_node: int | None = None,
) -> np.ndarray:
    """Generalised advantages on the path to `leaf`, per policy token, written with `assign`; returns them [P].

    Reads the token column "value" (value of the state before that token, from the critic) and the rewards of the nodes
    of the path below `from_node`; a node's reward falls at its end and belongs to the last policy token until then.
    Writes the token column "return" too (advantage + value: the critic's target; the mean where paths share a token).

    Args:
        truncated: the episode was cut, not ended: the value after the last token (`tree.value[leaf]`) is what was still
            to come. A terminated episode has nothing after it, whatever the critic thinks.

    Raises:
        ConfigError: gamma or lam outside [0, 1].
        DataError: a value is missing; truncated, but `tree.value[leaf]` is NaN; a reward before the first policy token.
    """
    where = policy_tokens(tree, leaf, from_node)
    rewards = path_rewards(tree, leaf, from_node=from_node)
    values = tree.column("value")[where].astype(np.float64)
    missing = int(np.isnan(values).sum())
    if missing:
        raise DataError(
            f"task {tree.task!r}: {missing} of {len(where)} policy tokens on the path to node {leaf} have no value; "
            "fill the token column 'value' from the critic first"
        )
    bootstrap = float(tree.value[leaf]) if truncated else 0.0
    if math.isnan(bootstrap):
        raise DataError(
            f"task {tree.task!r}: node {leaf} was truncated, but has no value; set tree.value[{leaf}] to the critic's "
            "value of its last state, or call it terminated"
        )
    advantages = gae_values(rewards, values, gamma=gamma, lam=lam, bootstrap=bootstrap)
    _add_mean(tree.column("return"), tree.weight, where, advantages + values)
    assign(tree, leaf, advantages, from_node=from_node)
    return advantages


def _reward(tree: TokenTree, node: int) -> float:
    """The node's own reward, 0 where there is none."""
    reward = float(tree.reward[node])
    return 0.0 if math.isnan(reward) else reward


@dataclass(frozen=True)
class Turn:
    """One turn of the policy: consecutive sampled nodes, and the reward earned until the next turn begins."""

    nodes: tuple[int, ...]
    reward: float


def turns(tree: TokenTree, leaf: int, *, from_node: int | None = None) -> list[Turn]:
    """The policy's turns on the path to `leaf`, in order. Sampled nodes with nothing between them are one turn.

    Raises:
        DataError: a reward stands before the first turn.
    """
    nodes: list[list[int]] = []
    rewards: list[float] = []
    open_turn = False
    for node in _below(tree, leaf, from_node):
        if tree.sampled[node]:
            if not open_turn:
                nodes.append([])
                rewards.append(0.0)
            nodes[-1].append(node)
            open_turn = True
        elif tree.length[node]:
            open_turn = False
        reward = _reward(tree, node)
        if reward:
            if not rewards:
                raise DataError(f"task {tree.task!r}: node {node} has a reward, but no turn of the policy precedes it")
            rewards[-1] += reward
    return [Turn(tuple(turn), reward) for turn, reward in zip(nodes, rewards, strict=True)]


def turn_returns(rewards: Numbers, gamma: float = 1.0) -> np.ndarray:
    """Discounted reward to go of each turn, [turns] -> float64 [turns]: G_i = r_i + gamma * G_(i+1).

    Raises:
        ConfigError: gamma outside [0, 1].
    """
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma={gamma}: give a number in [0, 1]")
    out = np.array(rewards, np.float64)
    for i in range(len(out) - 2, -1, -1):
        out[i] += gamma * out[i + 1]
    return out


def assign_turns(
    tree: TokenTree, leaf: int, advantages: Numbers | None = None, *, gamma: float = 1.0, from_node: int | None = None
) -> np.ndarray:
    """Give every turn of the path its own advantage; returns them [turns].

    Args:
        advantages: [turns], for instance returns minus a baseline; None: the Monte-Carlo returns themselves.

    Raises:
        DataError: the number of advantages differs from the number of turns.
    """
    steps = turns(tree, leaf, from_node=from_node)
    if advantages is None:
        advantages = turn_returns([t.reward for t in steps], gamma)
    values = np.asarray(advantages, np.float64)
    if len(values) != len(steps):
        raise DataError(f"task {tree.task!r}: {len(values)} advantages for the {len(steps)} turns of node {leaf}")
    sizes = [sum(int(tree.length[n]) for n in t.nodes) for t in steps]
    assign(tree, leaf, np.repeat(values, sizes), from_node=from_node)
    return values


# -- trees with inner branches --
def node_values(tree: TokenTree, *, gamma: float = 1.0) -> np.ndarray:
    """Monte-Carlo value of every node, [N]: the mean, over the leaves below it, of the reward that comes after it.

    A node's own reward is earned on the way to it, so it counts for its ancestors, not for itself. One edge down is one
    step of gamma. Leaves without a reward (failed, not judged) are left out; NaN where none is left.
    """
    total, count = np.zeros(tree.n_nodes), np.zeros(tree.n_nodes)
    for leaf in tree.leaves():
        if math.isnan(tree.reward[leaf]):
            continue
        to_go = 0.0
        for node in reversed(tree.path(leaf)):
            total[node] += to_go
            count[node] += 1
            to_go = _reward(tree, node) + gamma * to_go
    return np.divide(total, count, out=np.full(tree.n_nodes, math.nan), where=count > 0)


def sibling_differences(tree: TokenTree, node: int, *, gamma: float = 1.0) -> dict[int, float]:
    """For each child of `node`: its reward plus gamma * its value, minus the mean of that over all children.

    What the choice of this child, rather than of an average sibling, brought (compare VinePPO, arXiv 2410.01679).
    Children without a judged leaf are left out; one child alone: 0.
    """
    return _differences(tree, node, node_values(tree, gamma=gamma), gamma)


def _differences(tree: TokenTree, node: int, values: np.ndarray, gamma: float) -> dict[int, float]:
    worth = {
        child: _reward(tree, child) + gamma * float(values[child])
        for child in tree.children(node)
        if not math.isnan(values[child])
    }
    mean = sum(worth.values()) / len(worth) if worth else 0.0
    return {child: value - mean for child, value in worth.items()}


def assign_siblings(tree: TokenTree, *, gamma: float = 1.0) -> dict[int, float]:
    """Credit every branching of a tree: a child's sibling difference on its own policy tokens.

    A node that is an only child was not chosen among others: it carries on its parent's difference (0 from the root
    on). Weights count the judged leaves below. Returns the advantage of every node that was written.
    """
    values = node_values(tree, gamma=gamma)
    judged = np.zeros(tree.n_nodes, np.int64)
    for leaf in tree.leaves():
        if not math.isnan(tree.reward[leaf]):
            judged[tree.path(leaf)] += 1
    carried = {0: 0.0}
    out: dict[int, float] = {}
    for node in tree.walk():
        if node not in carried:
            continue
        difference = _differences(tree, node, values, gamma)
        for child, value in difference.items():
            carried[child] = value if len(difference) > 1 else carried[node]
        if tree.sampled[node] and tree.length[node]:
            span = tree.span(node)
            new = float(judged[node])
            before = tree.weight[span].astype(np.float64)
            tree.advantage[span] = (before * tree.advantage[span] + new * carried[node]) / (before + new)
            tree.weight[span] += new
            out[node] = carried[node]
    return out


# -- search --
@dataclass(frozen=True)
class SearchTargets:
    """What a search taught about one node: children [C], visit shares [C] and the value of the node."""

    children: tuple[int, ...]
    policy: np.ndarray
    value: float


def search_targets(tree: TokenTree, node: int, *, temperature: float = 1.0) -> SearchTargets:
    """Targets of AlphaZero (Silver et al., arXiv 1712.01815) at a searched node: policy ~ visits^(1/temperature).

    The value is the mean of `tree.value` over the visited children, weighted by visits. temperature 0: the most visited
    child (ties: the first) takes all.

    Raises:
        ConfigError: negative temperature. DataError: no child was visited, or a visited child has no value.
    """
    if not temperature >= 0:
        raise ConfigError(f"temperature={temperature}: give 0 or more")
    children = tree.children(node)
    visits = tree.visits[children].astype(np.float64) if children else np.zeros(0)
    if not visits.sum():
        raise DataError(f"task {tree.task!r}: no child of node {node} was visited, so there is no search target")
    seen = visits > 0
    values = tree.value[children][seen]
    if np.isnan(values).any():
        raise DataError(f"task {tree.task!r}: a visited child of node {node} has no value")
    if temperature == 0:
        policy = np.zeros(len(children))
        policy[int(visits.argmax())] = 1.0
    else:
        logits = np.full(len(children), -math.inf)
        logits[seen] = np.log(visits[seen]) / temperature
        policy = np.exp(logits - logits.max())
        policy /= policy.sum()
    return SearchTargets(tuple(children), policy, float((visits[seen] * values).sum() / visits[seen].sum()))
