"""The systems, one module or folder each. This file is the catalogue and imports none of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from forethought.errors import ConfigError, nearest


@dataclass(frozen=True)
class Entry:
    """One system: where it stands, what it is, and how long its mini profile takes."""

    slug: str
    title: str
    paper: str
    line: str
    module: str
    mini: str
    """Measured time of the mini profile on 2 CPU cores (docs/results)."""


CATALOGUE: tuple[Entry, ...] = (
    Entry(
        slug="one-shot-rlvr",
        title="One-Shot RLVR",
        paper="Wang et al., arXiv 2504.20571",
        line="GRPO on one problem, chosen by the variance of its historical accuracy, against the whole pool",
        module="forethought.recipes.one_shot_rlvr",
        mini="31 minutes on 2 cores shared with other work",
    ),
    Entry(
        slug="inpo",
        title="INPO",
        paper="Zhang et al., arXiv 2407.00617",
        line="iterates towards the Nash policy of a general (cyclic) preference, against iterative DPO, IPO, SPPO and Nash-MD",
        module="forethought.recipes.inpo",
        mini="not run in full yet",
    ),
    Entry(
        slug="rlsp",
        title="RLSP",
        paper="Ye et al., arXiv 2502.06773",
        line="search by SFT on traces and PPO on two decoupled signals, a verifier and an exploration reward",
        module="forethought.recipes.rlsp",
        mini="not run in full yet",
    ),
    Entry(
        slug="phi-4-mini-reasoning",
        title="Phi-4-Mini-Reasoning",
        paper="Xu et al., arXiv 2504.21233",
        line="mid-training on packed traces, clean SFT, rollout DPO, then RL with three fixes of plain GRPO, as a ladder",
        module="forethought.recipes.phi_4_mini_reasoning",
        mini="not run in full yet",
    ),
)


def find(slug: str) -> Entry:
    """The catalogue's entry.

    Raises:
        ConfigError: no such recipe; the nearest name is offered.
    """
    for entry in CATALOGUE:
        if entry.slug == slug:
            return entry
    names = [e.slug for e in CATALOGUE]
    raise ConfigError(f"recipe {slug!r} is not known{nearest(slug, names)} known: {', '.join(names)}")


def load(slug: str) -> Any:
    """The recipe's module: PROFILES (name -> config), CLAIM, and run(config, run) -> results."""
    return importlib.import_module(find(slug).module)
