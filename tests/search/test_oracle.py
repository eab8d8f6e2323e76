"""The batched search equals the plain sequential one, bit for bit, whatever the rules; trees do not know each other."""

import numpy as np
import pytest
from games import HashGame
from oracle import Oracle

from forethought.errors import ConfigError
from forethought.search import kernels
from forethought.search.arrays import ArrayDomain
from forethought.search.mcts import Budget, Search, SearchConfig
from forethought.search.rules import PUCT, UCT, MaxBackup, ProgressiveWidth, SoftBackup

CONFIGS = {
    "uct": SearchConfig(select=UCT(c=1.0)),
    "uct, code form, edges": SearchConfig(select=UCT(c=0.7, factor=1.0, count="edges"), gamma=0.9),
    "uct, siblings": SearchConfig(select=UCT(normalise="siblings"), gamma=0.97),
    "uct, tree": SearchConfig(select=UCT(normalise="tree")),
    "puct": SearchConfig(select=PUCT(c=1.0)),
    "puct of exact, c 3": SearchConfig(select=PUCT(c=3.0), gamma=0.9),
    "muzero": SearchConfig(
        select=PUCT(c=1.25, c_base=19652, count="node", unvisited="lowest", normalise="siblings"),
        count_root=True,
        gamma=0.9,
    ),
    "puct, tree": SearchConfig(select=PUCT(unvisited="parent", normalise="tree"), gamma=0.5),
    "puct, parent": SearchConfig(select=PUCT(unvisited="parent"), max_depth=3),
    "max": SearchConfig(select=UCT(), backup=MaxBackup(), gamma=0.9),
    "puct, max": SearchConfig(select=PUCT(c=2.0, unvisited="lowest"), backup=MaxBackup()),
    "widening": SearchConfig(select=PUCT(), width=ProgressiveWidth(factor=0.8, power=0.6, least=1, most=4)),
}


def statistics(nodes):
    """Of the oracle, in the forest's terms: rows by node number."""
    number = {id(node): i for i, node in enumerate(nodes)}
    return [
        (
            node.visits,
            node.total,
            node.raw,
            [(e.n, e.w, e.q, -1 if e.child is None else number[id(e.child)]) for e in node.edges],
        )
        for node in nodes
    ]


def mine(search, tree=0):
    f = search.forest
    out = []
    for node in range(f.size[tree]):
        r = f.edge_rows(tree, node)
        k = f.edges[r]
        edges = list(zip(f.n[r, :k], f.w[r, :k], f.q[r, :k], f.child[r, :k], strict=True))
        out.append((f.visits[r], f.total[r], f.raw[r], edges))
    return out


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("players", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_equals_the_reference_bit_for_bit(name, players, compiled):
    config = CONFIGS[name]
    roots = [11, 12, 13, 14, 15]
    domain = ArrayDomain(HashGame(roots, players=players))
    if compiled and not (kernels.available() and kernels.carries(Search(domain, config).forest)):
        pytest.skip("no numba, or rules that only the NumPy path has")
    search = Search(domain, config, compiled=compiled)
    search.run(Budget(simulations=150))
    game = HashGame(roots, players=players)
    for tree in range(len(roots)):
        reference = Oracle(game, game.start[tree], config).run(150)
        assert mine(search, tree) == statistics(reference.nodes)
    assert search.counts["simulations"].tolist() == [150] * 5


def test_softmax_backup_equals_the_reference():
    config = SearchConfig(select=PUCT(c=1.5), backup=SoftBackup(temperature=0.3), gamma=0.9)
    search = Search(ArrayDomain(HashGame([3])), config)
    search.run(Budget(simulations=200))
    reference = Oracle(HashGame([3]), HashGame([3]).start[0], config).run(200)
    got, want = mine(search), statistics(reference.nodes)
    assert [x[0] for x in got] == [x[0] for x in want]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose([e[2] for e in a[3]], [e[2] for e in b[3]], atol=1e-12)


@pytest.mark.parametrize("leaves", [1, 4])
def test_a_tree_comes_out_the_same_alone_and_among_others(leaves):
    """AlphaLLM check 11, node numbers included; the fourth tree taken out changes none of the others."""
    roots = [1, 2, 3, 4, 5, 6, 7]
    config = SearchConfig(select=PUCT(), leaves=leaves)

    def run(which):
        search = Search(ArrayDomain(HashGame(which), [str(r) for r in which]), config)
        search.run(Budget(simulations=80))
        return {r: mine(search, t) for t, r in enumerate(which)}

    together = run(roots)
    assert together == {r: run([r])[r] for r in roots}
    assert {r: t for r, t in together.items() if r != 4} == run([r for r in roots if r != 4])


def test_a_search_goes_on_where_it_stopped():
    whole = Search(ArrayDomain(HashGame([5, 6])), SearchConfig(select=PUCT()))
    whole.run(Budget(simulations=120))
    parts = Search(ArrayDomain(HashGame([5, 6])), SearchConfig(select=PUCT()))
    for end in (1, 50, 120):
        parts.run(Budget(simulations=end))
    assert mine(parts) == mine(whole) and mine(parts, 1) == mine(whole, 1)


def test_compiled_rounds_are_refused_where_they_do_not_apply():
    for config in (SearchConfig(leaves=2), SearchConfig(backup=MaxBackup()), SearchConfig(exhaust=True)):
        with pytest.raises(ConfigError, match="compiled=True: needs numba"):
            Search(ArrayDomain(HashGame([1])), config, compiled=True)


@pytest.mark.skipif(not kernels.available(), reason="no numba")
@pytest.mark.parametrize("name", ["uct", "muzero", "puct, parent"])
@pytest.mark.parametrize("actions", [3, 4, 7])
def test_compiled_arrays_equal_the_others_to_the_last_one(name, actions):
    """Every array, of a search that stopped, grew its arrays and had trees of different ends."""
    runs = []
    for compiled in (False, True):
        search = Search(
            ArrayDomain(HashGame(range(9), actions=actions, players=2, end_share=4)), CONFIGS[name], compiled=compiled
        )
        for end in (10, 200):
            search.run(Budget(simulations=end))
        runs.append(search)
    plain, fast = (s.forest.to_arrays() for s in runs)
    for key, array in plain.items():
        np.testing.assert_array_equal(array, fast[key], key)
    assert dict(runs[0].counts).keys() == dict(runs[1].counts).keys()
    assert all((runs[0].counts[k] == runs[1].counts[k]).all() for k in runs[0].counts)
    assert runs[0].trace(3) == runs[1].trace(3)
