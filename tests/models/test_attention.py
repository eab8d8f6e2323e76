"""The exact ways to attend over a packed tree agree with attention path by path; padding is bounded."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import ModelError
from forethought.models import attention
from forethought.models.attention import TreeContext, _buckets, _Dense, _Family, _Row, _Rows
from forethought.tree.pack import Batch, pack
from forethought.tree.tree import TokenTree
from tinymodels import tiny

HEADS, KV_HEADS, SIZE = 4, 2, 8


@st.composite
def forests(draw) -> list[TokenTree]:
    """Random trees with empty and long spans, chains and bushes."""
    forest = []
    for _ in range(draw(st.integers(1, 3))):
        tree = TokenTree([7] * draw(st.integers(1, 9)))
        for _ in range(draw(st.integers(0, 8))):
            tree.add(draw(st.integers(0, tree.n_nodes - 1)), [9] * draw(st.sampled_from([0, 1, 1, 2, 3, 5, 12])))
        tree.weight[1:] = 1
        forest.append(tree)
    return forest


def packed(forest: list[TokenTree]) -> Batch:
    (batch,) = pack(forest, keep=[range(t.n_nodes) for t in forest])
    return batch


def random_qkv(batch: Batch, seed: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(1, h, batch.n_tokens, SIZE, generator=made, dtype=torch.float64) for h in heads]


def by_path(batch: Batch, forest: list[TokenTree], q, k, v, *, scaling, window, softcap) -> torch.Tensor:
    """Attention written out: each token over the packed tokens of its own path, one query at a time."""
    out = torch.full((1, batch.n_tokens, HEADS, SIZE), math.nan, dtype=q.dtype)
    for number, tree in enumerate(forest):
        for node in range(tree.n_nodes):
            path = [i for n in tree.path(node) for i in range(*batch.places[number, n])]
            begin, end = batch.places[number, node]
            for place in range(len(path) - (end - begin), len(path)):
                keys = path[: place + 1] if window is None else path[max(0, place + 1 - window) : place + 1]
                for head in range(HEADS):
                    group = head // (HEADS // KV_HEADS)
                    scores = k[0, group, keys] @ q[0, head, path[place]] * scaling
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    out[0, path[place], head] = scores.softmax(0) @ v[0, group, keys]
    return out


def kinds(context: TreeContext) -> set[type]:
    return {type(part) for part in context._parts}


@settings(max_examples=100, deadline=None)
@given(
    forests(),
    st.sampled_from([None, 1, 2, 3, 7, 100]),
    st.sampled_from([None, 1.5]),
    st.sampled_from([0.3, 1.0]),
    st.integers(0, 99),
)
def test_all_ways_are_one_attention(forest, window, softcap, scaling, seed):
    batch = packed(forest)
    q, k, v = random_qkv(batch, seed)
    how = dict(scaling=scaling, window=window, softcap=softcap)
    want = by_path(batch, forest, q, k, v, **how)
    with pytest.MonkeyPatch.context() as patch:
        contexts = {"dense": TreeContext(batch, dense=True), "family": TreeContext(batch, dense=False)}
        contexts["chosen"] = TreeContext(batch)
        patch.setattr(attention, "_SMALL", 10**9)  # whatever its size, gather it into padded rows:
        contexts["segments"] = TreeContext(batch)  # whole segments where a call costs much,
        patch.setattr(attention, "_CALL_COST", 0)
        contexts["spans"] = TreeContext(batch)  # spans under their paths where it costs nothing
    assert kinds(contexts["dense"]) == {_Dense} and kinds(contexts["family"]) == {_Family}
    assert kinds(contexts["segments"]) == kinds(contexts["spans"]) == {_Rows}
    for name, context in contexts.items():
        got = context.attend(0, q, k, v, **how)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@settings(max_examples=30, deadline=None)
@given(forests(), st.sampled_from([None, 3]), st.sampled_from([None, 1.5]), st.integers(0, 99))
def test_their_gradients_agree_too(forest, window, softcap, seed):
    batch = packed(forest)
    with pytest.MonkeyPatch.context() as patch:
        contexts = [TreeContext(batch, dense=True), TreeContext(batch, dense=False), TreeContext(batch)]
        patch.setattr(attention, "_CALL_COST", 0)
        contexts.append(TreeContext(batch))
    pull = torch.randn(1, batch.n_tokens, HEADS, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for context in contexts:
        qkv = [x.requires_grad_() for x in random_qkv(batch, seed)]
        out = context.attend(0, *qkv, scaling=0.5, window=window, softcap=softcap)
        found.append(torch.autograd.grad((out * pull).sum(), qkv))
    for gradients in found[1:]:
        for got, want in zip(gradients, found[0], strict=True):
            assert bool(torch.isfinite(got).all())
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_the_window_counts_depth_not_place():
    """root [0 1], a [2 3], b [4 5]: with a window of 3, the token at place 4 sees 0, 1 and itself, and none of a."""
    tree = TokenTree([7, 7])
    tree.add(0, [9, 9])
    tree.add(0, [9, 9])
    tree.weight[2:] = 1
    batch = packed([tree])
    q = torch.zeros(1, 1, 6, 6)
    v = torch.eye(6)[None, None]  # the output is the attention itself
    third, half = 1 / 3, 1 / 2
    want = [
        [1, 0, 0, 0, 0, 0],
        [half, half, 0, 0, 0, 0],
        [third, third, third, 0, 0, 0],
        [0, third, third, third, 0, 0],
        [third, third, 0, 0, third, 0],
        [0, third, 0, 0, third, third],
    ]
    for dense in (True, False, None):
        out = TreeContext(batch, dense=dense).attend(0, q, q, v, scaling=1.0, window=3, softcap=None)
        torch.testing.assert_close(out[0, :, 0], torch.tensor(want), atol=1e-6, rtol=0)


def test_capture_keeps_every_layers_keys_and_values():
    tree = TokenTree([7, 7])
    tree.add(0, [9])
    tree.weight[-1] = 1
    batch = packed([tree])
    context = TreeContext(batch, capture=True)
    for layer in (0, 1):
        q, k, v = random_qkv(batch, layer)
        context.attend(layer, q, k, v, scaling=1.0, window=None, softcap=None)
        assert context.keys is not None and context.values is not None
        assert torch.equal(context.keys[layer], k[0]) and torch.equal(context.values[layer], v[0])
    assert TreeContext(batch).keys is None


# -- which way is taken, and what padding costs --
def test_many_small_trees_are_few_calls_and_large_families_are_one_each():
    small = []
    for number in range(200):
        tree = TokenTree([7] * (3 + number % 5))
        for _ in range(3):
            tree.add(0, [9, 9])
        tree.weight[-1] = 1
        small.append(tree)
    context = TreeContext(packed(small))
    assert kinds(context) == {_Rows} and len(context._parts) <= 3
    large = TokenTree([7] * 400)
    for _ in range(8):
        large.add(0, [9] * 64)
    large.weight[-1] = 1
    context = TreeContext(packed([large]))
    assert [type(p) for p in context._parts] == [_Family, _Family]


@st.composite
def row_lists(draw) -> list[_Row]:
    made = []
    for _ in range(draw(st.integers(1, 40))):
        queries = draw(st.integers(1, 60))
        keys = queries + draw(st.integers(0, 300))
        made.append(_Row(torch.arange(queries), torch.arange(keys), torch.ones(queries, keys, dtype=torch.bool)))
    return made


@settings(max_examples=60, deadline=None)
@given(row_lists(), st.sampled_from([0, 1000, attention._CALL_COST]))
def test_padding_is_bounded(rows, call_cost):
    """A bucket of several rows computes at most twice its true pairs and the price of one further call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_CALL_COST", call_cost)
        buckets = list(_buckets(rows))
    assert sorted(id(r) for bucket in buckets for r in bucket) == sorted(map(id, rows))
    for bucket in buckets:
        true = sum(len(r.queries) * len(r.keys) for r in bucket)
        padded = len(bucket) * max(len(r.queries) for r in bucket) * max(len(r.keys) for r in bucket)
        assert padded == true if len(bucket) == 1 else padded <= 2 * true + call_cost


def test_rows_of_one_size_are_one_bucket_and_a_giant_stands_alone():
    def row(queries: int, keys: int) -> _Row:
        return _Row(torch.arange(queries), torch.arange(keys), torch.ones(queries, keys, dtype=torch.bool))

    assert [len(b) for b in _buckets([row(4, 20)] * 500)] == [500]
    giant = row(300, 2000)
    buckets = list(_buckets([giant] + [row(4, 20)] * 500))
    assert [len(b) for b in buckets] == [500, 1] and buckets[1][0] is giant
    assert list(_buckets([])) == []


# -- scope --
def test_calls_outside_the_scope_and_dropout_are_refused():
    model = tiny("llama")
    model.config._attn_implementation_internal = attention.NAME
    with pytest.raises(ModelError, match="called outside its scope"):
        model(torch.tensor([[5, 6, 7]]))
    model = tiny("llama").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    tree = TokenTree([5, 6])
    tree.weight[1] = 1
    batch = packed([tree])
    with (
        attention.using(attention.configs_of(model), TreeContext(batch)),
        pytest.raises(ModelError, match="attention dropout is not supported with token trees: set attention_dropout=0"),
    ):
        model.model(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False)
