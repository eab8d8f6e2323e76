"""Credit: the numbers of the published formulas, who counts, and where the advantages land."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import ConfigError, DataError
from forethought.tree import credit
from forethought.tree.tree import Kind, TokenTree

NAN, INF = math.nan, math.inf
finite = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3))


def sampled(tree, parent, n=1, reward=NAN, **kwargs):
    return tree.add(parent, range(10, 10 + n), sampled=True, logprobs=[-0.5] * n, reward=reward, **kwargs)


def observed(tree, parent, n=1, reward=NAN):
    return tree.add(parent, range(50, 50 + n), kind=Kind.OBSERVATION, reward=reward)


def group(rewards, n=2):
    tree = TokenTree([1, 2, 3])
    return [(tree, sampled(tree, 0, n, r)) for r in rewards]


# -- group estimators --
def test_group_of_eight():
    """Spec acceptance 3."""
    got = credit.group_normalised([1, 1, 0, 0, 0, 0, 0, 0])
    assert got.tolist() == pytest.approx([1.62018] * 2 + [-0.54006] * 6, abs=1e-5)
    for equal in (0.0, 1.0, 0.1, -7.3):
        assert credit.group_normalised([equal] * 8).tolist() == [0.0] * 8
        assert credit.group_normalised([equal] * 8, eps=0).tolist() == [0.0] * 8


def test_rejected_sample_moves_nobody():
    """Case H05, by flag and by NaN reward."""
    want = {
        None: [1 / 3, -2 / 3, 1 / 3, 0],
        "sample": [0.577350, -1.154701, 0.577350, 0],
        "population": [0.707107, -1.414214, 0.707107, 0],
    }
    for std, numbers in want.items():
        by_flag = credit.group_normalised([1, 0, 1, 5], std=std, eps=0, rejected=[False, False, False, True])
        assert by_flag.tolist() == pytest.approx(numbers, abs=1e-6)
        assert credit.group_normalised([1, 0, 1, NAN], std=std, eps=0).tolist() == by_flag.tolist()
    rejected = [False, True, True, True]
    for estimator in (credit.group_normalised, credit.leave_one_out):
        assert estimator([3, 0, 1, 5], rejected=rejected).tolist() == [0] * 4  # one left: nothing to compare with
        assert estimator([3, INF, 1, 5], rejected=rejected).tolist() == [0] * 4  # a rejected infinity is no error
        assert estimator([NAN, NAN]).tolist() == [0, 0]
        assert estimator([2.5]).tolist() == [0]
    assert credit.leave_one_out([1, 0, 1, NAN]).tolist() == pytest.approx([0.5, -1, 0.5, 0])
    assert credit.batch_whitened([1, 0, 1, NAN], eps=1e-12).tolist() == pytest.approx(want["sample"], abs=1e-6)


def test_leave_one_out():
    assert credit.leave_one_out([1, 0, 0, 3]).tolist() == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3])


def test_batch_whitened():
    assert credit.batch_whitened([1, 2, 3, 4], eps=1e-12).tolist() == pytest.approx(
        [-1.161895, -0.387298, 0.387298, 1.161895], abs=1e-6
    )
    copies = credit.batch_whitened([1, 1, 1, 4])
    assert credit.batch_whitened([1, 4], weight=[3, 1]).tolist() == pytest.approx([copies[0], copies[3]])
    assert credit.batch_whitened([2.0, 2.0]).tolist() == [0, 0]
    assert credit.batch_whitened([2.0]).tolist() == [0]


@settings(max_examples=80)
@given(st.lists(st.one_of(finite, st.just(NAN)), min_size=1, max_size=12), st.integers(0, 10_000))
def test_group_estimators_have_mean_zero_and_do_not_depend_on_order_or_level(rewards, seed):
    kept = ~np.isnan(rewards)
    order = np.random.default_rng(seed).permutation(len(rewards))
    for estimator in (
        credit.group_normalised,
        partial(credit.group_normalised, std=None),
        partial(credit.group_normalised, std="population"),
        credit.leave_one_out,
    ):
        got = estimator(rewards)
        assert np.isfinite(got).all()
        assert (got[~kept] == 0).all()
        assert abs(got.sum()) < 1e-6
        assert estimator(np.array(rewards)[order]) == pytest.approx(got[order], abs=1e-6)
        assert estimator(np.array(rewards) + 100) == pytest.approx(got, abs=1e-4)
        if credit.is_zero_variance(rewards):
            assert (got == 0).all()
        else:
            best = int(np.nanargmax(rewards))
            assert got[best] == got.max() > 0


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: credit.group_normalised([1, INF]),
            DataError,
            "reward of sample 1 is inf: give a finite number, or NaN",
        ),
        (lambda: credit.leave_one_out([-INF, 0]), DataError, "reward of sample 0 is -inf"),
        (lambda: credit.group_normalised([]), DataError, "at least one"),
        (lambda: credit.group_normalised([[1, 2]]), DataError, r"rewards of shape \(1, 2\)"),
        (lambda: credit.group_normalised([1, 2], rejected=[True]), DataError, "1 rejected flags for 2 rewards"),
        (lambda: credit.group_normalised([1, 2], std="unbiased"), ConfigError, "std='unbiased': give 'sample'"),
        (lambda: credit.group_normalised([1, 2], eps=-1), ConfigError, "eps=-1: give 0 or more"),
        (lambda: credit.batch_whitened([1, 2], eps=0), ConfigError, "eps=0: give a positive number"),
        (lambda: credit.gae_values([1], [1], gamma=1.5, lam=1), ConfigError, r"gamma=1.5: give a number in \[0, 1\]"),
        (lambda: credit.gae_values([1], [1], gamma=1, lam=NAN), ConfigError, "lam=nan"),
        (lambda: credit.gae_values([1, 2], [1], gamma=1, lam=1), DataError, "2 rewards for 1 values"),
        (lambda: credit.gae_values([1, NAN], [1, 1], gamma=1, lam=1), DataError, "reward nan at step 1 of 2"),
        (lambda: credit.gae_values([1], [1], gamma=1, lam=1, bootstrap=INF), DataError, "value inf at step 1 of 1"),
        (lambda: credit.turn_returns([1], gamma=-0.1), ConfigError, "gamma=-0.1"),
        (lambda: credit.zero_variance_share([]), DataError, "no groups"),
        (lambda: credit.whiten([TokenTree([1])]), DataError, "nothing to whiten"),
    ],
)
def test_bad_input_is_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


# -- writing --
def test_a_group_is_what_it_is_said_to_be():
    """Spec acceptance 4: 128 groups of one prompt; row 1's rewards leave row 0's advantages alone."""
    tree = TokenTree([1, 2, 3])
    leaves = [sampled(tree, 0, 2) for _ in range(128 * 8)]
    groups = [[(tree, n) for n in leaves[i : i + 8]] for i in range(0, len(leaves), 8)]
    rng = np.random.default_rng(0)
    tree.reward[leaves] = rng.integers(0, 2, len(leaves))
    tree.reward[leaves[:3]] = [1, 0, 1]
    before = credit.assign_groups(groups)
    assert len(before) == 128
    first = tree.advantage[tree.span(leaves[0])].copy()
    credit.clear([tree])
    assert tree.weight.sum() == 0 and not tree.advantage.any()
    tree.reward[leaves[8:16]] = 50 + np.arange(8)
    after = credit.assign_groups(groups)
    assert after[0].tolist() == before[0].tolist() != [0] * 8
    assert after[1].tolist() != before[1].tolist()
    assert tree.advantage[tree.span(leaves[0])].tolist() == first.tolist()
    for leaf, advantage in zip(leaves, np.concatenate(after), strict=True):
        assert tree.advantage[tree.span(leaf)].tolist() == pytest.approx([advantage] * 2, abs=1e-6)
    assert tree.weight.tolist() == [0] * 3 + [1] * (2 * len(leaves))


def test_a_rejected_sample_gets_no_weight():
    samples = group([1, 0, NAN])
    (advantages,) = credit.assign_groups([samples], partial(credit.group_normalised, std=None))
    tree = samples[0][0]
    assert advantages.tolist() == [0.5, -0.5, 0]
    assert tree.weight.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0]
    assert tree.advantage.tolist() == [0, 0, 0, 0.5, 0.5, -0.5, -0.5, 0, 0]


def test_observations_and_prompts_are_not_trained():
    tree = TokenTree([1, 2])
    first = sampled(tree, 0, 2)
    last = sampled(tree, observed(tree, first, 3), 1)
    assert credit.policy_tokens(tree, last).tolist() == [2, 3, 7]
    assert credit.assign(tree, last, 0.5) == 3
    assert tree.weight.tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert tree.advantage.tolist() == [0, 0, 0.5, 0.5, 0, 0, 0, 0.5]
    assert credit.assign(tree, last, np.array([1.0]), from_node=first) == 1
    assert tree.weight.tolist() == [0, 0, 1, 1, 0, 0, 0, 2]
    assert tree.advantage[7] == 0.75
    assert credit.assign(tree, last, 1.0, from_node=last) == 0


@settings(max_examples=60)
@given(
    parents=st.lists(st.integers(0, 30), min_size=1, max_size=14),
    kinds=st.lists(st.booleans(), min_size=14, max_size=14),
    sizes=st.lists(st.integers(0, 3), min_size=14, max_size=14),
    picks=st.lists(st.tuples(st.integers(0, 100), finite, st.booleans()), min_size=1, max_size=8),
)
def test_weight_times_advantage_is_the_sum_over_the_paths(parents, kinds, sizes, picks):
    tree = TokenTree([1])
    for parent, is_sampled, size in zip(parents, kinds, sizes, strict=False):
        (sampled if is_sampled else observed)(tree, parent % tree.n_nodes, size)
    count, total = np.zeros(tree.n_tokens), np.zeros(tree.n_tokens)
    for pick, advantage, cut in picks:
        leaf = pick % tree.n_nodes
        start = tree.path(leaf)[len(tree.path(leaf)) // 2] if cut else None
        credit.assign(tree, leaf, advantage, from_node=start)
        below = tree.path(leaf) if start is None else tree.path(leaf)[len(tree.path(start)) :]
        for node in below:
            if tree.sampled[node]:
                count[tree.span(node)] += 1
                total[tree.span(node)] += advantage
    assert tree.weight.tolist() == count.tolist()
    assert (tree.weight * tree.advantage).tolist() == pytest.approx(total.tolist(), abs=1e-4)


def test_assign_refuses():
    tree = TokenTree([1], task="t7")
    a, b = sampled(tree, 0, 2), sampled(tree, 0, 2)
    with pytest.raises(DataError, match=r"task 't7': node 2 is not on the path to node 1: \[0, 1\]"):
        credit.assign(tree, a, 1.0, from_node=b)
    with pytest.raises(DataError, match="3 advantages for the 2 policy tokens on the way to node 1"):
        credit.assign(tree, a, np.zeros(3))
    with pytest.raises(DataError, match="the advantage of node 1 is not finite; reject the sample"):
        credit.assign(tree, a, NAN)
    assert tree.weight.sum() == 0


def test_group_below_a_shared_turn():
    tree = TokenTree([1])
    turn = sampled(tree, 0, 2)
    leaves = [(tree, sampled(tree, turn, 1, r)) for r in (1.0, 0.0)]
    credit.assign_groups([leaves], credit.leave_one_out, from_nodes=[turn])
    assert tree.weight.tolist() == [0, 0, 0, 1, 1]
    assert tree.advantage.tolist() == [0, 0, 0, 1, -1]
    credit.clear([tree])
    credit.assign_groups([leaves], credit.leave_one_out)  # the whole path: what is shared cancels
    assert tree.weight.tolist() == [0, 2, 2, 1, 1]
    assert tree.advantage.tolist() == [0, 0, 0, 1, -1]


def test_zero_variance():
    groups = [group([1, 1]), group([1, 0]), group([NAN, 0, 0]), group([NAN, NAN]), group([0, NAN])]
    kept, dropped = credit.split_zero_variance(groups)
    assert kept == [groups[1]] and dropped == [groups[0], *groups[2:]]
    assert credit.zero_variance_share(groups) == 0.8
    assert credit.split_zero_variance([]) == ([], [])


def test_whiten_counts_tokens_not_samples():
    tree = TokenTree([1])
    a, b = sampled(tree, 0, 3), sampled(tree, 0, 1)
    other = TokenTree([1])
    c = sampled(other, 0, 2)
    for t, leaf, advantage in ((tree, a, 1.0), (tree, b, 4.0), (other, c, -2.0)):
        credit.assign(t, leaf, advantage)
    credit.whiten([tree, other])
    want = credit.batch_whitened([1, 1, 1, 4, -2, -2])
    assert tree.advantage.tolist() == pytest.approx([0, *want[:4]], abs=1e-6)
    assert other.advantage.tolist() == pytest.approx([0, *want[4:]], abs=1e-6)


# -- GAE --
def test_observations_do_not_dilute_gae():
    """Case H06: a1 o1 a2 o2, reward 1 at the end."""
    for gamma, want in ((0.9, [0.9, 1.0]), (0.0, [0.0, 1.0])):
        tree = TokenTree([1])
        a1 = sampled(tree, 0)
        a2 = sampled(tree, observed(tree, a1))
        end = observed(tree, a2, reward=1.0)
        tree.column("value")[:] = 0
        assert credit.gae(tree, end, gamma=gamma, lam=1.0).tolist() == pytest.approx(want)
        assert tree.advantage.tolist() == pytest.approx([0, want[0], 0, want[1], 0])
        assert tree.weight.tolist() == [0, 1, 0, 1, 0]
        assert tree.column("return")[[1, 3]].tolist() == pytest.approx(want)
        assert np.isnan(tree.column("return")[[0, 2, 4]]).all()


def test_gae_numbers():
    # delta = [0 + .9*.6 - .5, 1 + 0 - .6] = [.04, .4]; A0 = .04 + .9*.8*.4
    assert credit.gae_values([0, 1], [0.5, 0.6], gamma=0.9, lam=0.8).tolist() == pytest.approx([0.328, 0.4])
    # truncated: V = 2 is still to come: delta1 = 1 + 1.8 - .6 = 2.2
    got = credit.gae_values([0, 1], [0.5, 0.6], gamma=0.9, lam=0.8, bootstrap=2.0)
    assert got.tolist() == pytest.approx([0.04 + 0.72 * 2.2, 2.2])
    assert credit.gae_values([], [], gamma=1, lam=1).tolist() == []


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=10), st.floats(0, 1), st.floats(0, 1), finite)
def test_gae_between_its_two_ends(steps, gamma, lam, bootstrap):
    rewards, values = (list(x) for x in zip(*steps, strict=True))
    get = partial(credit.gae_values, rewards, values, gamma=gamma, bootstrap=bootstrap)
    one_step = np.array(rewards) + gamma * np.append(values[1:], bootstrap) - values
    assert get(lam=0.0) == pytest.approx(one_step)
    assert get(lam=1.0) == pytest.approx(credit.turn_returns([*rewards, bootstrap], gamma)[:-1] - values, abs=1e-6)
    direct = [sum((gamma * lam) ** (j - i) * one_step[j] for j in range(i, len(rewards))) for i in range(len(rewards))]
    assert get(lam=lam) == pytest.approx(direct, abs=1e-6)


def test_only_a_truncated_episode_bootstraps():
    """Case H19: limit 30; won at 12, never, won exactly at 30. Only the second has a future."""
    targets = []
    for won_at, truncated in ((12, False), (None, True), (30, False)):
        tree = TokenTree([1])
        node = 0
        for _ in range(won_at or 30):
            node = observed(tree, sampled(tree, node), reward=0.0)
        if won_at:
            tree.reward[node] = 1.0
        tree.value[node] = 0.7  # the critic has an opinion in every case
        tree.column("value")[:] = 0.25
        credit.gae(tree, node, gamma=1.0, lam=1.0, truncated=truncated)
        targets.append(float(tree.column("return")[credit.policy_tokens(tree, node)][-1]))
    assert targets == pytest.approx([1.0, 0.7, 1.0])


def test_gae_shares_and_refuses():
    tree = TokenTree([1], task="t")
    turn = sampled(tree, 0)
    leaves = [sampled(tree, turn, reward=r) for r in (1.0, 0.0)]
    with pytest.raises(
        DataError, match="2 of 2 policy tokens on the path to node 2 have no value; fill the token column"
    ):
        credit.gae(tree, leaves[0], gamma=1, lam=1)
    tree.column("value")[:] = 0.5
    with pytest.raises(DataError, match=r"node 2 was truncated, but has no value; set tree.value\[2\]"):
        credit.gae(tree, leaves[0], gamma=1, lam=1, truncated=True)
    assert tree.weight.sum() == 0  # nothing half-written
    for leaf in leaves:
        credit.gae(tree, leaf, gamma=1, lam=1)
    assert tree.weight.tolist() == [0, 2, 1, 1]
    assert tree.advantage.tolist() == [0, 0, 0.5, -0.5]  # the shared token: mean of +.5 and -.5
    assert tree.column("return")[1:].tolist() == [0.5, 1, 0]

    early = TokenTree([1], task="t")
    end = sampled(early, observed(early, 0, reward=2.0))
    early.column("value")[:] = 0
    for call in (partial(credit.gae, gamma=1, lam=1), credit.turns):
        with pytest.raises(DataError, match="task 't': node 1 has a reward, but no"):
            call(early, end)
    assert credit.gae(early, end, gamma=1, lam=1, from_node=1).tolist() == [0]  # what is above is past


def test_an_empty_answer_has_nothing_to_credit():
    tree = TokenTree([1, 2])
    leaf = sampled(tree, 0, 0, reward=1.0)
    tree.column("value")[:] = 0
    assert credit.gae(tree, leaf, gamma=1, lam=1).tolist() == []
    assert credit.assign(tree, leaf, 1.0) == 0
    assert tree.weight.tolist() == [0, 0] and tree.advantage.tolist() == [0, 0]


# -- turns --
def test_turn_returns_and_their_tokens():
    tree = TokenTree([1])
    thought = sampled(tree, 0, 2)
    act = sampled(tree, thought, 1)  # thought and act: one turn
    seen = observed(tree, act, 2, reward=1.0)
    last = sampled(tree, seen, 1, reward=0.5)
    end = observed(tree, last, 0, reward=2.0)
    assert credit.turns(tree, end) == [credit.Turn((1, 2), 1.0), credit.Turn((4,), 2.5)]
    assert credit.turns(tree, end, from_node=seen) == [credit.Turn((4,), 2.5)]
    assert credit.assign_turns(tree, end, gamma=0.5).tolist() == [2.25, 2.5]
    assert tree.advantage.tolist() == [0, 2.25, 2.25, 2.25, 0, 0, 2.5]
    assert tree.weight.tolist() == [0, 1, 1, 1, 0, 0, 1]
    credit.clear([tree])
    assert credit.assign_turns(tree, end, [1.0, -1.0]).tolist() == [1, -1]
    assert tree.advantage.tolist() == [0, 1, 1, 1, 0, 0, -1]
    with pytest.raises(DataError, match="3 advantages for the 2 turns of node 5"):
        credit.assign_turns(tree, end, [1, 2, 3])
    assert credit.turn_returns([1, 0, 2], 0.5).tolist() == [1.5, 1, 2]
    assert credit.turn_returns([], 0.5).tolist() == []


# -- trees --
def branching():
    """root - a(2) - {c: 1, d: 0};  root - b(1) - e - f: 0;  root - g: not judged."""
    tree = TokenTree([1])
    a, b = sampled(tree, 0, 2), sampled(tree, 0, 1)
    c, d = sampled(tree, a, 1, 1.0), sampled(tree, a, 1, 0.0)
    f = sampled(tree, observed(tree, b, 1), 1, 0.0)
    g = sampled(tree, 0, 1)
    return tree, (a, b, c, d, f, g)


def test_node_values():
    tree, (a, b, c, d, f, g) = branching()
    values = credit.node_values(tree)
    assert values[[0, a, b, c, d, f]].tolist() == pytest.approx([1 / 3, 0.5, 0, 0, 0, 0])
    assert math.isnan(values[g])
    assert credit.node_values(tree, gamma=0.5)[[0, a]].tolist() == pytest.approx([0.5 / 3, 0.5])


def test_sibling_differences():
    tree, (a, b, c, d, f, g) = branching()
    assert credit.sibling_differences(tree, 0) == {a: 0.25, b: -0.25}
    assert credit.sibling_differences(tree, a) == {c: 0.5, d: -0.5}
    assert credit.sibling_differences(tree, b) == {5: 0.0}
    assert credit.sibling_differences(tree, g) == {}
    written = credit.assign_siblings(tree)
    assert written == {a: 0.25, b: -0.25, c: 0.5, d: -0.5, f: -0.25}
    assert tree.weight.tolist() == [0, 2, 2, 1, 1, 1, 0, 1, 0]
    assert tree.advantage.tolist() == [0, 0.25, 0.25, -0.25, 0.5, -0.5, 0, -0.25, 0]


def test_search_targets():
    tree = TokenTree([1])
    children = [sampled(tree, 0) for _ in range(3)]
    tree.visits[children] = [6, 2, 0]
    tree.value[children[:2]] = [0.5, -0.5]
    got = credit.search_targets(tree, 0)
    assert got.children == tuple(children)
    assert got.policy.tolist() == pytest.approx([0.75, 0.25, 0])
    assert got.value == pytest.approx(0.25)
    assert credit.search_targets(tree, 0, temperature=0.5).policy.tolist() == pytest.approx([0.9, 0.1, 0])
    assert credit.search_targets(tree, 0, temperature=0).policy.tolist() == [1, 0, 0]
    assert credit.search_targets(tree, 0, temperature=1e-3).policy.tolist() == [1, 0, 0]  # no overflow
    tree.visits[children[2]] = 1
    with pytest.raises(DataError, match="a visited child of node 0 has no value"):
        credit.search_targets(tree, 0)
    with pytest.raises(DataError, match="no child of node 1 was visited"):
        credit.search_targets(tree, 1)
    with pytest.raises(ConfigError, match="temperature=-1"):
        credit.search_targets(tree, 0, temperature=-1)


def test_credit_needs_no_torch():
    code = "import sys, forethought.tree.credit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
