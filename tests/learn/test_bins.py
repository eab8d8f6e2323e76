"""Packing into bins: the packer by hand, isolation of documents, and the same loss as unpacked (Phi-4-Mini-Reasoning 1-3)."""

import pytest
import torch

from forethought.errors import ConfigError, DataError
from forethought.learn.losses import reduction_coefficients
from forethought.learn.offline import SFTConfig, SFTTrainer, pack_bins
from forethought.learn.optim import OptimConfig
from forethought.models.policy import Policy
from forethought.tree.bins import best_fit
from forethought.tree.pack import pack
from forethought.tree.tree import TokenTree
from tinymodels import IntTokenizer, tiny

EOS = 1


def document(prompt, answer) -> TokenTree:
    tree = TokenTree(prompt)
    node = tree.add(0, [*answer, EOS])
    tree.weight[tree.span(node)] = 1
    return tree


def of_length(n, first=20) -> TokenTree:
    return document([first, first + 1], [first + 2 + i for i in range(n - 3)])


def test_best_fit_by_hand():
    assert best_fit([5, 3, 4], 8) == ([[0, 1], [2]], [])
    assert best_fit([5, 6, 2, 3], 8) == ([[0, 3], [1, 2]], [])  # 2 goes where it fits tightest
    assert best_fit([9, 8], 8) == ([[1]], [0])
    assert best_fit([4, 4, 4, 4], 8) == ([[0, 1], [2, 3]], [])  # the oldest of equals
    assert best_fit([], 8) == ([], [])
    with pytest.raises(ConfigError, match="capacity=0"):
        best_fit([1], 0)


def test_every_document_once_and_no_bin_overfull():
    lengths = [(7 * i) % 13 + 1 for i in range(100)]
    bins, dropped = best_fit(lengths, 12)
    assert sorted([i for b in bins for i in b] + dropped) == list(range(100))
    assert all(sum(lengths[i] for i in b) <= 12 for b in bins) and all(lengths[i] > 12 for i in dropped)
    assert sum(sum(lengths[i] for i in b) for b in bins) / (12 * len(bins)) > 0.9


def test_a_bin_is_block_diagonal_with_positions_from_0():
    (batch,) = pack([of_length(5), of_length(3, 40)])
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert sum(int(batch.visible(s).sum()) for s in batch.segments) == 15 + 6  # causal inside a document, nothing else
    assert batch.n_targets == 3 + 1  # no target on questions, none across the border


def test_a_document_does_not_change_its_neighbour():
    policy = Policy(tiny("llama"), IntTokenizer())
    second = of_length(6, 40)
    (batch,) = pack([of_length(5), second])
    (other,) = pack([of_length(5, 60), second])
    with torch.no_grad():
        a, b = policy.hidden(batch)[5:], policy.hidden(other)[5:]
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_packed_loss_is_the_unpacked_loss():
    trees = [of_length(n, 20 + n) for n in (5, 9, 4, 7)]
    policy = Policy(tiny("llama"), IntTokenizer())

    def loss(groups):
        batches = [b for g in groups for b in pack([trees[i] for i in g])]
        weight, sequence = torch.cat([b.weight for b in batches]), torch.cat([b.sequence for b in batches])
        coef = reduction_coefficients(weight, sequence, "token-mean")
        with torch.no_grad():
            logp = torch.cat([policy.logprobs(b)[0] for b in batches])
        return float(-(coef * logp).sum())

    packed, dropped = best_fit([t.n_tokens for t in trees], 16)
    assert not dropped and len(packed) == 2
    assert loss(packed) == pytest.approx(loss([[i] for i in range(4)]), abs=1e-6)


def test_the_last_target_of_every_record_is_the_end():
    for tree in (of_length(5), of_length(9)):
        (batch,) = pack([tree])
        assert int(batch.targets[-1]) == EOS and len(batch.segments) == 1


def trainer(**config):
    trees = [of_length(n, 20 + n) for n in (5, 9, 4, 7, 12)]
    return SFTTrainer(
        Policy(tiny("llama"), IntTokenizer()), trees, SFTConfig(batch_size=1, optim=OptimConfig(lr=1e-3), **config)
    )


def test_the_trainer_counts_bins():
    packed = trainer(bin_length=10, epochs=2)
    assert packed.packing is not None
    assert packed.packing.dropped == [4] and packed.packing.bins == [[0, 2], [1], [3]]
    assert packed.packing.efficiency == pytest.approx(25 / 30) and packed.total == 6
    seen = sorted(packed.train_step()[0]["tokens/trained"] for _ in range(3))
    assert seen == [3 + 2, 5, 7]
    assert trainer(epochs=2).total == 10 and trainer().packing is None


def test_bins_that_hold_nothing():
    with pytest.raises(DataError, match=r"bin_length=3 dropped all 2 records \(the shortest has 5 tokens\)"):
        pack_bins([of_length(5), of_length(6)], 3)
    with pytest.raises(ConfigError, match="bin_length=-1"):
        SFTConfig(bin_length=-1)
