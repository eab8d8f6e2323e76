"""The arms: where they begin, what is paid; and the jobs that run one arm with one seed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from forethought.envs.congruence import parse_puzzle
from forethought.errors import ConfigError, DataError, nearest
from forethought.evaluate.behaviour import mean_behaviour, trace_behaviour
from forethought.recipes.jobs import Job
from forethought.recipes.rlsp.estimators import ReinforceConfig, ReinforceTrainer, online_config
from forethought.recipes.rlsp.measure import Look, seeded
from forethought.recipes.rlsp.signals import Exploration, make_reward, separate_parts
from forethought.recipes.rlsp.world import World, demonstration_records, from_files, miniature, pretrain, record_trees
from forethought.rewards.reward import Reward
from forethought.rundir import RunDir

if TYPE_CHECKING:
    from forethought.recipes.rlsp import RLSPConfig


@dataclass(frozen=True)
class Arm:
    """One row of the comparison.

    start: the base model, or the one after supervised fine-tuning. stage: "ppo" trains, "none" evaluates, "vote" lets
    many samples vote. outcome, exploration: what is paid. decay: the weight of exploration falls.
    """

    start: Literal["base", "sft"] = "sft"
    stage: Literal["none", "ppo", "vote"] = "ppo"
    outcome: bool = True
    exploration: Exploration = "none"
    decay: bool = False


ARMS: dict[str, Arm] = {
    "base": Arm(start="base", stage="none"),
    "SFT": Arm(stage="none"),
    "outcome only": Arm(),
    "outcome + length": Arm(exploration="length"),
    "outcome + creativity": Arm(exploration="creativity"),
    "length only": Arm(outcome=False, exploration="length"),
    "decaying length": Arm(exploration="length", decay=True),
    "majority vote": Arm(start="base", stage="vote"),
    "majority vote of SFT": Arm(stage="vote"),
    "outcome + length, no SFT": Arm(start="base", exploration="length"),
    "outcome only, no SFT": Arm(start="base"),
    "creativity only": Arm(outcome=False, exploration="creativity"),
    "outcome + both": Arm(exploration="both"),
    "outcome + both, no SFT": Arm(start="base", exploration="both"),
}


def arm_of(name: str) -> Arm:
    if name not in ARMS:
        raise ConfigError(f"arms: {name!r} is not known{nearest(name, ARMS)} known: {', '.join(ARMS)}")
    return ARMS[name]


def world_of(config: RLSPConfig, root: Path) -> World:
    """The world of this run; the miniature's base model lies where the pretraining job left it."""
    if config.model == "miniature":
        return miniature(config.miniature, str(root / "arms" / "pretraining" / "seed0" / "model"))
    return from_files(config.files, config.model)


def pretrain_job(job: Job, run: RunDir) -> Mapping[str, Any]:
    return pretrain(job.extra["config"].miniature, run)


class _Bench:
    """A loaded start model with its engine, its renderer and the evaluation."""

    def __init__(self, config: RLSPConfig, world: World, model: str, run: RunDir, seed: int):
        import torch

        from forethought.models.chat import ChatRenderer
        from forethought.models.load import load_model
        from forethought.models.policy import Policy
        from forethought.models.torch_engine import TorchEngine

        loaded, self.tokenizer = load_model(model, dtype=torch.float32, device=config.device)
        self.renderer = ChatRenderer(self.tokenizer)
        self.policy = Policy(loaded, self.tokenizer, end_ids=self.renderer.end_ids)
        self.engine = TorchEngine(self.policy, max_rows=config.max_rows)
        self.tokenizer.save_pretrained(run.path)
        self.look = Look(config, world, self.engine, self.encode, self.decode, seed)

    def encode(self, task: Mapping[str, Any]) -> list[int]:
        return self.renderer.prompt_ids(task["prompt"])

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def sft_job(job: Job, run: RunDir) -> Mapping[str, Any]:
    """Stage 1: fine-tune the start model on demonstrations of search, save it and measure it."""
    from forethought.learn.offline import SFTTrainer
    from forethought.learn.session import fit

    config: RLSPConfig = job.extra["config"]
    began = time.perf_counter()
    world = world_of(config, Path(job.extra["root"]))
    bench = _Bench(config, world, world.model, run, job.seed)
    source = config.miniature if world.puzzles else config.files
    trees = record_trees(bench.renderer, demonstration_records(source), max_length=config.sft_max_length)
    settings = replace(config.sft, seed=seeded(job.seed, "sft"))
    trainer = SFTTrainer(bench.policy, trees, settings, compute=config.compute_dtype())
    fit(
        trainer,
        run,
        steps=trainer.total,
        tags={"arm": job.arm, "seed": job.seed},
        title=f"{job.arm}, seed {job.seed}",
        save_every=settings.save_every,
        save_last=False,
    )
    with run.save_folder("model") as place:
        trainer.learner.save_model(place)
    numbers = bench.look.final()
    return {
        **numbers,
        "tokens_generated": 0,
        "tokens_trained": trainer.counts["tokens_trained"],
        "eval_tokens": bench.look.tokens,
        "eval_samples": bench.look.samples,
        "wall_s": time.perf_counter() - began,
    }


def arm_job(job: Job, run: RunDir) -> Mapping[str, Any]:
    """Train one arm with one seed (or only evaluate it) and return its numbers."""
    config: RLSPConfig = job.extra["config"]
    root = Path(job.extra["root"])
    arm = ARMS[job.arm]
    began = time.perf_counter()
    world = world_of(config, root)
    model = world.model if arm.start == "base" else str(root / "arms" / "SFT" / f"seed{job.seed}" / "model")
    bench = _Bench(config, world, model, run, job.seed)
    look = bench.look
    numbers: dict[str, Any] = {"tokens_generated": 0, "tokens_trained": 0}
    if arm.stage == "vote":
        numbers["votes"] = look.votes()
    elif arm.stage == "none":
        numbers |= look.final()
    else:
        numbers |= _train(config, job, run, arm, world, bench)
        numbers |= look.final()
    numbers |= {"eval_tokens": look.tokens, "eval_samples": look.samples}
    return {**numbers, "wall_s": time.perf_counter() - began}


def _train(config: RLSPConfig, job: Job, run: RunDir, arm: Arm, world: World, bench: _Bench) -> dict[str, Any]:
    """Stages 2 and 3: both signals in one run."""
    from forethought.learn.session import fit

    tasks = hard_tasks(config, bench, world.train) if config.hard_only else world.train
    reward = make_reward(
        config.signals,
        bench.decode,
        outcome=arm.outcome,
        exploration=arm.exploration,
        decay=arm.decay,
        puzzles=world.puzzles,
        thinking_end=config.thinking_end,
    )
    watch = _Watch(reward, bench, world.puzzles)
    trainer = _trainer(config, job, bench, tasks, reward, watch)
    try:
        fit(
            trainer,
            run,
            steps=trainer.config.steps,
            tags={"arm": job.arm, "seed": job.seed},
            title=f"{job.arm}, seed {job.seed}",
            evaluate=bench.look.short if config.curve_problems else None,
            eval_every=config.ppo.eval_every,
            save_every=config.ppo.save_every,
            save_last=config.keep_models,
            store_groups=config.ppo.store_groups,
            extra=reward.state_dict,
            restore_extra=reward.load_state_dict,
        )
    finally:
        reward.close()
    return {**trainer.counts, "samples": trainer.counts["verifier_calls"], "hard_tasks": len(tasks)}


def _trainer(config: RLSPConfig, job: Job, bench: _Bench, tasks: list, reward: Any, watch: _Watch) -> Any:
    from forethought.learn.online import OnlineTrainer
    from forethought.learn.ppo import PartConfig, PPOTrainer

    ppo = replace(config.ppo, seed=seeded(job.seed, job.arm))
    common: dict[str, Any] = {"compute": config.compute_dtype(), "on_groups": watch}
    given = (bench.policy, bench.engine, tasks, bench.encode, reward.judge_many)
    if config.estimator != "ppo":
        online = online_config(ppo, config.estimator, config.samples_per_prompt)
        return (ReinforceTrainer if isinstance(online, ReinforceConfig) else OnlineTrainer)(*given, online, **common)
    if config.signals.separate:
        weights = reward.combiner.weights
        parts = tuple(PartConfig(name=name, weight=weights()[name]) for name in separate_parts(reward))
        return PPOTrainer(*given, replace(ppo, parts=parts), part_weights=lambda step: weights(), **common)
    return PPOTrainer(*given, ppo, **common)


class _Watch:
    """After each rollout: numbers of the parts and of behaviour, and the weights' next position."""

    def __init__(self, reward: Any, bench: _Bench, puzzles: bool):
        self.reward, self.bench, self.puzzles = reward, bench, puzzles

    def __call__(self, step: int, groups: list) -> dict[str, float]:
        out = dict(self.reward.metrics)
        results = [r for g in groups for r in g.results if isinstance(r, Reward)]
        accuracy = float(np.mean([r.parts["correctness"] >= 1 for r in results])) if results else None
        if accuracy is not None:
            out["train/accuracy"] = accuracy
        if self.puzzles:
            texts = [(self.bench.decode(g.tree.node_ids(leaf)), g.task) for g in groups for leaf in g.leaves]
            found = mean_behaviour(trace_behaviour(text, parse_puzzle(task["prompt"])) for text, task in texts)
            kept = ("tries", "distinct tries", "recovered", "repetition", "false arithmetic", "false yes", "false no")
            out |= {f"train/{name}": found[name] for name in kept}
        self.reward.combiner.advance(accuracy)
        return out


def hard_tasks(config: RLSPConfig, bench: _Bench, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The problems that the start model answers wrong under greedy decoding.

    Raises:
        DataError: it answers all of them right.
    """
    from forethought.recipes.rlsp.world import Suite

    result = bench.look.sample(Suite("hard filter", tasks, 0.0), tasks, -2)
    right = {row.task for row in result.rows if row.right}
    hard = [t for t in tasks if str(t["id"]) not in right]
    if not hard:
        raise DataError(
            f"hard_only=true: the start model answers all {len(tasks)} training problems right under greedy decoding, so "
            "nothing is left; give harder problems or hard_only=false"
        )
    return hard
