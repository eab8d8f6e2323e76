"""Losses: the numbers of the published formulas, exactness under accumulation, and what must not leak."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import ConfigError, DataError
from forethought.learn.losses import (
    entropy_bonus,
    kl,
    kl_loss,
    policy_loss,
    reduction_coefficients,
    reinforce_loss,
    sequence_logprobs,
    sft_loss,
    token_logprobs,
)
from forethought.models.head import chunked_logprobs

NAN, INF = float("nan"), float("inf")


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def leaf(*values: float) -> torch.Tensor:
    return t(*values).requires_grad_()


# -- reductions --
TWO_SEQUENCES = (t(1, 1, 1, 1), torch.tensor([0, 0, 0, 1]))


@pytest.mark.parametrize(
    ("reduction", "want"),
    [
        ("token-mean", [0.25, 0.25, 0.25, 0.25]),
        ("dapo", [0.25, 0.25, 0.25, 0.25]),
        ("sequence-mean", [1 / 6, 1 / 6, 1 / 6, 0.5]),
        ("sequence-mean-token-sum", [0.05, 0.05, 0.05, 0.05]),
        ("dr-grpo", [0.05, 0.05, 0.05, 0.05]),
    ],
)
def test_reduction_values(reduction, want):
    assert reduction_coefficients(*TWO_SEQUENCES, reduction, max_length=10).tolist() == pytest.approx(want)


def test_weights_count_as_copies_and_weight_zero_is_out():
    # A token on two trained paths counts twice; the sequence without weight is no sequence.
    weight, sequence = t(2, 1, 1, 0, 0), torch.tensor([7, 7, 3, 9, 9])
    assert reduction_coefficients(weight, sequence, "token-mean").tolist() == [0.5, 0.25, 0.25, 0, 0]
    want = [1 / 3, 1 / 6, 1 / 2, 0, 0]
    assert reduction_coefficients(weight, sequence, "sequence-mean").tolist() == pytest.approx(want)
    assert reduction_coefficients(weight, sequence, "dr-grpo", max_length=4).tolist() == [0.25, 0.125, 0.125, 0, 0]


def test_accumulation_equals_one_batch():
    """Case H01: micro-batches A (NLL 1, 3) and B (6 x 0.5), then C (4 x 1) alone in the last window."""
    coef = reduction_coefficients(torch.ones(8), torch.tensor([0] * 2 + [1] * 6), "token-mean")
    assert coef.tolist() == [0.125] * 8
    nll = t(1, 3, *[0.5] * 6)
    micro = sft_loss(-nll[:2], coef[:2]).loss + sft_loss(-nll[2:], coef[2:]).loss
    assert micro.item() == 0.875
    last = reduction_coefficients(torch.ones(4), torch.zeros(4, dtype=torch.long), "token-mean")
    assert sft_loss(-torch.ones(4), last).loss.item() == 1.0

    w = torch.zeros((), requires_grad=True)
    seen = []
    for window in ([2, 6], [4]):
        coef = reduction_coefficients(torch.ones(sum(window)), torch.zeros(sum(window), dtype=torch.long), "token-mean")
        for part in coef.split(window):
            sft_loss(-w * torch.ones(len(part)), part).loss.backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
            w.grad = None
        seen.append(w.item())
    assert seen == pytest.approx([-0.1, -0.2])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    reduction=st.sampled_from(["token-mean", "sequence-mean", "dr-grpo"]),
    seed=st.integers(0, 1000),
)
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(lengths, cuts, reduction, seed):
    make = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    m = len(sequence)
    weight = torch.randint(1, 4, (m,), generator=make).float()
    old, advantage = torch.randn(m, generator=make), torch.randn(m, generator=make)
    logp = (old + 0.3 * torch.randn(m, generator=make)).requires_grad_()
    coef = reduction_coefficients(weight, sequence, reduction, max_length=5)
    whole = policy_loss(logp, old, advantage, coef)
    gradient = torch.autograd.grad(whole.loss, logp)[0]
    edges = [0, *sorted(min(c, m) for c in cuts), m]
    parts = [
        policy_loss(logp[a:b], old[a:b], advantage[a:b], coef[a:b])
        for a, b in zip(edges, edges[1:], strict=False)
        if b > a
    ]
    total = sum(p.loss for p in parts)
    torch.testing.assert_close(total, whole.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(total, logp)[0], gradient, rtol=1e-5, atol=1e-7)
    for name, value in whole.metrics.items():
        join = max if name.endswith("/max") else sum
        assert join(p.metrics[name] for p in parts) == pytest.approx(value, rel=1e-4, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    owners=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    reduction=st.sampled_from(["token-mean", "sequence-mean", "dr-grpo"]),
)
def test_processes_see_global_totals(lengths, owners, reduction):
    """Three processes (one may be empty): each one's coefficients are those of the undivided batch."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    weight = torch.arange(1, len(sequence) + 1).float()
    owner = torch.tensor([owners[i] for i in sequence.tolist()])
    whole = reduction_coefficients(weight, sequence, reduction, max_length=8)
    mine: dict[int, float] = {}

    def part(rank, total):
        here = owner == rank
        return reduction_coefficients(weight[here], sequence[here], reduction, max_length=8, total=total)

    for rank in range(3):  # first pass: what each process adds to the sum
        part(rank, lambda value, rank=rank: mine.setdefault(rank, value) + 1)
    for rank in range(3):
        got = part(rank, lambda value: sum(mine.values()))
        torch.testing.assert_close(got, whole[owner == rank])


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((t(1), torch.tensor([0]), "mean"), ConfigError, "reduction='mean': give one of token-mean, dapo,"),
        ((t(1), torch.tensor([0]), "dr-grpo"), ConfigError, "divides by max_length=None"),
        ((t(1, NAN), torch.tensor([0, 0]), "token-mean"), DataError, "weight of target 1 is nan"),
        ((t(1, -1), torch.tensor([0, 0]), "token-mean"), DataError, "weight of target 1 is -1.0"),
        ((t(0, 0), torch.tensor([0, 0]), "sequence-mean"), DataError, "nothing to train on"),
        ((t(), torch.tensor([], dtype=torch.long), "token-mean"), DataError, "nothing to train on"),
        ((t(1, 1), torch.tensor([0]), "token-mean"), DataError, r"got shapes \{'weight': \(2,\), 'sequence_ids': \(1,"),
    ],
)
def test_reductions_refuse(arguments, kind, message):
    with pytest.raises(kind, match=message):
        reduction_coefficients(*arguments)


# -- log-probs --
def test_temperature_divides_logits_not_log_probs():
    """Case H12."""
    logits, ids = t(2, 1, 0), torch.tensor(0)
    assert token_logprobs(logits, ids, 0.5).item() == pytest.approx(-0.142932, abs=1e-6)
    assert token_logprobs(logits, ids).item() == pytest.approx(-0.407606, abs=1e-6)
    with pytest.raises(ConfigError, match="temperature=0: log-probs need a positive one"):
        token_logprobs(logits, ids, 0)
    fused = chunked_logprobs(torch.ones(1, 1), logits[:, None], ids[None], temperature=0.5)[0]
    ratio = policy_loss(fused, token_logprobs(logits, ids, 0.5)[None], t(1), t(1)).metrics["ratio/mean"]
    assert ratio == pytest.approx(1.0, abs=1e-6)


# -- policy loss --
def test_token_mean_is_not_a_mean_over_sequences():
    """Spec acceptance 7: rho 1, A = (1, -1), masks (1,1,1) and (1,0,0): (-3 + 1) / 4."""
    logp = torch.full((6,), -0.7)
    advantage, sequence = t(1, 1, 1, -1, -1, -1), torch.tensor([0, 0, 0, 1, 1, 1])
    weight = t(1, 1, 1, 1, 0, 0)
    for reduction, want in (("token-mean", -0.5), ("sequence-mean", 0.0)):
        coef = reduction_coefficients(weight, sequence, reduction)
        assert policy_loss(logp, logp, advantage, coef).loss.item() == pytest.approx(want, abs=1e-7)


@pytest.mark.parametrize(
    # ratio, advantage, loss, gradient by logp
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # held back above
        (0.5, 2.0, -1.0, -1.0),  # pessimistic: not clipped
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),  # held back below
    ],
)
def test_symmetric_clip(ratio, advantage, loss, gradient):
    logp = leaf(math.log(ratio))
    out = policy_loss(logp, t(0), t(advantage), t(1))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss, rel=1e-6)
    assert logp.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert out.metrics["clip_ratio/high"] == float(ratio > 1.2 and advantage > 0)
    assert out.metrics["clip_ratio/low"] == float(ratio < 0.8 and advantage < 0)
    assert out.metrics["ratio/mean"] == out.metrics["ratio/max"] == pytest.approx(ratio, rel=1e-6)
    assert out.metrics["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)


def test_clip_higher_and_no_clip():
    old, logp, advantage, coef = t(0, 0), t(math.log(1.25), math.log(0.75)), t(1, -1), t(0.5, 0.5)
    assert policy_loss(logp, old, advantage, coef).loss.item() == pytest.approx(0.5 * (-1.2 + 0.8))
    assert policy_loss(logp, old, advantage, coef, clip_high=0.28).loss.item() == pytest.approx(0.5 * (-1.25 + 0.8))
    free = policy_loss(logp, old, advantage, coef, clip_low=None, clip_high=None)
    assert free.loss.item() == pytest.approx(0.5 * (-1.25 + 0.75))
    assert free.metrics["clip_ratio/low"] == free.metrics["clip_ratio/high"] == 0


def test_metrics_can_have_their_own_weights():
    # Coefficients of dr-grpo do not sum to 1; shares of tokens should be shares all the same.
    weight, sequence = t(1, 1), torch.tensor([0, 0])
    coef = reduction_coefficients(weight, sequence, "dr-grpo", max_length=10)
    share = reduction_coefficients(weight, sequence, "token-mean")
    arguments = (t(math.log(2), 0), t(0, 0), t(1, 1), coef)
    assert policy_loss(*arguments).metrics["clip_ratio/high"] == pytest.approx(0.1)
    out = policy_loss(*arguments, metric_coef=share)
    assert out.metrics["clip_ratio/high"] == 0.5
    assert out.metrics["ratio/mean"] == pytest.approx(1.5)
    assert out.loss.item() == policy_loss(*arguments).loss.item()


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    logp = leaf(math.log(10), math.log(10))
    out = policy_loss(logp, t(0, 0), t(-1, 1), t(1, 1), dual_clip=3.0)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(3.0 - 1.2)
    assert logp.grad.tolist() == [0, 0]
    assert policy_loss(logp, t(0, 0), t(-1, 1), t(1, 1)).loss.item() == pytest.approx(10 - 1.2)


def test_reinforce_is_the_gradient_at_ratio_one():
    logp, advantage, coef = leaf(-0.3, -2.0, -1.0), t(1.5, -0.5, 0.0), t(0.2, 0.3, 0.5)
    out = reinforce_loss(logp, advantage, coef)
    assert out.loss.item() == pytest.approx(0.2 * 1.5 * 0.3 - 0.3 * 0.5 * 2.0)
    plain = torch.autograd.grad(out.loss, logp)[0]
    clipped = torch.autograd.grad(policy_loss(logp, logp.detach(), advantage, coef).loss, logp)[0]
    torch.testing.assert_close(plain, clipped)
    torch.testing.assert_close(plain, -coef * advantage)


def test_sequence_level_ratio():
    """GSPO: both tokens of sequence 0 carry exp(mean log-ratio), and share its gradient."""
    logp = leaf(0.4, 0.0, 0.1)
    ids, coef = torch.tensor([5, 5, 2]), reduction_coefficients(t(1, 1, 1), torch.tensor([5, 5, 2]), "sequence-mean")
    out = policy_loss(logp, t(0, 0, 0), t(1, 1, -1), coef, clip_high=0.25, level="sequence", sequence_ids=ids)
    out.loss.backward()
    assert out.loss.item() == pytest.approx((-math.exp(0.2) + math.exp(0.1)) / 2)
    want = [-math.exp(0.2) / 4, -math.exp(0.2) / 4, math.exp(0.1) / 2]
    assert logp.grad.tolist() == pytest.approx(want, rel=1e-6)


def test_sequence_level_ratio_ignores_tokens_without_weight():
    out = policy_loss(
        t(0.4, NAN), t(0, 0), t(1, 1), t(1, 0), clip_high=1, level="sequence", sequence_ids=torch.tensor([0, 0])
    )
    assert out.loss.item() == pytest.approx(-math.exp(0.4))


def test_nothing_moves_when_all_rewards_are_equal():
    """Spec acceptance 13, the loss's part: advantages 0 give exactly no gradient, whatever the ratio."""
    logp = leaf(-0.1, -3.0, 5.0)
    policy_loss(logp, t(-1, -2, -3), t(0, 0, 0), t(0.3, 0.3, 0.4)).loss.backward()
    assert logp.grad.tolist() == [0, 0, 0]


# -- what must not leak --
def test_nan_behind_a_zero_coefficient():
    """Case H04."""
    logp = leaf(-0.5, -0.7)
    out = policy_loss(logp, t(-0.5, NAN), t(1, 1), t(1, 0))
    out.loss.backward()
    assert out.loss.item() == -1.0
    assert out.metrics["approx_kl"] == 0.0
    assert logp.grad.tolist() == [-1.0, 0.0]
    assert all(math.isfinite(v) for v in out.metrics.values())
    with pytest.raises(
        DataError, match="old_logp is nan at target 1, where the coefficient is 0.5: give a finite number"
    ):
        policy_loss(logp, t(-0.5, NAN), t(1, 1), t(0.5, 0.5))


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 1e30])
def test_no_rubbish_leaks_from_unused_tokens(rubbish):
    coef = t(0.5, 0, 0.5)
    dirty = leaf(-0.5, rubbish, -0.9)
    clean = leaf(-0.5, -0.1, -0.9)
    bad, ref = t(-0.6, rubbish, -0.8), t(-0.6, 0.0, -0.8)
    advantage = t(1.0, rubbish, -2.0)
    for dirty_out, clean_out in (
        (policy_loss(dirty, bad, advantage, coef), policy_loss(clean, ref, t(1, 0, -2), coef)),
        (
            policy_loss(dirty, bad, advantage, coef, dual_clip=2.0),
            policy_loss(clean, ref, t(1, 0, -2), coef, dual_clip=2.0),
        ),
        (reinforce_loss(dirty, advantage, coef), reinforce_loss(clean, t(1, 0, -2), coef)),
        (kl_loss(dirty, bad, coef), kl_loss(clean, ref, coef)),
        (kl_loss(dirty, bad, coef, clamp=None), kl_loss(clean, ref, coef, clamp=None)),
        (kl_loss(dirty, bad, coef, old_logp=bad), kl_loss(clean, ref, coef, old_logp=ref)),
        (entropy_bonus(dirty, coef), entropy_bonus(clean, coef)),
        (sft_loss(dirty, coef), sft_loss(clean, coef)),
    ):
        assert dirty_out.loss.item() == clean_out.loss.item()
        assert dirty_out.metrics == clean_out.metrics
        got = torch.autograd.grad(dirty_out.loss, dirty)[0]
        assert got.tolist() == torch.autograd.grad(clean_out.loss, clean)[0].tolist()
        assert got[1].item() == 0.0


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["logp", "old_logp", "advantage", "coef"])
def test_rubbish_that_counts_is_named(name, rubbish):
    arguments = {n: t(0.1, 0.2, 0.3, 0.4) for n in ("logp", "old_logp", "advantage", "coef")}
    arguments[name][2] = rubbish
    arguments[name][3] = rubbish
    with pytest.raises(DataError, match=rf"{name} is -?(nan|inf) at target 2 and 1 more, where the coefficient is"):
        policy_loss(*arguments.values())
    for call in (
        lambda: kl_loss(t(0, NAN), t(0, 0), t(1, 1)),
        lambda: entropy_bonus(t(0, NAN), t(1, 1)),
        lambda: sft_loss(t(0, NAN), t(1, 1)),
        lambda: reinforce_loss(t(0, NAN), t(0, 0), t(1, 1)),
        lambda: sequence_logprobs(t(0, NAN), torch.tensor([0, 0]), t(1, 1)),
    ):
        with pytest.raises(DataError, match="is nan at target 1, where"):
            call()


def test_extreme_ratios_stay_finite():
    logp = leaf(0.0, -500.0, 0.0)
    out = policy_loss(logp, t(-500, 0, -500), t(1, -1, 0), t(1, 1, 1))
    out.loss.backward()
    assert torch.isfinite(out.loss) and torch.isfinite(logp.grad).all()
    assert out.loss.item() == pytest.approx(-1.2 + 0.8)
    assert logp.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_low": 1.0}, "clip_low=1.0, clip_high=0.2: give 0 <= clip_low < 1"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"clip_high": NAN}, "clip_high=nan"),
        ({"dual_clip": 1.0}, "dual_clip=1.0: give a number above 1"),
        ({"level": "sequence"}, "level='sequence': 'token', or 'sequence' together with sequence_ids"),
        ({"sequence_ids": torch.tensor([0])}, "level='token'"),
    ],
)
def test_policy_loss_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        policy_loss(t(0), t(0), t(0), t(1), **arguments)


def test_shapes_must_agree():
    with pytest.raises(DataError, match=r"got shapes \{'coef': \(2,\), 'logp': \(1,\)"):
        policy_loss(t(0), t(0), t(0), t(1, 1))
    with pytest.raises(DataError, match="one entry per target is needed in each, flat"):
        sft_loss(torch.zeros(2, 2), torch.ones(2, 2))


def test_empty_micro_batch():
    logp = leaf()
    out = policy_loss(logp, t(), t(), t())
    out.loss.backward()
    assert out.loss.item() == 0 and logp.grad.shape == (0,)
    assert out.metrics["ratio/max"] == 0


# -- KL --
def test_three_estimators():
    """Case H31."""
    logp, ref = leaf(-1.0), t(-1.5)
    values = {name: kl(logp, ref, name).item() for name in ("k1", "k2", "k3")}
    assert values == pytest.approx({"k1": 0.5, "k2": 0.125, "k3": 0.106531}, abs=1e-6)
    gradients = {name: torch.autograd.grad(kl(logp, ref, name).sum(), logp)[0].item() for name in values}
    assert gradients == pytest.approx({"k1": 1.0, "k2": 0.5, "k3": 0.393469}, abs=1e-6)


def test_low_variance_kl_numbers():
    """Spec acceptance 5: mean over masked tokens only."""
    assert kl(t(0, 0, 0), t(-0.5, 0.5, 0)).tolist() == pytest.approx([0.10653, 0.14872, 0], abs=1e-5)
    coef = reduction_coefficients(t(1, 1, 0), torch.zeros(3, dtype=torch.long), "token-mean")
    out = kl_loss(t(0, 0, 0), t(-0.5, 0.5, 7), coef)
    assert out.loss.item() == pytest.approx((0.10653 + 0.14872) / 2, abs=1e-5)
    assert out.metrics["kl"] == out.loss.item()


def test_kl_clamp():
    logp = leaf(-30.0, 0.0)
    value = kl(logp, t(0.0, -50.0))
    assert value.tolist() == pytest.approx([math.exp(10) - 11, math.exp(-10) + 9], rel=1e-6)
    assert torch.autograd.grad(value.sum(), logp)[0].tolist() == [0, 0]
    assert kl(logp, t(0.0, -50.0), "k1", clamp=None).tolist() == [-30, 50]
    for bad, message in (
        ({"clamp": 0.0}, "clamp=0.0"),
        ({"estimator": "k4"}, "estimator='k4': give one of k1, k2, k3"),
    ):
        with pytest.raises(ConfigError, match=message):
            kl(logp, t(0, 0), **bad)


def test_the_estimators_on_average():
    """Over all tokens of a small vocabulary: k1 and k3 give the KL; k2 its gradient; k1 no gradient."""
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.7, 0.3, -0.6], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    true = (logp.exp() * (logp - ref)).sum()
    true_gradient = torch.autograd.grad(true, logits, retain_graph=True)[0]
    p = logp.exp().detach()
    assert (p * kl(logp, ref, "k1")).sum().item() == pytest.approx(true.item())
    assert (p * kl(logp, ref, "k3")).sum().item() == pytest.approx(true.item())
    gradient = {
        name: torch.autograd.grad((p * kl(logp, ref, name)).sum(), logits, retain_graph=True)[0]
        for name in ("k1", "k2")
    }
    torch.testing.assert_close(gradient["k2"], true_gradient)
    torch.testing.assert_close(gradient["k1"], torch.zeros(3, dtype=torch.float64))


def test_ratio_weighted_kl():
    """The ratio's own gradient turns that of k3 into that of k2 on-policy: (exp(d) - d - 1) + (1 - exp(d)) = -d."""
    logp, ref = leaf(-1.0), t(-1.5)
    out = kl_loss(logp, ref, t(1), old_logp=t(-1.0))
    assert out.loss.item() == pytest.approx(0.106531, abs=1e-6)
    assert torch.autograd.grad(out.loss, logp)[0].item() == pytest.approx(0.5, abs=1e-6)
    off = kl_loss(logp, ref, t(1), old_logp=t(-1.0 - math.log(2)))
    assert off.loss.item() == off.metrics["kl"] == pytest.approx(2 * 0.106531, abs=1e-6)
    with pytest.raises(DataError, match="old_logp is nan at target 0"):
        kl_loss(logp, ref, t(1), old_logp=t(NAN))


# -- entropy --
def test_entropy_numbers_and_direction():
    """Spec acceptance 6: ln 2 and 0.975328; the term alone raises the entropy of a small policy."""
    logits = torch.tensor([[0.0, 0.0, -1e9], [1.0, 0.0, 0.0]], requires_grad=True)
    ids = torch.tensor([0, 0])

    def entropy():
        return chunked_logprobs(torch.eye(2), logits.T.contiguous(), ids, entropy=True)[1]

    out = entropy_bonus(entropy(), t(0.5, 0.5))
    assert entropy().tolist() == pytest.approx([0.693147, 0.975328], abs=1e-6)
    assert out.metrics["entropy"] == pytest.approx((0.693147 + 0.975328) / 2, abs=1e-6)
    assert out.loss.item() == -out.metrics["entropy"]
    before = entropy()[1].item()
    policy = policy_loss(*[chunked_logprobs(torch.eye(2), logits.T.contiguous(), ids)[0]] * 2, t(1, 1), t(0.5, 0.5))
    (0.001 * out.loss + 0.0 * policy.loss).backward()
    alone = logits.grad.clone()
    logits.grad = None
    (0.001 * entropy_bonus(entropy(), t(0.5, 0.5)).loss).backward()
    torch.testing.assert_close(alone, logits.grad)  # with policy coefficient 0 it is the only gradient
    assert alone[1].abs().max() > 0
    with torch.no_grad():
        logits -= 100 * alone
    assert entropy()[1].item() > before


# -- imitation --
def test_sft():
    logp = leaf(-1.0, -3.0, -0.5)
    out = sft_loss(logp, t(0.5, 0.25, 0.0))
    out.loss.backward()
    assert out.loss.item() == 1.25
    assert logp.grad.tolist() == [-0.5, -0.25, 0.0]


def test_sequence_logprobs():
    logp = leaf(-1, -2, -4, NAN)
    ids, sums = sequence_logprobs(logp, torch.tensor([9, 4, 9, 4]), t(1, 1, 2, 0))
    assert ids.tolist() == [4, 9]
    assert sums.tolist() == [-2, -9]
    sums[1].backward()
    assert logp.grad.tolist() == [1, 0, 2, 0]
