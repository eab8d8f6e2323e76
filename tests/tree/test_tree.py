import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.tree.tree import Kind, Stop, TokenTree

spans = st.lists(st.tuples(st.integers(0, 10**6), st.lists(st.integers(0, 50), max_size=6)), min_size=1, max_size=12)


def build(root, rows):
    tree = TokenTree(root, task="t", seed=3)
    for pick, ids in rows:
        tree.add(pick % tree.n_nodes, ids, sampled=True, logprobs=[-0.5 * i for i in ids], stop=Stop.EOS)
    return tree


def test_path_ids_are_what_was_added():
    tree = TokenTree([1, 2, 3])
    a = tree.add(0, [4, 5], sampled=True, logprobs=[-1.0, -2.0], stop=Stop.EOS, reward=1.0)
    b = tree.add(0, [6])
    c = tree.add(a, [7, 8], kind=Kind.OBSERVATION)
    assert tree.path_ids(c) == [1, 2, 3, 4, 5, 7, 8]
    assert tree.path(c) == [0, a, c] and tree.path_length(c) == 7
    assert tree.leaves() == [c, b] and tree.children(0) == [a, b]
    assert tree.logprob[tree.span(a)].tolist() == [-1.0, -2.0]
    assert np.isnan(tree.logprob[tree.span(c)]).all()
    assert tree.reward[a] == 1.0 and np.isnan(tree.reward[b])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=5), spans)
def test_adding_never_changes_existing_spans(root, rows):
    tree = TokenTree(root)
    seen: list[tuple[int, list[int]]] = [(0, list(root))]
    for pick, ids in rows:
        node = tree.add(pick % tree.n_nodes, ids)
        seen.append((node, list(ids)))
        assert all(tree.node_ids(n) == want for n, want in seen)
        assert tree.path_ids(node) == sum((tree.node_ids(n) for n in tree.path(node)), [])
    assert sorted(tree.walk()) == list(range(tree.n_nodes))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=5), spans)
def test_arrays_round_trip_and_keep_growing(root, rows):
    tree = build(root, rows)
    tree.column("ref_logprob")[:] = 0.25
    tree.meta[0]["note"] = "ü\n"
    back = TokenTree.from_arrays(tree.to_arrays())
    for name in ("parent", "start", "length", "kind", "sampled", "stop", "reward", "ids", "logprob", "weight"):
        np.testing.assert_array_equal(getattr(back, name), getattr(tree, name))
    assert (back.task, back.seed, back.meta, back.columns) == (tree.task, tree.seed, tree.meta, tree.columns)
    node = back.add(back.n_nodes - 1, [1, 2])
    assert back.node_ids(node) == [1, 2] and np.isnan(back.column("ref_logprob")[back.span(node)]).all()
    assert back.children(back.n_nodes - 2) == [node]


def test_refuses_what_cannot_be_stored():
    tree = TokenTree([1])
    with pytest.raises(IndexError, match="parent 5"):
        tree.add(5, [1])
    with pytest.raises(ValueError, match="1 log-probs for 2 ids"):
        tree.add(0, [1, 2], logprobs=[-1.0])
    with pytest.raises(ValueError, match="token ids"):
        tree.add(0, [-1])
    tree.meta[0]["x"] = float("nan")
    with pytest.raises(ValueError):
        tree.to_arrays()


def test_meta_is_json():
    tree = TokenTree([1], meta={"parts": {"format": 1.0}})
    assert json.loads(tree.to_arrays()["meta"].tobytes().decode())["meta"] == [{"parts": {"format": 1.0}}]
