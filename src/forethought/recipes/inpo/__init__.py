"""INPO: iterative Nash policy optimisation, learning from general preferences (Zhang et al., arXiv 2407.00617).

The method: sample pairs from the current policy pi_t, let an oracle compare them, and regress the difference of
log-ratios h = D - (tau/eta) D_ref - (1 - tau/eta) D_t of each winner and loser on 1/(2 eta); the minimiser is the next
step of online mirror descent towards the equilibrium of the preference game. Here: the exact game in a table
(`games.py`, `tables.py`), the same methods with a small neural policy (`world.py`, `arms.py`), and the published scale.
Baselines on the same samples: iterative DPO on the reference and on the previous iterate, IPO, SPPO, Nash-MD.

Departures from the paper:
1. The headline arm is on i.i.d. pairs with drawn labels, which the loss needs; the paper trains on tournaments (K = 8),
   here the arm "INPO, tournament". The paper profile is on tournaments.
2. An iteration is minimised for a fixed number of passes (the paper tells none); `game.valid_share` stops early instead.
3. Nash-MD's opponent is estimated from the policy's own samples (see `learn/game_pairs.py`); SPPO trains on all samples
   in pairs, as the others, in place of the best and the worst (`sppo_pair_mode=max_min`).
4. Miniature: the prompt shows the order of the classes, so that prompts help one another; the same 16 prompts come in
   every iteration; the reference plays the roles 15/70/15, far from the equilibrium (uniform would begin at a gap of
   0.02). All seeds share the reference; a seed changes samples, labels and batches. Answers without a class or an end
   play a fourth role that loses, and are kept as pairs: left out, nothing would push them down.
5. Gaps are exact, over all 363 words, with respect to INPO's own tau: baselines that aim at another point are off by
   design, so the gap at tau 0 stands beside it.
6. The unread part of the setup (epochs, warm-up of the schedule per iteration) follows Online-RLHF, whose loop the
   paper starts from; each iteration has a fresh optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forethought.errors import ConfigError
from forethought.learn.optim import OptimConfig
from forethought.learn.preference_game import GameConfig
from forethought.recipes.arms_config import ArmsConfig
from forethought.recipes.inpo.arms import (
    ARMS,
    REFERENCE,
    SCALAR,
    arm_job,
    check_arm,
    game_config,
    pretrain_job,
    table_job,
)
from forethought.recipes.inpo.games import check_strengths
from forethought.recipes.inpo.measure import GAP
from forethought.recipes.inpo.tables import TableConfig, said
from forethought.recipes.inpo.world import KINDS, FilesConfig, MiniatureConfig, open_files
from forethought.recipes.jobs import Job, keep_tokenizer, run_jobs
from forethought.recipes.results import Verdict, arms_table, results, summarise
from forethought.report.curves import curves
from forethought.rundir import RunDir

RIVALS = ("DPO", "DPO, base previous", "SPPO")
CLAIM = (
    "on cyclic preferences INPO's last iterate comes near the Nash policy and stays there, while iterative DPO (on the "
    "reference at small beta, or on the previous iterate) and SPPO do not"
)
RULE = (
    "shown if (a) in the exact game INPO settles at the equilibrium at eta 1 and goes round at eta 0.2, DPO on the reference "
    "goes round at beta 0.05 and settles off the equilibrium at beta 1, and DPO on the previous iterate goes round; and (b) "
    "with the neural policy, over seeds, with t intervals on per-seed differences of the mean duality gap of the last 10 "
    "iterates: INPO minus each of DPO, DPO with base previous and SPPO lies below 0, and INPO lies below half of the "
    "reference's gap; reversed if INPO minus one of the three lies above 0; otherwise not shown"
)
RULE_FILES = (
    "over seeds, with t intervals of the win rate on held-out prompts against the reference, by the held-out oracle where "
    "there is one: shown if INPO's minus DPO's lies above 0; reversed if it lies below 0; otherwise not shown"
)


@dataclass(frozen=True, kw_only=True)
class INPOConfig(ArmsConfig):
    """Settings of the recipe."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    arms: tuple[str, ...] = tuple(a for a in ARMS if a != SCALAR)
    oracle: str = "preferences"
    """Miniature: preferences, or bradley-terry (a scalar reward of all arms). A pretrained model: FILE.py:NAME or judge."""
    eta: float = 1.0
    """Inverse step size of INPO: larger is slower."""
    eta_schedule: Literal["constant", "growing"] = "constant"
    """growing: eta_t = tau (t + 2) / 2, and `eta` is not used."""
    tau: float = 0.1
    """Strength of the tie to the reference; also that of the duality gap."""
    pair_mode: Literal["iid", "soft", "tournament", "max_min"] = "iid"
    """Of the arm INPO."""
    dpo_beta: float = 0.05
    dpo_tuned_beta: float = 0.5
    """Of the arm "DPO, tuned beta"."""
    dpo_previous_beta: float = 10.0
    """Of the arm "DPO, base previous"."""
    dpo_previous_lr: float | None = 2e-3
    dpo_pair_mode: Literal["iid", "tournament", "max_min"] = "iid"
    """Of the arms of DPO and IPO."""
    dpo_lr: float | None = None
    """Learning rates of the baselines; game.optim.lr where none is given."""
    ipo_beta: float = 0.1
    ipo_lr: float | None = None
    sppo_beta: float = 2.0
    """Inverse step size of SPPO."""
    sppo_pair_mode: Literal["iid", "max_min"] = "iid"
    sppo_lr: float | None = None
    nash_md_beta: float = 0.1
    nash_md_mixture: float = 0.1
    """Share of the reference in the opponent; tau / eta in the exact step."""
    nash_md_lr: float | None = None
    output: Literal["last", "mixture"] = "last"
    """What a run gives: the last iterate, or the uniform mixture of all (keep_models then keeps every iterate)."""
    save_every: int = 0
    """Iterations (miniature) or optimiser steps between checkpoints; 0: only on Ctrl-C."""
    store_groups: int = 1
    """Prompts an iteration whose answers are kept for the report."""
    max_rows: int = 1024
    table: TableConfig = field(default_factory=TableConfig)
    miniature: MiniatureConfig = field(default_factory=MiniatureConfig)
    files: FilesConfig = field(default_factory=FilesConfig)
    game: GameConfig = field(
        default_factory=lambda: GameConfig(
            iterations=24,
            prompts_per_iteration=128,
            samples=8,
            keep_truncated=True,
            epochs=3,
            batch_size=128,
            monitor_prompts=0,
            micro_tokens=1500,
            optim=OptimConfig(lr=1e-3, schedule="linear"),
        )
    )

    def __post_init__(self):
        bad = self.arm_problems(check_arm)
        for name in ("dpo_lr", "dpo_previous_lr", "ipo_lr", "sppo_lr", "nash_md_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                bad.append(f"{name}={value}: give a positive number, or none for game.optim.lr")
        for name in ("save_every", "store_groups"):
            if getattr(self, name) < 0:
                bad.append(f"{name}={getattr(self, name)}: give 0 or more")
        if self.game.loss != "inpo" or self.game.eta is not None or self.game.tau is not None:
            bad.append("game.loss, game.eta and game.tau are set by the arms, eta and tau: leave them alone")
        if self.model == "miniature":
            if self.oracle not in KINDS:
                bad.append(f"oracle={self.oracle!r}: the miniature knows {' and '.join(KINDS)}")
            if self.game.prompts_per_iteration % self.miniature.prompts:
                bad.append(
                    f"game.prompts_per_iteration={self.game.prompts_per_iteration}: give a multiple of "
                    f"miniature.prompts={self.miniature.prompts}"
                )
        elif SCALAR in self.arms:
            bad.append(f"the arm {SCALAR!r} is of the miniature; name a reward's oracle in its place")
        try:
            if self.eta_schedule == "constant":
                check_strengths(self.eta, self.tau)
        except ConfigError as err:
            bad.append(str(err))
        if bad:
            raise ConfigError("inpo: " + "; ".join(bad))
        for arm in self.arms:
            if arm != REFERENCE:
                game_config(self, arm, 0)


PROFILES: dict[str, INPOConfig] = {
    "mini": INPOConfig(),
    "smoke": INPOConfig(
        seeds=(0,),
        arms=("reference", "INPO", "INPO, tournament", "DPO", "SPPO", "Nash-MD"),
        workers=1,
        table=TableConfig(iterations=120, seeds=2),
        miniature=MiniatureConfig(prompts=6, width=32, layers=1, pretrain_steps=60, pretrain_batch=32),
        game=GameConfig(
            iterations=2,
            prompts_per_iteration=12,
            samples=8,
            keep_truncated=True,
            epochs=1,
            batch_size=24,
            monitor_prompts=0,
            micro_tokens=1500,
            optim=OptimConfig(lr=2e-3, schedule="linear"),
        ),
    ),
    "paper": INPOConfig(
        seeds=(0,),
        arms=("reference", "INPO, tournament", "INPO, tau 0", "DPO", "SPPO"),
        model="RLHFlow/LLaMA3-SFT",
        oracle="",  # the user's: FILE.py:NAME or judge
        eta=0.005,
        tau=0.005 / 3,
        pair_mode="tournament",
        dpo_beta=0.1,
        dpo_previous_lr=None,
        dpo_pair_mode="tournament",
        sppo_beta=0.001,
        sppo_pair_mode="max_min",
        keep_models=True,
        save_every=20,
        max_rows=256,
        workers=1,
        device=None,
        dtype="bf16",
        table=TableConfig(iterations=0),
        files=FilesConfig(prompts="data/prompts.jsonl", held_out="data/held_out.jsonl"),
        game=GameConfig(
            iterations=3,
            prompts_per_iteration=20_000,
            samples=8,
            max_new_tokens=2048,
            temperature=1.0,
            epochs=2,
            batch_size=128,
            monitor_prompts=0,
            micro_tokens=16_384,
            # 3% of the 314 steps of an iteration.
            optim=OptimConfig(lr=5e-7, schedule="cosine", warmup_steps=9),
        ),
    ),
}


def run(config: INPOConfig, run: RunDir, *, profile: str = "mini") -> dict[str, Any]:
    """The table, then all arms over all seeds; returns results.json. A run that was stopped goes on where it was."""
    mini = config.model == "miniature"
    extra = {"config": config, "root": str(run.path)}
    workers = config.processes
    if not mini:  # what can be wrong with the files and the oracle is found before anything is trained
        open_files(config.files, config.oracle, None, 0).close()
    table: dict[str, Any] = {}
    if config.table.iterations:
        job = Job("table", 0, table_job, config.table, extra)
        table = run_jobs([job], run, title="the exact game", workers=1)["table", 0]
    if mini:
        run_jobs([Job("pretraining", 0, pretrain_job, config.miniature, extra)], run, title="reference", workers=1)
    jobs = [Job(arm, seed, arm_job, config, extra) for arm in config.arms for seed in config.seeds]
    done = run_jobs(jobs, run, title="arms x seeds", workers=workers)
    keep_tokenizer(jobs, run)
    return _results(config, profile, table, done, run)


def _results(
    config: INPOConfig, profile: str, table: Mapping[str, Any], done: Mapping[tuple[str, int], dict], run: RunDir
) -> dict[str, Any]:
    mini = config.model == "miniature"
    per_arm = {
        arm: [{k: v for k, v in done[arm, s].items() if isinstance(v, float) and k != "wall_s"} for s in config.seeds]
        for arm in config.arms
    }
    budget = {}
    for arm in config.arms:
        rows = [done[arm, seed] for seed in config.seeds]
        counted = {
            "tokens_generated": "tokens_generated",
            "tokens_trained": "tokens_trained",
            "env_steps": "answers",
            "verifier_calls": "verifier_calls",
            "pairs_trained": "pairs",
            "tokens_evaluated": "tokens_evaluated",
        }
        budget[arm] = {name: sum(r.get(source, 0) for r in rows) for name, source in counted.items()}
        budget[arm]["wall_s"] = round(sum(r["wall_s"] for r in rows), 1)
    metric = _metric(config)
    verdict, differences, notes = judge(config, table, per_arm, metric)
    if too_long := max(row["too_long"] for row in done.values()):
        plural = "s" if too_long > 1 else ""
        notes.append(f"{too_long} prompt{plural} of more than {config.files.max_prompt_tokens} tokens left out")
    shown = curves(row for row in run.metrics() if row.get("arm") in config.arms)
    drawn = {
        name: {
            arm: {"step": curve.steps, "mean": curve.mean, "lo": curve.lo, "hi": curve.hi}
            for arm, curve in arms.items()
        }
        for name, arms in shown.items()
        if name.startswith("eval/")
    }
    if table:
        drawn["exact game/dual_gap"] = table["curves"]
    head = "INPO" if "INPO" in config.arms else config.arms[0]
    return results(
        recipe="inpo",
        profile=profile,
        model=config.model,
        seeds=config.seeds,
        claim=CLAIM,
        arms=arms_table(per_arm),
        budget=budget,
        verdict=verdict,
        verdict_rule=RULE if mini else RULE_FILES,
        headline={"arm": head, "metric": metric},
        differences=differences,
        tables={"The exact game: KL from the equilibrium, duality gap, spread of the last iterates": table["rows"]}
        if table
        else {},
        game=table.get("game"),
        dropped={f"{arm} {seed}": row["dropped"] for (arm, seed), row in done.items() if row.get("dropped")},
        notes=notes,
        curves=drawn,
    )


def _metric(config: INPOConfig) -> str:
    """What arms are compared on."""
    if config.model != "miniature":
        return "win rate held out oracle" if config.files.held_out_oracle else "win rate"
    return GAP if config.output == "last" else "gap, mixture"


def judge(
    config: INPOConfig, table: Mapping[str, Any], per_arm: Mapping[str, list[dict[str, float]]], metric: str
) -> tuple[Verdict, dict[str, Any], list[str]]:
    """Verdict by the rule, paired differences, and each condition with its outcome in words."""
    mini = config.model == "miniature"
    first = next((a for a in config.arms if a.startswith("INPO")), None)

    def values(arm: str) -> list[float]:
        return [row[metric] for row in per_arm[arm]]

    differences = {
        f"{first} minus {arm}": summarise([a - b for a, b in zip(values(first), values(arm), strict=True)])
        for arm in config.arms
        if first is not None and arm != first
    }
    conditions: list[tuple[str, bool | None]] = []
    if mini:
        checks = said(table["rows"]) if table else {}
        conditions += [(f"exact game: {text}", ok) for text, ok in checks.items()] or [("exact game", None)]
    reversed_ = False
    for arm in RIVALS if mini else ("DPO",):
        found = differences.get(f"{first} minus {arm}")
        ends = [-x if mini else x for x in found["ci95"] if x is not None] if found else []  # a smaller gap is better
        conditions.append((f"{first or 'INPO'} is better than {arm}", min(ends) > 0 if ends else None))
        reversed_ = reversed_ or (bool(ends) and max(ends) < 0)
    if mini:
        half = None
        if first is not None and REFERENCE in config.arms:
            left = summarise([a - b / 2 for a, b in zip(values(first), values(REFERENCE), strict=True)])["ci95"][1]
            half = None if left is None else left < 0
        conditions.append((f"{first or 'INPO'} is below half of the reference's gap", half))
    words = {True: "met", False: "not met", None: "not measured"}
    notes = [f"{words[ok]}: {text}" for text, ok in conditions]
    if reversed_:
        return "reversed", differences, notes
    return ("shown" if all(ok is True for _, ok in conditions) else "not shown"), differences, notes


__all__ = ["ARMS", "CLAIM", "PROFILES", "RULE", "INPOConfig", "judge", "run"]
