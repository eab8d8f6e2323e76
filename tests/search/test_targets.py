"""Trees as training data: the hand-worked cases of AlphaLLM-CPL and ExACT, and the formats."""

import math

import numpy as np
import pytest
from test_text_world import LINES, Answer, decode, prompts, run, scripted
from worlds import Heap

from forethought.data import read_jsonl, write_jsonl
from forethought.errors import ConfigError, DataError
from forethought.learn.pair_batches import PreferencePair, problem
from forethought.search.critics import Rollouts
from forethought.search.env_world import EnvRoot
from forethought.search.mcts import Budget, SearchConfig
from forethought.search.policies import LegalActions
from forethought.search.result import SearchTree
from forethought.search.rules import UCT, FixedWidth
from forethought.search.search import search
from forethought.search.targets import (
    Move,
    TreePair,
    best_leaf,
    best_path,
    direct,
    drop_contradictions,
    explored_paths,
    full_pairs,
    greedy_leaf,
    outcome_targets,
    pair_tree,
    policy_targets,
    preference_rows,
    prefix_samples,
    sft_rows,
    step_pairs,
    stepwise_rows,
    successful,
    train_paths,
    traversal,
    value_targets,
)
from forethought.search.text_world import Option

NAN = math.nan


def tree(parents, q, *, visits=None, raw=None, ended=(), text=None, player=None, success=None, task=None):
    n = len(parents)
    places: dict[int, int] = {}
    slot = []
    for p in parents:
        slot.append(places.get(p, -1) + 1)
        places[p] = slot[-1]
    return SearchTree(
        name="t",
        parent=np.array(parents),
        slot=np.array(slot),
        depth=np.zeros(n, int),
        visits=np.array(visits or [5] * n),
        q=np.array(q, float),
        value=np.array(q, float),
        raw=np.array(raw or q, float),
        reward=np.zeros(n),
        prior=np.full(n, NAN),
        player=np.array(player or [0] * n),
        ended=np.array([i in ended for i in range(n)]),
        made=np.ones(n, bool),
        success=np.array(success or [NAN] * n),
        text=text or ["", *(chr(96 + i) for i in range(1, n))],
        seen=[""] * n,
        task=task,
    )


STAR = tree([-1, 0, 0, 0, 0], [0.4, 0.9, 0.5, 0.45, -0.2])


def gaps(found):
    return [(p.chosen, p.rejected) for p in found]


# -- AlphaLLM-CPL ------------------------------------------------------------------------------------------------------


def test_pairs_of_siblings():
    """Check 2: scores .9, .5, .45, -.2; tau .3."""
    each, counts = step_pairs(STAR, 0.3)
    assert sorted(gaps(each)) == [(1, 2), (1, 3), (1, 4)] and counts["pairs"] == 3
    assert each[0] == TreePair(0, 1, 4, pytest.approx(1.1), "step")  # largest gap first
    every, _ = step_pairs(STAR, 0.3, rule="all", most=99)
    assert sorted(gaps(every)) == [(1, 2), (1, 3), (1, 4), (2, 4), (3, 4)]
    assert gaps(step_pairs(STAR, 0.3, rule="best_worst")[0]) == [(1, 4)]
    none, counts = step_pairs(STAR, 2.0)
    assert none == [] and counts["unused parents"] == 1
    most, counts = step_pairs(STAR, 0.3, most=2)
    assert gaps(most) == [(1, 4), (1, 3)] and counts["over most"] == 1


def test_what_gives_no_pair():
    """Check 3: one child, equal scores, NaN (counted)."""
    assert step_pairs(tree([-1, 0], [0.5, 0.9]), 0.0)[0] == []
    equal, counts = step_pairs(tree([-1, 0, 0], [0.5, 0.5, 0.5]), 0.0)
    assert equal == [] and counts["unused parents"] == 1
    lost, counts = step_pairs(tree([-1, 0, 0], [0.5, NAN, 0.5]), 0.0)
    assert lost == [] and counts["missing scores"] == 1
    same, counts = step_pairs(tree([-1, 0, 0], [0.5, 0.9, 0.1], text=["", "a ", "a"]), 0.0)
    assert same == [] and counts["equal text"] == 1


def test_few_visits_are_not_compared():
    """Check 4: child (.9, n 1) ignored with n_min 2 -> (.5, -.2) and no other."""
    found, counts = step_pairs(
        tree([-1, 0, 0, 0, 0], [0.4, 0.9, 0.5, 0.45, -0.2], visits=[9, 1, 3, 3, 2]), 0.3, least_visits=2
    )
    assert gaps(found) == [(2, 4)] and counts["few visits"] == 1
    pulled, _ = step_pairs(tree([-1, 0, 0], [0.0, 1.0, 0.5], visits=[5, 1, 4]), 0.0, shrink=1.0)
    assert pulled[0].gap == pytest.approx(1.0 / 2 - 2.0 / 5)


def test_two_bad_options_teach_nothing():
    found, counts = step_pairs(tree([-1, 0, 0], [0, -0.5, -0.9]), 0.1, floor=0.0)
    assert found == [] and counts["below floor"] == 1


def test_raw_scores_of_the_other_player_are_turned():
    two = tree([-1, 0, 0], [0, 0.5, -0.5], raw=[0, -0.5, 0.5], player=[0, 1, 1])
    assert gaps(step_pairs(two, 0.1, score="raw")[0]) == [(1, 2)] == gaps(step_pairs(two, 0.1)[0])


def test_contradictions_go():
    """Check 15: (a, b) and (b, a) under one prefix: both removed and counted."""
    two = tree([-1, 0, 0, 0, 0], [0] * 5, text=["", "x", "y", "y", "x"])
    pairs = [TreePair(0, 1, 2, 0.5, "step"), TreePair(0, 3, 4, 0.5, "step"), TreePair(0, 1, 3, 0.5, "step")]
    kept, gone = drop_contradictions(two, pairs[:2])
    assert kept == [] and gone == 2
    kept, gone = drop_contradictions(two, [pairs[0]])
    assert kept == [pairs[0]] and gone == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tau": -0.1}, "tau=-0.1: give a finite number of at least 0"),
        ({"tau": NAN}, "tau=nan"),
        ({"rule": "x"}, "rule='x'"),
        ({"most": 0}, "most=0"),
        ({"least_visits": 0}, "least_visits=0"),
        ({"score": "x"}, "score='x'"),
        ({"shrink": -1}, "shrink=-1"),
    ],
)
def test_bad_pair_settings(kwargs, message):
    """Check 16."""
    with pytest.raises(ConfigError, match=message):
        step_pairs(STAR, **({"tau": 0.3} | kwargs))


def test_complete_pairs():
    many = tree([-1, 0, 0, 0, 0], [0] * 5, raw=[0, 0.9, 0.2, 0.4, 0.85], ended=(1, 2, 3, 4))
    found, counts = full_pairs(many, 0.3, most=2)
    assert gaps(found) == [(1, 2), (1, 3)] and counts["pairs"] == 2 and found[0].kind == "full"
    assert full_pairs(many, 0.8)[0] == []


@pytest.fixture
def text():
    """Two steps each; one answer ends by itself, one was cut."""
    said = {"": ["a\n", "b\n"], "a\n": ["c", "=="], "b\n": ["d"]}

    def script(before, index):
        so_far = before.removeprefix("<bos>ab")
        options = said[so_far]
        word = options[index % len(options)]
        return Answer(text=word, end=word in ("c", "d"))

    def critic(leaves):
        return [{"a\n": 0.6, "b\n": 0.1, "a\nc": 0.9, "a\n==": 1.0, "b\nd": 0.2}[leaf.text] for leaf in leaves]

    config = SearchConfig(select=UCT(c=1.0), width=FixedWidth(k=2), max_depth=2)
    found = run(scripted(script), prompts("ab"), 12, critic, config=config, option=Option(sampling=LINES))
    return found.trees[0]


def row(tree, said):
    return next(r for r in range(len(tree)) if tree.said(r) == said)


def test_a_cut_answer_is_never_chosen(text):
    """Check 14: complete pairs end with the end token on both sides, steps hold none."""
    found, counts = full_pairs(text, 0.1)
    assert counts["cut"] == 1 and gaps(found) == [(row(text, "a\nc"), row(text, "b\nd"))]
    full, chosen, rejected = pair_tree(text, found[0])
    assert full.node_ids(chosen)[-1] == 2 == full.node_ids(rejected)[-1]
    steps, _ = step_pairs(text, 0.1)
    step = next(p for p in steps if p.parent == 0)
    pair, chosen, rejected = pair_tree(text, step)
    assert decode(pair.node_ids(chosen)) == "a\n" and 2 not in pair.node_ids(chosen) + pair.node_ids(rejected)
    assert pair.node_ids(0) == text.tokens[0].node_ids(0) and pair.logprob[pair.span(chosen)].tolist() == [-1.0, -1.0]
    assert problem(PreferencePair(pair, chosen, rejected)) is None
    deeper = TreePair(row(text, "a\n"), row(text, "a\nc"), row(text, "a\n=="), 0.1, "step")
    pair, chosen, _ = pair_tree(text, deeper)
    assert decode(pair.node_ids(0)) == "aba\n" and decode(pair.node_ids(chosen)) == "c"


def test_rows_of_text(text, tmp_path):
    leaf = row(text, "a\nc")
    assert sft_rows(text, [leaf], prompt="ab") == [{"prompt": "ab", "completion": "a\nc", "tree": "ab", "score": 0.9}]
    step = next(p for p in step_pairs(text, 0.1)[0] if p.parent == 0)
    (pair,) = preference_rows(text, [step], prompt="ab")
    assert (pair["prompt"], pair["chosen"], pair["rejected"], pair["kind"]) == ("ab", "a\n", "b\n", "step")
    assert stepwise_rows(text, [row(text, "b\nd")], 0.15, prompt="ab") == [
        {"prompt": "ab", "completions": ["b\n", "d"], "labels": [True, True], "tree": "ab"}
    ]
    deeper = TreePair(row(text, "a\n"), leaf, row(text, "a\n=="), 0.1, "step")
    assert preference_rows(text, [deeper], prompt="ab")[0]["prompt"] == "aba\n"
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, preference_rows(text, [step, deeper], prompt="ab"))
    assert [r["chosen"] for r in read_jsonl(path)] == ["a\n", "c"]
    with pytest.raises(DataError, match="no text column 'prompt'"):
        sft_rows(text, [leaf])
    text.task = {"prompt": "what?"}
    assert sft_rows(text, [leaf])[0]["prompt"] == "what?"


def test_paths_as_credit(text):
    tokens = text.tokens[0]
    assert train_paths(text, [row(text, "a\nc")]) == 4  # a, line end, c, end
    assert tokens.weight.sum() == 4 and tokens.advantage[tokens.weight > 0].tolist() == [1.0] * 4
    assert decode(tokens.ids[tokens.weight > 0]) == "a\nc"
    train_paths(text, [row(text, "b\nd")], [-0.5])
    assert tokens.advantage.min() == -0.5


# -- paths, values, visits ---------------------------------------------------------------------------------------------

DEEP = tree(
    [-1, 0, 0, 1, 1, 2],
    [0.5, 0.6, 0.4, 0.7, 0.5, 0.95],
    visits=[9, 6, 3, 2, 4, 3],
    ended=(3, 5),
    success=[NAN, NAN, NAN, 1, NAN, 0],
)


def test_paths():
    assert greedy_leaf(DEEP) == 3 and greedy_leaf(DEEP, "visits") == 4
    assert best_leaf(DEEP) == 5 and best_path(DEEP) == [0, 2, 5]
    assert best_leaf(tree([-1, 0], [0, 1])) is None and best_path(tree([-1, 0], [0, 1])) == [0, 1]
    assert successful(DEEP) == [3] and successful(DEEP, threshold=0.9) == [5]
    assert successful(DEEP, lambda t, r: True) == [3, 5]
    with pytest.raises(DataError, match="nothing says which answers are right"):
        successful(tree([-1, 0], [0, 1], ended=(1,)))
    assert DEEP.said(3) == "ac" and DEEP.path(3) == [0, 1, 3]


def test_outcome_filter():
    """AlphaLLM check 16: scores .99, .7, .4 with gamma .9 -> one row; none is an empty list, not an error here."""
    three = tree([-1, 0, 0, 0], [0] * 4, raw=[0, 0.99, 0.7, 0.4], ended=(1, 2, 3))
    assert successful(three, threshold=0.9) == [1] and successful(three, threshold=0.99) == []


def test_value_targets():
    """AlphaLLM check 6: an option trajectory of 4, wrong -> 4 rows, 5 with the prompt, the same target."""
    line = tree([-1, 0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4, 0.5])
    got = outcome_targets(line, 4, 0.0)
    assert [t.row for t in got] == [0, 1, 2, 3, 4] and {t.value for t in got} == {0.0}
    assert [t.row for t in outcome_targets(line, 4, 0.0, prompt=False)] == [1, 2, 3, 4]
    assert [(t.row, t.value) for t in value_targets(DEEP, least_visits=4)] == [(0, 0.5), (1, 0.6), (4, 0.5)]


def test_policy_targets():
    (first, *_) = policy_targets(DEEP)
    assert first.children == (1, 2) and first.probabilities == pytest.approx((2 / 3, 1 / 3))
    assert [t.row for t in policy_targets(DEEP, least_visits=6)] == [0, 1]
    cold = policy_targets(DEEP, temperature=0.5)[0].probabilities
    assert cold == pytest.approx((36 / 45, 9 / 45)) and first.texts == ("a", "b")
    with pytest.raises(ConfigError, match="temperature=0"):
        policy_targets(DEEP, temperature=0)


# -- ExACT: traversals -------------------------------------------------------------------------------------------------


def show(moves):
    return " ".join({"act": f"{m.row}", "back": f"BACK({m.row})", "goto": f"GOTO({m.row})"}[m.kind] for m in moves)


def test_traversal():
    """Check 12: paths [x, y], [x, z], [w] from r: r x y BACK z GOTO(r) w; imitation: r w; an equal path adds nothing."""
    r, x, y, z, w = range(5)
    moves = traversal([[r, x, y], [r, x, z], [r, w]])
    assert show(moves) == "1 2 BACK(1) 3 GOTO(0) 4"
    assert direct(moves) == [Move("act", w)]
    assert traversal([[r, x, y], [r, x, y], [r, x]]) == traversal([[r, x, y]])
    assert show(direct(traversal([[r, x, y], [r, x, z]]))) == "1 3"
    assert show(traversal([[r, x], [r, x, z], [r, w]])) == "1 3 GOTO(0) 4"
    stops = traversal([[r, x, y], [r, x, z]], undoable=lambda row: row != y)
    assert show(stops) == "1 3"
    with pytest.raises(DataError, match="does not begin in the root"):
        traversal([[r, x], [w, x]])


def test_the_walk_of_a_search_up_to_its_goal():
    roots = [EnvRoot(task={"heap": 6})]
    config = SearchConfig(select=UCT(c=1.0))
    found = search(roots, LegalActions(), Heap, Rollouts(), Budget(simulations=40), config=config)
    (view,) = found.trees
    trace = found.search.trace(0)
    assert len(trace) == 40 and trace[:3] == [1, 2, 3]
    goal = trace[20]
    paths = explored_paths(view, trace, goal)
    assert [p[-1] for p in paths] == trace[: trace.index(goal) + 1]
    moves = traversal(paths)
    assert moves[-1] == Move("act", goal) and direct(moves) == [Move("act", r) for r in view.path(goal)[1:]]
    at = 0
    for move in moves:  # every step of the walk is one that the tree allows
        assert int(view.parent[move.row]) == at if move.kind == "act" else move.row in view.path(at)
        at = move.row
    few = explored_paths(view, trace, goal, limit=4)
    assert len(few) == 4 and few[-1][-1] == goal
    fewer = explored_paths(view, trace, goal, similar=lambda a, b: True)
    assert [p[-1] for p in fewer] == [trace[0], goal]
    with pytest.raises(DataError, match="row 999 is not in the trace"):
        explored_paths(view, trace, 999)


def test_prefix_samples():
    """Check 13: 20 items -> 10 samples; the last holds items 1-4 and 9-20."""
    samples = prefix_samples(list(range(1, 21)))
    assert len(samples) == 10 and samples[0] == [1, 2] and samples[-1] == [1, 2, 3, 4, *range(9, 21)]
    assert samples[7] == list(range(1, 17))


def test_rows_of_an_environment():
    found = search([EnvRoot(task={"heap": 4})], LegalActions(), Heap, None, Budget(simulations=60))
    (view,) = found.trees
    leaf = next(r for r in view.finished() if view.depth[r] == 2)
    (line,) = sft_rows(view, [leaf])
    assert [m["role"] for m in line["messages"]] == ["user", "assistant", "user", "assistant"]
    assert (
        line["messages"][0]["content"] == "4 left" and line["messages"][1]["content"] == view.text[view.path(leaf)[1]]
    )
    pair = next(p for p in step_pairs(view, 0.01)[0] if p.parent != 0)
    (got,) = preference_rows(view, [pair])
    assert got["prompt"][-1] == {"role": "user", "content": view.seen[pair.parent]}
    assert got["chosen"] == [{"role": "assistant", "content": view.text[pair.chosen]}]
    with pytest.raises(DataError, match="no token pairs; use preference_rows"):
        pair_tree(view, pair)
    with pytest.raises(DataError, match="no sampled tokens; use sft_rows"):
        train_paths(view, [1])
