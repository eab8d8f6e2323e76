"""Learning from preference pairs: DPO and its relatives on token trees.

One optimiser step sees `batch_size` pairs; its loss is the mean over all of them, whatever the micro-batches and
processes. The log-probs of what the policy is tied to (the reference, the previous iterate) are computed once, before
the first step, and kept in token columns: no second model is in memory while training. Without a reference the policy
as it is before the first step is taken, which costs no second model at all.

Precision: these log-probs are made in the dtype and under the mask of training, without dropout, and differences are
summed over an answer in float64: with targets near 1 nat small faults would dominate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from forethought.config import derive_seed
from forethought.data import BatchSampler
from forethought.errors import ConfigError, DataError
from forethought.learn.learner import Learner, Targets
from forethought.learn.losses import LossOut
from forethought.learn.optim import OptimConfig
from forethought.learn.pair_batches import (
    PREVIOUS,
    REASONS,
    REFERENCE,
    Answers,
    PreferencePair,
    annotate,
    check_column,
    distinct,
    left_out,
    micro_batches,
    problem,
    usable_pairs,
)
from forethought.learn.pair_losses import (
    Form,
    check_dpo,
    check_inpo,
    dpo_loss,
    floor,
    inpo_loss,
    ipo_loss,
    nash_md_loss,
    sppo_loss,
)
from forethought.models.load import cast_weights
from forethought.models.policy import Policy

__all__ = [
    "PREVIOUS",
    "REASONS",
    "REFERENCE",
    "Answers",
    "Numbers",
    "PairConfig",
    "PairLossConfig",
    "PairTrainer",
    "PreferencePair",
    "annotate",
    "left_out",
    "measure_pairs",
    "micro_batches",
    "pair_loss",
    "update_pairs",
    "usable_pairs",
]

PairLoss = Literal["dpo", "ipo", "inpo", "sppo", "nash_md"]
_READS = {
    "dpo": ("beta", "base", "form", "label_smoothing"),
    "ipo": ("beta", "base"),
    "inpo": ("eta", "tau"),
    "sppo": ("beta",),
    "nash_md": ("beta",),
}
_BETA = {"dpo": 0.1, "ipo": 0.1, "sppo": 0.001, "nash_md": 0.1}
_ETA = 0.005


class Numbers(NamedTuple):
    """The strengths of a loss with their defaults filled in; NaN where it reads none."""

    beta: float
    eta: float
    tau: float


@dataclass(frozen=True, kw_only=True)
class PairLossConfig:
    """Which loss, and what it is tied to; see `pair_losses`. A setting that the loss does not read is an error."""

    method_name: ClassVar[str] = "pairs"

    loss: PairLoss = "dpo"
    beta: float | None = None
    """dpo, ipo, nash_md: strength of the tie (default 0.1); sppo: inverse step size (default 0.001)."""
    base: Literal["reference", "previous", "none"] = "reference"
    """dpo, ipo: what h is measured against; none is reference-free."""
    form: Form = "sigmoid"
    """dpo: sigmoid, hinge, or robust (with label_smoothing)."""
    label_smoothing: float = 0.0
    """dpo: share of labels taken to be flipped."""
    eta: float | None = None
    """inpo: inverse step size (default 0.005, the paper's)."""
    tau: float | None = None
    """inpo: strength of the tie to the reference (default eta / 3, the paper's)."""

    def __post_init__(self):
        if bad := self.problems():
            raise ConfigError(f"{self.method_name}: " + "; ".join(bad))

    def problems(self) -> list[str]:
        """What is wrong with the settings, each with its fix."""
        if self.loss not in _READS:
            return [f"loss={self.loss!r}: give one of {', '.join(_READS)}"]
        reads = _READS[self.loss]
        bad = []
        for f in fields(PairLossConfig):
            if f.name != "loss" and f.name not in reads and getattr(self, f.name) != f.default:
                bad.append(
                    f"{f.name}={getattr(self, f.name)}: loss={self.loss} does not read it (but {', '.join(reads)})"
                )
        if self.base not in ("reference", "previous", "none"):
            bad.append(f"base={self.base!r}: 'reference', 'previous' or 'none'")
        beta, eta, tau = self.numbers()
        try:
            if self.loss == "inpo":
                check_inpo(eta, tau)
            else:
                check_dpo(beta, self.form, self.label_smoothing)
        except ConfigError as err:
            bad.append(str(err))
        return bad

    def numbers(self) -> Numbers:
        if self.loss == "inpo":
            eta = _ETA if self.eta is None else self.eta
            return Numbers(math.nan, eta, eta / 3 if self.tau is None else self.tau)
        return Numbers(_BETA[self.loss] if self.beta is None else self.beta, math.nan, math.nan)

    def columns(self, numbers: Numbers | None = None) -> list[str]:
        """The token columns that the loss reads."""
        if self.loss == "inpo":
            _, eta, tau = numbers or self.numbers()
            return ([REFERENCE] if tau > 0 else []) + ([PREVIOUS] if tau < eta else [])
        if self.loss == "sppo":
            return [PREVIOUS]
        if self.loss == "nash_md":
            return [REFERENCE]
        return {"reference": [REFERENCE], "previous": [PREVIOUS], "none": []}[self.base]


@dataclass(frozen=True, kw_only=True)
class PairConfig(PairLossConfig):
    """Settings of offline preference learning. One optimiser step sees `batch_size` pairs."""

    labels: Literal["hard", "soft"] = "hard"
    """soft: weigh both orders of a pair by its `p` (dpo, ipo, inpo)."""
    epochs: int = 1
    """Passes over the pairs; with `steps` > 0 that many steps are made instead."""
    steps: int = 0
    batch_size: int = 8
    """Pairs a step; the last batch of an epoch may be smaller."""
    micro_tokens: int = 4096
    """Packed tokens per forward."""
    seed: int = 0
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6))

    def problems(self) -> list[str]:
        bad = super().problems()
        for name in ("epochs", "batch_size", "micro_tokens"):
            if getattr(self, name) < 1:
                bad.append(f"{name}={getattr(self, name)}: give at least 1")
        if self.steps < 0:
            bad.append(f"steps={self.steps}: give 0 (train for `epochs`) or a positive number")
        if self.labels not in ("hard", "soft"):
            bad.append(f"labels={self.labels!r}: 'hard' or 'soft'")
        if self.labels == "soft" and self.loss in ("sppo", "nash_md"):
            bad.append(f"labels=soft: loss={self.loss} reads win probabilities, not labels")
        return bad


# -- the loss of a micro-batch -----------------------------------------------------------------------------------------


def pair_loss(
    config: PairLossConfig,
    numbers: Numbers,
    answers: Answers,
    pairs: Sequence[PreferencePair],
    logp: torch.Tensor,
    columns: dict[str, torch.Tensor],
    *,
    total: float,
    soft: bool = False,
) -> LossOut:
    """The loss of the pairs of one batch, each with coefficient 1/total, and its metrics.

    Beside those of `pair_losses`: loss/excess for hard labels with a known p, margin/... of every column, and moved/max,
    the largest |D_policy - D_previous| (0 before the first step of an iteration).

    Args:
        logp: [M] log-probs of the batch's targets, with gradient. columns: [M] each.
        total: pairs of the whole step. soft: weigh both orders by p.

    Raises:
        ConfigError, DataError: see `pair_losses`; a pair without the win probabilities that its loss reads.
    """
    beta, eta, tau = numbers
    p = torch.tensor([pair.p for pair in pairs], dtype=answers.dtype, device=logp.device)
    coef = torch.full_like(p, 1 / total)
    policy = answers.sums(logp)
    ties = {name: answers.sums(values) for name, values in columns.items() if name in (REFERENCE, PREVIOUS)}
    none = (None, None)
    labels = p if soft else None
    if config.loss in ("dpo", "ipo"):
        base = ties.get({"reference": REFERENCE, "previous": PREVIOUS}.get(config.base, ""), none)
        if config.loss == "ipo":
            out = ipo_loss(*policy, *base, coef, beta=beta, p=labels)
        else:
            smooth = config.label_smoothing
            out = dpo_loss(*policy, *base, coef, beta=beta, form=config.form, label_smoothing=smooth, p=labels)
    elif config.loss == "inpo":
        reference, previous = ties.get(REFERENCE, none), ties.get(PREVIOUS, none)
        out = inpo_loss(*policy, *reference, *previous, coef, eta=eta, tau=tau, p=labels)
    else:
        wins = torch.tensor([_wins(pair, config.loss) for pair in pairs], dtype=answers.dtype, device=logp.device)
        if config.loss == "sppo":
            out = sppo_loss(*policy, *ties[PREVIOUS], wins[:, 0], wins[:, 1], coef, beta=beta)
        else:
            out = _nash_md(answers, logp, columns[REFERENCE], wins, coef, beta)
    metrics = dict(out.metrics)
    if config.loss in ("ipo", "inpo") and not soft:
        rest = (coef * floor(p, eta if config.loss == "inpo" else beta)).sum()
        metrics["loss/excess"] = float((out.loss - rest).detach())
    margin = (policy[0] - policy[1]).detach()
    for column, (chosen, rejected) in ties.items():
        name = {REFERENCE: "reference", PREVIOUS: "previous"}[column]
        metrics[f"margin/{name}"] = float((coef * (chosen - rejected)).sum())
        if column == PREVIOUS:
            metrics["moved/max"] = float((margin - chosen + rejected).abs().max())
    metrics["margin/policy"] = float((coef * margin).sum())
    return LossOut(out.loss, metrics)


def _wins(pair: PreferencePair, loss: str) -> tuple[float, float]:
    if pair.win_chosen is None or pair.win_rejected is None:
        raise DataError(
            f"pair {pair.name!r}: {loss} reads the win probability of each answer; give win_chosen and win_rejected"
        )
    return pair.win_chosen, pair.win_rejected


def _nash_md(answers: Answers, logp, reference, wins, coef, beta) -> LossOut:
    """Each of the two answers of a pair counts half of it."""
    win, weight = wins.new_zeros(answers.count), wins.new_zeros(answers.count)
    for side, which in enumerate((answers.chosen, answers.rejected)):
        win.index_copy_(0, which, wins[:, side])
        weight.index_add_(0, which, coef / 2)
    tokens = answers.target
    terms = answers.share.to(answers.dtype) * weight[answers.owner]
    chosen, rejected = answers.sums(logp.detach())
    out = nash_md_loss(
        logp.index_select(0, tokens).to(answers.dtype),
        reference.index_select(0, tokens).to(answers.dtype),
        win[answers.owner],
        terms,
        beta=beta,
    )
    numbers = {"logps/chosen": chosen, "logps/rejected": rejected}
    return LossOut(out.loss, out.metrics | {name: float((coef * v).sum()) for name, v in numbers.items()})


def update_pairs(
    learner: Learner,
    pairs: Sequence[PreferencePair],
    config: PairLossConfig,
    numbers: Numbers,
    *,
    soft: bool = False,
    temperature: float = 1.0,
    watch: Sequence[str] = (),
) -> dict[str, float]:
    """One optimiser step on these pairs (this process's share of the global batch); returns its metrics.

    `watch`: columns that are only reported on (margin/previous, moved/max).

    Raises:
        DataError: a column that the loss reads is missing or not finite; see `Learner.update` for the rest.
    """
    columns = list(dict.fromkeys([*config.columns(numbers), *watch]))
    total = learner.distributed.sum(len(pairs))
    with learner.distributed.together():
        for column in columns:
            check_column(pairs, column)
        device = learner.policy.device
        packed = micro_batches(pairs, learner.policy.layout, learner.micro_tokens, columns) if pairs else []
        packed = [(batch.to(device), mine) for batch, mine in packed]
    where = {id(batch): (Answers(batch, mine), mine) for batch, mine in packed}

    def loss(t: Targets) -> LossOut:
        answers, mine = where[id(t.batch)]
        return pair_loss(config, numbers, answers, mine, t.logp, t.columns, total=total, soft=soft)

    return learner.update(
        distinct(pairs), loss, batches=[b for b, _ in packed], columns=columns, temperature=temperature
    )


@torch.no_grad()
def measure_pairs(
    policy: Policy,
    pairs: Sequence[PreferencePair],
    config: PairLossConfig,
    numbers: Numbers | None = None,
    *,
    soft: bool = False,
    temperature: float = 1.0,
    micro_tokens: int | None = 4096,
) -> dict[str, np.ndarray]:
    """Numbers of each pair [P], without a step and without dropout: loss, policy (D), and margin (D minus its base, as h).

    Raises:
        DataError: a column that the loss reads is missing or not finite.
    """
    numbers = numbers or config.numbers()
    columns = config.columns(numbers)
    for column in columns:
        check_column(pairs, column)
    place = {id(pair): i for i, pair in enumerate(pairs)}
    out = {name: np.full(len(pairs), math.nan) for name in ("loss", "policy", "margin")}
    training = policy.model.training
    policy.model.eval()
    try:
        for batch, mine in micro_batches(pairs, policy.layout, micro_tokens, columns):
            batch = batch.to(policy.device)
            answers = Answers(batch, mine)
            logp, _ = policy.logprobs(batch, temperature=temperature)
            chosen, rejected = answers.sums(logp)
            out["policy"][[place[id(pair)] for pair in mine]] = (chosen - rejected).cpu().numpy()
            for number, pair in enumerate(mine):
                one, at = answers.only(number), place[id(pair)]
                found = pair_loss(config, numbers, one, [pair], logp, batch.columns, total=1, soft=soft)
                out["loss"][at] = float(found.loss)
                out["margin"][at] = found.metrics.get("h/mean", found.metrics.get("rewards/margins", math.nan))
    finally:
        policy.model.train(training)
    return out


# -- offline -----------------------------------------------------------------------------------------------------------


class PairTrainer:
    """Offline preference learning: `train_step()`, or `session.fit` for a whole run.

    Args:
        policy: with fp32 weights; see `Learner`.
        pairs: sound ones (`usable_pairs`); several may share a tree.
        config: see `PairConfig`.
        reference, previous: policies whose log-probs the loss is tied to; each is read once, before the first step, and
            then let go. It is cast to `compute`. None: the policy as it is before the first step. "columns": the
            trees carry the log-probs already, in the columns "ref_logprob" and "prev_logprob".
        compute: dtype of forward and backward; masters are fp32.

    Raises:
        DataError: no pairs; a pair whose answers are equal, empty, after different prompts or too long (it is named);
            a log-prob that is missing or not finite.
        ConfigError: a policy is given that the loss does not read.
    """

    def __init__(
        self,
        policy: Policy,
        pairs: Sequence[PreferencePair],
        config: PairConfig,
        *,
        reference: Policy | Literal["columns"] | None = None,
        previous: Policy | Literal["columns"] | None = None,
        compute: torch.dtype = torch.float32,
    ):
        if not pairs:
            raise DataError("no preference pairs: the data is empty")
        for number, pair in enumerate(pairs):
            if wrong := problem(pair, policy.context):
                raise DataError(
                    f"pair {number} ({pair.name!r}): {REASONS[wrong]}; usable_pairs(pairs) leaves such pairs out"
                )
        self.policy, self.pairs, self.config = policy, list(pairs), config
        self._ties: dict[str, Policy | Literal["columns"] | None] = {REFERENCE: reference, PREVIOUS: previous}
        for name, column in (("reference", REFERENCE), ("previous", PREVIOUS)):
            if self._ties[column] is not None and column not in config.columns():
                raise ConfigError(f"{name}: the loss {config.loss!r} does not read it as it is set; leave it out")
        size = min(config.batch_size, len(pairs))
        self.sampler = BatchSampler(
            len(pairs), size, derive_seed(config.seed, "pairs"), epochs=None if config.steps else config.epochs
        )
        self.total = config.steps or config.epochs * -(-len(pairs) // size)
        self.learner = Learner(
            policy, config.optim, total_steps=self.total, compute=compute, micro_tokens=config.micro_tokens
        )
        self.compute = compute
        self.step = 0
        self.counts = {"tokens_generated": 0, "tokens_trained": 0}
        self._ready = False

    def prepare(self) -> None:
        """Fill the token columns that the loss reads; `train_step` does it by itself before the first step."""
        if self._ready:
            return
        if self.step:
            raise DataError("the log-probs of the reference belong to the weights before the first step")
        own: list[str] = []
        for column in self.config.columns():
            tie = self._ties[column]
            if tie is None:
                own.append(column)
            elif tie == "columns":
                check_column(self.pairs, column)
            else:
                if tie.dtype != self.compute:
                    cast_weights(tie.model, self.compute)
                annotate(tie, self.pairs, column, micro_tokens=self.config.micro_tokens)
        if own:
            annotate(self.policy, self.pairs, own[0], micro_tokens=self.config.micro_tokens)
            for tree in distinct(self.pairs):
                for column in own[1:]:
                    tree.column(column)[:] = tree.column(own[0])
        self._ties = dict.fromkeys(self._ties)
        self._ready = True

    def train_step(self, progress: Any = None) -> tuple[dict[str, float], list]:
        """One optimiser step; returns its metrics."""
        self.prepare()
        mine = self.learner.distributed.share([self.pairs[i] for i in next(self.sampler)])
        metrics: dict[str, float] = {"epoch": self.sampler.epoch}
        soft = self.config.labels == "soft"
        metrics |= update_pairs(self.learner, mine, self.config, self.config.numbers(), soft=soft)
        self.counts["tokens_trained"] = self.learner.tokens_trained
        self.step += 1
        return metrics, []

    def state_dict(self) -> dict[str, Any]:
        trees = distinct(self.pairs)
        columns = self.config.columns() if self._ready else []
        return {
            "step": self.step,
            "learner": self.learner.state_dict(),
            "sampler": self.sampler.state_dict(),
            "counts": dict(self.counts),
            "columns": {c: torch.from_numpy(np.concatenate([t.column(c) for t in trees])) for c in columns},
            "ready": self._ready,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trees = distinct(self.pairs)
        sizes = [tree.n_tokens for tree in trees]
        for column, values in state["columns"].items():
            if len(values) != sum(sizes):
                raise DataError(f"the checkpoint has {len(values)} values of {column!r}, the pairs {sum(sizes)} tokens")
            for tree, part in zip(trees, np.split(values.numpy(), np.cumsum(sizes)[:-1]), strict=True):
                tree.column(column)[:] = part
        self._ready = state["ready"]
        self.step = state["step"]
        self.learner.load_state_dict(state["learner"])
        self.sampler.load_state_dict(state["sampler"])
        self.counts = dict(state["counts"])
