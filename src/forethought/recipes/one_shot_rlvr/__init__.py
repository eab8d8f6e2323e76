r"""One-Shot RLVR: reinforcement learning on one training problem (Wang et al., arXiv 2504.20571).

The method: train on the pool with a verifiable reward and record every problem's accuracy; rank the problems by the
variance of their accuracy over time (`history.py`); train again on the first one alone, as many groups of 8 samples
as a step has rows. Loss L = L_policy + beta * KL + alpha * entropy with beta = 0.001 and alpha = -0.001, clip 0.2, AdamW with
weight decay 0.01. Every coefficient, the selection rule, k, the reward, the labels, temperature and updates per rollout
are settings; the rows of the paper's ablation table are arms (`arms.py`).

Departures from the paper and its code:
1. The token mean is global over the step; the reference averages within micro-batches and weights by samples.
2. One prompt stands once and has 128 groups (here 16); the reference copies the record 128 times because its
   loader drops incomplete batches. Groups are by row, never by prompt text, as there.
3. One optimiser step per rollout, as the released worker does (the paper says 8): `online.updates_per_rollout`.
4. Only the response is scored; the reference decodes prompt and response together (its prompt contains \boxed{}).
5. PPO (the arm "one-shot PPO", or `algorithm=ppo` for all): the exact script is not published. Critic from the same
   model, gamma = lambda = 1, value clip 0.5, whitened advantages as the paper's code has them; the KL is a loss, as for
   GRPO, or with `ppo.kl_placement=reward` a penalty on every token: never both.
6. Miniature: the base model is trained from scratch on a mixture of careful work and guesses, so that ability is
   latent BY CONSTRUCTION; it tests elicitation, not new knowledge. All seeds share that base (a seed changes sampling, data
   order and rewards). Rollouts and evaluation are at temperature 1 (paper: 0.6 and greedy), because the greedy mode
   of a mixture is its most frequent style, which leaves no headroom; the greedy number is reported beside it.
7. Checkpoint rule: the last one. The paper reports the checkpoint with the best six-benchmark average, a selection on
   test sets: `checkpoint=best`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from forethought.errors import ConfigError
from forethought.files import to_json, write_atomic
from forethought.learn.online import OnlineConfig, RolloutConfig
from forethought.learn.optim import OptimConfig
from forethought.learn.ppo import PPOConfig
from forethought.recipes.arms_config import ArmsConfig
from forethought.recipes.jobs import Job, keep_tokenizer, run_jobs
from forethought.recipes.one_shot_rlvr.arms import ARMS, arm_job, arm_of, pretrain_job, world_of
from forethought.recipes.one_shot_rlvr.history import AccuracyHistory, Ranking, rank
from forethought.recipes.one_shot_rlvr.world import FilesConfig, MiniatureConfig, Suite, World, check_world
from forethought.recipes.results import Verdict, arms_table, paired_differences, results
from forethought.rundir import RunDir

CLAIM = "RL on one well-chosen problem raises held-out accuracy nearly as much as RL on the whole pool, beyond format repair"
MINI_CRITIC_LR = 1e-3  # ten times the actor's, as the paper's 1e-5 is of its 1e-6
RULE = (
    "over seeds, with t intervals on per-seed differences of held-out accuracy at the last step: shown if one-shot minus "
    "format only lies above 0 and one-shot keeps at least 80% of the full pool's mean gain over the base; reversed if "
    "one-shot minus format only lies below 0; otherwise not shown"
)


@dataclass(frozen=True, kw_only=True)
class PPOVariant:
    """What PPO needs beyond the settings of `online`, whose group advantages it replaces by a critic."""

    critic: Literal["shared", "detached", "separate"] = "separate"
    critic_lr: float = 1e-5
    gamma: float = 1.0
    lam: float = 1.0
    value_clip: float = 0.5
    kl_placement: Literal["loss", "reward"] = "loss"
    critic_warmup: int = 0
    """Rollouts at the beginning on which only the critic is trained."""

    def config(self, online: OnlineConfig) -> PPOConfig:
        """These settings on the rollouts and the loss terms of `online`; one pass over each rollout."""
        shared = {f.name: getattr(online, f.name) for f in fields(RolloutConfig)}
        shared |= {} if self.kl_placement == "loss" else {"kl_estimator": "k1"}
        return PPOConfig(
            **shared,
            minibatches=online.updates_per_rollout,
            kl_placement=self.kl_placement,
            gamma=self.gamma,
            lam=self.lam,
            value_clip=self.value_clip,
            reward_clip=0.0,
            critic=self.critic,
            critic_warmup=self.critic_warmup,
            critic_optim=replace(online.optim, lr=self.critic_lr),
        )


@dataclass(frozen=True, kw_only=True)
class OneShotConfig(ArmsConfig):
    """Settings of the recipe."""

    arms: tuple[str, ...] = tuple(a for a in ARMS if a not in ("one-shot PPO", "unguessable label", "random reward"))
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """Of all arms but "one-shot PPO"."""
    beta: float = 0.001
    """KL coefficient."""
    alpha: float = -0.001
    """Entropy coefficient as the paper writes it: negative raises entropy."""
    selection: Literal["variance", "std", "random", "lim", "index"] = "variance"
    k: int = 1
    """Problems selected; the groups of a step are shared out among them."""
    selection_seed: int = 0
    train_mode: Literal["train-strict", "eval-qwen", "math-verify"] = "train-strict"
    eval_mode: Literal["train-strict", "eval-qwen", "math-verify"] = "train-strict"
    thinking_end: str | None = None
    """End mark of the thinking of a model that thinks; only what follows is scored, and nothing without the mark."""
    eval_temperature: float = 1.0
    eval_tokens: int = 0
    """Longest response in evaluation; 0: as in training."""
    checkpoint: Literal["last", "best"] = "last"
    """Which weights the final numbers are of: the last, or those with the best mean accuracy over the suites' curves (the
    paper's rule; it selects on the test sets, so read its numbers as upper limits)."""
    curve_problems: int = 200
    """Problems of each suite that the curves use; the final numbers use all."""
    miniature: MiniatureConfig = field(default_factory=MiniatureConfig)
    files: FilesConfig = field(default_factory=FilesConfig)
    ppo: PPOVariant = field(default_factory=lambda: PPOVariant(critic_lr=MINI_CRITIC_LR))
    online: OnlineConfig = field(
        default_factory=lambda: OnlineConfig(
            steps=100,
            prompts_per_step=16,
            group_size=8,
            max_new_tokens=64,
            temperature=1.0,
            eval_every=25,
            micro_tokens=100_000,
            # Tuned for both: 3e-5, 1e-4 and 3e-4 were tried for one-shot and for the full pool; 1e-4 is best for both.
            optim=OptimConfig(lr=1e-4, weight_decay=0.01),
        )
    )

    def __post_init__(self):
        bad = self.arm_problems(arm_of)
        if self.k < 1:
            bad.append(f"k={self.k}: select at least 1 problem")
        if self.k > self.online.prompts_per_step:
            bad.append(f"k={self.k} exceeds online.prompts_per_step={self.online.prompts_per_step}: each needs a group")
        if self.beta < 0:
            bad.append(f"beta={self.beta}: give 0 or more")
        if self.online.kl_coef or self.online.entropy_coef:
            bad.append("online.kl_coef and online.entropy_coef are set through beta and alpha: leave them at 0")
        if self.algorithm == "ppo" or "one-shot PPO" in self.arms:
            try:
                self.ppo.config(self.online)
            except ConfigError as err:
                bad.append(str(err))
        if self.model != "miniature" and not self.files.train:
            bad.append(f"model={self.model!r} needs problems: files.train is empty")
        if self.model != "miniature" and not self.files.suites:
            bad.append(f"model={self.model!r} needs something to be evaluated on: files.suites is empty")
        if self.model != "miniature" and {"guessable label", "in context"} & set(self.arms):
            bad.append(
                "the arms 'guessable label' and 'in context' are made from chains of the miniature: leave them out"
            )
        if bad:
            raise ConfigError("one-shot-rlvr: " + "; ".join(bad))

    def ranking(self, history: AccuracyHistory) -> Ranking:
        return rank(history, self.selection, self.selection_seed)


_QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."

# The paper's six: AIME and AMC by 8 samples at temperature 0.6, the others greedily.
_SUITES = tuple(
    Suite(name=name, path=f"data/{name}.jsonl", samples=samples, temperature=temperature, system=_QWEN_SYSTEM)
    for name, samples, temperature in (
        ("math500", 1, 0.0),
        ("aime24", 8, 0.6),
        ("amc23", 8, 0.6),
        ("minerva", 1, 0.0),
        ("olympiadbench", 1, 0.0),
        ("aime25", 8, 0.6),
    )
)

PROFILES: dict[str, OneShotConfig] = {
    "mini": OneShotConfig(),
    "smoke": OneShotConfig(
        seeds=(0,),
        arms=("one-shot", "full pool", "base", "format only", "one-shot PPO"),
        curve_problems=8,
        workers=1,
        miniature=MiniatureConfig(
            width=64,
            layers=2,
            pool=8,
            heldout=16,
            shifted=8,
            pretrain_steps=150,
            pretrain_batch=16,
            pretrain_problems=400,
            pretrain_shifted=100,
        ),
        online=OnlineConfig(
            steps=4,
            prompts_per_step=4,
            group_size=4,
            max_new_tokens=24,
            eval_every=2,
            optim=OptimConfig(lr=3e-4, weight_decay=0.01),
        ),
    ),
    "paper": OneShotConfig(
        seeds=(0,),
        arms=("one-shot", "full pool", "base", "format only"),
        model="Qwen/Qwen2.5-Math-1.5B",
        eval_mode="eval-qwen",
        eval_tokens=3072,
        keep_models=True,
        curve_problems=100_000,
        max_rows=256,
        workers=1,
        device=None,
        dtype="bf16",
        ppo=PPOVariant(),
        files=FilesConfig(train="data/dsr_sub.parquet", history="data/acc_step_500.json", suites=_SUITES),
        online=OnlineConfig(
            steps=2000,
            prompts_per_step=128,
            group_size=8,
            max_new_tokens=3072,
            temperature=0.6,
            eval_every=20,
            save_every=20,
            store_groups=0,  # a tree holds the 1024 responses of a step
            micro_tokens=24_000,
            optim=OptimConfig(lr=1e-6, weight_decay=0.01),
        ),
    ),
}


def run(config: OneShotConfig, run: RunDir, *, profile: str = "mini") -> dict[str, Any]:
    """All arms over all seeds; returns results.json. A run that was stopped goes on where it was."""
    mini = config.model == "miniature"
    extra = {"config": config, "root": str(run.path)}
    workers = config.processes
    if mini:
        run_jobs([Job("pretraining", 0, pretrain_job, config.miniature, extra)], run, title="base model", workers=1)
    world = world_of(config, run.path)  # reads the files before anything is trained on them
    check_world(world.pool, config.k)
    history_path = _history(config, world, run, extra, workers)
    jobs = [
        Job(arm, seed, arm_job, config, {**extra, "history": str(history_path)})
        for arm in _order(config)
        for seed in config.seeds
    ]
    done = run_jobs(jobs, run, title="arms x seeds", workers=workers)
    keep_tokenizer(jobs, run)
    return _results(config, profile, world, AccuracyHistory.read(history_path), done)


def _order(config: OneShotConfig) -> list[str]:
    return [a for a in config.arms if a != "full pool"] + [a for a in config.arms if a == "full pool"]


def _history(config: OneShotConfig, world: World, run: RunDir, extra: Mapping[str, Any], workers: int) -> Path:
    """The accuracy history: the published file, or that of the full-pool arm with the first seed (the ranking is made once)."""
    target = run.path / "history.json"
    if config.files.history:
        write_atomic(target, to_json(AccuracyHistory.read(config.files.history).to_json()))
        return target
    # The full-pool arm of every seed is needed anyway; run side by side, the first one gives the history.
    seeds = config.seeds if "full pool" in config.arms else config.seeds[:1]
    run_jobs(
        [Job("full pool", seed, arm_job, config, extra) for seed in seeds], run, title="full pool", workers=workers
    )
    source = run.path / Job("full pool", config.seeds[0], arm_job, config).folder / "history.json"
    write_atomic(target, source.read_bytes())
    return target


def _results(
    config: OneShotConfig, profile: str, world: World, history: AccuracyHistory, done: Mapping[tuple[str, int], dict]
) -> dict[str, Any]:
    per_arm = {
        arm: [
            {k: v for k, v in done[arm, seed].items() if isinstance(v, float) and k != "wall_s"}
            for seed in config.seeds
        ]
        for arm in config.arms
    }
    first = next(iter(world.suites), "heldout")
    metric = f"{first} accuracy"
    base = {seed: done["base", seed][metric] for seed in config.seeds} if "base" in config.arms else {}
    for arm, rows in per_arm.items():
        for seed, row in zip(config.seeds, rows, strict=True):
            if seed in base and arm != "base":
                row[f"{metric}/before"], row[f"{metric}/after"] = base[seed], row[metric]
    budget = {}
    for arm in config.arms:
        rows = [done[arm, seed] for seed in config.seeds]
        calls = sum(r.get("verifier_calls", 0) for r in rows)
        budget[arm] = {
            "tokens_generated": sum(r.get("tokens_generated", 0) for r in rows),
            "tokens_trained": sum(r.get("tokens_trained", 0) for r in rows),
            "env_steps": sum(r.get("samples", 0) for r in rows),
            "verifier_calls": calls,
            "wall_s": round(sum(r.get("wall_s", 0.0) for r in rows), 1),
        }
    ranking = config.ranking(history)
    verdict, differences = _verdict(config, done, metric)
    return results(
        recipe="one-shot-rlvr",
        profile=profile,
        model=config.model,
        seeds=config.seeds,
        claim=CLAIM,
        arms=arms_table(per_arm),
        budget=budget,
        verdict=verdict,
        verdict_rule=RULE,
        headline={"arm": "one-shot" if "one-shot" in config.arms else config.arms[0], "metric": metric},
        differences=differences,
        selection={
            "rule": config.selection,
            "first": ranking.order[:8],
            "scores": [ranking.scores[i] for i in ranking.order[:8]],
            "ties": ranking.ties,
            "problems": len(ranking.order),
        },
        dropped=world.dropped,
        verifier_modes={"train": config.train_mode, "eval": config.eval_mode},
        checkpoint_rule=config.checkpoint,
        notes=[
            "The premise is built in: the base model was pretrained on a mixture of careful work and guesses, so this tests "
            "elicitation, not new knowledge."
        ]
        if config.model == "miniature"
        else [],
    )


def _verdict(
    config: OneShotConfig, done: Mapping[tuple[str, int], dict], metric: str
) -> tuple[Verdict, dict[str, Any]]:
    pairs = [("one-shot", "format only"), ("one-shot", "base"), ("full pool", "base"), ("full pool", "format only")]
    pairs += [("one-shot", other) for other in config.arms if other not in ("one-shot", "format only", "base")]
    differences = paired_differences(done, pairs, config.seeds, metric)
    beyond = differences.get("one-shot minus format only")
    gain, whole = differences.get("one-shot minus base"), differences.get("full pool minus base")
    if beyond is None or gain is None or whole is None or beyond["ci95"][0] is None:
        return "not shown", differences
    if beyond["ci95"][1] < 0:
        return "reversed", differences
    if beyond["ci95"][0] > 0 and whole["mean"] > 0 and gain["mean"] >= 0.8 * whole["mean"]:
        return "shown", differences
    return "not shown", differences


__all__ = ["ARMS", "CLAIM", "PROFILES", "RULE", "OneShotConfig", "run"]
