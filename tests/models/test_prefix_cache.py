"""Keys and values kept between calls: the same samples as without, each token run once, also after trees were dropped."""

import numpy as np
import pytest
import torch

from forethought.errors import EngineError
from forethought.models.engine import Sampling
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine
from forethought.tree.tree import TokenTree
from tinymodels import CONFIGS, IntTokenizer, tiny


@pytest.fixture(scope="module")
def policies():
    return {name: Policy(tiny(name), IntTokenizer()) for name in CONFIGS}


def grow(engine, rounds=3, prompts=((5, 6, 7, 8), (9, 10), (11, 12, 13, 14, 15, 16, 17))):
    """Trees that branch: each round samples two children of every newest first child and one of the root."""
    trees = [TokenTree(ids, task=str(i)) for i, ids in enumerate(prompts)]
    leaves = [(t, 0) for t in trees]
    for number in range(rounds):
        new = engine.extend(leaves, 2, Sampling(max_tokens=3 + number, ignore_eos=True, seed=number))
        leaves = [(t, nodes[0]) for (t, _), nodes in zip(leaves, new, strict=True)]
        leaves += [(trees[0], new[0][1]), (trees[1], 0)]
    return trees


def same(trees, others):
    for a, b in zip(trees, others, strict=True):
        assert (a.ids == b.ids).all() and (a.parent == b.parent).all()
        np.testing.assert_allclose(a.logprob, b.logprob, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_reuse_changes_no_sample(policies, family):
    """AlphaLLM check 14: with reuse as without, within 1e-5, for every family of attention."""
    plain, kept = TorchEngine(policies[family]), TorchEngine(policies[family])
    want = grow(plain)
    with kept.reuse():
        same(grow(kept), want)
    assert kept.cache is None
    assert kept.stats.tokens_generated == plain.stats.tokens_generated
    assert kept.stats.tokens_prefilled < plain.stats.tokens_prefilled


def test_each_token_is_run_once(policies):
    """The prefill counter: every prompt once, and the last token of each row that is gone on from."""
    engine = TorchEngine(policies["llama"])
    tree = TokenTree([5, 6, 7, 8, 9], task="a")
    with engine.reuse():
        ends = engine.extend([(tree, 0)], 3, Sampling(max_tokens=4, ignore_eos=True))[0]
        assert engine.stats.tokens_prefilled == 5 and engine.stats.tokens_reused == 0
        below = engine.extend([(tree, n) for n in ends], 2, Sampling(max_tokens=4, ignore_eos=True))
        assert engine.stats.tokens_prefilled == 5 + 3 and engine.stats.tokens_reused == 3 * (5 + 3)
        engine.extend([(tree, 0), (tree, below[0][0]), (tree, below[0][0])], 1, Sampling(max_tokens=2))
        assert engine.stats.tokens_prefilled == 8 + 2  # the prompt's last token for its logits, and one new end
        # An observation between: only its own tokens and the row's last one are new.
        seen = tree.add(below[1][0], [20, 21, 22])
        engine.extend([(tree, seen)], 1, Sampling(max_tokens=2))
        assert engine.stats.tokens_prefilled == 10 + 4


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_few_rows_and_small_prefills(policies, rows):
    """Lanes that are refilled, rows that wait, columns that move: what is kept stays right."""
    want = grow(TorchEngine(policies["gemma2"]))
    engine = TorchEngine(policies["gemma2"], max_rows=rows, prefill_tokens=6)
    with engine.reuse():
        same(grow(engine), want)


def test_dropped_trees_are_run_again(policies):
    plain = TorchEngine(policies["qwen3"])
    want = grow(plain)
    engine = TorchEngine(policies["qwen3"])
    with engine.reuse(max_tokens=70):
        same(grow(engine), want)
        assert len(engine.cache) <= 70
    all_kept = TorchEngine(policies["qwen3"])
    with all_kept.reuse():
        grow(all_kept)
    assert all_kept.stats.tokens_prefilled < engine.stats.tokens_prefilled <= plain.stats.tokens_prefilled


def test_new_weights_forget(policies):
    policy = Policy(tiny("llama"), IntTokenizer())
    engine = TorchEngine(policy)
    tree = TokenTree([5, 6, 7, 8], task="a")
    with engine.reuse():
        engine.extend([(tree, 0)], 1, Sampling(max_tokens=3, ignore_eos=True))
        assert len(engine.cache) == 4 + 2
        engine.load_weights({k: v * 1.5 for k, v in policy.model.state_dict().items()})
        assert len(engine.cache) == 0
        (got,) = engine.extend([(tree, 0)], 1, Sampling(max_tokens=3, ignore_eos=True))[0]
    other = TokenTree([5, 6, 7, 8], task="a")
    other.add(0, [1])
    (want,) = TorchEngine(policy).extend([(other, 0)], 1, Sampling(max_tokens=3, ignore_eos=True))[0]
    assert tree.node_ids(got) == other.node_ids(want)


def test_blocks_may_be_nested(policies):
    engine = TorchEngine(policies["llama"])
    with engine.reuse():
        cache = engine.cache
        with engine.reuse(max_tokens=5):
            assert engine.cache is cache
        assert engine.cache is cache


def test_an_empty_path_is_refused_all_the_same(policies):
    engine = TorchEngine(policies["llama"])
    with engine.reuse(), pytest.raises(EngineError, match="has an empty path"):
        engine.extend([(TokenTree([], task="a"), 0)], 1, Sampling(max_tokens=2))


def test_no_gradient_is_kept(policies):
    engine = TorchEngine(policies["llama"])
    tree = TokenTree([5, 6, 7], task="a")
    with engine.reuse():
        engine.extend([(tree, 0)], 2, Sampling(max_tokens=3, ignore_eos=True))
        pairs = engine.cache.layers_of(tree)
        assert len(pairs) == 3 and not any(t.requires_grad for pair in pairs.values() for t in pair)
        assert torch.isfinite(pairs[0][0][:, :3]).all()
