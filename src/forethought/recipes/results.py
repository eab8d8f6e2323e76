"""results.json: what every recipe, demo and job leaves behind (design section 4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from forethought.evaluate.stats import mean_ci
from forethought.rundir import versions

Verdict = Literal["shown", "not shown", "reversed"]


def summarise(per_seed: Sequence[float | None]) -> dict[str, Any]:
    """{mean, ci95, n, per_seed} of one metric; seeds without a number are null and do not count."""
    values = [None if v is None or not math.isfinite(v) else float(v) for v in per_seed]
    known = [v for v in values if v is not None]
    if not known:
        return {"mean": None, "ci95": [None, None], "n": 0, "per_seed": values}
    estimate = mean_ci(known)
    return {"mean": estimate.mean, "ci95": [estimate.low, estimate.high], "n": estimate.n, "per_seed": values}


def arms_table(per_arm: Mapping[str, Sequence[Mapping[str, float | None]]]) -> dict[str, dict[str, Any]]:
    """Arm -> metric -> summary, from one dict of numbers per seed."""
    out: dict[str, dict[str, Any]] = {}
    for arm, seeds in per_arm.items():
        names = list(dict.fromkeys(name for row in seeds for name in row))
        out[arm] = {name: summarise([row.get(name) for row in seeds]) for name in names}
    return out


def paired_differences(
    done: Mapping[tuple[str, int], Mapping[str, Any]],
    pairs: Iterable[tuple[str, str]],
    seeds: Sequence[int],
    metric: str,
) -> dict[str, dict[str, Any]]:
    """ "a minus b" -> summary of the per-seed differences of a metric, for the pairs of arms that were both run."""
    run = {arm for arm, _ in done}
    return {
        f"{a} minus {b}": summarise([done[a, s][metric] - done[b, s][metric] for s in seeds])
        for a, b in pairs
        if a in run and b in run
    }


def results(
    *,
    recipe: str,
    profile: str,
    model: str,
    seeds: Sequence[int],
    claim: str,
    arms: Mapping[str, Mapping[str, Any]],
    budget: Mapping[str, Mapping[str, float]],
    verdict: Verdict,
    verdict_rule: str,
    **more: Any,
) -> dict[str, Any]:
    """The mapping that goes to results.json. `more`: further top-level entries (notes, examples, tables)."""
    return {
        "schema": 1,
        "recipe": recipe,
        "profile": profile,
        "model": model,
        "seeds": list(seeds),
        "claim": claim,
        "arms": arms,
        "budget": budget,
        "verdict": verdict,
        "verdict_rule": verdict_rule,
        "versions": versions(),
        **more,
    }


def markdown_table(arms: Mapping[str, Mapping[str, Any]], metrics: Sequence[str], digits: int = 3) -> str:
    """Arms x metrics as a Markdown table of `mean [low, high]`, for the pages under docs/results."""

    def cell(entry: Mapping[str, Any] | None) -> str:
        if not entry or entry["mean"] is None:
            return "-"
        low, high = entry["ci95"]
        interval = "" if low is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
        return f"{entry['mean']:.{digits}f}{interval}"

    rows = ["| arm | " + " | ".join(metrics) + " |", "|---" * (len(metrics) + 1) + "|"]
    rows += [f"| {arm} | " + " | ".join(cell(table.get(m)) for m in metrics) + " |" for arm, table in arms.items()]
    return "\n".join(rows)
