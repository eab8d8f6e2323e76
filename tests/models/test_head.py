"""The fused vocabulary head against plain autograd: values, every gradient, and what must not leak."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from forethought.errors import ConfigError, DataError
from forethought.models.head import chunked_logprobs


def plain(hidden, weight, ids, *, temperature=1.0, softcap=None, bias=None):
    """Log-probs and entropies the short way: all logits at once."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logp = torch.log_softmax(logits, -1)
    return logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def case(m=7, d=5, v=23, dtype=torch.float64, seed=0, spread=1.0):
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(m, d, generator=make, dtype=dtype).requires_grad_()
    weight = (torch.randn(v, d, generator=make, dtype=dtype) * spread).requires_grad_()
    bias = torch.randn(v, generator=make, dtype=dtype).requires_grad_()
    ids = torch.randint(0, v, (m,), generator=make)
    return hidden, weight, bias, ids


def test_worked_numbers():
    # Logits [2, 1, 0]: temperature scales them before the softmax (case H12).
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [1.0], [0.0]])
    ids = torch.tensor([0])
    assert chunked_logprobs(hidden, weight, ids)[0].item() == pytest.approx(-0.407606, abs=1e-6)
    assert chunked_logprobs(hidden, weight, ids, temperature=0.5)[0].item() == pytest.approx(-0.142932, abs=1e-6)
    _, entropy = chunked_logprobs(hidden, torch.zeros(2, 1), ids, entropy=True)
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)
    _, entropy = chunked_logprobs(hidden, torch.tensor([[1.0], [0.0], [0.0]]), ids, entropy=True, chunk=1)
    assert entropy.item() == pytest.approx(0.975328, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 9),
    v=st.integers(1, 40),
    chunk=st.integers(1, 45),
    temperature=st.sampled_from([1.0, 0.6, 2.0]),
    softcap=st.sampled_from([None, 1.5]),
    use_bias=st.booleans(),
    use_entropy=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_values_and_gradients_equal_plain_autograd(m, v, chunk, temperature, softcap, use_bias, use_entropy, seed):
    hidden, weight, bias, ids = case(m=m, v=v, seed=seed)
    kwargs = {"temperature": temperature, "softcap": softcap, "bias": bias if use_bias else None}
    make = torch.Generator().manual_seed(seed + 1)
    g_logp, g_ent = (torch.randn(m, generator=make, dtype=torch.float64) for _ in range(2))
    wanted = [hidden, weight, *([bias] if use_bias else [])]

    logp, entropy = plain(hidden, weight, ids, **kwargs)
    loss = (g_logp * logp).sum() + ((g_ent * entropy).sum() if use_entropy else 0)
    right = torch.autograd.grad(loss, wanted)

    ours, our_entropy = chunked_logprobs(hidden, weight, ids, entropy=use_entropy, chunk=chunk, **kwargs)
    torch.testing.assert_close(ours, logp, rtol=1e-10, atol=1e-10)
    loss = (g_logp * ours).sum()
    if use_entropy:
        torch.testing.assert_close(our_entropy, entropy, rtol=1e-10, atol=1e-10)
        loss = loss + (g_ent * our_entropy).sum()
    else:
        assert our_entropy is None
    for got, want in zip(torch.autograd.grad(loss, wanted), right, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_gradcheck():
    hidden, weight, bias, ids = case(m=3, d=4, v=11)

    def both(hidden, weight, bias):
        logp, entropy = chunked_logprobs(
            hidden, weight, ids, bias=bias, temperature=0.7, softcap=2.0, entropy=True, chunk=4
        )
        return logp, entropy

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_only_the_entropy_can_carry_gradient():
    hidden, weight, _, ids = case()
    _, entropy = chunked_logprobs(hidden, weight, ids, entropy=True, chunk=8)
    got = torch.autograd.grad(entropy.sum(), [hidden, weight])
    want = torch.autograd.grad(plain(hidden, weight, ids)[1].sum(), [hidden, weight])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_fp32_matches_to_1e5():
    hidden, weight, _, ids = case(m=64, d=32, v=1000, dtype=torch.float32, spread=0.3)
    upstream = torch.linspace(-1, 1, 64)
    got = chunked_logprobs(hidden, weight, ids, chunk=130)[0]
    want = plain(hidden, weight, ids)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(got @ upstream, [hidden, weight]),
        torch.autograd.grad(want @ upstream, [hidden, weight]),
        rtol=1e-5,
        atol=1e-5,
    )


def test_bf16_is_as_near_to_the_truth_as_plain_bf16():
    hidden, weight, _, ids = case(m=64, d=32, v=1000, dtype=torch.bfloat16, spread=0.3)
    upstream = torch.linspace(-1, 1, 64)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    want = plain(*exact, ids)[0]
    right = torch.autograd.grad(want @ upstream.double(), exact)
    short = plain(hidden, weight, ids)[0]
    short_grads = torch.autograd.grad(short @ upstream, [hidden, weight])
    got = chunked_logprobs(hidden, weight, ids, chunk=130)[0]
    got_grads = torch.autograd.grad(got @ upstream, [hidden, weight])
    assert got.dtype == torch.float32
    assert [g.dtype for g in got_grads] == [torch.bfloat16] * 2
    assert (got - want).abs().max() <= (short - want).abs().max() * 1.5
    for ours, theirs, truth in zip(got_grads, short_grads, right, strict=True):
        assert (ours - truth).norm() <= (theirs - truth).norm() * 1.5
        assert (ours - truth).norm() <= 0.01 * truth.norm()


def test_confident_targets_keep_their_gradient_in_bf16():
    # p of the target is 0.9995: rounded to bf16 it is 1, and 1 - p would be lost.
    hidden = torch.tensor([[1.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[8.0], [0.0], [-0.5]], dtype=torch.bfloat16, requires_grad=True)
    ids = torch.tensor([0])
    logp, _ = chunked_logprobs(hidden, weight, ids)
    logp.sum().backward()
    p = torch.softmax(torch.tensor([8.0, 0.0, -0.5]), 0)
    torch.testing.assert_close(weight.grad[0, 0].float(), 1 - p[0], rtol=0.01, atol=0)


class Products(TorchDispatchMode):
    """Shapes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm:
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("frozen", [True, False])
def test_no_weight_gradient_is_computed_for_a_frozen_weight(frozen):
    hidden, weight, _, ids = case(m=7, d=5, v=23)
    weight.requires_grad_(not frozen)
    with Products() as products:
        chunked_logprobs(hidden, weight, ids)[0].sum().backward()
    # forward: logits; backward: logits again, gradient of hidden, gradient of the weight
    assert products.shapes == [(7, 23), (7, 23), (7, 5)] + ([] if frozen else [(23, 5)])
    assert (weight.grad is None) == frozen
    want = torch.autograd.grad(plain(hidden, weight, ids)[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, want)


def test_rows_without_gradient_cost_nothing_in_backward():
    hidden, weight, _, ids = case(m=7, d=5, v=23)
    logp, _ = chunked_logprobs(hidden, weight, ids)
    with Products() as products:
        (logp * torch.tensor([0.0, 1, 0, 0, -1, 0, 0])).sum().backward()
    assert products.shapes == [(2, 23), (2, 5), (23, 5)]


def test_tied_embedding_adds_both_gradients():
    embedding = torch.nn.Embedding(13, 6, dtype=torch.float64)
    tokens, ids = torch.tensor([1, 4, 4, 9]), torch.tensor([4, 4, 9, 0])
    chunked_logprobs(torch.tanh(embedding(tokens)), embedding.weight, ids, chunk=5)[0].sum().backward()
    got = embedding.weight.grad.clone()
    embedding.zero_grad()
    plain(torch.tanh(embedding(tokens)), embedding.weight, ids)[0].sum().backward()
    torch.testing.assert_close(got, embedding.weight.grad)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    weight = torch.tensor([[1e4], [-1e4], [0.0], [2e4]], requires_grad=True)
    logp, entropy = chunked_logprobs(hidden, weight, torch.tensor([0, 1]), entropy=True, chunk=1)
    torch.testing.assert_close(logp, torch.tensor([-1e4, 0.0]))
    torch.testing.assert_close(entropy, torch.zeros(2))
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_rubbish_in_an_unused_row_stays_there():
    hidden, weight, _, ids = case()
    dirty = hidden.detach().clone()
    dirty[2] = float("nan")
    dirty.requires_grad_()
    upstream = torch.ones(7, dtype=torch.float64)
    upstream[2] = 0
    logp, entropy = chunked_logprobs(dirty, weight, ids, entropy=True, chunk=8)
    assert logp.isnan().tolist() == [False, False, True, False, False, False, False]
    got = torch.autograd.grad([logp, entropy], [dirty, weight], [upstream, upstream])
    want = torch.autograd.grad(
        (lambda pair: (pair[0] + pair[1])[upstream > 0].sum())(plain(hidden, weight, ids)), [hidden, weight]
    )
    torch.testing.assert_close(got, want)
    assert got[0][2].tolist() == [0.0] * 5


def test_no_chunk_ever_holds_all_logits(monkeypatch):
    sizes = []
    real = torch.Tensor.new_empty

    def watched(self, *args, **kwargs):
        out = real(self, *args, **kwargs)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(torch.Tensor, "new_empty", watched)
    hidden, weight, _, ids = case(m=512, d=4, v=9000, dtype=torch.float32)
    chunked_logprobs(hidden, weight, ids)[0].sum().backward()
    assert max(sizes) <= 2**20 < 512 * 9000


def test_no_rows():
    hidden, weight, _, ids = case(m=0)
    logp, entropy = chunked_logprobs(hidden, weight, ids, entropy=True)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert weight.grad.abs().sum() == 0


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"temperature": 0.0}, ConfigError, "temperature=0.0: log-probs need a positive one"),
        ({"temperature": float("nan")}, ConfigError, "temperature=nan"),
        ({"softcap": 0.0}, ConfigError, "softcap=0.0: give a positive number or None"),
        ({"chunk": 0}, ConfigError, "chunk=0: give at least 1"),
        ({"ids": torch.tensor([0, 23])}, DataError, r"ids run from 0 to 23: they must lie in \[0, 23\)"),
        ({"ids": torch.tensor([-100, 2])}, DataError, "ids run from -100 to 2"),
        ({"ids": torch.tensor([0])}, ValueError, r"give \[M, D\], \[V, D\] and \[M\]"),
        ({"weight": torch.zeros(23, 4, dtype=torch.float64)}, ValueError, "width 5, weight has width 4"),
        ({"weight": torch.zeros(23, 5)}, ValueError, "hidden is torch.float64, weight is torch.float32: cast one"),
        ({"bias": torch.zeros(5, dtype=torch.float64)}, ValueError, r"give torch.float64 \[23\]"),
    ],
)
def test_bad_input_is_refused_before_compute(change, kind, message):
    hidden, weight, _, ids = case(m=2)
    arguments = {"hidden": hidden, "weight": weight, "ids": ids} | change
    with pytest.raises(kind, match=message):
        chunked_logprobs(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("ids"), **arguments)
