"""Tree layout against linear layout: the same loss and gradients, for every family, with LoRA and tied weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import DataError, ModelError
from forethought.models.attention import TreeContext, using
from forethought.models.policy import Policy
from forethought.tree.pack import pack, write_back
from forethought.tree.tree import TokenTree
from tinymodels import CONFIGS, IntTokenizer, tiny


@st.composite
def trees(draw, vocab=97):
    tree = TokenTree(draw(st.lists(st.integers(3, vocab - 1), min_size=1, max_size=6)))
    for _ in range(draw(st.integers(1, 7))):
        parent = draw(st.integers(0, tree.n_nodes - 1))
        node = tree.add(parent, draw(st.lists(st.integers(3, vocab - 1), min_size=0, max_size=5)))
        if draw(st.booleans()):
            tree.weight[tree.span(node)] = draw(st.sampled_from([1.0, 2.0, 3.0]))
        tree.advantage[tree.span(node)] = draw(st.sampled_from([-1.5, 0.5, 2.0]))
    tree.weight[tree.span(tree.n_nodes - 1)] = 1.0
    return tree


def loss_and_gradients(policy, batches):
    """sum over targets of weight * advantage * log-prob: every weight, every advantage and every target counts."""
    policy.model.zero_grad()
    total = 0.0
    for batch in batches:
        if batch.n_targets:
            logp, entropy = policy.logprobs(batch, entropy=True)
            loss = (batch.weight * (batch.advantage * logp + 0.1 * entropy)).sum()
            loss.backward()
            total += float(loss.detach())
    grads = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    return total, grads


def assert_same(policy_tree, policy_linear, forest, budget=None):
    one, grads = loss_and_gradients(policy_tree, pack(forest, layout="tree", max_tokens=budget))
    two, wanted = loss_and_gradients(policy_linear, pack(forest, layout="linear", max_tokens=budget))
    assert one == pytest.approx(two, abs=1e-5, rel=1e-5)
    assert grads.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(grads[name], wanted[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def llama():
    model = tiny("llama")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # tied
    return Policy(model, IntTokenizer(), layout="tree"), Policy(model, IntTokenizer(), layout="linear")


@settings(max_examples=25, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3))
def test_tree_equals_linear_on_random_trees(llama, forest):
    assert_same(*llama, forest)


@settings(max_examples=15, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3))
def test_a_token_budget_changes_nothing(llama, forest):
    policy = llama[0]
    whole, grads = loss_and_gradients(policy, pack(forest))
    budget = max(t.path_length(n) for t in forest for n in t.leaves())
    batches = pack(forest, max_tokens=budget)
    assert all(b.n_tokens <= budget for b in batches)
    parts, pieces = loss_and_gradients(policy, batches)
    assert parts == pytest.approx(whole, abs=1e-5, rel=1e-5)
    for name in grads:
        torch.testing.assert_close(pieces[name], grads[name], atol=1e-5, rtol=1e-4)
    # each target stands in exactly one batch
    where = [(int(a), int(b)) for batch in batches for a, b in zip(batch.tree, batch.token, strict=True)]
    assert len(where) == len(set(where)) == sum(int((t.weight > 0).sum()) for t in forest)


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("dense", [True, False, None])
def test_families(family, dense, monkeypatch):
    """Sliding windows shorter than the path, soft caps, q/k norms; all exact ways to compute tree attention."""
    tree = TokenTree([5, 9, 3, 7, 8, 4])
    a = tree.add(0, [11, 12, 13, 14, 15, 16, 17])
    for ids in ([21, 22, 23], [31, 32, 33, 34, 35, 36], [], [41]):
        node = tree.add(a, ids)
        tree.weight[tree.span(node)] = 1
    b = tree.add(0, [51, 52])
    tree.weight[tree.span(a)] = 3
    tree.weight[tree.span(b)] = 1
    tree.advantage[:] = np.linspace(-1, 1, tree.n_tokens)
    model = tiny(family)
    policy = Policy(model, IntTokenizer(), layout="tree")
    original = policy.hidden
    monkeypatch.setattr(policy, "hidden", lambda batch: original(batch, context=TreeContext(batch, dense=dense)))
    assert_same(policy, Policy(model, IntTokenizer(), layout="linear"), [tree, tree])


def test_lora():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("llama"), LoraConfig(r=4, target_modules="all-linear"))
    fresh = Policy(model, IntTokenizer()).frozen_copy()  # of an adapter that does nothing yet: the base model itself
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    tree = TokenTree([5, 9, 3])
    for ids in ([11, 12], [13, 14, 15]):
        node = tree.add(0, ids)
        tree.weight[tree.span(node)] = 1
        tree.advantage[tree.span(node)] = len(ids)
    policy = Policy(model, IntTokenizer(), layout="tree")
    assert_same(policy, Policy(model, IntTokenizer(), layout="linear"), [tree])
    assert all("lora" in n for n, p in model.named_parameters() if p.grad is not None)

    def scores(p):
        return p.score_tokens([tree])[0][1]

    torch.testing.assert_close(scores(fresh), scores(Policy(tiny("llama"), IntTokenizer())), atol=1e-5, rtol=1e-4)
    kept = policy.frozen_copy()  # of a trained adapter: a copy with the adapter in it
    before = scores(policy)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.mul_(-2)
    torch.testing.assert_close(scores(kept), before, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(scores(policy), before, atol=1e-3)


def test_lora_on_the_head_is_refused():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("qwen2"), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ModelError, match="leave lm_head out"):
        Policy(model, IntTokenizer())


def test_predecessors_targets_positions_and_visibility_by_hand():
    #      root [10 11]
    #      /         \
    #  a [12]       b [15 16]
    #   |    \
    # c [13] d [14]
    tree = TokenTree([10, 11])
    a = tree.add(0, [12])
    b = tree.add(0, [15, 16])
    c = tree.add(a, [13])
    d = tree.add(a, [14])
    tree.weight[2:] = 1
    tree.weight[tree.span(a)] = 2
    (batch,) = pack([tree])
    assert batch.ids.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert batch.positions.tolist() == [0, 1, 2, 3, 3, 2, 3]
    assert list(zip(batch.predecessors.tolist(), batch.targets.tolist(), strict=True)) == [
        (1, 12), (2, 13), (2, 14), (1, 15), (5, 16),
    ]  # fmt: skip
    assert batch.weight.tolist() == [2, 1, 1, 1, 1]
    rows = ["1000000", "1100000", "1110000", "1111000", "1110100", "1100010", "1100011"]
    assert ["".join(map(str, r)) for r in batch.visible(batch.segments[0]).int().tolist()] == rows
    # b's two tokens are one sequence; a has two trained children and is a sequence of its own
    assert batch.sequence.unique().numel() == 4
    linear = pack([tree], layout="linear")[0]
    assert [linear.ids[s.start : s.stop].tolist() for s in linear.segments] == [
        [10, 11, 12, 13], [10, 11, 12, 14], [10, 11, 15, 16],
    ]  # fmt: skip
    assert linear.weight.tolist() == [1, 1, 1, 1, 1, 1]  # the shared token's 2 is shared out over its two rows
    assert (b, c, d) == (2, 3, 4)


def test_the_turns_of_one_trajectory_are_one_sequence():
    tree = TokenTree([1, 2])
    a1 = tree.add(0, [3])
    o1 = tree.add(a1, [4])
    a2 = tree.add(o1, [5, 6])
    for node in (a1, a2):
        tree.weight[tree.span(node)] = 1
    (batch,) = pack([tree])
    assert batch.targets.tolist() == [3, 5, 6] and batch.sequence.unique().numel() == 1


def test_untrained_branches_take_no_room():
    tree = TokenTree([1, 2])
    tree.add(0, [3] * 50)
    kept = tree.add(0, [4])
    tree.weight[tree.span(kept)] = 1
    assert pack([tree])[0].ids.tolist() == [1, 2, 4]
    assert pack([TokenTree([1, 2])]) == []


def test_empty_spans_pass_their_predecessor_on():
    tree = TokenTree([7])
    empty = tree.add(0, [])
    node = tree.add(empty, [8])
    tree.weight[tree.span(node)] = 1
    for layout in ("tree", "linear"):
        (batch,) = pack([tree], layout=layout)
        assert (
            batch.predecessors.tolist() == [0] and batch.targets.tolist() == [8] and batch.positions.tolist() == [0, 1]
        )


def test_changing_a_sibling_changes_nothing_exactly(llama):
    """No leak between branches or between trees of one batch (case H11)."""
    policy = llama[0]

    def score(sibling, other):
        forest = []
        for root, mine, theirs in (([5, 6, 7], [8, 9], sibling), (other, [12, 13], [14])):
            tree = TokenTree(root)
            tree.add(0, theirs)
            tree.weight[tree.span(tree.n_nodes - 1)] = 1
            node = tree.add(0, mine)
            tree.weight[tree.span(node)] = 1
            forest.append(tree)
        (batch,) = pack(forest)
        logp, _ = policy.logprobs(batch)
        mine = (batch.tree == 0) & (batch.token >= 3 + len(sibling))
        return logp[mine].detach()

    with torch.no_grad():
        assert torch.equal(score([20, 21, 22], [30, 31, 32, 33]), score([40, 41, 42], [50, 51, 52, 53]))


def test_packed_documents_do_not_see_each_other():
    """Case H11 by its numbers: documents of 3 and 2 tokens in one batch."""
    forest = []
    for ids in ([5, 6, 7], [8, 9]):
        tree = TokenTree(ids)
        tree.weight[1:] = 1
        forest.append(tree)
    (batch,) = pack(forest)
    assert sum(int(batch.visible(s).sum()) for s in batch.segments) == 9
    assert batch.positions.tolist() == [0, 1, 2, 0, 1] and batch.n_targets == 3


def test_bad_input_is_refused():
    tree = TokenTree([1, 2, 3])
    tree.weight[0] = 1
    with pytest.raises(DataError, match="nothing precedes it"):
        pack([tree])
    tree.weight[:] = [0, 1, 1]
    assert [b.n_tokens for b in pack([tree, tree], max_tokens=2)] == [3, 3]  # a longer path has a batch of its own
    tree.weight[1] = np.nan
    with pytest.raises(DataError, match="NaN"):
        pack([tree])


def test_write_back_puts_values_where_they_came_from():
    tree = TokenTree([1, 2])
    a, b = tree.add(0, [3, 4]), tree.add(0, [5])
    tree.weight[2:] = 1
    (batch,) = pack([tree])
    write_back([tree], batch, "ref_logprob", torch.tensor([-1.0, -2.0, -3.0]))
    assert tree.column("ref_logprob")[tree.span(a)].tolist() == [-1, -2]
    assert tree.column("ref_logprob")[tree.span(b)].tolist() == [-3]
    assert pack([tree], columns=["ref_logprob"])[0].columns["ref_logprob"].tolist() == [-1, -2, -3]


def test_the_models_own_attention_is_back_after_the_scope():
    model = tiny("llama")
    policy = Policy(model, IntTokenizer())
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="stop here"), using(policy.configs, None):
        assert model.config._attn_implementation == "forethought"
        raise RuntimeError("stop here")
    assert model.config._attn_implementation == before
    ids = torch.tensor([[5, 6, 7]])
    assert torch.isfinite(model(ids).logits).all()
