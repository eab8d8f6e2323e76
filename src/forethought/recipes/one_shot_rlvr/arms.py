"""The arms: what is trained on, what pays, which loss terms act; and the job that runs one arm with one seed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forethought.envs.arithmetic import UNGUESSABLE, wrong_label
from forethought.errors import ConfigError, nearest
from forethought.files import append_whole, to_json
from forethought.recipes.jobs import Job
from forethought.recipes.one_shot_rlvr.history import AccuracyHistory, select
from forethought.recipes.one_shot_rlvr.world import World, from_files, in_context, miniature, pretrain, seeded
from forethought.rundir import RunDir

if TYPE_CHECKING:
    from forethought.recipes.one_shot_rlvr import OneShotConfig


@dataclass(frozen=True)
class Arm:
    """One row of the comparison.

    problems: "pool"; "selected" (the first k of the ranking); "median" (its middle); "impossible" (lowest mean
    accuracy); "none" (evaluation only). policy, decay, kl, entropy: which terms of the loss act. label: what counts
    as right. algorithm: None is that of the config.
    """

    problems: Literal["pool", "selected", "median", "impossible", "none"] = "selected"
    reward: Literal["outcome", "format", "random"] = "outcome"
    label: Literal["gold", "guessable", "unguessable"] = "gold"
    policy: bool = True
    decay: bool = True
    kl: bool = True
    entropy: bool = True
    in_context: bool = False
    algorithm: Literal["grpo", "ppo"] | None = None


ARMS: dict[str, Arm] = {
    "one-shot": Arm(),
    "one-shot PPO": Arm(algorithm="ppo"),
    "full pool": Arm(problems="pool"),
    "base": Arm(problems="none"),
    "format only": Arm(problems="pool", reward="format"),
    "median problem": Arm(problems="median"),
    "impossible problem": Arm(problems="impossible"),
    "policy only": Arm(decay=False, kl=False, entropy=False),
    "policy + entropy": Arm(decay=False, kl=False),
    "entropy only": Arm(policy=False, decay=False, kl=False),
    "guessable label": Arm(label="guessable"),
    "unguessable label": Arm(label="unguessable"),
    "random reward": Arm(reward="random"),
    "in context": Arm(problems="none", in_context=True),
}


def arm_of(name: str) -> Arm:
    if name not in ARMS:
        raise ConfigError(f"arms: {name!r} is not known{nearest(name, ARMS)} known: {', '.join(ARMS)}")
    return ARMS[name]


def world_of(config: OneShotConfig, root: Path) -> World:
    """The world of this run; the miniature's base model lies where the pretraining job left it."""
    if config.files.train or config.model != "miniature":
        return from_files(config.files, config.model)
    return miniature(config.miniature, config.eval_temperature, str(root / "arms" / "pretraining" / "seed0" / "model"))


def pretrain_job(job: Job, run: RunDir) -> Mapping[str, Any]:
    return pretrain(job.extra["config"].miniature, run.path, run)


def problems_of(arm: Arm, config: OneShotConfig, world: World, history: AccuracyHistory | None) -> list[dict[str, Any]]:
    """The problems that an arm trains on, most preferred first."""
    if arm.problems == "pool":
        return world.pool
    if history is None:
        raise ConfigError(f"an arm on {arm.problems!r} problems needs an accuracy history")
    ranking = config.ranking(history)
    if arm.problems == "selected":
        chosen = select(ranking, config.k)
    elif arm.problems == "median":
        chosen = [ranking.order[len(ranking.order) // 2]]
    else:
        shares = history.shares()
        chosen = [min((i for i in shares if shares[i]), key=lambda i: (sum(shares[i]) / len(shares[i]), i))]
    out = []
    for index in chosen:
        task = world.by_index(index)
        if arm.label == "unguessable":
            task = {**task, "answer": UNGUESSABLE}
        elif arm.label == "guessable":
            if "chain" not in task:
                raise ConfigError("the guessable wrong label is made from a chain of the miniature; give this arm up")
            task = wrong_label(task, "guessable")
        out.append(task)
    return out


def arm_job(job: Job, run: RunDir) -> Mapping[str, Any]:
    """Train one arm with one seed (or only evaluate it) and return its numbers."""
    import torch

    from forethought.learn.online import OnlineTrainer
    from forethought.learn.ppo import PPOTrainer
    from forethought.learn.session import fit
    from forethought.models.chat import ChatRenderer
    from forethought.models.load import load_model
    from forethought.models.policy import Policy
    from forethought.models.torch_engine import TorchEngine
    from forethought.rewards.math_rewards import FormatReward, OutcomeReward, RandomReward

    config: OneShotConfig = job.extra["config"]
    root = Path(job.extra["root"])
    arm = ARMS[job.arm]
    world = world_of(config, root)
    history = AccuracyHistory.read(job.extra["history"]) if job.extra.get("history") else None
    model, tokenizer = load_model(world.model, dtype=torch.float32, device=config.device)
    policy = Policy(model, tokenizer)
    engine = TorchEngine(policy, max_rows=config.max_rows)
    renderer = ChatRenderer(tokenizer)
    tokenizer.save_pretrained(run.path)

    def encode(task):
        return renderer.prompt_ids(task["prompt"])

    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    look = _Evaluation(config, world, engine, encode, decode, job.seed)
    began = time.perf_counter()
    numbers: dict[str, Any] = {}
    if arm.problems == "none":
        change = in_context(problems_of(Arm(), config, world, history)[0]) if arm.in_context else None
        return {**look.final(change), "wall_s": time.perf_counter() - began}
    tasks = problems_of(arm, config, world, history)
    if arm.reward == "format":
        reward: Any = FormatReward(decode, thinking_end=config.thinking_end)
    elif arm.reward == "random":
        reward = RandomReward(seed=seeded(job.seed, "random reward"))
    else:
        reward = OutcomeReward(decode, mode=config.train_mode, thinking_end=config.thinking_end)
    online = replace(
        config.online,
        seed=seeded(job.seed, job.arm),
        policy_coef=config.online.policy_coef if arm.policy else 0.0,
        kl_coef=config.beta if arm.kl else 0.0,
        entropy_coef=-config.alpha if arm.entropy else 0.0,
        optim=config.online.optim if arm.decay else replace(config.online.optim, weight_decay=0.0),
    )
    watch = _Observables(run, decode, record=arm.problems == "pool")
    more: dict[str, Any] = {"compute": config.compute_dtype(), "on_groups": watch}
    if (arm.algorithm or config.algorithm) == "ppo":
        trainer = PPOTrainer(policy, engine, tasks, encode, reward.judge_many, config.ppo.config(online), **more)
    else:
        trainer = OnlineTrainer(policy, engine, tasks, encode, reward.judge_many, online, **more)
    best = _Best(trainer.learner.optimizer, look.short)

    def restore(saved: Any) -> None:
        watch.load_state_dict(saved["watch"])
        best.load_state_dict(saved["best"])

    fit(
        trainer,
        run,
        steps=online.steps,
        title=f"{job.arm}, seed {job.seed}",
        evaluate=best if config.checkpoint == "best" else look.short,
        eval_every=online.eval_every,
        save_every=online.save_every,
        save_last=config.keep_models,
        store_groups=online.store_groups,
        extra=lambda: {"watch": watch.state_dict(), "best": best.state_dict()},
        restore_extra=restore,
    )
    if config.checkpoint == "best":
        numbers["best step"] = best.restore()
    numbers |= look.final()
    numbers |= _after_saturation(run.metrics())
    if arm.problems == "pool":
        run.write_json("history.json", watch.history.to_json())
    return {
        **numbers,
        **trainer.counts,
        "verifier_calls": trainer.counts["verifier_calls"] if arm.reward == "outcome" else 0,
        "samples": trainer.counts["verifier_calls"],
        "problems": [str(t["index"]) for t in tasks[:8]],
        "trained_answers": [str(t["answer"]) for t in tasks[:8]],
        "wall_s": time.perf_counter() - began,
    }


class _Evaluation:
    """Accuracy, boxed, truncated and repeated shares on the world's suites; one engine, one template, one length."""

    def __init__(self, config: OneShotConfig, world: World, engine, encode, decode, seed: int):
        self.config, self.world, self.engine, self.encode, self.decode, self.seed = (
            config,
            world,
            engine,
            encode,
            decode,
            seed,
        )

    def _suite(self, name: str, tasks, samples: int, temperature: float, step: int):
        from forethought.evaluate.suites import evaluate
        from forethought.models.engine import Sampling
        from forethought.rewards.math_rewards import OutcomeReward

        reward = OutcomeReward(self.decode, mode=self.config.eval_mode, thinking_end=self.config.thinking_end)
        sampling = Sampling(
            max_tokens=self.config.eval_tokens or self.config.online.max_new_tokens,
            temperature=temperature,
            seed=seeded(self.seed, "eval", name, step),
        )
        return evaluate(
            self.engine,
            tasks,
            reward.judge_many,
            prompt_ids=self.encode,
            decode=self.decode,
            samples=samples,
            sampling=sampling,
            name=name,
        )

    def short(self, step: int) -> dict[str, float]:
        """What a curve needs: the first `curve_problems` problems of every suite."""
        out: dict[str, float] = {}
        for number, (name, (tasks, samples, temperature)) in enumerate(self.world.suites.items()):
            result = self._suite(name, tasks[: self.config.curve_problems], samples, temperature, step)
            metrics = result.metrics()
            key = "eval" if number == 0 else f"eval {name}"
            out |= {f"{key}/accuracy": metrics["accuracy"], f"{key}/boxed": metrics["boxed"]}
        return out

    def final(self, change=None) -> dict[str, float]:
        """Every problem of every suite."""
        out: dict[str, float] = {}
        for name, (tasks, samples, temperature) in self.world.suites.items():
            tasks = [change(t) for t in tasks] if change else tasks
            metrics = self._suite(name, tasks, samples, temperature, -1).metrics()
            for part in ("accuracy", "boxed", "truncated", "repeated"):
                out[f"{name} {part}"] = metrics[part]
            out[f"{name} length"] = metrics["length/mean"]
        return out


class _Best:
    """Evaluates like the function it wraps, and keeps the weights with the best mean accuracy over the suites."""

    def __init__(self, optimizer, evaluate):
        self.optimizer, self.evaluate = optimizer, evaluate
        self.kept: dict[str, Any] = {}

    def __call__(self, step: int) -> dict[str, float]:
        numbers = self.evaluate(step)
        scores = [v for k, v in numbers.items() if k.endswith("/accuracy")]
        mean = sum(scores) / len(scores)
        if not self.kept or mean > self.kept["mean"]:
            weights = {n: w.clone() for n, w in self.optimizer.master_state().items()}
            self.kept = {"mean": mean, "step": step, "weights": weights}
        return numbers

    def restore(self) -> float:
        """Put the best weights back; returns their step."""
        self.optimizer.load_masters(self.kept["weights"])
        return float(self.kept["step"])

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


class _Observables:
    """What the paper watches in training: accuracy of each distinct problem, its answers with counts, the history."""

    def __init__(self, run: RunDir, decode, *, record: bool):
        self.run, self.decode, self.record = run, decode, record
        self.history = AccuracyHistory()

    def __call__(self, step: int, groups) -> dict[str, float]:
        from forethought.evaluate.metrics import distinct_answers
        from forethought.rewards.verify import extract_answer

        trees = {id(g.tree): g for g in groups}
        shares = []
        for group in trees.values():
            mine = [g for g in groups if g.tree is group.tree]
            rewards = [float(r) for g in mine for r in g.rewards]
            if self.record:
                self.history.record_rewards(step, group.task["index"], rewards)
            valid = [r for r in rewards if r == r]
            shares.append(sum(valid) / max(1, len(valid)))
        out = {"train/accuracy": sum(shares) / len(shares)}
        if len(trees) <= 4:
            texts = [self.decode(g.tree.node_ids(leaf)) for g in groups for leaf in g.leaves]
            answers = distinct_answers([extract_answer(t) for t in texts])
            out["train/distinct_answers"] = float(len(answers))
            row = {"step": step + 1, "answers": [[a, c] for a, c in answers[:10]]}
            append_whole(self.run.path / "answers.jsonl", (to_json(row) + "\n").encode())
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = AccuracyHistory.from_json(state["history"])


def _after_saturation(rows: list[dict[str, Any]]) -> dict[str, float]:
    """First step at which training accuracy is 0.99 or more, and what the curve's accuracy gained after it."""
    saturated = next((r["step"] for r in rows if (r.get("train/accuracy") or 0) >= 0.99), None)
    out: dict[str, float] = {"train accuracy, last": rows[-1].get("train/accuracy") or 0.0}
    if saturated is not None:
        curve = [(r["step"], r["eval/accuracy"]) for r in rows if r.get("eval/accuracy") is not None]
        before = [a for s, a in curve if s <= saturated]
        after = [a for s, a in curve if s > saturated]
        out["saturated at step"] = float(saturated)
        if before and after:
            out["gain after saturation"] = after[-1] - before[-1]
    return out
