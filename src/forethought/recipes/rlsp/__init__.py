r"""RLSP: reinforcement learning via self-play, a model's search on its own trajectories (Ye et al., arXiv 2502.06773).

Three stages: supervised fine-tuning on demonstrations of the reasoning process (where there are any), then one PPO run on
two decoupled signals: an outcome verifier that reads the answer alone, and an exploration reward that reads the trajectory
alone (its length, or how many different things were tried). R = w_c * correctness + w_e * exploration, clipped; per
token a KL to the start model (k1, 0.05) in the reward; GAE with gamma 1, lambda 0.95; advantages whitened over the
rollout; critic warm-up of 4 rollouts; 4 updates a rollout. The rows of the paper's comparison are arms (`arms.py`).

The full text of the paper could not be read; its released code and abstract were. Departures from the code:
1. The last box is graded and the whole reasoning is paid; the code takes the first box for both, which punishes a
   corrected answer and leaves thinking after it unpaid. Switches: `signals.answer`, `signals.scope`.
2. A scorer that fails leaves its sample out (counted; too many stop the run); the code gives 0.0 or 0.5, which beats
   most honest rewards. An empty reasoning has the reward of the shortest one; the code divides by zero.
3. The paid length is capped below the limit of generation, so that an endless response is not the best one.
4. Strict verification with gold and answer in this order; the gold rides with its record.
5. The token mean is global over a minibatch. The learning rate is constant after its warm-up in the miniature; the
   cosine of the paper profile falls to 0 (the code's has a minimum).
6. Extensions, off by default: decaying weights, standardised parts, separate advantages, REINFORCE and RLOO with the KL
   in the loss.
7. Miniature: congruence puzzles in place of MATH, a base model pretrained here on a mixture of guesses and a few searches, so
   that search is latent BY CONSTRUCTION; one token a number and set phrase in place of characters; a critic of its own
   is a copy of the policy. All seeds share the base; a seed changes SFT order, sampling and data order. The length
   strength c is set to the length of its traces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forethought.errors import ConfigError
from forethought.learn.offline import SFTConfig
from forethought.learn.optim import OptimConfig
from forethought.learn.ppo import PPOConfig
from forethought.recipes.arms_config import ArmsConfig
from forethought.recipes.jobs import Job, keep_tokenizer, run_jobs
from forethought.recipes.results import Verdict, arms_table, results, summarise
from forethought.recipes.rlsp.arms import ARMS, arm_job, arm_of, pretrain_job, sft_job, world_of
from forethought.recipes.rlsp.estimators import Estimator, online_config
from forethought.recipes.rlsp.measure import at_budget
from forethought.recipes.rlsp.signals import SignalConfig
from forethought.recipes.rlsp.world import FilesConfig, MiniatureConfig, SuiteConfig, World
from forethought.rewards.verify import Mode
from forethought.rundir import RunDir

CLAIM = (
    "PPO on a verifier plus an exploration reward makes search grow and beats PPO on the verifier alone, exploration alone "
    "is hacked, and one answer of the trained policy beats the base model's majority vote at equal tokens"
)
RULE = (
    "over seeds, with t intervals on per-seed differences at temperature 0.7 at the last step: shown if outcome + length "
    "minus outcome only lies above 0 both in accuracy and in distinct tries, length only minus outcome + length lies below "
    "0 in accuracy while its responses are longer, and outcome + length minus the base's majority vote (the fewest votes "
    "that cost at least as many tokens) lies above 0; reversed if outcome + length minus outcome only lies below 0 in "
    "accuracy; otherwise not shown"
)


@dataclass(frozen=True, kw_only=True)
class RLSPConfig(ArmsConfig):
    """Settings of the recipe."""

    arms: tuple[str, ...] = (
        "base",
        "SFT",
        "outcome only",
        "outcome + length",
        "outcome + creativity",
        "length only",
        "decaying length",
        "majority vote",
        "majority vote of SFT",
        "outcome + length, no SFT",
    )
    signals: SignalConfig = field(default_factory=SignalConfig)
    estimator: Estimator = "ppo"
    samples_per_prompt: int = 4
    """Of the estimators without a critic; PPO's is ppo.group_size."""
    hard_only: bool = False
    """Train on the problems only that the arm's start model answers wrong under greedy decoding."""
    eval_mode: Mode = "train-strict"
    eval_tokens: int = 0
    """Longest response in evaluation; 0: as in training."""
    thinking_end: str | None = None
    """End mark of the thinking of a model that thinks; only what follows is graded, and nothing without the mark."""
    curve_problems: int = 100
    """Problems of each suite that the curves use; 0: no curves. The final numbers use all."""
    miniature: MiniatureConfig = field(default_factory=MiniatureConfig)
    files: FilesConfig = field(default_factory=FilesConfig)
    sft_max_length: int | None = None
    """Longest demonstration in tokens; longer ones are cut."""
    sft: SFTConfig = field(
        default_factory=lambda: SFTConfig(
            epochs=4, batch_size=32, micro_tokens=4096, optim=OptimConfig(lr=2e-4, warmup_steps=10)
        )
    )
    ppo: PPOConfig = field(
        default_factory=lambda: PPOConfig(
            # Tuned for outcome only and outcome + length alike, on the validation puzzles and other seeds: lr 1e-4 to
            # 1e-3 (from 1e-3 on arithmetic breaks), KL 0.01 and 0.05 (0.05 holds responses of 60 tokens at the length
            # of the start model), lambda 0.95 and 1.
            steps=100,
            prompts_per_step=80,
            group_size=1,
            max_new_tokens=112,
            temperature=0.7,
            minibatches=2,
            kl_coef=0.01,
            ratio="behaviour",
            critic="separate",
            critic_warmup=4,
            eval_every=25,
            micro_tokens=4096,
            optim=OptimConfig(lr=2e-4, warmup_steps=10),
            critic_optim=OptimConfig(lr=5e-4),
        )
    )

    def __post_init__(self):
        bad = self.arm_problems(arm_of)
        for name in ("curve_problems", "eval_tokens"):
            if getattr(self, name) < 0:
                bad.append(f"{name}={getattr(self, name)}: give 0 or more")
        if self.ppo.parts:
            bad.append("ppo.parts is set through signals.separate: leave it empty")
        bad += self.signals.problems(self.ppo.max_new_tokens)
        if self.estimator != "ppo":
            if self.signals.separate:
                bad.append(
                    f"signals.separate needs estimator='ppo', which has values to subtract, not {self.estimator!r}"
                )
            try:
                online_config(self.ppo, self.estimator, self.samples_per_prompt)
            except ConfigError as err:
                bad.append(f"estimator={self.estimator!r}: {err}")
        if self.model != "miniature":
            if not self.files.train:
                bad.append(f"model={self.model!r} needs problems: files.train is empty")
            if not self.files.suites:
                bad.append(f"model={self.model!r} needs something to be evaluated on: files.suites is empty")
            if any(arm_of(a).start == "sft" for a in self.arms) and not self.files.demonstrations:
                bad.append(
                    "arms that begin with supervised fine-tuning need files.demonstrations, or choose the arms that do not"
                )
            paid = {e for a in self.arms if (e := arm_of(a).exploration) in ("creativity", "both")}
            if paid and not self.signals.grader.base_url:
                bad.append("arms that pay creativity need signals.grader.base_url and signals.grader.model")
        if bad:
            raise ConfigError("rlsp: " + "; ".join(bad))


def _suites() -> tuple[SuiteConfig, ...]:
    """MATH-500 and AIME 2024 under the training template, and MATH-500 under a step format for the start model."""
    return (
        SuiteConfig(name="math500", path="data/math500.jsonl"),
        SuiteConfig(name="aime24", path="data/aime24.jsonl", samples=8),
        SuiteConfig(name="math500 greedy", path="data/math500.jsonl", temperature=0.0),
        SuiteConfig(name="math500 step format", path="data/math500.jsonl", template="steps"),
    )


PROFILES: dict[str, RLSPConfig] = {
    "mini": RLSPConfig(),
    "smoke": RLSPConfig(
        seeds=(0,),
        arms=("base", "SFT", "outcome only", "outcome + length", "majority vote"),
        curve_problems=8,
        workers=1,
        miniature=MiniatureConfig(
            train=60, heldout=12, demonstrations=24, width=32, layers=2, pretrain_steps=60, pretrain_batch=16
        ),
        sft=SFTConfig(epochs=1, batch_size=12, optim=OptimConfig(lr=1e-3)),
        signals=SignalConfig(cap=40.0),
        ppo=PPOConfig(
            steps=3,
            prompts_per_step=8,
            group_size=1,
            max_new_tokens=48,
            temperature=0.7,
            minibatches=2,
            critic="separate",
            critic_warmup=1,
            eval_every=2,
            optim=OptimConfig(lr=3e-4),
            critic_optim=OptimConfig(lr=1e-3),
        ),
    ),
    "paper": RLSPConfig(
        seeds=(0,),
        # The published pair: verifier alone, and verifier with the length reward, both from the instruct model.
        arms=("base", "outcome only, no SFT", "outcome + length, no SFT", "majority vote"),
        model="meta-llama/Llama-3.1-8B-Instruct",
        signals=SignalConfig(c=1000.0, unit="characters", cap=3500.0, floor=1.0),
        eval_mode="eval-qwen",
        eval_tokens=8192,
        curve_problems=100,
        max_rows=256,
        keep_models=True,
        workers=1,
        device=None,
        dtype="bf16",
        files=FilesConfig(train="data/math_train.jsonl", suites=_suites()),
        sft_max_length=8192,
        sft=SFTConfig(
            epochs=2,
            batch_size=24,
            micro_tokens=16_384,
            optim=OptimConfig(lr=5e-6, schedule="cosine"),
        ),
        ppo=PPOConfig(
            steps=4688,  # 200 passes over 12,000 problems
            prompts_per_step=512,
            group_size=1,
            max_new_tokens=4096,
            temperature=0.7,
            minibatches=4,
            kl_coef=0.05,
            critic="separate",
            critic_warmup=4,
            eval_every=20,
            save_every=20,
            store_groups=1,
            micro_tokens=16_384,
            optim=OptimConfig(lr=2e-7, beta2=0.95, schedule="cosine", warmup_steps=560),
            critic_optim=OptimConfig(lr=2e-6, beta2=0.95, schedule="cosine", warmup_steps=560),
        ),
    ),
}


def run(config: RLSPConfig, run: RunDir, *, profile: str = "mini") -> dict[str, Any]:
    """All arms over all seeds; returns results.json. A run that was stopped goes on where it was."""
    mini = config.model == "miniature"
    extra = {"config": config, "root": str(run.path)}
    workers = config.processes
    if mini:
        run_jobs([Job("pretraining", 0, pretrain_job, config.miniature, extra)], run, title="base model", workers=1)
    world = world_of(config, run.path)  # reads the files before anything is trained on them
    done: dict[tuple[str, int], dict] = {}
    if any(ARMS[a].start == "sft" for a in config.arms):
        tuned = [Job("SFT", seed, sft_job, config, extra) for seed in config.seeds]
        done |= run_jobs(tuned, run, title="supervised fine-tuning", workers=workers)
    others = [a for a in config.arms if a != "SFT"]
    jobs = [Job(arm, seed, arm_job, config, extra) for arm in others for seed in config.seeds]
    done |= run_jobs(jobs, run, title="arms x seeds", workers=workers)
    keep_tokenizer(jobs, run)
    return _results(config, profile, world, done)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in row.items() if isinstance(v, float) and k != "wall_s"}


def _results(config: RLSPConfig, profile: str, world: World, done: Mapping[tuple[str, int], dict]) -> dict[str, Any]:
    first = world.suites[0].name
    votes = _votes(config, first, done)
    per_arm = {
        arm: [{**_numbers(done[arm, seed]), **votes.get((arm, seed), {})} for seed in config.seeds]
        for arm in config.arms
    }
    budget = {}
    for arm in config.arms:
        rows = [done[arm, seed] for seed in config.seeds]
        budget[arm] = {
            "tokens_generated": sum(r["tokens_generated"] for r in rows),
            "tokens_trained": sum(r["tokens_trained"] for r in rows),
            "env_steps": sum(r.get("samples", 0) for r in rows),
            "verifier_calls": sum(r.get("verifier_calls", 0) for r in rows),
            "tokens_evaluated": sum(r["eval_tokens"] for r in rows),
            "wall_s": round(sum(r.get("wall_s", 0.0) for r in rows), 1),
        }
    verdict, conditions, differences = judge(config, per_arm, first)
    notes = [
        f"{'met' if met else 'not met' if met is not None else 'not measured'}: {text}" for text, met in conditions
    ]
    if world.puzzles:
        notes.append(
            "The premise is built in: the base model was pretrained on a mixture with a few searches in it, so this tests "
            "elicitation, not new knowledge."
        )
    if any(world.dropped.values()):
        notes.append(f"Training problems left out: {', '.join(f'{k}: {v}' for k, v in world.dropped.items() if v)}.")
    arm = "outcome + length" if "outcome + length" in config.arms else config.arms[-1]
    return results(
        recipe="rlsp",
        profile=profile,
        model=config.model,
        seeds=config.seeds,
        claim=CLAIM,
        arms=arms_table(per_arm),
        budget=budget,
        verdict=verdict,
        verdict_rule=RULE,
        headline={"arm": arm, "metric": f"{first} accuracy"},
        differences=differences,
        votes={f"{arm} {seed}": row["votes"] for (arm, seed), row in done.items() if "votes" in row},
        dropped=world.dropped,
        notes=notes,
    )


def _votes(
    config: RLSPConfig, first: str, done: Mapping[tuple[str, int], dict]
) -> dict[tuple[str, int], dict[str, float]]:
    """Numbers of the voting arms at the token cost of one answer of the method with the same seed."""
    method = next((a for a in ("outcome + length", "outcome + length, no SFT") if a in config.arms), None)
    out = {}
    for (arm, seed), row in done.items():
        if "votes" not in row or arm not in config.arms:
            continue
        tokens = done[method, seed][f"{first} length"] if method else 0.0
        k, accuracy, cost = at_budget(row["votes"], tokens)
        out[arm, seed] = {f"{first} accuracy": accuracy, f"{first} length": cost, "votes": float(k)}
    return out


def judge(
    config: RLSPConfig, per_arm: Mapping[str, list[dict[str, float]]], first: str
) -> tuple[Verdict, list[tuple[str, bool | None]], dict[str, Any]]:
    """The verdict by `RULE`, its conditions (None: not measured), and paired differences."""

    def gap(a: str, b: str, metric: str = "accuracy") -> dict[str, Any] | None:
        if a not in per_arm or b not in per_arm:
            return None
        name = f"{first} {metric}"
        rows = zip(per_arm[a], per_arm[b], strict=True)
        return summarise([x[name] - y[name] if name in x and name in y else None for x, y in rows])

    def above(d: dict[str, Any] | None, sign: int = 1) -> bool | None:
        if d is None or d["mean"] is None or d["ci95"][0] is None:
            return None
        return d["ci95"][0] > 0 if sign > 0 else d["ci95"][1] < 0

    both, only, alone, vote = "outcome + length", "outcome only", "length only", "majority vote"
    shorter = gap(alone, both, "length")
    conditions: list[tuple[str, bool | None]] = [
        (f"{both} above {only} in accuracy", above(gap(both, only))),
        (f"{both} above {only} in distinct tries", above(gap(both, only, "distinct tries"))),
        (f"{alone} below {both} in accuracy", above(gap(alone, both), -1)),
        (f"{alone} longer than {both}", None if shorter is None or shorter["mean"] is None else shorter["mean"] > 0),
        (f"{both} above the {vote} of the base at equal tokens", above(gap(both, vote))),
    ]
    names = [(both, other) for other in config.arms if other not in (both,)]
    names += [("outcome + creativity", only), ("SFT", "base"), (only, "SFT"), (only, vote)]
    differences = {f"{a} minus {b}": d for a, b in names if (d := gap(a, b)) is not None and a != b}
    tries = gap(both, only, "distinct tries")
    if tries is not None:
        differences[f"{both} minus {only}, distinct tries"] = tries
    if all(met for _, met in conditions):
        return "shown", conditions, differences
    return ("reversed" if above(gap(both, only), -1) else "not shown"), conditions, differences


__all__ = ["ARMS", "CLAIM", "PROFILES", "RULE", "RLSPConfig", "judge", "run"]
