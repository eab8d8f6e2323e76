"""Preference losses: the numbers of the published formulas, their special cases, accumulation, labels, and refusals."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import ConfigError, DataError
from forethought.learn.pair_losses import dpo_loss, floor, inpo_loss, ipo_loss, nash_md_loss, sppo_loss

NAN = float("nan")
P = torch.tensor([[0.5, 0.9, 0.3], [0.1, 0.5, 0.8], [0.7, 0.2, 0.5]], dtype=torch.float64)
"""The cyclic oracle over three answers."""


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def leaf(*values: float) -> torch.Tensor:
    return t(*values).requires_grad_()


def batch(n=5, seed=0) -> list[torch.Tensor]:
    """Log-probs of n pairs under policy, reference and previous iterate: chosen, rejected each."""
    make = torch.Generator().manual_seed(seed)
    return [-20 * torch.rand(n, generator=make, dtype=torch.float64) for _ in range(6)]


# -- DPO ---------------------------------------------------------------------------------------------------------------


def test_dpo_numbers_and_sign():
    """Case H02."""
    chosen, rejected = leaf(-12.0), leaf(-15.0)
    out = dpo_loss(chosen, rejected, t(-13.0), t(-14.5), beta=0.2)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.554355, abs=1e-6)
    assert chosen.grad.item() == pytest.approx(-0.085111, abs=1e-6)
    assert rejected.grad.item() == pytest.approx(0.085111, abs=1e-6)
    assert out.metrics == pytest.approx(
        {
            "h/mean": 1.5,
            "margin/policy": 3.0,
            "margin/reference": 1.5,
            "rewards/chosen": 0.2,
            "rewards/rejected": -0.1,
            "rewards/margins": 0.3,
            "rewards/accuracies": 1,
            "logps/chosen": -12.0,
            "logps/rejected": -15.0,
        },
        abs=1e-6,
    )
    assert dpo_loss(t(-3), t(-4), t(-3), t(-4), beta=0.2).loss.item() == pytest.approx(math.log(2))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 0), min_size=4, max_size=4), st.floats(0.01, 5))
def test_dpo_is_never_negative_and_one_step_raises_the_margin(values, beta):
    pair = [leaf(v) for v in values[:2]]
    reference = [t(v) for v in values[2:]]
    out = dpo_loss(*pair, *reference, beta=beta)
    assert out.loss.item() >= 0
    out.loss.backward()
    assert pair[0].grad.item() <= 0 <= pair[1].grad.item()
    after = dpo_loss(*[p - p.grad for p in pair], *reference, beta=beta)
    assert after.metrics["h/mean"] >= out.metrics["h/mean"]


def test_dpo_accumulates_and_refuses():
    chosen, rejected, reference = t(-1, -2), t(-3, -1), (t(-2, -2), t(-2, -2))
    whole = dpo_loss(chosen, rejected, *reference, beta=0.5)
    halves = [
        dpo_loss(chosen[i], rejected[i], reference[0][i], reference[1][i], t(0.5), beta=0.5)
        for i in (slice(0, 1), slice(1, 2))
    ]
    assert sum(h.loss.item() for h in halves) == pytest.approx(whole.loss.item())
    assert whole.metrics["rewards/accuracies"] == 0.5
    for name, value in whole.metrics.items():
        assert sum(h.metrics[name] for h in halves) == pytest.approx(value)
    with pytest.raises(ConfigError, match="beta=0: give a positive number"):
        dpo_loss(chosen, rejected, *reference, beta=0)
    with pytest.raises(ConfigError, match="form='ipo': give one of sigmoid, hinge, robust"):
        dpo_loss(chosen, rejected, *reference, beta=0.1, form="ipo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"label_smoothing=0.5: the share of flipped labels lies in \[0, 0.5\)"):
        dpo_loss(chosen, rejected, *reference, beta=0.1, label_smoothing=0.5)
    with pytest.raises(DataError, match="no preference pairs"):
        dpo_loss(t(), t(), t(), t(), beta=0.1)
    with pytest.raises(DataError, match="policy_rejected is nan at target 1"):
        dpo_loss(chosen, t(-3, NAN), *reference, beta=0.5)
    with pytest.raises(DataError, match="p is 1.5 at pair 1: a probability"):
        dpo_loss(chosen, rejected, *reference, beta=0.5, p=t(0.5, 1.5))
    with pytest.raises(DataError, match="reference: log-probs of both answers are needed"):
        dpo_loss(chosen, rejected, reference[0], None, beta=0.5)


def test_a_pair_with_coefficient_0_is_out():
    chosen, rejected = leaf(-1, NAN), leaf(-3, -1)
    out = dpo_loss(chosen, rejected, t(-2, -2), t(-2, NAN), t(1, 0), beta=0.5)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(math.log(1 + math.exp(-1)))
    assert chosen.grad[1].item() == 0 and rejected.grad[1].item() == 0


def test_forms_of_dpo():
    """Reference-free, so that x = beta * 1.5 = 0.3; l(x) = log(1 + exp(-x))."""
    pair = t(-12.0), t(-13.5), None, None
    pro, con = math.log(1 + math.exp(-0.3)), math.log(1 + math.exp(0.3))
    assert dpo_loss(*pair, beta=0.2).loss.item() == pytest.approx(pro)
    assert dpo_loss(*pair, beta=0.2, label_smoothing=0.1).loss.item() == pytest.approx(0.9 * pro + 0.1 * con)
    robust = dpo_loss(*pair, beta=0.2, form="robust", label_smoothing=0.1).loss.item()
    assert robust == pytest.approx((0.9 * pro - 0.1 * con) / 0.8)
    assert dpo_loss(*pair, beta=0.2, form="hinge").loss.item() == pytest.approx(0.7)
    assert dpo_loss(*pair, beta=2.0, form="hinge").loss.item() == 0
    # Robust: the mean over labels that are flipped with this probability is the loss without flips.
    flipped = dpo_loss(t(-13.5), t(-12.0), None, None, beta=0.2, form="robust", label_smoothing=0.1).loss.item()
    assert 0.9 * robust + 0.1 * flipped == pytest.approx(pro)


# -- INPO and IPO ------------------------------------------------------------------------------------------------------


def test_inpo_by_hand():
    """Acceptance check 1."""
    chosen, rejected = leaf(-10), leaf(-12)
    out = inpo_loss(chosen, rejected, t(-11), t(-11), t(-10.5), t(-11.5), eta=0.5, tau=0.1)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.04)
    assert chosen.grad.item() == pytest.approx(0.4) and rejected.grad.item() == pytest.approx(-0.4)
    want = {"margin/policy": 2, "margin/reference": 0, "margin/previous": 1, "h/mean": 1.2, "h/target": 1}
    assert {k: out.metrics[k] for k in want} == pytest.approx(want)
    assert out.metrics["rewards/margins"] == pytest.approx(0.6)  # eta h; its target is 1/2
    assert out.metrics["logps/chosen"] == -10


@pytest.mark.parametrize("eta", [0.005, 0.5, 3.0])
def test_inpo_s_special_cases_are_ipo(eta):
    """Acceptance check 2: tau = eta, and the first iteration, whatever tau is."""
    policy_c, policy_r, ref_c, ref_r, prev_c, prev_r = batch()
    ipo = ipo_loss(policy_c, policy_r, ref_c, ref_r, beta=eta)
    assert torch.allclose(
        inpo_loss(policy_c, policy_r, ref_c, ref_r, prev_c, prev_r, eta=eta, tau=eta).loss, ipo.loss, rtol=1e-12
    )
    assert torch.equal(inpo_loss(policy_c, policy_r, ref_c, ref_r, None, None, eta=eta, tau=eta).loss, ipo.loss)
    for tau in (0.0, 0.3 * eta, eta):
        first = inpo_loss(policy_c, policy_r, ref_c, ref_r, ref_c, ref_r, eta=eta, tau=tau)
        assert torch.allclose(first.loss, ipo.loss, rtol=1e-10)
    free = inpo_loss(policy_c, policy_r, None, None, prev_c, prev_r, eta=eta, tau=0)
    assert torch.equal(free.loss, ipo_loss(policy_c, policy_r, prev_c, prev_r, beta=eta).loss)
    assert "margin/reference" not in free.metrics


def test_swapping_the_answers_turns_h():
    """Acceptance check 3."""
    values = batch()
    swapped = [values[i] for i in (1, 0, 3, 2, 5, 4)]
    forward, back = inpo_loss(*values, eta=2.0, tau=0.5), inpo_loss(*swapped, eta=2.0, tau=0.5)
    assert back.metrics["h/mean"] == pytest.approx(-forward.metrics["h/mean"])
    c, r, rc, rr, vc, vr = values
    h = (c - r) - 0.25 * (rc - rr) - 0.75 * (vc - vr)
    assert forward.loss.item() == pytest.approx(((h - 0.25) ** 2).mean().item())
    assert back.loss.item() == pytest.approx(((h + 0.25) ** 2).mean().item())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eta": 0.5, "tau": -0.1}, "tau=-0.1: the tie to the reference is 0 or more"),
        ({"eta": 0.0, "tau": 0.0}, "eta=0.0: give a positive number"),
        ({"eta": -1.0, "tau": 0.0}, "eta=-1.0: give a positive number"),
        ({"eta": 0.5, "tau": 0.6}, "tau=0.6 exceeds eta=0.5: the previous iterate would count negatively"),
        ({"eta": NAN, "tau": 0.1}, "eta=nan: give a positive number"),
        ({"eta": 0.5, "tau": NAN}, "tau=nan: the tie"),
    ],
)
def test_inpo_refuses_settings(settings, message):
    """Acceptance check 13."""
    with pytest.raises(ConfigError, match=message):
        inpo_loss(*batch(), **settings)


def test_inpo_refuses_missing_and_undefined_log_probs():
    """Acceptance check 13."""
    values = batch()
    with pytest.raises(DataError, match="log-probs of the previous are missing; they count 0.8"):
        inpo_loss(*values[:4], None, None, eta=0.5, tau=0.1)
    with pytest.raises(DataError, match="log-probs of the reference are missing; they count 0.2"):
        inpo_loss(*values[:2], None, None, *values[4:], eta=0.5, tau=0.1)
    values[3][2] = NAN
    with pytest.raises(DataError, match="reference_rejected is nan at target 2"):
        inpo_loss(*values, eta=0.5, tau=0.1)


def test_the_loss_has_a_floor():
    """Acceptance check 16: p = .9, eta 1: best h .4, loss .09."""
    zero = t(0.0)
    best = min(
        (inpo_loss(t(h / 100), zero, zero, zero, zero, zero, eta=1.0, tau=0.3, p=t(0.9)).loss.item(), h / 100)
        for h in range(-100, 101)
    )
    assert best == (pytest.approx(0.09), pytest.approx(0.4))
    assert floor(t(0.9), 1.0).item() == pytest.approx(0.09)
    at_best = inpo_loss(t(0.4), zero, zero, zero, zero, zero, eta=1.0, tau=0.3, p=t(0.9)).metrics
    assert at_best["loss/excess"] == pytest.approx(0, abs=1e-12)
    assert at_best["h/target"] == pytest.approx(0.4) == at_best["h/mean"]
    assert floor(t(0.5), 0.005).item() == pytest.approx(10_000)


@pytest.mark.parametrize(
    "loss",
    [
        lambda *v, **k: inpo_loss(*v, eta=0.8, tau=0.2, **k),
        lambda *v, **k: ipo_loss(*v[:4], v[6], beta=0.8, **k),
        lambda *v, **k: dpo_loss(*v[:4], v[6], beta=0.8, **k),
    ],
    ids=["inpo", "ipo", "dpo"],
)
def test_soft_labels_are_the_mean_over_drawn_ones(loss):
    """Acceptance check 17: loss and gradients, here exactly: both labels, weighed with their probabilities."""
    p = t(0.9, 0.5, 0.2, 0.0, 1.0)
    n = len(p)

    def at(values, coef, **labels):
        values = [v.clone().requires_grad_() for v in values]
        out = loss(*values, coef, **labels).loss
        grads = torch.autograd.grad(out, values[:2])
        return out.item(), grads

    values = batch(n)
    swapped = [values[i] for i in (1, 0, 3, 2, 5, 4)]
    soft, soft_grads = at(values, torch.full_like(p, 1 / n), p=p)
    won, won_grads = at(values, p / n)
    lost, lost_grads = at(swapped, (1 - p) / n)
    assert soft == pytest.approx(won + lost)
    for side in (0, 1):
        assert torch.allclose(soft_grads[side], won_grads[side] + lost_grads[1 - side])
    # And by drawing: the mean of many Bernoulli labels comes near.
    draws = torch.rand(4000, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) < p
    share = draws.double().mean(0)
    drawn = at(values, share / n)[0] + at(swapped, (1 - share) / n)[0]
    assert drawn == pytest.approx(soft, rel=0.03)


def test_accuracy_of_soft_labels_is_by_the_likelier_winner():
    zero = t(0, 0, 0)
    out = ipo_loss(t(1, 1, -1), zero, zero, zero, beta=1.0, p=t(0.9, 0.1, 0.2))
    assert out.metrics["rewards/accuracies"] == pytest.approx(2 / 3)


def test_population_gradient_of_the_tabular_minimiser_is_zero():
    """Both orders of a pair, weighed as drawn from the previous iterate: the planning step is the loss's minimum."""
    reference, previous = t(1 / 3, 1 / 3, 1 / 3).log(), t(0.2, 0.5, 0.3).log()
    eta, tau = 1.0, 0.05
    step = P @ previous.exp() / eta + tau / eta * reference + (1 - tau / eta) * previous
    best = step.log_softmax(0)
    torch.testing.assert_close(best.exp(), t(0.23576, 0.49436, 0.26988), atol=5e-6, rtol=0)
    for start, zero in ((best, True), (previous, False)):
        logits = start.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(population(logits, reference, previous, eta, tau), logits)
        assert (gradient.abs().max().item() < 1e-12) == zero


def population(logits, reference, previous, eta, tau):
    """INPO's expected loss over ordered pairs i.i.d. from the previous iterate, with soft labels."""
    policy = logits.log_softmax(0)
    i, j = map(list, zip(*((i, j) for i, j in product(range(3), repeat=2) if i != j), strict=True))
    weight = (previous[i] + previous[j]).exp()
    pair = (policy[i], policy[j], reference[i], reference[j], previous[i], previous[j])
    return inpo_loss(*pair, weight, eta=eta, tau=tau, p=P[i, j]).loss


# -- SPPO and Nash-MD --------------------------------------------------------------------------------------------------


def test_sppo_by_hand():
    """Acceptance check 18: eta_s = 1000, win .7, moved by 150: residual -50, term 2500."""
    chosen, rejected = leaf(-100), leaf(-300)
    out = sppo_loss(chosen, rejected, t(-250), t(-300), t(0.7), t(0.5), beta=1e-3)
    out.loss.backward()
    assert out.metrics["residual/chosen"] == pytest.approx(-50) and out.metrics["residual/rejected"] == pytest.approx(0)
    assert out.loss.item() == pytest.approx(1250)  # the mean of 2500 and 0
    assert chosen.grad.item() == pytest.approx(-50) and rejected.grad.item() == 0
    assert out.metrics["rewards/chosen"] == pytest.approx(0.15)
    with pytest.raises(DataError, match="win_rejected is -0.1 at pair 0"):
        sppo_loss(t(-1), t(-1), t(-1), t(-1), t(0.5), t(-0.1), beta=1.0)
    with pytest.raises(DataError, match="win_chosen is nan"):
        sppo_loss(t(-1), t(-1), t(-1), t(-1), t(NAN), t(0.1), beta=1.0)
    with pytest.raises(ConfigError, match="beta=0: give a positive"):
        sppo_loss(t(-1), t(-1), t(-1), t(-1), t(0.1), t(0.1), beta=0)


def test_sppo_s_minimum_is_its_tabular_step():
    """pi_(t+1) ~ pi_t exp(eta_s P(y > pi_t)), up to the constant that the residuals share."""
    previous = t(0.2, 0.5, 0.3).log()
    win = P @ previous.exp()
    moved = (previous + win / 0.5).log_softmax(0) - previous
    target = (win - 0.5) / 0.5
    assert torch.allclose(moved - target, (moved - target)[0].expand(3))


def test_nash_md_by_hand():
    """Two answers of two and one tokens; beta .5."""
    logp, win = leaf(-1, -2, -3), t(0.8, 0.8, 0.1)
    out = nash_md_loss(logp, t(-1.5, -2, -2), win, t(0.5, 0.5, 0.5), beta=0.5)
    out.loss.backward()
    # per token: coef * (beta * (logp - ref) - (win - 1/2))
    assert logp.grad.tolist() == pytest.approx([0.5 * (0.25 - 0.3), 0.5 * (0 - 0.3), 0.5 * (-0.5 + 0.4)])
    assert out.loss.item() == pytest.approx(0.5 * (0.5 * (-0.5 + 0 + 3) - (0.3 * -3 + -0.4 * -3)))
    assert out.metrics["kl"] == pytest.approx(0.5 * (0.5 + 0 - 1))
    assert out.metrics["loss/score"] == pytest.approx(0.5 * (0.3 * -3 - 0.4 * -3))
    with pytest.raises(ConfigError, match="beta=-1: give 0 or more"):
        nash_md_loss(logp, logp.detach(), win, win, beta=-1)
    with pytest.raises(DataError, match="win is 2.0 at pair 1"):
        nash_md_loss(logp, logp.detach(), t(0.5, 2, 0.5), win, beta=1)


def test_nash_md_s_first_step_is_inpo_s():
    """Acceptance check 19: at uniform with a uniform reference both expected gradients point the same way; from
    another point, where the mixture is not the previous iterate, they differ."""

    def directions(previous, reference, mix):
        eta, tau = 1.0, mix
        logits = previous.clone().requires_grad_()
        (inpo,) = torch.autograd.grad(population(logits, reference, previous, eta, tau), logits)
        mixture = ((1 - mix) * previous + mix * reference).log_softmax(0).exp()
        logits = previous.clone().requires_grad_()
        out = nash_md_loss(logits.log_softmax(0), reference, P @ mixture, previous.exp(), beta=tau)
        (nash,) = torch.autograd.grad(out.loss, logits)
        return inpo / inpo.norm(), nash / nash.norm()

    uniform = t(1, 1, 1).log_softmax(0)
    a, b = directions(uniform, uniform, 0.3)
    torch.testing.assert_close(a, b)
    a, b = directions(t(0.2, 0.5, 0.3).log(), uniform, 0.3)
    assert (a - b).norm().item() > 0.05
