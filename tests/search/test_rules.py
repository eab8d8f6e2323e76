"""The hand-worked numbers of the specs: selection, width, backup, decision, priors, critics, merging."""

import math

import numpy as np
import pytest
from games import HashGame

from forethought.errors import ConfigError, RewardError
from forethought.search.arrays import ArrayDomain, ArrayStep
from forethought.search.critics import Combined, Judgement, Part
from forethought.search.forest import Forest
from forethought.search.mcts import Budget, Search, SearchConfig
from forethought.search.policies import count_prior
from forethought.search.rules import (
    PUCT,
    UCT,
    FixedWidth,
    ImportanceWidth,
    MaxBackup,
    Noise,
    ProgressiveWidth,
    SoftBackup,
    SpreadWidth,
    decide,
    importance_width,
)
from forethought.search.text_world import TextMerge, edit_distance, has_formula


def node(select, n, w, *, prior=None, visits=None, **settings):
    """A forest of one node with these edge statistics."""
    forest = Forest(1, select=select, nodes=len(n) + 1, width=len(n), **settings)
    forest.size[0] = 1
    forest.give_edges(np.array([0]), np.array([prior or [1 / len(n)] * len(n)]), np.array([len(n)]))
    forest.n[0], forest.w[0] = n, w
    forest.q[0] = np.divide(w, n, out=np.zeros(len(n)), where=np.array(n) > 0)
    forest.visits[0] = sum(n) if visits is None else visits
    forest.own[0] = forest.visits[0] - sum(n)
    return forest


ROOT = np.array([0])


# -- AlphaLLM ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "want"), [(2.0, 1.5730), (1.0, 1.2587)])
def test_ucb(factor, want):
    """Check 1: w .5, n 4, N 10, C 1."""
    forest = node(UCT(c=1.0, factor=factor), [4, 6], [2.0, 0.0])
    assert UCT(c=1.0, factor=factor).scores(forest, ROOT)[0, 0] == pytest.approx(want, abs=5e-5)


def test_unvisited_edges_come_first_in_order():
    forest = node(UCT(), [3, 0, 0], [3.0, 0, 0])
    assert UCT().scores(forest, ROOT)[0, 1:].tolist() == [math.inf, math.inf]
    forest.refresh(ROOT)
    assert forest.best[0] == 1


def test_importance_width():
    """Check 2."""
    got = importance_width(np.array([0, 0.4, 1.3, 2.7, 25]), 1.0, 2, 10)
    assert got.tolist() == [2, 2, 2, 3, 10]
    assert importance_width(np.array([0.9]), 1.0, 10, 60).tolist() == [10]
    forest = node(UCT(), [1, 1, 1], [0.4, -0.6, 0.2])
    forest.size[0] = 4
    forest.child[0], forest.parent[1:4], forest.depth[1:4] = [1, 2, 3], 0, 1
    forest.raw[:4] = [0.1, 0.4, -0.6, 0.2]
    assert ImportanceWidth().importance(forest, ROOT)[0] == pytest.approx(0.7)
    assert ImportanceWidth()(forest, ROOT).tolist() == [10]
    assert ImportanceWidth(alpha=30)(forest, ROOT).tolist() == [22]
    forest.raw[2] = math.nan  # a missing value is no difference
    assert ImportanceWidth().importance(forest, ROOT)[0] == pytest.approx(0.3)


def test_spread_width():
    """Check 3: child means .2, .8, -.4 -> D .6 -> int(1.2) = 1; an allowance of 3 stays 3."""
    forest = node(UCT(), [1, 1, 1], [0.2, 0.8, -0.4])
    forest.depth[0] = 1
    rule = SpreadWidth(factor=2.0)
    assert rule(forest, ROOT).tolist() == [3]
    forest.w[0] = forest.q[0] = [2.0, 8.0, -4.0]  # D = 6 -> 12, at most 10
    forest.allowed[0] = rule(forest, ROOT)[0]
    assert forest.allowed[0] == 10
    forest.q[0] = [0.0, 0.0, 0.0]
    assert rule(forest, ROOT).tolist() == [10]  # never shrinks
    forest.allowed[0] = 0
    forest.depth[0] = 0
    assert rule(forest, ROOT).tolist() == [40]
    forest.depth[0] = 11
    assert rule(forest, ROOT).tolist() == [1]


def test_combined_score():
    """Check 4: .4 + .8 + .75 = 1.95; weight 0 on the PRM -> 1.15, and it is not called."""
    calls = []

    def prm(items):
        calls.append(len(items))
        return [0.8] * len(items)

    def critic(weight):
        return Combined(
            {
                "value": Part(lambda items: [0.4] * len(items)),
                "prm": Part(prm, weight),
                "orm": Part(lambda items: [[1, 0, 1, 1]] * len(items)),
            }
        )

    (got,) = critic(1.0)(["x"])
    assert got.value == pytest.approx(1.95) and got.parts == {"value": 0.4, "prm": 0.8, "orm": 0.75}
    assert critic(1.0).columns == ("value", "prm", "orm")
    (got,) = critic(0.0)(["x"])
    assert got.value == pytest.approx(1.15) and calls == [1]


def test_critics_on_one_scale_and_with_parts_missing():
    parts = {
        "value": Part(lambda i: [-1.0, 1.0, math.nan], 1.0, (-1, 1)),
        "prm": Part(lambda i: [0.5] * 3, 3.0, (0, 1)),
    }
    first, second, third = Combined(parts, scale=(0, 1))([0, 1, 2])
    assert (first.value, second.value) == (1.5, 2.5)
    assert isinstance(third, RewardError) and "no value of value" in str(third)
    third = Combined(parts, scale=(0, 1), missing="skip")([0, 1, 2])[2]
    assert third == Judgement(pytest.approx(0.5 * 3 * 4 / 3), {"prm": 0.5})

    def down(items):
        raise RewardError("away")

    (lost,) = Combined({"value": Part(down)})([0])
    assert str(lost) == "no value of value: away"
    with pytest.raises(ConfigError, match="critic 'value' gave 2.0, outside its scale"):
        Combined({"value": Part(lambda i: [2.0], 1.0, (0, 1))})([0])
    for bad, message in [
        ({}, "all weights are 0"),
        ({"a": Part(down, -1.0)}, "weight=-1.0"),
        ({"a": Part(down, 1.0, (1, 0))}, "give \\(lowest, highest\\)"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Combined(bad)
    with pytest.raises(ConfigError, match="has no scale, but all are to be mapped"):
        Combined({"a": Part(down)}, scale=(0, 1))


class Star:
    """A root whose edges end at once, with these values."""

    def __init__(self, values, prior=None):
        self.values, self.prior, self.actions = np.array(values), prior, len(values)

    def roots(self):
        return self._step(np.array([-1]))

    def step(self, states, actions):
        return self._step(actions.astype(np.int64))

    def _step(self, states):
        prior = np.array([self.prior or [1 / self.actions] * self.actions] * len(states))
        value = np.where(states < 0, 0.0, self.values[states])
        return ArrayStep(states, value, prior=prior, ended=states >= 0)


def run(model, simulations, **config):
    search = Search(ArrayDomain(model), SearchConfig(**config))
    search.run(Budget(simulations=simulations))
    return search.forest


def test_backup_of_means():
    """Check 5: .5, -.1, 1.1 under one child that has no value of its own: visits 3, mean .5; root visits = iterations."""

    forest = node(UCT(), [0], [0.0])
    for value in (0.5, -0.1, 1.1):  # three new leaves under the one child
        paths = forest.descend(np.array([0]))
        if forest.size[0] == 1:
            forest.add(paths, reward=np.zeros(1), raw=np.zeros(1), player=np.zeros(1, np.int8), ended=np.zeros(1, bool))
            forest.reserve(4)
            child = np.array([1])
            forest.give_edges(child, np.full((1, 3), 1 / 3), np.array([3]))
            forest.refresh(np.array([0, 1]))
            paths = forest.descend(np.array([0]))
        assert paths.last.tolist() == [1]
        forest.add(
            paths, reward=np.zeros(1), raw=np.array([value]), player=np.zeros(1, np.int8), ended=np.ones(1, bool)
        )
        forest.back_up(paths, np.array([value]))
    assert forest.n[0, 0] == 3 and forest.q[0, 0] == pytest.approx(0.5)
    assert forest.visits[0] == 3 and forest.visits[1] == 3
    assert (forest.visits == forest.own + forest.n.sum(1)).all()


def test_merge():
    """Check 9."""
    assert (
        edit_distance("a+b", "a+c") == 1 and edit_distance("", "abc") == 3 and edit_distance("kitten", "sitting") == 3
    )
    assert TextMerge(distance="edit", threshold=20).between("x" * 30, "") == 30
    close = TextMerge(distance="normalised", threshold=0.3)
    assert close.between("3 + 4 = 7", "3 + 5 = 8") == pytest.approx(2 / 9)
    apart = TextMerge(distance="normalised", threshold=0.3, numbers=True)
    assert apart.between("3 + 4 = 7", "3 + 5 = 8") == math.inf  # different mathematics
    assert apart.nearest("so 3 + 4 = 7", ["3 + 4 = 7", "x"]) == pytest.approx(3 / 12)
    assert TextMerge().nearest("a", []) == math.inf and TextMerge().between(" a\n", "a") == 0
    for bad in ({"distance": "x"}, {"mode": "x"}, {"threshold": 0}, {"rounds": 0}):
        with pytest.raises(ConfigError, match="merge:"):
            TextMerge(**bad)


def test_formula_rule():
    """Check 10: what ends at a blank line and what goes on."""
    assert not has_formula("First we look at the problem.\n\n")
    assert (
        has_formula("so x = 3.\n\n") and has_formula(r"\(a\)") and has_formula("$x$") and has_formula(r"n \le 3: a<b")
    )


# -- ExACT -------------------------------------------------------------------------------------------------------------


def test_puct_sequence():
    """Checks 1, 2, 15: choices a, a, a, b, b, b; scores at the fourth; another c changes the counts."""
    model = Star([0.2, 0.9, 0.5], prior=[0.5, 0.3, 0.2])
    search = Search(ArrayDomain(model), SearchConfig(select=PUCT(c=1.0)))
    chosen = []
    for number in range(1, 7):
        before = search.forest.n[0, :3].copy()
        search.run(Budget(simulations=number))
        chosen.append(int((search.forest.n[0, :3] - before).argmax()))
        if number == 3:
            first = PUCT(c=1.0).scores(search.forest, ROOT)[0, :3]
    assert chosen == [0, 0, 0, 1, 1, 1]
    assert first == pytest.approx([0.4165, 0.5196, 0.3464], abs=5e-5)
    f = search.forest
    assert f.n[0, :3].tolist() == [3, 3, 0] and f.q[0, :3] == pytest.approx([0.2, 0.9, 0.0])
    other = run(model, 6, select=PUCT(c=3.0))
    assert other.n[0, :3].tolist() != [3, 3, 0]


def test_the_prior_decides_the_first_visit():
    forest = node(PUCT(), [0, 0], [0, 0], prior=[0.3, 0.7])
    assert PUCT(c=1.0).scores(forest, ROOT)[0].tolist() == [0.3, 0.7]


def test_backup_of_one_edge():
    """Check 3: .5, .9, .2 through one edge -> .5333, N 3, which is N of the node's edges."""
    forest = node(PUCT(), [3], [0.5 + 0.9 + 0.2])
    assert forest.q[0, 0] == pytest.approx(0.5333, abs=5e-5) and forest.total_visits(ROOT, "edges")[0] == 3


def test_priors_from_counts():
    """Check 4."""
    assert count_prior([9, 6, 3]) == pytest.approx([0.5, 1 / 3, 1 / 6])
    assert count_prior([0.8, 0.2], temperature=5.0) == pytest.approx([0.5689, 0.4311], abs=5e-5)
    with pytest.raises(ConfigError, match="prior temperature=0"):
        count_prior([1, 2], temperature=0)


def test_decisions():
    """Check 7, and the other rules."""
    n, q = [7, 7, 6], [0.4, 0.5, 0.9]
    assert decide(n, q, "robust") == 1 and decide(n, q, "visits") == 0 and decide(n, q, "value") == 2
    assert decide([0, 5], [9.0, 0.1], "value") == 1  # no visit, no value
    rng = np.random.default_rng(0)
    drawn = [decide([8, 2, 0], [0, 0, 0], "sample", temperature=1.0, rng=rng) for _ in range(400)]
    assert 0.14 < np.mean(np.array(drawn) == 1) < 0.26 and 2 not in drawn
    assert all(decide([8, 2, 0], [0, 0, 0], "sample", temperature=0.05, rng=rng) == 0 for _ in range(50))
    for rule, kwargs, message in [
        ("best", {}, "decision='best'"),
        ("sample", {}, "needs rng"),
        ("sample", {"temperature": 0, "rng": rng}, "temperature=0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            decide([1], [0], rule, **kwargs)
    with pytest.raises(ConfigError, match="no edge was visited"):
        decide([0, 0], [0, 0])


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_max_and_softmax_backup():
    q, seen, prior = np.array([[0.2, 0.8, 5.0]]), np.array([[True, True, False]]), np.array([[0.25, 0.25, 0.5]])
    assert MaxBackup().value(q, seen, prior).tolist() == [0.8]
    hot = SoftBackup(temperature=1e6).value(q, seen, prior)[0]
    cold = SoftBackup(temperature=1e-3).value(q, seen, prior)[0]
    assert hot == pytest.approx(0.5, abs=1e-4) and cold == pytest.approx(0.8, abs=1e-3)
    mid = SoftBackup(temperature=0.5).value(q, seen, prior)[0]
    assert mid == pytest.approx(0.5 * math.log((math.exp(0.4) + math.exp(1.6)) / 2))
    assert MaxBackup().value(q, np.zeros((1, 3), bool), prior)[0] == -math.inf


def test_a_mean_drags_and_a_maximum_does_not():
    values = [0.0, 0.0, 1.0]
    mean, best = run(Star(values), 60, select=UCT(c=2.0)), run(Star(values), 60, select=UCT(c=2.0), backup=MaxBackup())
    assert mean.value_of(ROOT)[0] < 0.9 and best.value_of(ROOT)[0] == 1.0


def test_progressive_width_opens_edges_in_order():
    rule = ProgressiveWidth(factor=1.0, power=0.5, least=1, most=3)
    f = run(Star([0.0] * 5), 40, select=UCT(c=5.0), width=rule)
    assert (f.n[0, :3] > 0).all() and f.n[0, 3:5].sum() == 0
    f = run(Star([0.0] * 5), 4, select=UCT(c=5.0), width=rule)
    assert (f.n[0, :5] > 0).sum() == 2  # ceil(sqrt(3)) when the fourth was chosen


def test_noise_is_a_switch():
    def priors(noise, seed=0, names=("a", "b")):
        search = Search(ArrayDomain(HashGame([1, 1]), names), SearchConfig(select=PUCT(), noise=noise, seed=seed))
        search.run(Budget(simulations=1))
        return [search.forest.prior[search.forest.edge_rows(t)].tolist() for t in (0, 1)]

    plain = priors(None)
    assert plain[0] == plain[1]
    a, b = priors(Noise(alpha=0.3, share=0.25))
    assert a != b and a != plain[0] and sum(a) == pytest.approx(1.0)
    assert priors(Noise())[0] == priors(Noise(), names=("a", "c"))[0]  # a tree's noise is its own
    assert priors(Noise(), seed=1)[0] != a
    mixed = np.array(a) - 0.75 * np.array(plain[0])
    assert (mixed >= 0).all() and mixed.sum() == pytest.approx(0.25)


def test_bad_rules():
    for make, message in [
        (lambda: UCT(c=-1), "c=-1: give a finite number of at least 0"),
        (lambda: UCT(factor=0), "factor=0: give a finite number above 0"),
        (lambda: PUCT(unvisited="x"), "unvisited='x': give one of 'parent', 'lowest'"),
        (lambda: PUCT(normalise="x"), "normalise='x'"),
        (lambda: PUCT(c=math.nan), "c=nan"),
        (lambda: FixedWidth(k=0), "width=0: give a finite number of at least 1"),
        (lambda: ImportanceWidth(least=3, most=2), "most width=2: give a finite number of at least 3"),
        (lambda: ProgressiveWidth(power=0), "power=0"),
        (lambda: SpreadWidth(root=0), "root width=0"),
        (lambda: SoftBackup(temperature=0), "temperature=0"),
        (lambda: Noise(share=2), "share=2: give a number from 0 to 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make()


def test_the_root_can_move_on():
    """Advancing the root keeps the statistics below it and searches on from there."""
    search = Search(ArrayDomain(HashGame([3], end_share=0)), SearchConfig(select=PUCT()))
    search.run(Budget(simulations=50))
    f = search.forest
    child = int(f.child[0, f.n[0].argmax()])
    before = f.visits[child]
    f.root[0] = child
    search.run(Budget(simulations=60))
    assert f.visits[child] == before + 10 and f.visits[0] == 50
