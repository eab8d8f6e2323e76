"""Stored trees of a model made of hashes (AlphaLLM check 18): a change of rules changes them on purpose or not at all.

PYTHONPATH=src:tests/search python tests/search/test_golden.py    writes the files anew
"""

import json
from pathlib import Path

import pytest
from games import HashGame

from forethought.search.arrays import ArrayDomain
from forethought.search.mcts import Budget, Search, SearchConfig
from forethought.search.rules import PUCT, UCT, MaxBackup, Noise, ProgressiveWidth, SoftBackup

HERE = Path(__file__).parent / "golden"
CONFIGS = {
    "uct": SearchConfig(select=UCT(c=1.0)),
    "puct": SearchConfig(select=PUCT(c=1.5), gamma=0.9),
    "muzero": SearchConfig(
        select=PUCT(c=1.25, c_base=19652, count="node", unvisited="lowest", normalise="siblings"), count_root=True
    ),
    "max-four-leaves": SearchConfig(select=UCT(c=0.5), backup=MaxBackup(), leaves=4),
    "soft-noise": SearchConfig(select=PUCT(c=1.0), backup=SoftBackup(temperature=0.2), noise=Noise(), seed=7),
    "virtual-loss": SearchConfig(select=PUCT(unvisited="parent", normalise="tree"), leaves=3, virtual="loss"),
    "widening": SearchConfig(select=UCT(), width=ProgressiveWidth(factor=0.8, power=0.6, most=4), max_depth=4),
}


def grown(name):
    """Two trees, one player and two: per node its parent, and visits and value of its edges."""
    out = []
    for players in (1, 2):
        search = Search(ArrayDomain(HashGame([42], players=players), ["golden"]), CONFIGS[name])
        search.run(Budget(simulations=40))
        f = search.forest
        rows = range(int(f.size[0]))
        edges = [[[int(n), round(float(q), 9)] for n, q in zip(f.n[r], f.q[r], strict=True)] for r in rows]
        out.append({"players": players, "parent": [int(f.parent[r]) for r in rows], "edges": edges})
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_golden_trees(name):
    want = json.loads((HERE / f"{name}.json").read_text())
    got = grown(name)
    for a, b in zip(got, want, strict=True):
        assert a["parent"] == b["parent"]
        assert [[n for n, _ in row] for row in a["edges"]] == [[n for n, _ in row] for row in b["edges"]]
        for x, y in zip(a["edges"], b["edges"], strict=True):
            assert [q for _, q in x] == pytest.approx([q for _, q in y], abs=1e-8)


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name in CONFIGS:
        (HERE / f"{name}.json").write_text(json.dumps(grown(name)) + "\n")
