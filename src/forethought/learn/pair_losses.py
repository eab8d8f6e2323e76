"""Preference losses: pure functions of log-probs of whole answers, one entry per pair.

With D the log-prob of the chosen answer minus that of the rejected one, each a SUM over the answer's tokens with its end
token (never a mean: dividing by the length would change the game), under the policy, the reference and the previous
iterate:

    DPO       -log sigmoid(beta h),                h = D_policy - D_reference
    IPO       (h - 1/(2 beta))^2,                  h = D_policy - D_reference
    INPO      (h - 1/(2 eta))^2,                   h = D_policy - (tau/eta) D_reference - (1 - tau/eta) D_previous
    SPPO      (r - (win - 1/2)/beta)^2             for either answer, r = its log-prob, policy minus previous
    Nash-MD   beta log-ratio (detached) * logp - (win - 1/2) logp, a sum over tokens

Sources: DPO: Rafailov et al., arXiv 2305.18290; cDPO: E. Mitchell, "A note on DPO with noisy preferences" (2023); robust:
Chowdhury et al., arXiv 2403.00409; hinge: Zhao et al. (SLiC), arXiv 2305.10425, as Liu et al., arXiv 2309.06657, put it;
IPO: Azar et al., arXiv 2310.12036; INPO: Zhang et al., arXiv 2407.00617; SPPO: Wu et al., arXiv 2405.00675; Nash-MD: Munos
et al., arXiv 2312.00886, in the form of TRL's trainer.

Departures: TRL's IPO divides each sum by its number of tokens; these do not. Soft labels (`p`) weigh both orders of a
pair, p loss(h) + (1 - p) loss(-h): the mean over many drawn labels, without their noise (INPO's remark on variance).

The reduction is `sum(coef * per-pair loss)`, as in `losses`; with accumulation give 1 / all pairs of the step. A pair
with coefficient 0 takes no part. P: pairs. Metrics are coefficient-weighted sums, so they add up like the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch.nn import functional as F

from forethought.errors import ConfigError, DataError
from forethought.learn.losses import LossOut, active

Form = Literal["sigmoid", "hinge", "robust"]
Labels = torch.Tensor | None
"""[P], the probability that the chosen answer wins; None: it does."""


def dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor | None,
    reference_rejected: torch.Tensor | None,
    coef: torch.Tensor | None = None,
    *,
    beta: float,
    form: Form = "sigmoid",
    label_smoothing: float = 0.0,
    p: Labels = None,
) -> LossOut:
    """DPO: sum over pairs of coef * loss(beta * h).

    Args:
        policy_chosen ... reference_rejected: [P] log-probs of whole answers (`losses.sequence_logprobs`). Without a
            reference (None, None) it counts as 0.
        coef: [P]; None is the mean over the pairs of this call.
        beta: > 0, strength of the tie to the reference.
        form: loss(x) is -log sigmoid(x), for "hinge" max(0, 1 - x); "robust" takes the bias of flipped labels out.
        label_smoothing: in [0, 1/2), the share of labels that are flipped. Sigmoid and hinge mix both orders with it
            (cDPO); robust: ((1 - s) loss(x) - s loss(-x)) / (1 - 2 s), which may be negative.
        p: [P] soft labels.

    Returns:
        loss, and metrics h/mean, margin/policy, margin/reference (mean D), rewards/chosen, rewards/rejected,
        rewards/margins, rewards/accuracies, logps/chosen, logps/rejected (TRL's names; rewards are times beta).

    Raises:
        ConfigError: beta not positive, an unknown form, label_smoothing outside [0, 1/2).
        DataError: no pairs, something non-finite, or p outside [0, 1].
    """
    check_dpo(beta, form, label_smoothing)
    sides = _sides(coef, policy_chosen, policy_rejected, reference=(reference_chosen, reference_rejected), p=p)
    s = label_smoothing

    def order(x: torch.Tensor) -> torch.Tensor:
        def plain(y: torch.Tensor) -> torch.Tensor:
            return F.relu(1 - y) if form == "hinge" else F.softplus(-y)

        if form == "robust":
            return ((1 - s) * plain(x) - s * plain(-x)) / (1 - 2 * s)
        return (1 - s) * plain(x) + s * plain(-x) if s else plain(x)

    h = sides.h(reference=1.0)
    loss = sides.reduce(lambda sign: order(sign * beta * h))
    return LossOut(loss, sides.metrics(beta, h, reference=1.0))


def ipo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor | None,
    reference_rejected: torch.Tensor | None,
    coef: torch.Tensor | None = None,
    *,
    beta: float,
    p: Labels = None,
) -> LossOut:
    """IPO: sum over pairs of coef * (h - 1/(2 beta))^2, over sums of log-probs.

    Arguments, errors and metrics as `dpo_loss`, and those of `inpo_loss` on the target (with beta for eta).
    """
    _positive("beta", beta)
    sides = _sides(coef, policy_chosen, policy_rejected, reference=(reference_chosen, reference_rejected), p=p)
    return _squared(sides, beta, reference=1.0)


def inpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor | None,
    reference_rejected: torch.Tensor | None,
    previous_chosen: torch.Tensor | None,
    previous_rejected: torch.Tensor | None,
    coef: torch.Tensor | None = None,
    *,
    eta: float,
    tau: float,
    p: Labels = None,
) -> LossOut:
    """INPO: sum over pairs of coef * (h - 1/(2 eta))^2.

    The smallest loss is not 0: a pair whose chosen answer wins with probability p has its best h at (2p - 1)/(2 eta)
    and keeps p(1 - p)/eta^2 (see `floor`). Judge progress by h/mean against h/target, or by the excess over that floor.

    Args:
        policy_chosen ... previous_rejected: [P] log-probs of whole answers. The reference may be None where tau is 0,
            the previous iterate where tau is eta.
        eta: > 0, an INVERSE step size. tau: in [0, eta], strength of the tie to the reference.
        p: [P] soft labels. Hard labels are drawn: chosen is who won.

    Returns:
        loss, and the metrics of `dpo_loss` with h/target (mean of 1/(2 eta), or of (2p - 1)/(2 eta)), margin/previous,
        and for soft labels loss/excess. Rewards are times eta, minus both ties: their margin has its target at 1/2.

    Raises:
        ConfigError: eta not positive, tau outside [0, eta]. DataError: as `dpo_loss`; a log-prob is missing.
    """
    check_inpo(eta, tau)
    share = tau / eta
    sides = _sides(
        coef,
        policy_chosen,
        policy_rejected,
        reference=(reference_chosen, reference_rejected),
        previous=(previous_chosen, previous_rejected),
        p=p,
    )
    ties = {"reference": share, "previous": 1 - share}
    for name, weight in ties.items():
        if weight and name not in sides.chosen:
            raise DataError(
                f"inpo: the log-probs of the {name} are missing; they count {weight:.3g} at this tau and eta"
            )
    return _squared(sides, eta, **ties)


def floor(p: torch.Tensor, eta: float) -> torch.Tensor:
    """p (1 - p) / eta^2: what the squared loss of a pair keeps at its best h. For IPO eta is beta."""
    return p * (1 - p) / eta**2


def sppo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    previous_chosen: torch.Tensor,
    previous_rejected: torch.Tensor,
    win_chosen: torch.Tensor,
    win_rejected: torch.Tensor,
    coef: torch.Tensor | None = None,
    *,
    beta: float,
) -> LossOut:
    """SPPO: sum over pairs of coef * (mean over both answers of (policy - previous - (win - 1/2)/beta)^2).

    Args:
        win_chosen, win_rejected: [P] mean probability of each answer to win against the previous iterate.
        beta: > 0, an inverse step size (the paper's eta is 1/beta; its code takes 0.001).

    Returns:
        loss, and metrics rewards/... (beta * (policy - previous), whose targets are win - 1/2), logps/...,
        residual/chosen, residual/rejected (mean of policy - previous - target).

    Raises:
        ConfigError: beta not positive. DataError: as `dpo_loss`; a win probability outside [0, 1].
    """
    _positive("beta", beta)
    coef = _coefficients(coef, policy_chosen)
    names = ("policy_chosen", "policy_rejected", "previous_chosen", "previous_rejected", "win_chosen", "win_rejected")
    given = (policy_chosen, policy_rejected, previous_chosen, previous_rejected, win_chosen, win_rejected)
    policy_c, policy_r, previous_c, previous_r, win_c, win_r = active(coef, **dict(zip(names, given, strict=True)))
    _probabilities(coef, win_chosen=win_c, win_rejected=win_r)
    moved_c, moved_r = policy_c - previous_c, policy_r - previous_r
    left_c, left_r = moved_c - (win_c - 0.5) / beta, moved_r - (win_r - 0.5) / beta
    loss = (coef * (left_c.square() + left_r.square()) / 2).sum()
    out = _rewards(coef, beta * moved_c, beta * moved_r, policy_c, policy_r)
    return LossOut(loss, out | _sums(coef, {"residual/chosen": left_c, "residual/rejected": left_r}))


def nash_md_loss(
    logp: torch.Tensor, reference: torch.Tensor, win: torch.Tensor, coef: torch.Tensor, *, beta: float
) -> LossOut:
    """Nash-MD by REINFORCE, as TRL has it: sum over TOKENS of coef * (beta * log-ratio - (win - 1/2)) * logp.

    The log-ratio logp - reference is not differentiated. On-policy answers only.

    Args:
        logp, reference: [M] log-probs of tokens. win: [M], the probability that the token's answer wins against one of
            the mixture policy. coef: [M], 1 / answers for the mean over answers.
        beta: >= 0, strength of the tie to the reference.

    Returns:
        loss, and metrics loss/score (mean of (win - 1/2) * log-prob of the answer) and kl (mean log-ratio of answers).

    Raises:
        ConfigError: beta negative. DataError: something non-finite where coef is not 0; win outside [0, 1].
    """
    if not 0 <= beta < math.inf:
        raise ConfigError(f"beta={beta}: give 0 or more")
    logp, reference, win = active(coef, logp=logp, reference=reference, win=win)
    _probabilities(coef, win=win)
    ratio = (logp - reference).detach()
    score = (win - 0.5) * logp
    loss = (coef * (beta * ratio * logp - score)).sum()
    return LossOut(loss, _sums(coef, {"loss/score": score, "kl": ratio}))


# -- checks that configs make, too -------------------------------------------------------------------------------------


def check_dpo(beta: float, form: str, label_smoothing: float) -> None:
    """Raises: ConfigError."""
    _positive("beta", beta)
    if form not in get_args(Form):
        raise ConfigError(f"form={form!r}: give one of {', '.join(get_args(Form))}")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing={label_smoothing}: the share of flipped labels lies in [0, 0.5)")


def check_inpo(eta: float, tau: float) -> None:
    """Raises: ConfigError."""
    _positive("eta", eta)
    if not tau >= 0:
        raise ConfigError(f"tau={tau}: the tie to the reference is 0 or more")
    if not tau <= eta:
        raise ConfigError(
            f"tau={tau} exceeds eta={eta}: the previous iterate would count negatively; eta is an inverse step size, "
            "give tau <= eta"
        )


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={value}: give a positive number")


def _probabilities(coef: torch.Tensor, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        bad = ((tensor < 0) | (tensor > 1)) & (coef != 0)
        if bool(bad.any()):
            where = int(bad.nonzero()[0])
            raise DataError(f"{name} is {float(tensor[where])} at pair {where}: a probability lies in [0, 1]")


# -- what they share ---------------------------------------------------------------------------------------------------


def _coefficients(coef: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if coef is not None:
        return coef
    if not len(like):
        raise DataError("no preference pairs: give at least one")
    return torch.full_like(like, 1 / len(like), requires_grad=False)


def _sums(coef: torch.Tensor, numbers: dict[str, torch.Tensor]) -> dict[str, float]:
    with torch.no_grad():
        sums = (torch.stack([n.to(coef.dtype) for n in numbers.values()]) * coef).sum(1).tolist()
    return dict(zip(numbers, sums, strict=True))


def _rewards(coef, chosen, rejected, policy_chosen, policy_rejected) -> dict[str, float]:
    numbers = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": chosen > rejected,
        "logps/chosen": policy_chosen,
        "logps/rejected": policy_rejected,
    }
    return _sums(coef, numbers)


class _Pairs:
    """Both answers under the policy and under what it is tied to, without the pairs whose coefficient is 0."""

    def __init__(self, coef: torch.Tensor, tensors: dict[str, torch.Tensor]):
        self.coef, self.p = coef, tensors.pop("p", None)
        self.chosen = {name[:-7]: t for name, t in tensors.items() if name.endswith("_chosen")}
        self.rejected = {name[:-9]: t for name, t in tensors.items() if name.endswith("_rejected")}
        if self.p is not None:
            _probabilities(coef, p=self.p)

    def _tied(self, side: dict[str, torch.Tensor], ties: dict[str, float]) -> torch.Tensor:
        out = side["policy"]
        for name, weight in ties.items():
            if weight and name in side:
                out = out - weight * side[name]
        return out

    def h(self, **ties: float) -> torch.Tensor:
        return self._tied(self.chosen, ties) - self._tied(self.rejected, ties)

    def reduce(self, loss: Callable[[float], torch.Tensor]) -> torch.Tensor:
        """sum(coef * loss) with loss(1.0) that of the order given, loss(-1.0) that of the other."""
        if self.p is None:
            return (self.coef * loss(1.0)).sum()
        return (self.coef * (self.p * loss(1.0) + (1 - self.p) * loss(-1.0))).sum()

    def metrics(self, scale: float, h: torch.Tensor, **ties: float) -> dict[str, float]:
        chosen, rejected = scale * self._tied(self.chosen, ties), scale * self._tied(self.rejected, ties)
        out = _sums(self.coef, {"h/mean": h} | {f"margin/{n}": self.chosen[n] - self.rejected[n] for n in self.chosen})
        out |= _rewards(self.coef, chosen, rejected, self.chosen["policy"], self.rejected["policy"])
        if self.p is not None:  # "chosen" is then just the first one
            out |= _sums(self.coef, {"rewards/accuracies": (chosen > rejected) == (self.p > 0.5)})
        return out


def _sides(coef, policy_chosen, policy_rejected, *, p: Labels, **ties) -> _Pairs:
    tensors = {"policy_chosen": policy_chosen, "policy_rejected": policy_rejected}
    for name, (chosen, rejected) in ties.items():
        if (chosen is None) != (rejected is None):
            raise DataError(f"{name}: log-probs of both answers are needed, or of neither")
        if chosen is not None:
            tensors |= {f"{name}_chosen": chosen, f"{name}_rejected": rejected}
    if p is not None:
        tensors["p"] = p
    coef = _coefficients(coef, policy_chosen)
    return _Pairs(coef, dict(zip(tensors, active(coef, **tensors), strict=True)))


def _squared(sides: _Pairs, scale: float, **ties: float) -> LossOut:
    """The squared loss of IPO and INPO, with scale for beta and eta."""
    target = 1 / (2 * scale)
    h = sides.h(**ties)
    loss = sides.reduce(lambda sign: (sign * h - target).square())
    sure = torch.ones_like(h) if sides.p is None else 2 * sides.p - 1
    out = sides.metrics(scale, h, **ties) | _sums(sides.coef, {"h/target": sure * target})
    if sides.p is not None:
        out["loss/excess"] = float((loss - (sides.coef * floor(sides.p, scale)).sum()).detach())
    return LossOut(loss, out)
