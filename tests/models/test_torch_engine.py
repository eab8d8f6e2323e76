"""The torch engine against transformers: greedy tokens, log-probs, independence of neighbours, stop rules."""

from collections import Counter

import numpy as np
import pytest
import torch

from forethought.errors import ConfigError, EngineError
from forethought.models.engine import Sampling, row_seed
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine, sample
from forethought.tree.tree import Kind, Stop, TokenTree
from tinymodels import CONFIGS, IntTokenizer, tiny


def prompts(count, longest=20, seed=0):
    rng = np.random.default_rng(seed)
    return [TokenTree(rng.integers(3, 97, size=rng.integers(1, longest)), task=f"t{i}") for i in range(count)]


@pytest.fixture(scope="module")
def llama():
    return Policy(tiny("llama"), IntTokenizer())


@pytest.mark.parametrize("family", list(CONFIGS))
def test_greedy_equals_generate_on_50_prompts_of_mixed_length(family):
    policy = Policy(tiny(family), IntTokenizer())
    trees = prompts(50)
    new = TorchEngine(policy, max_rows=16).extend([(t, 0) for t in trees], 1, Sampling(max_tokens=12, temperature=0))
    for tree, (node,) in zip(trees, new, strict=True):
        ids = torch.tensor([tree.node_ids(0)])
        want = policy.core.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert tree.node_ids(node) == want[0, ids.shape[1] :].tolist()
        assert tree.stop[node] == (Stop.EOS if tree.node_ids(node)[-1] == 1 else Stop.LENGTH)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_logprobs_equal_a_plain_forward(family):
    """Rows of different lengths, row replacement (27 rows in 4 places), shared prefixes, two generations deep."""
    policy = Policy(tiny(family), IntTokenizer())
    engine = TorchEngine(policy, max_rows=4)
    trees = prompts(9)
    first = engine.extend([(t, 0) for t in trees], 3, Sampling(max_tokens=15, seed=1))
    deeper = engine.extend([(t, n[0]) for t, n in zip(trees, first, strict=True)], 2, Sampling(max_tokens=6, seed=2))
    for tree, one, two in zip(trees, first, deeper, strict=True):
        for node in [*one, *two]:
            ids = torch.tensor([tree.path_ids(node)])
            with torch.no_grad():
                logp = policy.core(ids).logits[0].float().log_softmax(-1)
            begin = ids.shape[1] - int(tree.length[node])
            want = logp[begin - 1 : -1].gather(1, ids[0, begin:, None])[:, 0]
            np.testing.assert_allclose(tree.logprob[tree.span(node)], want.numpy(), atol=1e-4)
            assert tree.kind[node] == Kind.ASSISTANT and tree.sampled[node]


@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_a_rows_sample_does_not_depend_on_its_neighbours(llama, max_rows):
    alone = prompts(7)
    for tree in alone:
        for _ in range(4):  # one at a time
            TorchEngine(llama, max_rows=1).extend([(tree, 0)], 1, Sampling(max_tokens=12, seed=5))
    together = prompts(7)
    TorchEngine(llama, max_rows=max_rows, prefill_tokens=30).extend(
        [(t, 0) for t in together], 4, Sampling(max_tokens=12, seed=5)
    )
    for a, b in zip(alone, together, strict=True):
        assert [a.node_ids(n) for n in a.children(0)] == [b.node_ids(n) for n in b.children(0)]
    assert len({tuple(b.node_ids(n)) for b in together for n in b.children(0)}) > 20  # and the samples differ


def test_the_same_leaf_twice_gives_different_samples(llama):
    (tree,) = prompts(1)
    one, two = TorchEngine(llama).extend([(tree, 0), (tree, 0)], 2, Sampling(max_tokens=12))
    assert len({tuple(tree.node_ids(n)) for n in one + two}) == 4


def test_each_prefix_token_is_prefilled_once(llama):
    engine = TorchEngine(llama)
    tree = TokenTree([5] * 10, task="a")
    a, b = tree.add(0, [6, 7]), tree.add(0, [8])
    engine.extend([(tree, a), (tree, b)], 8, Sampling(max_tokens=3, ignore_eos=True))
    assert engine.stats.tokens_prefilled == 13 and engine.stats.tokens_generated == 16 * 3
    assert engine.stats.requests == 16


def test_sampling_frequencies_follow_the_distribution(llama):
    tree = TokenTree([5, 6, 7], task="freq")
    with torch.no_grad():
        probs = llama.core(torch.tensor([[5, 6, 7]])).logits[0, -1].div(0.7).softmax(-1).numpy()
    new = TorchEngine(llama).extend([(tree, 0)], 4000, Sampling(max_tokens=1, temperature=0.7))[0]
    seen = Counter(tree.node_ids(n)[0] for n in new)
    for token in np.argsort(-probs)[:5]:
        spread = 4 * np.sqrt(probs[token] * (1 - probs[token]) / 4000)
        assert abs(seen[int(token)] / 4000 - probs[token]) < spread + 1e-3


def test_tempered_and_untempered_logprobs():
    """Case H12: temperature divides logits before the softmax."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    zero = torch.zeros(1)
    ids, logp = sample(logits, zero, Sampling(temperature=0.5))
    assert ids.tolist() == [0] and logp.item() == pytest.approx(-0.142932, abs=1e-6)
    ids, logp = sample(logits, zero, Sampling(temperature=0.5, logprobs="untempered"))
    assert ids.tolist() == [0] and logp.item() == pytest.approx(-0.407606, abs=1e-6)
    ids, logp = sample(torch.tensor([[1.0, 3.0, 3.0]]), zero, Sampling(temperature=0))
    assert ids.tolist() == [1]  # ties: lowest id
    assert logp.item() == pytest.approx(float(torch.tensor([1.0, 3, 3]).log_softmax(-1)[1]))


@pytest.mark.parametrize(
    ("kwargs", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.67}, {0, 1}),
        ({"top_k": 3, "top_p": 0.95}, {0, 1, 2}),
    ],
)
def test_truncation(kwargs, allowed):
    """Probabilities 0.6652, 0.2447, 0.0900, 0.0001: a head is kept until its mass reaches top_p."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -7.0]]).expand(200, -1)
    draws = torch.linspace(0, 0.99999, 200)
    ids, logp = sample(logits, draws, Sampling(**kwargs))
    assert set(ids.tolist()) == allowed
    want = torch.tensor([2.0, 1.0, 0.0, -7.0]).log_softmax(-1)[ids]  # of the whole distribution, before truncation
    torch.testing.assert_close(logp, want)


class Letters(IntTokenizer):
    def decode(self, ids, **_):
        return "".join(chr(97 + i % 26) for i in ids)


def test_stop_strings_span_tokens(llama):
    policy = Policy(llama.model, Letters())
    plain = prompts(6)
    base = TorchEngine(policy).extend([(t, 0) for t in plain], 2, Sampling(max_tokens=20, seed=3, ignore_eos=True))
    for tree, nodes in zip(plain, base, strict=True):
        for index, node in enumerate(nodes):
            text = Letters().decode(tree.node_ids(node))
            stop = text[6:9]  # a three-token string
            again = TokenTree(tree.node_ids(0), task=tree.task)
            new = TorchEngine(policy).extend(
                [(again, 0)], 2, Sampling(max_tokens=20, seed=3, ignore_eos=True, stop=(stop, "§"))
            )[0][index]
            got = Letters().decode(again.node_ids(new))
            assert got == text[: text.index(stop) + 3] and again.stop[new] == Stop.STRING


def test_context_limit_and_empty_prompts(llama):
    engine = TorchEngine(llama)
    tree = TokenTree([5] * 250, task="long")
    full = TokenTree([5] * 256, task="full")
    (a,), (b,) = engine.extend([(tree, 0), (full, 0)], 1, Sampling(max_tokens=50, ignore_eos=True))
    assert tree.length[a] == 6 and tree.stop[a] == Stop.LENGTH
    assert full.length[b] == 0 and full.stop[b] == Stop.LENGTH
    with pytest.raises(EngineError, match="nothing to predict from"):
        engine.extend([(TokenTree(task="empty"), 0)], 1, Sampling())
    with pytest.raises(EngineError, match="n=0"):
        engine.extend([(tree, 0)], 0, Sampling())
    assert engine.extend([], 3, Sampling()) == []


def test_score_equals_the_stored_logprobs(llama):
    engine = TorchEngine(llama)
    trees = prompts(5)
    new = engine.extend([(t, 0) for t in trees], 2, Sampling(max_tokens=9, temperature=0.6, seed=9))
    leaves = [(t, n) for t, nodes in zip(trees, new, strict=True) for n in nodes]
    for (tree, node), got in zip(leaves, engine.score(leaves, temperature=0.6), strict=True):
        assert len(got) == tree.path_length(node) and np.isnan(got[0]) and np.isfinite(got[1:]).all()
        np.testing.assert_allclose(got[-int(tree.length[node]) :], tree.logprob[tree.span(node)], atol=1e-4)


def test_untempered_storage_equals_the_score_at_temperature_one(llama):
    engine = TorchEngine(llama)
    (tree,) = prompts(1)
    (node,) = engine.extend([(tree, 0)], 1, Sampling(max_tokens=8, temperature=0.5, logprobs="untempered"))[0]
    got = engine.score([(tree, node)])[0][-int(tree.length[node]) :]
    np.testing.assert_allclose(got, tree.logprob[tree.span(node)], atol=1e-4)


def test_progress_and_seeds(llama):
    calls = []
    TorchEngine(llama).extend(
        [(t, 0) for t in prompts(3)],
        2,
        Sampling(max_tokens=5),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1] == (6, 6) and [d for d, _ in calls] == sorted(d for d, _ in calls)
    keys = {row_seed(s, t, leaf, i) for s in (0, 1) for t in ("a", "b") for leaf in (0, 1) for i in (0, 1)}
    assert len(keys) == 16
    assert row_seed(0, "a", 0, 0) == row_seed(0, "a", 0, 0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"stop": "x"}, "tuple of non-empty"),
        ({"logprobs": "both"}, "'tempered' or 'untempered'"),
    ],
)
def test_sampling_refuses(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**kwargs)


def test_named_rows_depend_on_their_name_alone(llama):
    """Whatever else hangs in the tree, and wherever the leaf stands in the call."""
    sampling = Sampling(max_tokens=8, seed=3)

    def ids(leaves, names):
        new = TorchEngine(llama).extend(leaves, 2, sampling, names=names)
        return [[tree.node_ids(n) for n in nodes] for (tree, _), nodes in zip(leaves, new, strict=True)]

    bare = TokenTree([5, 6, 7], task="a")
    first = ids([(bare, 0), (bare, 0)], ["x", "y"])
    grown = TokenTree([5, 6, 7], task="b")
    grown.add(0, [9, 9])
    assert ids([(grown, 0)], ["y"]) == first[1:]
    assert len({str(row) for rows in first for row in rows}) == 4
    with pytest.raises(EngineError, match="1 names for 2 leaves: give one each"):
        TorchEngine(llama).extend([(bare, 0), (bare, 0)], 1, sampling, names=["x"])
