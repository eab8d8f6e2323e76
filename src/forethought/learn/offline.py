"""Offline learning: supervised fine-tuning on token trees made from records.

Every record is one tree (`models.chat.sft_tree`); its targets are the assistant's tokens and their end tokens.
Documents of a batch are packed without padding and cannot see each other. With `bin_length` the unit of a batch is a
sequence of packed documents, as in pretraining: a step then sees about as many tokens whatever the documents' lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forethought.config import derive_seed
from forethought.data import BatchSampler
from forethought.errors import ConfigError, DataError
from forethought.learn.learner import Learner, Targets
from forethought.learn.losses import LossOut, Reduction, sft_loss
from forethought.learn.optim import OptimConfig
from forethought.models.policy import Policy
from forethought.tree.bins import best_fit
from forethought.tree.tree import TokenTree


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Settings of supervised fine-tuning. One optimiser step sees `batch_size` records."""

    epochs: int = 1
    """Passes over the data; with `steps` > 0 that many steps are made instead."""
    steps: int = 0
    batch_size: int = 8
    """Records a step (bins with `bin_length`); the last batch of an epoch may be smaller."""
    bin_length: int = 0
    """Tokens of a packed sequence: records are packed by best fit, longer ones are dropped and counted. 0: no bins."""
    reduction: Reduction = "token-mean"
    micro_tokens: int = 4096
    """Packed tokens per forward."""
    eval_every: int = 0
    save_every: int = 0
    seed: int = 0
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=2e-5))

    def __post_init__(self):
        bad = [
            f"{name}={getattr(self, name)}: give at least 1"
            for name in ("epochs", "batch_size", "micro_tokens")
            if getattr(self, name) < 1
        ]
        if self.bin_length < 0:
            bad.append(f"bin_length={self.bin_length}: give 0 (a batch counts records) or a number of tokens")
        if self.steps < 0:
            bad.append(f"steps={self.steps}: give 0 (train for `epochs`) or a positive number")
        if bad:
            raise ConfigError("sft: " + "; ".join(bad))


def sft_objective(t: Targets) -> LossOut:
    """Mean negative log-likelihood of the targets."""
    return sft_loss(t.logp, t.coef)


@dataclass(frozen=True)
class Packing:
    """bins: record indices of each sequence; dropped: records longer than a sequence; efficiency: share of the
    sequences' tokens that are real."""

    bins: list[list[int]]
    dropped: list[int]
    efficiency: float


def pack_bins(trees: Sequence[TokenTree], bin_length: int) -> Packing:
    """Records into sequences of `bin_length` tokens.

    Raises:
        DataError: every record is longer than that.
    """
    lengths = [t.n_tokens for t in trees]
    bins, dropped = best_fit(lengths, bin_length)
    if not bins:
        raise DataError(
            f"bin_length={bin_length} dropped all {len(trees)} records (the shortest has {min(lengths)} tokens): raise it"
        )
    real = sum(lengths) - sum(lengths[i] for i in dropped)
    return Packing(bins, dropped, real / (len(bins) * bin_length))


class SFTTrainer:
    """Supervised fine-tuning over trees whose token weights mark the targets.

    Raises:
        DataError: no trees, no target in any of them, or a path longer than the context.
    """

    def __init__(
        self, policy: Policy, trees: Sequence[TokenTree], config: SFTConfig, *, compute: torch.dtype = torch.float32
    ):
        if not trees:
            raise DataError("no records: the data is empty")
        if not any(t.weight.any() for t in trees):
            raise DataError("no record has a target: nothing of them is written by the assistant")
        for number, tree in enumerate(trees):
            longest = max(tree.path_length(n) for n in tree.leaves())
            if longest > policy.context:
                raise DataError(
                    f"record {number} has {longest} tokens; the context is {policy.context}: give a max_length"
                )
        self.policy, self.trees, self.config = policy, list(trees), config
        self.packing = pack_bins(trees, config.bin_length) if config.bin_length else None
        self.units = self.packing.bins if self.packing else [[i] for i in range(len(trees))]
        """Record indices of what a batch counts: bins or single records."""
        size = min(config.batch_size, len(self.units))
        self.sampler = BatchSampler(
            len(self.units),
            size,
            derive_seed(config.seed, "records"),
            epochs=None if config.steps else config.epochs,
        )
        self.total = config.steps or config.epochs * -(-len(self.units) // size)
        self.learner = Learner(
            policy,
            config.optim,
            total_steps=self.total,
            compute=compute,
            micro_tokens=config.micro_tokens,
            dropout=hasattr(policy.model, "peft_config"),  # an adapter's own; full weights train without
        )
        self.step = 0
        self.counts = {"tokens_generated": 0, "tokens_trained": 0}

    def train_step(self, progress: Any = None) -> tuple[dict[str, float], list]:
        """One optimiser step; a batch without any target is skipped and counted."""
        share = self.learner.distributed.share([self.trees[i] for unit in next(self.sampler) for i in self.units[unit]])
        metrics: dict[str, float] = {"epoch": self.sampler.epoch}
        if self.learner.distributed.sum(sum(float(t.weight.sum()) for t in share)) > 0:
            metrics |= self.learner.update(share, sft_objective, reduction=self.config.reduction)
        else:
            metrics["batches_without_target"] = 1
        self.counts["tokens_trained"] = self.learner.tokens_trained
        self.step += 1
        return metrics, []

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "learner": self.learner.state_dict(),
            "sampler": self.sampler.state_dict(),
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.learner.load_state_dict(state["learner"])
        self.sampler.load_state_dict(state["sampler"])
        self.counts = dict(state["counts"])
