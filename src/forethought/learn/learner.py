"""Learner: token trees + a loss -> one optimiser step.

Trees are packed into micro-batches under a token budget, every loss coefficient is computed over the whole global batch
first, so neither the budget nor the number of processes changes the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from forethought.errors import DataError
from forethought.learn.distributed import Distributed
from forethought.learn.losses import LossOut, Reduction, reduction_coefficients
from forethought.learn.optim import OptimConfig, Optimizer
from forethought.models.policy import Policy
from forethought.tree.pack import Batch, pack
from forethought.tree.tree import TokenTree


@dataclass
class Targets:
    """What a loss sees of one micro-batch; flat float32 tensors [M], one entry per trained token.

    logp: log-probs under the policy now (with gradient). entropy: of its distribution there (with gradient), if asked.
    behaviour: the sampler's log-probs (NaN where not sampled). advantage; coef: global reduction coefficients;
    share: each token's share of all trained tokens (sums to 1 over the global batch), for metrics; sequence.
    columns: further token columns by name. hidden: [M, D] final hidden states that the log-probs were read from (with
    gradient), for further heads. batch: the micro-batch itself, which says where each target came from.
    """

    logp: torch.Tensor
    entropy: torch.Tensor | None
    behaviour: torch.Tensor
    advantage: torch.Tensor
    coef: torch.Tensor
    share: torch.Tensor
    sequence: torch.Tensor
    columns: dict[str, torch.Tensor]
    hidden: torch.Tensor
    batch: Batch


Loss = Callable[[Targets], LossOut]


class Learner:
    """Owns the optimiser of a policy.

    Args:
        policy: with fp32 weights; cast to `compute` here, masters stay fp32.
        config: optimiser settings.
        total_steps: optimiser steps of the run (for the schedule).
        compute: dtype of forward and backward.
        micro_tokens: packed tokens per forward; None packs everything into one.
        dropout: train with the model's dropout; off by default, because a ratio compares two passes of one function.
        distributed: process group; by default what the environment says.
        model: what is optimised; by default the policy's model.

    `saves`: what else belongs into the model's folder is written by these functions of the folder (a critic).
    """

    def __init__(
        self,
        policy: Policy,
        config: OptimConfig,
        *,
        total_steps: int,
        compute: torch.dtype = torch.float32,
        micro_tokens: int | None = 4096,
        dropout: bool = False,
        distributed: Distributed | None = None,
        model: nn.Module | None = None,
    ):
        self.policy = policy
        self.dropout = dropout
        self.saves: list[Callable[[Path], None]] = []
        self.optimizer = Optimizer(
            policy.model if model is None else model, config, total_steps=total_steps, compute=compute
        )
        self.micro_tokens = micro_tokens
        self.distributed = distributed or Distributed()
        if self.distributed.world > 1:  # fresh adapters are drawn by each process for itself
            self.distributed.broadcast(self.optimizer.masters)
            self.optimizer.refresh()
        self.tokens_trained = 0

    def pack(
        self, trees: Sequence[TokenTree], columns: Iterable[str] = (), weights: Sequence[np.ndarray] | None = None
    ) -> list[Batch]:
        layout, budget = self.policy.layout, self.micro_tokens
        batches = pack(trees, layout=layout, max_tokens=budget, columns=columns, weights=weights)
        return [b.to(self.policy.device) for b in batches]

    def update(
        self,
        trees: Sequence[TokenTree],
        loss: Loss,
        *,
        weights: Sequence[np.ndarray] | None = None,
        batches: Sequence[Batch] | None = None,
        reduction: Reduction = "token-mean",
        max_length: int | None = None,
        columns: Iterable[str] = (),
        temperature: float = 1.0,
        entropy: bool = False,
        others: Mapping[str, Optimizer] | None = None,
    ) -> dict[str, float]:
        """One optimiser step on these trees (this process's share of the global batch).

        `weights`: per tree, token weights [T] in place of `tree.weight`. `batches`: the trees packed already, where a
        micro-batch has to hold certain targets together. `max_length`: see `losses.reduction_coefficients`.
        `others`: optimisers, by name, of further modules that the loss reads; they step together with the policy's or
        not at all, and report "<name>/grad_norm" and "<name>/lr".

        Metrics are those of the global batch: what the loss reports is summed over micro-batches and processes (it is
        coefficient-weighted already), and so are the token counts; of names ending in "/max" it is the maximum.

        Raises:
            DataError: no process has a trained token. FloatingPointError: non-finite loss or gradient. Whatever a loss
            raises. In all cases on every process, with no weight changed and no gradient left behind.
        """
        began = time.perf_counter()
        others = others or {}
        with self.distributed.together():
            if batches is None:
                batches = self.pack(trees, columns, weights)
            else:
                batches = [b.to(self.policy.device) for b in batches]
            weight = torch.cat([b.weight for b in batches]) if batches else torch.zeros(0)
            if not torch.isfinite(weight).all():
                raise DataError("a token weight is infinite: weights count trained paths")
        sequence = torch.cat([b.sequence for b in batches]) if batches else torch.zeros(0, dtype=torch.long)
        total = self.distributed.sum
        coefficients = reduction_coefficients(weight, sequence, reduction, max_length=max_length, total=total)
        shares = reduction_coefficients(weight, sequence, "token-mean", total=total)
        packed = time.perf_counter()
        metrics: dict[str, float] = {}
        self.policy.model.train(self.dropout)
        try:
            with self.distributed.together():
                begin = 0
                for batch in batches:
                    here = slice(begin, begin + batch.n_targets)
                    begin += batch.n_targets
                    out = self._backward(batch, loss, coefficients[here], shares[here], temperature, entropy)
                    _add(metrics, {"loss": float(out.loss.detach()), **out.metrics})
        except BaseException:
            for optimizer in (self.optimizer, *others.values()):
                optimizer.zero_grad()
            raise
        counts = {"tokens/trained": len(weight), "tokens/packed": sum(b.n_tokens for b in batches)}
        mine, metrics = metrics | counts, {}
        for row in self.distributed.gather(mine):
            _add(metrics, row)
        for optimizer in (self.optimizer, *others.values()):
            self.distributed.sum_gradients(optimizer.masters)
        try:
            for optimizer in others.values():
                optimizer.norm()
            metrics |= self.optimizer.step()
        except FloatingPointError:
            for optimizer in (self.optimizer, *others.values()):
                optimizer.zero_grad()
            raise
        for name, optimizer in others.items():
            metrics |= {f"{name}/{k}": v for k, v in optimizer.step().items()}
        self.tokens_trained += int(metrics["tokens/trained"])
        metrics["time/pack"] = packed - began
        metrics["time/update"] = time.perf_counter() - packed
        return metrics

    def _backward(
        self,
        batch: Batch,
        loss: Loss,
        coefficients: torch.Tensor,
        shares: torch.Tensor,
        temperature: float,
        entropy: bool,
    ) -> LossOut:
        """Forward and backward of one micro-batch; its gradients are added to what is there."""
        logp, spread, hidden = self.forward(batch, temperature, entropy)
        out = loss(
            Targets(
                logp=logp,
                entropy=spread,
                behaviour=batch.columns["logprob"],
                advantage=batch.advantage,
                coef=coefficients,
                share=shares,
                sequence=batch.sequence,
                columns=batch.columns,
                hidden=hidden,
                batch=batch,
            )
        )
        if not torch.isfinite(out.loss):
            raise FloatingPointError(f"the loss is {float(out.loss)}; no weight was changed")
        out.loss.backward()
        return out

    def forward(
        self, batch: Batch, temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Log-probs [M], entropies [M] if asked, and the hidden states [M, D] of both."""
        hidden = self.policy.hidden(batch).index_select(0, batch.predecessors)
        return *self.policy.head_logprobs(hidden, batch.targets, temperature=temperature, entropy=entropy), hidden

    # -- checkpoints --
    def save_model(self, folder: Path | str) -> None:
        """An HF folder with the fp32 master weights."""
        from forethought.models.load import save_pretrained

        save_pretrained(self.policy.model, self.policy.tokenizer, folder, state=self.optimizer.master_state())
        for save in self.saves:
            save(Path(folder))

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "tokens_trained": self.tokens_trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.tokens_trained = state["tokens_trained"]


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        total[name] = max(total.get(name, value), value) if name.endswith("/max") else total.get(name, 0) + value
