"""Losses: pure functions of flat per-token tensors, with the reduction as an explicit, global argument.

Every token loss is `sum(coef * per-token loss)`. The coefficients come from `reduction_coefficients` over the WHOLE
global batch (all micro-batches, all processes) before the first backward, so micro-batches and processes only add up:
no mean of means. A token with coefficient 0 takes no part at all; whatever stands there (NaN, infinity) reaches neither
the loss nor a gradient. Something non-finite where the coefficient is not 0 is an error that names the token.

Sources: clipped policy loss: Schulman et al., arXiv 1707.06347; clipped value loss: OpenAI baselines, ppo2; GRPO: Shao
et al., arXiv 2402.03300; asymmetric clip (clip-higher) and the token mean: Yu et al. (DAPO), arXiv 2503.14476; constant
normaliser: Liu et al. (Dr. GRPO), arXiv 2503.20783; sequence ratio: Zheng et al. (GSPO), arXiv 2507.18071; dual clip:
Ye et al., arXiv 1912.09729; KL estimators: J. Schulman, "Approximating KL Divergence" (2020). Preference losses stand in
`pair_losses`.

Departures: the token mean of GRPO implementations is a mean within a micro-batch; here it is the mean over the global
batch. Log-ratios are cut to [-20, 20] before exp, so that a clipped or unused extreme cannot overflow.

A token that lies on k trained paths (weight k) stands once, with one advantage (their mean): exact while the ratio is
inside the clip range; outside it the clip acts on the mean advantage, not on each path's own.

M: targets (trained tokens). Metrics are coefficient-weighted sums, so they add up like the loss; names ending in "/max"
are maxima.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from forethought.errors import ConfigError, DataError

Reduction = Literal["token-mean", "dapo", "sequence-mean", "sequence-mean-token-sum", "dr-grpo"]
Estimator = Literal["k1", "k2", "k3"]

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossOut:
    """A scalar to call backward on, and numbers to log."""

    loss: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)


# -- reductions --
def reduction_coefficients(
    weight: torch.Tensor,
    sequence_ids: torch.Tensor,
    reduction: Reduction,
    *,
    max_length: int | None = None,
    total: Callable[[float], float] = float,
) -> torch.Tensor:
    """Coefficient [M] of every token of the global batch, so that the reduced loss is sum(coef * per-token loss).

    With w the token weights and S the number of sequences that have a weight:

    - "token-mean" (also "dapo"): w / sum(w). Every token of the batch counts alike.
    - "sequence-mean" (GRPO as published): w / (weight of its sequence) / S. Every sequence counts alike.
    - "sequence-mean-token-sum" (also "dr-grpo"): w / (S * max_length). No division by the sequence's own length.

    Pass all micro-batches of the step at once (concatenated): a sequence may be spread over them.

    Args:
        weight: [M] >= 0; 0 takes a token out.
        sequence_ids: [M] integers, equal within a sequence. A sequence lives in one process.
        max_length: the constant length of "dr-grpo" (the largest number of new tokens); the others ignore it.
        total: sums a number over all processes. Each process calls it once; gradients are then to be SUMMED over
            processes (with a framework that averages them, multiply the loss by the number of processes).

    Returns:
        float32 [M].

    Raises:
        ConfigError: unknown reduction, or "dr-grpo" without max_length.
        DataError: NaN, infinite or negative weights; no process has a weight above 0.
    """
    if reduction not in get_args(Reduction):
        raise ConfigError(f"reduction={reduction!r}: give one of {', '.join(get_args(Reduction))}")
    constant = reduction in ("sequence-mean-token-sum", "dr-grpo")
    if constant and (max_length is None or max_length < 1):
        raise ConfigError(f"reduction={reduction!r} divides by max_length={max_length}: give the largest length")
    _same_shape(weight=weight, sequence_ids=sequence_ids)
    w = weight.detach().cpu().double()  # sums in fp64; not every device has it
    bad = (~(torch.isfinite(w) & (w >= 0))).nonzero()[:, 0].tolist()
    if bad:
        raise DataError(f"weight of target {bad[0]} is {float(w[bad[0]])}: weights count trained paths, give 0 or more")
    _, place = torch.unique(sequence_ids.cpu(), return_inverse=True)
    per_sequence = torch.zeros(int(place.max()) + 1 if len(place) else 0, dtype=torch.float64)
    per_sequence.index_add_(0, place, w)
    token_mean = reduction in ("token-mean", "dapo")
    norm = total(float(w.sum() if token_mean else (per_sequence > 0).sum()))
    if not norm > 0:
        raise DataError("nothing to train on: no token of the batch has a weight above 0")
    if token_mean:
        coef = w / norm
    elif reduction == "sequence-mean":
        own = per_sequence[place]
        coef = torch.where(own > 0, w / own, 0.0) / norm
    else:
        coef = w / (norm * float(max_length or 1))
    return coef.float().to(weight.device)


# -- log-probs --
def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [...] of `ids` [...] under softmax(logits / temperature), logits [..., V]; fp32.

    The temperature divides the logits: dividing a log-prob gives a number that is no log-prob.
    `models.head.chunked_logprobs` gives the same without the logits.

    Raises:
        ConfigError: temperature not positive. Greedy samples have no distribution; score them at temperature 1, and
            know that a ratio on them is then off-policy.
    """
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature}: log-probs need a positive one (0 is greedy: score it at 1)")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return torch.log_softmax(wide, -1).gather(-1, ids[..., None])[..., 0]


# -- policy losses --
def policy_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantage: torch.Tensor,
    coef: torch.Tensor,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    dual_clip: float | None = None,
    level: Literal["token", "sequence"] = "token",
    sequence_ids: torch.Tensor | None = None,
    metric_coef: torch.Tensor | None = None,
) -> LossOut:
    """Clipped policy loss: sum of coef * max(-A * rho, -A * clip(rho, 1 - clip_low, 1 + clip_high)).

    rho = exp(logp - old_logp). GRPO and PPO: clip_low = clip_high = 0.2; DAPO: clip_high = 0.28; a side that is None is
    not clipped. With old_logp = logp.detach() (one update a rollout) rho is 1 and the gradient is REINFORCE's.

    Args:
        logp, old_logp, advantage, coef: [M].
        dual_clip: c > 1; for negative advantages the loss is at most c * |A|.
        level: "sequence" takes the geometric mean of the ratios of a sequence (GSPO; its clips are about 3e-4 and
            4e-4). All tokens of a sequence must be in this call. Needs sequence_ids [M].
        metric_coef: [M] weights of the metrics, which should sum to 1 over the global batch; `coef` if None, which is
            right for the means, but not for "dr-grpo", whose coefficients do not sum to 1.

    Returns:
        loss, and metrics clip_ratio/low and clip_ratio/high (share of tokens held back by that side), ratio/mean,
        ratio/max, approx_kl (of the old from the new policy: rho - 1 - log rho).

    Raises:
        ConfigError: clip, dual_clip or level outside its range. DataError: something non-finite where coef is not 0.
    """
    if (clip_low is not None and not 0 <= clip_low < 1) or (clip_high is not None and not clip_high >= 0):
        raise ConfigError(
            f"clip_low={clip_low}, clip_high={clip_high}: give 0 <= clip_low < 1, clip_high >= 0, or None"
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip={dual_clip}: give a number above 1 or None")
    if level not in ("token", "sequence") or (level == "sequence") != (sequence_ids is not None):
        raise ConfigError(f"level={level!r}: 'token', or 'sequence' together with sequence_ids")
    logp, old_logp, advantage = active(coef, logp=logp, old_logp=old_logp, advantage=advantage)
    log_ratio = logp - old_logp
    if sequence_ids is not None:
        log_ratio = _sequence_mean(log_ratio, sequence_ids, coef)
    log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    low = 0.0 if clip_low is None else 1 - clip_low
    high = math.inf if clip_high is None else 1 + clip_high
    per_token = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
    if dual_clip is not None:
        per_token = torch.where(advantage < 0, torch.minimum(per_token, -advantage * dual_clip), per_token)
    with torch.no_grad():
        share = coef if metric_coef is None else metric_coef
        sums = torch.stack(
            [
                (share * ((ratio < low) & (advantage < 0))).sum(),
                (share * ((ratio > high) & (advantage > 0))).sum(),
                (share * ratio).sum(),
                (share * (ratio - 1 - log_ratio)).sum(),
                ratio.masked_fill(coef == 0, 0).max() if len(ratio) else ratio.new_zeros(()),
            ]
        ).tolist()
    names = ("clip_ratio/low", "clip_ratio/high", "ratio/mean", "approx_kl", "ratio/max")
    return LossOut((coef * per_token).sum(), dict(zip(names, sums, strict=True)))


def reinforce_loss(logp: torch.Tensor, advantage: torch.Tensor, coef: torch.Tensor) -> LossOut:
    """REINFORCE: -sum(coef * advantage * logp), no ratio and no clip; [M] each. On-policy data only.

    Raises:
        DataError: something non-finite where coef is not 0.
    """
    logp, advantage = active(coef, logp=logp, advantage=advantage)
    return LossOut(-(coef * advantage * logp).sum())


# -- values --
def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    coef: torch.Tensor,
    *,
    clip: float | None = 0.2,
    metric_coef: torch.Tensor | None = None,
) -> LossOut:
    """Clipped value loss of PPO: sum of coef * 0.5 * max((V - R)^2, (V_clip - R)^2).

    V_clip = V_old + clamp(V - V_old, -clip, clip); without a clip it is half the squared error.

    Args:
        values, old_values, returns, coef: [M]; old_values are those that the returns were made with.
        metric_coef: as in `policy_loss`.

    Returns:
        loss, and metrics value/clip_ratio (share of tokens whose clipped error is the larger one, so that they have no
        gradient) and value/error (mean squared error).

    Raises:
        ConfigError: clip not positive. DataError: something non-finite where coef is not 0.
    """
    if clip is not None and not clip > 0:
        raise ConfigError(f"value clip={clip}: give a positive number or None")
    values, old_values, returns = active(coef, values=values, old_values=old_values, returns=returns)
    plain = (values - returns).square()
    error = plain
    if clip is not None:
        held = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        error = torch.maximum(plain, held)
    with torch.no_grad():
        share = coef if metric_coef is None else metric_coef
        sums = torch.stack([(share * (error > plain)).sum(), (share * plain).sum()]).tolist()
    return LossOut(0.5 * (coef * error).sum(), dict(zip(("value/clip_ratio", "value/error"), sums, strict=True)))


# -- regularisers --
def kl(
    logp: torch.Tensor, ref_logp: torch.Tensor, estimator: Estimator = "k3", *, clamp: float | None = 10.0
) -> torch.Tensor:
    """Per-token estimate [M] of KL(policy || reference) from tokens that the policy sampled.

    With d = ref_logp - logp, cut to [-clamp, clamp] (no gradient outside):

    - "k1": -d. Unbiased, noisy, may be negative. The one for a penalty inside the REWARD (no gradient needed). As a
      loss its expected gradient is zero: do not train on it.
    - "k2": d^2 / 2. Slightly biased value; its gradient is, in expectation, that of the KL.
    - "k3": exp(d) - d - 1. Unbiased, low variance, never negative: the KL term of GRPO's LOSS and the default here. Its
      gradient by logp is 1 - exp(d), which is that of the KL the other way round.

    Raises:
        ConfigError: unknown estimator, clamp not positive.
    """
    if estimator not in get_args(Estimator):
        raise ConfigError(f"estimator={estimator!r}: give one of {', '.join(get_args(Estimator))}")
    if clamp is not None and not clamp > 0:
        raise ConfigError(f"clamp={clamp}: give a positive number or None")
    d = ref_logp - logp
    if clamp is not None:
        d = d.clamp(-clamp, clamp)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(d) - d


def kl_loss(
    logp: torch.Tensor,
    ref_logp: torch.Tensor,
    coef: torch.Tensor,
    *,
    estimator: Estimator = "k3",
    clamp: float | None = 10.0,
    old_logp: torch.Tensor | None = None,
) -> LossOut:
    """sum(coef * kl), to be multiplied by beta; see `kl`. Metric: kl.

    Args:
        old_logp: [M]; if given, each term is multiplied by the ratio exp(logp - old_logp), gradient included. Then the
            gradient of k3 is, in expectation, that of KL(policy || reference), also off-policy (DeepSeek-V3.2, arXiv
            2512.02556; TRL's default). None is GRPO as published.

    Raises:
        ConfigError: as `kl`. DataError: something non-finite where coef is not 0.
    """
    logp, ref_logp = active(coef, logp=logp, ref_logp=ref_logp)
    per_token = kl(logp, ref_logp, estimator, clamp=clamp)
    if old_logp is not None:
        (old_logp,) = active(coef, old_logp=old_logp)
        per_token = per_token * (logp - old_logp).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    loss = (coef * per_token).sum()
    return LossOut(loss, {"kl": float(loss.detach())})


def entropy_bonus(entropy: torch.Tensor, coef: torch.Tensor) -> LossOut:
    """-sum(coef * entropy), [M] in nats: a loss that falls when entropy rises. Metric: entropy.

    To be multiplied by a positive number; papers that write alpha * entropy into the loss mean the negative of it.

    Raises:
        DataError: a non-finite entropy where coef is not 0.
    """
    (entropy,) = active(coef, entropy=entropy)
    loss = -(coef * entropy).sum()
    return LossOut(loss, {"entropy": -float(loss.detach())})


# -- imitation --
def sft_loss(logp: torch.Tensor, coef: torch.Tensor) -> LossOut:
    """Negative log-likelihood: -sum(coef * logp), [M].

    Raises:
        DataError: a non-finite log-prob where coef is not 0.
    """
    (logp,) = active(coef, logp=logp)
    return LossOut(-(coef * logp).sum())


def sequence_logprobs(
    logp: torch.Tensor, sequence_ids: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the log-probs of each sequence: distinct ids [S], ascending, and sums [S]. Weight 0 leaves a token out.

    Raises:
        DataError: a non-finite log-prob where weight is not 0.
    """
    (logp,) = active(weight, logp=logp)
    ids, place = torch.unique(sequence_ids, return_inverse=True)
    return ids, logp.new_zeros(len(ids)).index_add(0, place, weight * logp)


# -- shared --
def _same_shape(**tensors: torch.Tensor) -> None:
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(s) != 1 for s in shapes.values()):
        raise DataError(f"one entry per target is needed in each, flat: got shapes {shapes}")


def active(coef: torch.Tensor, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with 0 wherever coef is 0 (before anything is computed from them, so gradients there are exactly 0).

    Raises:
        DataError: shapes differ; coef or a tensor is non-finite where it counts.
    """
    _same_shape(coef=coef, **tensors)
    used = coef != 0
    for name, tensor in {"coef": coef, **tensors}.items():
        bad = used & ~torch.isfinite(tensor)
        if bool(bad.any()):
            where = bad.nonzero()[:, 0].tolist()
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            raise DataError(
                f"{name} is {float(tensor[where[0]])} at target {where[0]}{more}, where the coefficient is "
                f"{float(coef[where[0]]):.3g}: give a finite number, or weight 0 to leave the token out"
            )
    return [torch.where(used, tensor, 0.0) for tensor in tensors.values()]


def _sequence_mean(values: torch.Tensor, sequence_ids: torch.Tensor, coef: torch.Tensor) -> torch.Tensor:
    """Each token's mean [M] over the tokens of its sequence whose coefficient is not 0 (0 for the others)."""
    _same_shape(values=values, sequence_ids=sequence_ids)
    _, place = torch.unique(sequence_ids, return_inverse=True)
    used = (coef != 0).to(values.dtype)
    size = int(place.max()) + 1 if len(place) else 0
    sums = values.new_zeros(size).index_add(0, place, values * used)
    counts = used.new_zeros(size).index_add(0, place, used)
    return (sums / counts.clamp_min(1))[place] * used
