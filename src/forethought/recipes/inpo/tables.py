"""The exact game of the recipe: every method from the reference, in a table, with what became of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forethought.errors import ConfigError
from forethought.recipes.inpo.games import (
    CYCLE,
    Array,
    Method,
    Trajectory,
    check_preferences,
    critical_eta,
    dual_gap,
    log_policy,
    nash,
    omega,
    play,
)


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """The game in a table."""

    preferences: tuple[tuple[float, ...], ...] = field(default_factory=lambda: tuple(map(tuple, CYCLE.tolist())))
    """P [n, n]."""
    shares: tuple[float, ...] = ()
    """Reference policy [n]; empty: uniform."""
    tau: float = 0.05
    iterations: int = 1000
    """0: no table."""
    seeds: int = 8
    """Of the runs on drawn pairs."""

    def __post_init__(self):
        bad = []
        if not (math.isfinite(self.tau) and self.tau > 0):
            bad.append(f"tau={self.tau}: give a positive number")
        if self.iterations < 0:
            bad.append(f"iterations={self.iterations}: give 0 (no table) or more")
        if self.seeds < 1:
            bad.append(f"seeds={self.seeds}: give at least 1")
        if self.shares and len(self.shares) != len(self.preferences):
            bad.append(f"shares={self.shares}: give {len(self.preferences)} numbers, one for each answer, or none")
        if bad:
            raise ConfigError("table: " + "; ".join(bad))
        check_preferences(self.preferences)

    @property
    def P(self) -> Array:
        return check_preferences(self.preferences)

    @property
    def ref(self) -> Array:
        n = len(self.preferences)
        return log_policy(self.shares or [1 / n] * n)


def methods(tau: float) -> dict[str, Method]:
    """The runs of the comparison, by name."""
    out = {f"INPO, eta {eta:g}": Method(eta=eta, tau=tau) for eta in (1.0, 0.5, 0.35, 0.3, 0.2, 0.1)}
    out["INPO, growing eta"] = Method(schedule="growing", tau=tau)
    out["INPO, tau 0 (SPPO)"] = Method(eta=1.0, tau=0.0)
    out |= {f"INPO, {n} pairs": Method(eta=1.0, tau=tau, pairs=n) for n in (200, 2000)}
    out["INPO, 200 soft pairs"] = Method(eta=1.0, tau=tau, pairs=200, pair_mode="soft")
    out["INPO, tournament"] = Method(eta=1.0, tau=tau, pair_mode="tournament")
    out |= {f"Nash-MD, eta {eta:g}": Method(name="nash-md", eta=eta, tau=tau) for eta in (1.0, 0.3, 0.1)}
    out |= {f"DPO on ref, beta {b:g}": Method(name="dpo", beta=b) for b in (0.05, 0.1, 0.5, 1.0, 2.0)}
    out |= {f"DPO on previous, beta {b:g}": Method(name="dpo", beta=b, base="previous") for b in (0.5, 1.0, 3.0)}
    out |= {f"IPO on ref, beta {b:g}": Method(name="ipo", beta=b) for b in (0.05, 0.2, 1.0)}
    return {name: method for name, method in out.items() if not (method.name == "inpo" and method.eta < method.tau)}


def outcome(run: Trajectory, tau: float, star: Array) -> dict[str, float]:
    """What became of a run: numbers of its last iterates and of its average."""
    distances, gaps = run.distances(star), run.gaps(tau)
    return {
        "KL, t=20": float(distances[min(20, len(distances) - 1)]),
        "KL, t=100": float(distances[min(100, len(distances) - 1)]),
        "KL, last 100": float(distances[-100:].mean()),
        "gap, last": float(gaps[-1]),
        "gap, last 100": float(gaps[-100:].mean()),
        "gap, average policy": float(dual_gap(run.P, run.average(), run.ref, tau)),
        "spread, second half": run.spread(len(gaps) // 2),
    }


def play_all(config: TableConfig) -> dict[str, Any]:
    """Rows (name -> numbers, means over seeds for drawn pairs), gap curves with intervals, and the game's own numbers."""
    from forethought.report.curves import interval

    P, ref, tau = config.P, config.ref, config.tau
    star = nash(P, ref, tau)
    rows: dict[str, dict[str, float]] = {}
    curves: dict[str, dict[str, Any]] = {}
    shown = sorted({round(t) for t in np.geomspace(1, config.iterations, 60)} | {0})
    for name, method in methods(tau).items():
        seeds = range(config.seeds if method.pairs else 1)
        runs = [play(method, P, ref, config.iterations, seed=s) for s in seeds]
        found = [outcome(r, tau, star) for r in runs]
        rows[name] = {key: float(np.mean([f[key] for f in found])) for key in found[0]}
        gaps = np.array([r.gaps(tau)[shown] for r in runs])
        bands = [interval(column.tolist()) for column in gaps.T]
        curves[name] = {
            "step": shown,
            "mean": gaps.mean(0).tolist(),
            "lo": [lo for lo, _ in bands],
            "hi": [hi for _, hi in bands],
        }
    game = {
        "equilibrium": [round(float(p), 5) for p in np.exp(star)],
        "omega": omega(P, star),
        "critical eta": critical_eta(P, ref, tau),
        "gap of the reference": float(dual_gap(P, ref, ref, tau)),
    }
    return {"rows": rows, "curves": curves, "game": game}


def said(rows: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
    """What the paper and the spec say of the exact game, held against the rows."""
    checks = (
        ("INPO at eta 1 settles at the equilibrium", "INPO, eta 1", "KL, last 100", lambda v: v < 1e-6),
        (
            "INPO at eta 0.2, below the critical eta, goes round",
            "INPO, eta 0.2",
            "spread, second half",
            lambda v: v > 0.5,
        ),
        ("DPO on ref at beta 0.05 goes round", "DPO on ref, beta 0.05", "spread, second half", lambda v: v > 0.9),
        ("DPO on ref at beta 1 settles", "DPO on ref, beta 1", "spread, second half", lambda v: v < 1e-6),
        ("DPO on ref at beta 1 is off the equilibrium", "DPO on ref, beta 1", "KL, last 100", lambda v: v > 1e-3),
        ("DPO on the previous iterate goes round", "DPO on previous, beta 1", "spread, second half", lambda v: v > 0.9),
    )
    return {text: test(rows[name][key]) for text, name, key, test in checks if name in rows}
