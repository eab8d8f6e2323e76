"""Phi-4-Mini-Reasoning: mid-training on distilled traces, curated SFT, rollout DPO, RL with a verifiable reward (Xu et al.,
arXiv 2504.21233).

The ladder: 1 mid-training on every right trace of a teacher, packed; 2 SFT on few clean, hard ones, one a sequence,
so that the end is learnt; 3 DPO on the teacher's right against wrong rollouts; 4 GRPO with reward +1/-1 and three fixes:
prompts of uniform answer length, over-sampling with rebalancing, annealed temperature (`learn.rebalance`). Every stage
begins with the model before it and a fresh optimiser; every model is measured on the same questions, seeds and sampling.
Arms beside it: few traces only ("a thousand good examples"), stage 2 packed, plain GRPO at the same number of generated
tokens, each fix left out.

Departures from the paper and what it leaves open:
1. The paper's text was read through digests only; what they do not give is a choice here, and a setting: the
   measure of uniform length (std / mean <= 0.25), the sizes of over-sampling, the DPO beta (0.1), pairs a question (1).
2. Packed documents cannot see each other and positions restart (not stated in the paper).
3. Rollouts called wrong are not re-checked by a second model.
4. Miniature: modular chain arithmetic, a rule teacher with slips instead of a large model, a transformer made from
   scratch whose base was trained on answers without steps and on single steps (it knows arithmetic, not chains);
   token-mean loss in GRPO, as everywhere in this library (`online.reduction=sequence-mean` is the published average over
   answers).
5. The repetition rule of the miniature's bank looks at 5-token runs (a step has about 6 tokens); 20 elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from forethought.envs.modular import ModularConfig
from forethought.errors import ConfigError
from forethought.learn.offline import SFTConfig
from forethought.learn.online import OnlineConfig, RolloutConfig
from forethought.learn.optim import OptimConfig
from forethought.learn.pairs import PairConfig
from forethought.learn.ppo import PPOConfig
from forethought.learn.rebalance import RebalanceConfig
from forethought.recipes.arms_config import ArmsConfig
from forethought.recipes.jobs import Job, run_jobs
from forethought.recipes.phi_4_mini_reasoning.bank import check_fit
from forethought.recipes.phi_4_mini_reasoning.ladder import LADDER, RL_ARMS, arm_of, check_arms, ladder_job, rl_job
from forethought.recipes.results import Verdict, arms_table, paired_differences, results
from forethought.rundir import RunDir

CLAIM = (
    "bulk distillation, then clean SFT, rollout DPO and steadied RL each make a small model a better reasoner, where few "
    "traces do not, and the fixes beat plain GRPO at the same number of generated tokens"
)
RULE = (
    "over seeds, with t intervals on per-seed differences of greedy accuracy on the hard levels: shown if mid-training minus "
    "few-shot SFT, SFT minus mid-training, DPO minus SFT, RL minus DPO and RL minus GRPO all lie above 0; reversed if "
    "mid-training minus few-shot SFT lies below 0; otherwise not shown"
)
STEPS = (
    ("few-shot SFT", "base"),
    ("mid-training", "base"),
    ("mid-training", "few-shot SFT"),
    ("SFT", "mid-training"),
    ("SFT", "SFT packed"),
    ("DPO", "SFT"),
    ("RL", "DPO"),
    ("RL", "GRPO"),
    *(("RL", name) for name in RL_ARMS if name not in ("RL", "GRPO")),
)
_DECIDING = (("mid-training", "few-shot SFT"), ("SFT", "mid-training"), ("DPO", "SFT"), ("RL", "DPO"), ("RL", "GRPO"))
METRIC = "greedy hard"


def _sft(lr: float, **more: Any) -> SFTConfig:
    return SFTConfig(micro_tokens=16_384, optim=OptimConfig(lr=lr, schedule="cosine", warmup_steps=20), **more)


@dataclass(frozen=True, kw_only=True)
class MiniatureConfig:
    """The procedural world and the model made for it."""

    world: ModularConfig = field(default_factory=ModularConfig)
    questions: int = 3000
    """Training questions: of the bank, and of RL."""
    validation: int = 100
    test: int = 300
    width: int = 96
    layers: int = 3
    heads: int = 4
    facts: float = 3.0
    """Single steps of arithmetic in the base's data, for each question that it is shown with its answer."""
    pretrain: SFTConfig = field(default_factory=lambda: _sft(2e-3, steps=400, batch_size=64))
    """The base: single steps, and question -> answer without steps."""


@dataclass(frozen=True, kw_only=True)
class FilesConfig:
    """Files for a pretrained model (the paper profile)."""

    bank: str = ""
    """JSONL of the teacher's rollouts; the record is described in `bank.py`."""
    validation: str = ""
    """Questions that stage 1 is stopped by."""
    test: str = ""
    prompt_column: str = "problem"
    answer_column: str = "answer"
    limit: int | None = None
    """Use the first N records of every file."""


@dataclass(frozen=True, kw_only=True)
class Phi4Config(ArmsConfig):
    """Settings of the recipe."""

    arms: tuple[str, ...] = (*LADDER, *(a for a in RL_ARMS if a != "PPO"))
    """Stages of the ladder and forms of stage 4."""
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """Of stage 4; PPO takes the prompt filter and the annealing, not the rebalancing (it compares no group)."""
    instruction: str = "Please reason step by step, and put your final answer within \\boxed{}."
    """Behind every question of a file."""
    rollouts: int = 8
    """Of the teacher, for each question of the miniature."""
    max_new_tokens: int = 64
    one_box: bool = True
    """Several different boxed answers are wrong."""
    wrong_reward: float = -1.0
    """-1 as published, or 0."""
    mask_question: bool = True
    """Train on the trace only; off: standard language modelling of question and trace."""
    few_shot: int = 200
    """Traces of the arm that learns from few."""
    few: SFTConfig = field(default_factory=lambda: _sft(1e-3, epochs=10, batch_size=32))
    traces: int | None = None
    """Traces of stage 1; null: all right ones."""
    mid: SFTConfig = field(default_factory=lambda: _sft(2e-3, epochs=2, batch_size=8, bin_length=256))
    gate_checks: int = 6
    """Evaluations on the validation questions during stage 1."""
    patience: int = 4
    """Stage 1 ends after so many evaluations without a new best; 0: never before its epochs are over."""
    sft_level: int = 4
    sft_quota: int = 500
    """Records of each domain and level."""
    sft_per_question: int = 1
    sft_pick: Literal["shortest", "random"] = "random"
    sft: SFTConfig = field(default_factory=lambda: _sft(5e-4, epochs=2, batch_size=32))
    sft_bin: int = 256
    """Bin of the arm whose stage 2 is packed."""
    dpo_level: int = 2
    pairs_per_question: int = 1
    keep_truncated: bool = False
    """A rollout that was cut may be the wrong side of a pair."""
    dpo: PairConfig = field(
        default_factory=lambda: PairConfig(
            loss="dpo",
            beta=0.1,
            epochs=1,
            batch_size=32,
            micro_tokens=16_384,
            optim=OptimConfig(lr=2e-5, warmup_steps=10),
        )
    )
    uniform_c: float = 0.25
    """Fix A: largest std / mean of a prompt's answer lengths."""
    probe_samples: int = 8
    rl_questions: int = 400
    """Questions of stage 4; 0: all."""
    rebalance: RebalanceConfig = field(default_factory=lambda: RebalanceConfig(enough=2, most=32, accuracy_max=0.5))
    """Fix B."""
    temperature_end: float = 0.6
    """Fix C."""
    online: OnlineConfig = field(
        default_factory=lambda: OnlineConfig(
            steps=60,
            prompts_per_step=16,
            group_size=8,
            advantage_std="population",
            eval_every=20,
            micro_tokens=16_384,
            optim=OptimConfig(lr=1e-4),
        )
    )
    control_factor: int = 5
    """A control makes at most so many times the method's steps before its tokens are spent."""
    eval_temperature: float = 0.6
    eval_top_p: float = 0.95
    eval_samples: int = 8
    eval_tokens: int = 0
    """Longest answer in evaluation; 0: as in training."""
    hard_level: int = 4
    """Levels from here on are the hard ones, of which the verdict speaks."""
    save_every: int = 0
    keep_models: bool = True
    miniature: MiniatureConfig = field(default_factory=MiniatureConfig)
    files: FilesConfig = field(default_factory=FilesConfig)

    def __post_init__(self):
        bad = self.arm_problems(arm_of)
        for name, least in (
            ("rollouts", 1),
            ("max_new_tokens", 1),
            ("few_shot", 1),
            ("sft_quota", 1),
            ("eval_samples", 1),
        ):
            if getattr(self, name) < least:
                bad.append(f"{name}={getattr(self, name)}: give at least {least}")
        for name, least in (("pairs_per_question", 1), ("gate_checks", 1), ("control_factor", 1), ("probe_samples", 2)):
            if getattr(self, name) < least:
                bad.append(f"{name}={getattr(self, name)}: give at least {least}")
        if self.patience < 0 or self.rl_questions < 0:
            bad.append(f"patience={self.patience}, rl_questions={self.rl_questions}: give 0 or more")
        if self.wrong_reward >= 1 or self.wrong_reward > 0:
            bad.append(f"wrong_reward={self.wrong_reward}: give -1 or 0 (right answers earn 1)")
        if self.sft.bin_length or self.few.bin_length:
            bad.append("sft.bin_length, few.bin_length: these stages are unpacked; the packed arm takes sft_bin")
        if not 0 < self.temperature_end <= self.online.temperature:
            bad.append(
                f"temperature_end={self.temperature_end}: give 0 < end <= online.temperature={self.online.temperature}"
            )
        if self.online.temperature_end is not None:
            bad.append("online.temperature_end is set through temperature_end: leave it at null")
        if self.dpo.loss != "dpo":
            bad.append(f"dpo.loss={self.dpo.loss!r}: stage 3 is DPO")
        if any(a in RL_ARMS for a in self.arms) and "DPO" not in self.arms:
            bad.append("arms: stage 4 begins with the model of 'DPO', which is left out")
        if {"GRPO", "PPO"} & set(self.arms) and "RL" not in self.arms:
            bad.append("arms: the controls take their number of tokens from 'RL', which is left out")
        if self.model != "miniature":
            bad += [
                f"files.{n} is empty: give a path" for n in ("bank", "validation", "test") if not getattr(self.files, n)
            ]
        if bad:
            raise ConfigError("phi-4-mini-reasoning: " + "; ".join(bad))
        if self.model == "miniature":
            levels = range(self.miniature.world.min_level, self.miniature.world.max_level + 1)
            check_fit(max(self.sft_level, self.dpo_level), levels)
        check_arms(self)

    @property
    def ladder(self) -> tuple[str, ...]:
        return tuple(name for name in LADDER if name in self.arms)

    def sft_packed(self) -> SFTConfig:
        """Stage 2 as it should not be: in bins, with about as many records a step."""
        return replace(self.sft, bin_length=self.sft_bin, batch_size=max(1, self.sft.batch_size // 6))

    def ppo_config(self, online: OnlineConfig) -> PPOConfig:
        """PPO on the same rollouts: reward on the last token, discount 1, lambda 1, a critic on the policy's trunk."""
        shared = {f.name: getattr(online, f.name) for f in fields(RolloutConfig)}
        return PPOConfig(
            **shared, gamma=1.0, lam=1.0, critic="shared", critic_optim=replace(online.optim, lr=10 * online.optim.lr)
        )


_PAPER = OptimConfig(lr=1e-5, schedule="cosine", warmup_ratio=0.1)
PROFILES: dict[str, Phi4Config] = {
    "mini": Phi4Config(),
    "smoke": Phi4Config(
        seeds=(0,),
        arms=("base", "few-shot SFT", "mid-training", "SFT", "DPO", "RL", "GRPO"),
        few_shot=16,
        few=_sft(1e-3, epochs=1, batch_size=8),
        traces=200,
        mid=_sft(2e-3, epochs=1, batch_size=4, bin_length=256),
        gate_checks=2,
        sft_quota=16,
        uniform_c=10.0,
        probe_samples=4,
        rl_questions=8,
        rebalance=RebalanceConfig(enough=1, most=8),
        eval_samples=2,
        max_new_tokens=48,
        workers=1,
        dpo=PairConfig(loss="dpo", beta=0.1, batch_size=16, optim=OptimConfig(lr=2e-5)),
        miniature=MiniatureConfig(
            questions=40, validation=10, test=20, width=32, layers=2, pretrain=_sft(2e-3, steps=20, batch_size=16)
        ),
        online=OnlineConfig(
            steps=2,
            prompts_per_step=4,
            group_size=4,
            advantage_std="population",
            eval_every=1,
            optim=OptimConfig(lr=1e-4),
        ),
    ),
    "paper": Phi4Config(
        seeds=(0,),
        model="microsoft/Phi-4-mini-instruct",
        files=FilesConfig(
            bank="data/rollouts.jsonl", validation="data/math_validation.jsonl", test="data/math500.jsonl"
        ),
        max_new_tokens=25_000,
        few_shot=1000,
        few=SFTConfig(epochs=5, batch_size=128, micro_tokens=32_768, optim=_PAPER),
        mid=SFTConfig(epochs=5, batch_size=128, bin_length=16_384, micro_tokens=32_768, optim=_PAPER),
        sft=SFTConfig(epochs=5, batch_size=128, micro_tokens=32_768, optim=_PAPER),
        sft_bin=16_384,
        sft_level=4,  # levels 1 to 5: elementary, middle school, high school, college, graduate
        sft_quota=20_000,
        dpo_level=3,
        dpo=PairConfig(loss="dpo", beta=0.1, epochs=1, batch_size=128, micro_tokens=32_768, optim=OptimConfig(lr=5e-7)),
        rl_questions=0,
        rebalance=RebalanceConfig(enough=4, most=128, accuracy_max=0.5),
        online=OnlineConfig(
            steps=500,
            prompts_per_step=32,
            group_size=8,
            advantage_std="population",
            reduction="sequence-mean",
            eval_every=20,
            save_every=20,
            store_groups=0,
            micro_tokens=32_768,
            optim=OptimConfig(lr=5e-7),
        ),
        eval_tokens=32_768,
        eval_samples=8,
        save_every=100,
        workers=1,
        device=None,
        dtype="bf16",
    ),
}


def run(config: Phi4Config, run: RunDir, *, profile: str = "mini") -> dict[str, Any]:
    """The ladder of every seed, then the forms of stage 4; returns results.json. A stopped run goes on where it was."""
    workers = config.processes
    extra: dict[str, Any] = {"config": config}
    ladders = run_jobs(
        [Job("ladder", seed, ladder_job, config, extra) for seed in config.seeds], run, title="ladder", workers=workers
    )
    numbers: dict[tuple[str, int], dict[str, Any]] = {
        (stage, seed): found for (_, seed), job in ladders.items() for stage, found in job["stages"].items()
    }
    arms = [a for a in config.arms if a in RL_ARMS]
    if arms:
        extra["models"] = {str(seed): numbers["DPO", seed]["model"] for seed in config.seeds}
        first = [a for a in arms if a not in ("GRPO", "PPO")]
        jobs = [Job(arm, seed, rl_job, config, extra) for arm in first for seed in config.seeds]
        numbers |= run_jobs(jobs, run, title="RL", workers=workers)
        # The controls stop at the tokens that the method generated with the same seed, probing included.
        extra = (
            extra | {"tokens": {str(seed): numbers["RL", seed]["tokens_generated"] for seed in config.seeds}}
            if "RL" in arms
            else extra
        )
        rest = [Job(arm, seed, rl_job, config, extra) for arm in arms if arm not in first for seed in config.seeds]
        if rest:
            numbers |= run_jobs(rest, run, title="controls at the same tokens", workers=workers)
    return _results(config, profile, numbers)


def _results(config: Phi4Config, profile: str, numbers: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
    counts = ("tokens_generated", "tokens_trained", "env_steps", "verifier_calls", "wall_s")
    per_arm: dict[str, list[dict[str, float | None]]] = {}
    budget: dict[str, dict[str, float]] = {}
    shown = ("accuracy", "hard", "level", "ends", "length", "spread", "pool", "packing", "pairs", "steps", "logps")
    for arm in config.arms:
        rows = [numbers[arm, seed] for seed in config.seeds]
        names = [n for n in rows[0] if any(part in n for part in shown) and not isinstance(rows[0][n], (dict, str))]
        order = [
            n
            for n in ("greedy hard", "greedy accuracy", "sampled accuracy", "greedy ends", "sampled ends")
            if n in names
        ]
        per_arm[arm] = [{n: row.get(n) for n in [*order, *(n for n in names if n not in order)]} for row in rows]
        budget[arm] = {c: round(float(sum(row.get(c, 0) or 0 for row in rows)), 1) for c in counts}
    differences = paired_differences(numbers, STEPS, config.seeds, METRIC)
    return results(
        recipe="phi-4-mini-reasoning",
        profile=profile,
        model=config.model,
        seeds=config.seeds,
        claim=CLAIM,
        arms=arms_table(per_arm),
        budget=budget,
        verdict=_verdict(differences),
        verdict_rule=RULE,
        headline={"arm": "RL" if "RL" in config.arms else config.arms[-1], "metric": METRIC},
        differences=differences,
        notes=[
            "Budgets are those of the arm itself, over all seeds; a stage also needs the ones it begins with.",
            "GRPO generated as many tokens as RL, probing included (up to the last step).",
        ],
    )


def _verdict(differences: Mapping[str, Mapping[str, Any]]) -> Verdict:
    found = [differences.get(f"{a} minus {b}") for a, b in _DECIDING]
    first = found[0]
    if first is not None and first["ci95"][1] is not None and first["ci95"][1] < 0:
        return "reversed"
    if all(d is not None and d["ci95"][0] is not None and d["ci95"][0] > 0 for d in found):
        return "shown"
    return "not shown"


__all__ = ["CLAIM", "PROFILES", "RULE", "Phi4Config", "run"]
