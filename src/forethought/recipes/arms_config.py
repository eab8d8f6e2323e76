"""Settings that every recipe has: seeds, arms, the model, and how its jobs run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ArmsConfig:
    """A comparison of arms over seeds; a recipe's own settings are a subclass, which gives `arms` its default."""

    seeds: tuple[int, ...] = (0, 1, 2)
    arms: tuple[str, ...]
    model: str = "miniature"
    """"miniature" makes its own model; otherwise a pretrained one, which works on files."""
    max_rows: int = 128
    """Rows that the engine decodes together."""
    keep_models: bool = False
    workers: int = 0
    """Jobs side by side; 0: one per core (the miniature, on a CPU), 1 otherwise."""
    device: str | None = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Compute precision; master weights are fp32."""

    def arm_problems(self, check: Callable[[str], Any]) -> list[str]:
        """What is wrong with these settings, each with its fix.

        Args:
            check: raises ConfigError for a name that is no arm.
        """
        bad = []
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            bad.append(f"seeds={self.seeds}: give at least one, each once")
        if not self.arms or len(set(self.arms)) < len(self.arms):
            bad.append(f"arms={self.arms}: give at least one, each once")
        for arm in self.arms:
            check(arm)
        if self.workers < 0:
            bad.append(f"workers={self.workers}: give 0 (one per core) or a number of processes")
        if self.max_rows < 1:
            bad.append(f"max_rows={self.max_rows}: give at least 1")
        return bad

    @property
    def processes(self) -> int:
        """How many jobs run side by side."""
        return self.workers or (os.cpu_count() if self.model == "miniature" else 1) or 1

    def compute_dtype(self) -> Any:
        """The torch dtype of forward and backward."""
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]
