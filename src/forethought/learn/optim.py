"""Optimiser and schedule: AdamW on fp32 master weights, whatever the precision of the compute weights.

In fp32 the model's parameters are the masters. In bf16 the model holds rounded copies: every finished gradient is added
to the master's fp32 gradient at once (so accumulation over micro-batches loses nothing), the step runs on the masters,
and the copies are rounded anew. So a small step is never lost to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from forethought.errors import ConfigError
from forethought.models.load import cast_weights

_COLLECTOR = "_forethought_collector"


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 1e-5
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay; applied to matrices only (not to biases and norms)."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: constant, or a fall that would reach 0 with the step after the last."""
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    """Warm-up as a share of all steps, in place of `warmup_steps`."""

    def __post_init__(self):
        bad = []
        if not (math.isfinite(self.lr) and self.lr > 0):
            bad.append(f"lr={self.lr}: give a positive number, for example 1e-5")
        if not 0 <= self.weight_decay < math.inf:
            bad.append(f"weight_decay={self.weight_decay}: give 0 or more")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            bad.append(f"beta1={self.beta1}, beta2={self.beta2}: both lie in [0, 1)")
        if not 0 < self.eps < math.inf:
            bad.append(f"eps={self.eps}: give a positive number")
        if not 0 <= self.grad_clip < math.inf:
            bad.append(f"grad_clip={self.grad_clip}: give 0 (off) or a positive norm")
        if self.warmup_steps < 0:
            bad.append(f"warmup_steps={self.warmup_steps}: give 0 or more")
        if not 0 <= self.warmup_ratio < 1:
            bad.append(f"warmup_ratio={self.warmup_ratio}: give a share of the steps, 0 <= share < 1")
        if self.warmup_steps and self.warmup_ratio:
            bad.append(f"warmup_steps={self.warmup_steps}, warmup_ratio={self.warmup_ratio}: give one of them")
        if self.schedule not in ("constant", "linear", "cosine"):
            bad.append(f"schedule={self.schedule!r}: 'constant', 'linear' or 'cosine'")
        if bad:
            raise ConfigError("optim: " + "; ".join(bad))

    def factor(self, step: int, total: int) -> float:
        """Multiplier of lr at 0-based optimiser step `step` of `total`."""
        warmup = self.warmup_steps or math.ceil(self.warmup_ratio * total)
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


class Optimizer:
    """AdamW over the trainable parameters of `model`, with fp32 masters.

    Args:
        model: in fp32 (its weights become the masters).
        config: see `OptimConfig`.
        total_steps: for the schedule.
        compute: dtype that the model's parameters are cast to, the frozen ones too; buffers keep theirs.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, *, total_steps: int, compute: torch.dtype = torch.float32
    ):
        self.config, self.total_steps, self.step_index = config, total_steps, 0
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ConfigError("the model has no trainable parameter: every one has requires_grad=False")
        wrong = sorted({str(p.dtype) for _, p in named} - {"torch.float32"})
        if wrong:
            raise ConfigError(
                f"master weights are fp32, but the model holds {', '.join(wrong)}: load it with dtype=float32"
            )
        self.names = [n for n, _ in named]
        self.split = compute != torch.float32
        self.masters = [p.detach().clone() if self.split else p for _, p in named]
        if self.split:
            cast_weights(model, compute)
        self.params = [p for _, p in model.named_parameters() if p.requires_grad]
        if self.split:
            for master, p in zip(self.masters, self.params, strict=True):
                master.requires_grad_(True)
                # A later optimiser of the same model takes over: two collectors would eat each other's gradients.
                if (before := getattr(p, _COLLECTOR, None)) is not None:
                    before.remove()
                setattr(p, _COLLECTOR, p.register_post_accumulate_grad_hook(self._collector(master)))
        decay = [m for m in self.masters if m.ndim >= 2]
        plain = [m for m in self.masters if m.ndim < 2]
        groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        fused = self.masters[0].device.type in ("cpu", "cuda")
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=fused,
        )

    @staticmethod
    def _collector(master: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def collect(p: torch.Tensor) -> None:
            if p.grad is None:
                return
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad.add_(p.grad)
            p.grad = None

        return collect

    def reset(self, total_steps: int) -> None:
        """Begin anew on the weights as they are: no moments, no gradients, the schedule at its first step."""
        self.zero_grad()
        self.adamw.state.clear()
        self.step_index, self.total_steps = 0, total_steps

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.config.lr * self.config.factor(self.step_index, self.total_steps)

    @torch.no_grad()
    def norm(self) -> float:
        """Norm of the accumulated gradients.

        Raises:
            FloatingPointError: it is not finite; the gradients were cleared.
        """
        norm = float(torch.nn.utils.get_total_norm([m.grad for m in self.masters if m.grad is not None]))
        if not math.isfinite(norm):
            self.zero_grad()
            raise FloatingPointError(
                f"the gradient norm is {norm} at optimiser step {self.step_index}; the weights were left as they were"
            )
        return norm

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """One AdamW step on the accumulated gradients; clears them. Returns grad_norm (before clipping) and lr.

        A non-finite gradient norm raises before any weight is touched.
        """
        norm = self.norm()
        if self.config.grad_clip and norm > self.config.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.grad_clip, torch.tensor(norm))
        lr = self.lr
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.refresh()
        self.zero_grad()
        self.step_index += 1
        return {"grad_norm": norm, "lr": lr}

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the compute weights anew."""
        if self.split:
            for p, master in zip(self.params, self.masters, strict=True):
                p.copy_(master)

    def zero_grad(self) -> None:
        for tensor in (*self.masters, *self.params):
            tensor.grad = None

    def master_state(self) -> dict[str, torch.Tensor]:
        """fp32 trainable weights by parameter name."""
        return {n: m.detach() for n, m in zip(self.names, self.masters, strict=True)}

    @torch.no_grad()
    def load_masters(self, state: dict[str, torch.Tensor]) -> None:
        """Put these weights (see `master_state`) into the masters and the compute copies; the moments stay.

        Raises:
            ConfigError: they are not this model's.
        """
        if list(state) != self.names:
            raise ConfigError("the checkpoint's trainable parameters are not those of this model")
        for master, saved in zip(self.masters, state.values(), strict=True):
            master.copy_(saved)
        self.refresh()

    def state_dict(self) -> dict[str, Any]:
        return {"step_index": self.step_index, "masters": self.master_state(), "adamw": self.adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_masters(state["masters"])
        self.step_index = state["step_index"]
        self.adamw.load_state_dict(state["adamw"])
