"""`forethought train inpo`, `sppo` and `online-dpo`: preference games on the user's prompts with the user's oracle.

The oracle compares two answers: a function, a chat model, or a reward as Bradley-Terry. With held-out prompts the job
ends with how often the trained model's greedy answers win against those of the model before, by the same oracle; the
lengths stand beside it, for an oracle may simply like long answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forethought.errors import ConfigError, RewardError, RunError
from forethought.evaluate.stats import bootstrap_ci, paired_bootstrap, wilson
from forethought.files import from_json
from forethought.learn.optim import OptimConfig
from forethought.learn.pair_losses import Form
from forethought.learn.preference_game import GameConfig, GameTrainer
from forethought.models.engine import Sampling
from forethought.progress import Progress
from forethought.recipes.inputs import Judge, Say, Task, encode_prompts, load_prompts
from forethought.recipes.judging import close_oracle, open_oracle, trial
from forethought.recipes.own_grpo import STORED, RewardedJob
from forethought.recipes.own_job import (
    Place,
    Session,
    cell,
    difference,
    load,
    overlap,
    overlap_note,
    verdict,
    without_held_out,
)
from forethought.recipes.preference_job import OracleSettings
from forethought.recipes.session import Workbench
from forethought.rewards.oracles import Oracle, ask_oracle
from forethought.rewards.pairs import PairMode
from forethought.tree.store import TreeStore
from forethought.tree.tree import Kind, Stop, TokenTree


@dataclass(frozen=True, kw_only=True)
class GameJob(OracleSettings, RewardedJob):
    """Settings that all preference games share; see `GameConfig`."""

    method: Literal["inpo", "sppo", "online-dpo"]
    iterations: int = 3
    prompts_per_iteration: int = 64
    samples: int = 8
    pair_mode: PairMode = "iid"
    max_new_tokens: int = 64
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    keep_truncated: bool = False
    max_length: int | None = None
    epochs: int = 1
    batch_size: int = 32
    valid_share: float = 0.0
    patience: int = 1
    monitor_prompts: int = 16
    micro_tokens: int = 4096
    store_groups: int = 1
    """Prompts of an iteration that are kept in the tree store, for the report."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-7))

    def __post_init__(self):
        self.config()
        self.check_timeout()
        if not 0 < self.scale < float("inf"):
            raise ConfigError(f"scale={self.scale}: give a positive number")

    def config(self) -> GameConfig:
        """The trainer's settings. Raises: ConfigError."""
        own = {f.name: getattr(self, f.name) for f in fields(GameConfig) if f.name in self.__dataclass_fields__}
        return GameConfig(**{"loss": self.method, **own})

    def may_change(self) -> tuple[str, ...]:
        return tuple(name for name in super().may_change() if name != "epochs")  # it sets where iterations begin

    def require(self) -> None:
        super().require()
        bad = []
        if self.oracle is None and not self.reward:
            bad.append(
                "no oracle: give --oracle FILE.py:NAME (a function f(task, a, b) -> P(a wins)), --oracle judge with "
                "judge.url and judge.model, or --reward FILE.py:NAME for Bradley-Terry on a reward"
            )
        bad += self.oracle_problems(self.reward)
        if bad:
            raise ConfigError("train: " + "; ".join(bad))


@dataclass(frozen=True, kw_only=True)
class INPOJob(GameJob):
    """Settings of `forethought train inpo`."""

    method: Literal["inpo"] = "inpo"
    eta: float | None = None
    """Inverse step size; 0.005 unless given (or set by the schedule)."""
    tau: float | None = None
    """Strength of the tie to the reference; eta / 3 unless given."""
    eta_schedule: Literal["constant", "growing"] = "constant"
    """growing sets eta to tau (t + 2) / 2 in iteration t."""


@dataclass(frozen=True, kw_only=True)
class SPPOJob(GameJob):
    """Settings of `forethought train sppo`."""

    method: Literal["sppo"] = "sppo"
    beta: float = 0.001
    """Inverse step size."""


@dataclass(frozen=True, kw_only=True)
class OnlineDPOJob(GameJob):
    """Settings of `forethought train online-dpo`."""

    method: Literal["online-dpo"] = "online-dpo"
    loss: Literal["dpo", "ipo", "nash_md"] = "dpo"
    beta: float = 0.1
    """Strength of the tie."""
    base: Literal["reference", "previous", "none"] = "reference"
    """dpo, ipo: what margins are measured against: the model before training, that of each iteration's beginning, none."""
    form: Form = "sigmoid"
    """dpo: sigmoid, hinge, or robust (with label_smoothing)."""
    label_smoothing: float = 0.0
    """dpo: share of labels taken to be flipped."""
    mixture: float = 0.5
    """nash_md: share of the reference in the opponent."""


class _Game(GameTrainer):
    """The trainer with what a user should hear of: comparisons that failed."""

    say: Say
    told = False

    def train_step(self, progress=None):
        metrics, shown = super().train_step(progress)
        missing = sum(v for k, v in metrics.items() if k.startswith("pairs/dropped/") and k.endswith("not_judged"))
        if missing and not self.told:
            self.told = True
            self.say(f"step {self.step}: {missing:.0f} answers or pairs are left out, because comparisons failed")
        return metrics, shown


def game(job: GameJob, at: Place, say: Say) -> Path:
    """The job from its files to its results."""
    with contextlib.ExitStack() as stack:
        judge = None
        if job.reward:
            judge = stack.enter_context(Judge(job.reward, job.reward_weights, timeout=job.reward_timeout))
        oracle = open_oracle(
            job.oracle or "reward",
            reward=judge,
            judge=job.judge,
            scale=job.scale,
            both_orders=job.both_orders,
            timeout=job.reward_timeout,
            seed=job.seed,
            cache=None,
        )
        stack.callback(close_oracle, oracle)
        tasks = load_prompts(job.data, job)
        held_out = load_prompts(job.eval_data, job) if job.eval_data else []
        if job.prompts_per_iteration > len(tasks):
            raise ConfigError(
                f"prompts_per_iteration={job.prompts_per_iteration} exceeds the {len(tasks)} prompts of {job.data}: lower "
                "it, and raise samples for more pairs"
            )
        if judge is not None:
            judge.check([*tasks, *held_out], say)
        trial(oracle, tasks, say)
        shared = overlap(tasks, held_out, say)
        bench = load(job, job.seed, say)
        ids = encode_prompts(bench, tasks, job.data, job.max_new_tokens, say)
        if job.eval_data:
            encode_prompts(bench, held_out, job.eval_data, job.max_new_tokens, say)
        place = {str(t["id"]): i for i, t in enumerate(tasks)}
        trainer = _Game(
            bench.policy,
            bench.engine,
            tasks,
            lambda task: ids[place[str(task["id"])]],
            oracle,
            job.config(),
            decode=bench.decode,
            compute=bench.compute,
        )
        trainer.say = say
        say(batch_arithmetic(job.config(), len(tasks)))
        run = at.open(bench)
        total = job.config().total_steps
        session = Session(trainer, run, job, job.method, total, say, store_groups=job.store_groups)

        def measure(step: int) -> tuple[dict[str, float], dict[str, Any]]:
            rows = _answers(bench, held_out, job)
            session.spent["tokens_generated"] += sum(row["length"] for row in rows)
            asked = oracle.queries
            _score(oracle, held_out, rows)
            if step:
                _against(oracle, held_out, rows, _read_rows(run.path / "eval_before.json"))
            session.spent["verifier_calls"] += oracle.queries - asked
            if step in (0, total):
                _store(run.path, rows, step, job)
            return _summary(rows), {"rows": [{k: v for k, v in row.items() if k != "tree"} for row in rows]}

        session.fit(measure if held_out else None)
        found = _results(job, session, held_out)
        session.finish(found | {"notes": [*found["notes"], *overlap_note(shared).get("notes", [])]})
        return run.path


def batch_arithmetic(config: GameConfig, records: int) -> str:
    """What an iteration consists of, in one line."""
    prompts, samples = config.prompts_per_iteration, config.samples
    passes = f"{config.epochs} pass{'es' if config.epochs > 1 else ''}"
    pairs = (
        f"up to {prompts * config.pairs_per_prompt} pairs ({config.pair_mode}), {passes}: up to {config.inner_steps}"
    )
    used = config.iterations / -(-records // prompts)
    return (
        f"{prompts} prompts x {samples} samples = {prompts * samples} answers an iteration, {pairs} updates; "
        f"{config.iterations} iterations = {used:.3g} passes over {records} prompts"
    )


# -- held-out prompts --------------------------------------------------------------------------------------------------


def _answers(bench: Workbench, tasks: Sequence[Task], job: GameJob) -> list[dict[str, Any]]:
    """Greedy answers to the held-out prompts."""
    trees = [TokenTree(bench.prompt_ids(t), kind=Kind.PROMPT, task=str(t["id"]), seed=job.seed) for t in tasks]
    sampling = Sampling(max_tokens=job.max_new_tokens, temperature=0.0, stop=job.stop, seed=job.seed)
    with Progress(len(tasks), "evaluating") as bar:
        nodes = bench.engine.extend([(t, 0) for t in trees], 1, sampling, progress=lambda done, _: bar.update(done))
    rows = []
    for tree, (node,) in zip(trees, nodes, strict=True):
        stop = Stop(int(tree.stop[node])).name.lower()
        text = bench.decode(tree.node_ids(node))
        rows.append({"task": tree.task, "text": text, "length": int(tree.length[node]), "stop": stop, "tree": tree})
    return rows


def _score(oracle: Oracle, tasks: Sequence[Task], rows: list[dict[str, Any]]) -> None:
    """The rewards of an oracle that has them (Bradley-Terry)."""
    scores = getattr(oracle, "scores", None)
    if scores is None:
        return
    given = scores([(task, row["text"]) for task, row in zip(tasks, rows, strict=True)])
    for row, score in zip(rows, given, strict=True):
        row["reward"] = None if isinstance(score, RewardError) else float(score)


def _against(
    oracle: Oracle, tasks: Sequence[Task], rows: list[dict[str, Any]], before: Sequence[Mapping[str, Any]]
) -> None:
    """The probability that each answer wins against that of the model before; equal ones are even, failed ones None."""
    items = [(task, row["text"], old["text"]) for task, row, old in zip(tasks, rows, before, strict=True)]
    asked = [item for item in items if item[1] != item[2]]
    given = iter(ask_oracle(oracle, asked) if asked else [])
    for row, item in zip(rows, items, strict=True):
        p = 0.5 if item[1] == item[2] else next(given)
        row["win"] = None if isinstance(p, RewardError) else p
    if all(row["win"] is None for row in rows):
        raise RewardError("every comparison of the evaluation failed")


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        return from_json(path.read_text())["rows"]
    except (OSError, ValueError, KeyError) as err:
        raise RunError(f"{path}: the answers before training cannot be read: {err}") from None


def _known(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    out = {"eval/length": float(np.mean([row["length"] for row in rows]))}
    out["eval/truncated"] = float(np.mean([row["stop"] == "length" for row in rows]))
    for name, column in (("eval/win_rate", "win"), ("eval/reward", "reward")):
        if values := _known(rows, column):
            out[name] = float(np.mean(values))
    return out


def _store(folder: Path, rows: Sequence[Mapping[str, Any]], step: int, job: GameJob) -> None:
    with TreeStore(folder / "trees.sqlite") as store:
        for row in rows[:STORED]:
            tree = row["tree"]
            store.append(tree, task=tree.task, step=step, arm=job.method, seed=job.seed, kind="eval")


def _results(job: GameJob, session: Session, held_out: Sequence[Task]) -> dict[str, Any]:
    if not session.before or not session.after:
        advice = "--eval-data FILE measures the win rate against the model before training"
        return without_held_out(session, "rewards/accuracies", "training_accuracy", advice)
    sides = {"before": session.before["rows"], "after": session.after["rows"]}
    arms: dict[str, Any] = {}
    for side, rows in sides.items():
        arms[side] = {
            "length": cell(bootstrap_ci([row["length"] for row in rows])),
            "truncated": cell(wilson(sum(row["stop"] == "length" for row in rows), len(rows))),
        }
        if rewards := _known(rows, "reward"):
            arms[side]["reward"] = cell(bootstrap_ci(rewards))
    wins = _known(sides["after"], "win")
    change = paired_bootstrap(wins, [0.5] * len(wins))
    arms["after"]["win_rate"] = cell(bootstrap_ci(wins))
    examples = []
    for task, before, after in zip(held_out[:STORED], sides["before"], sides["after"], strict=False):
        entry = {"prompt": task["prompt"], "before": before["text"], "after": after["text"]}
        examples.append(entry | {"probability that after wins": after["win"]})
    return {
        "claim": f"By the oracle, the trained model's greedy answers to {len(wins)} held-out prompts win against those of "
        "the model before training.",
        "arms": arms,
        "verdict": verdict(change, better=1),
        "verdict_rule": "95% interval (bootstrap over prompts) of the mean probability to win on the held-out prompts: all "
        "above 1/2 is shown, all below 1/2 is reversed, else not shown",
        "difference": difference(change),
        "notes": ["The oracle that judges here is the one that trained; see whether the lengths moved with it."],
        "examples": examples,
        "headline": {"arm": "after", "metric": "win_rate"},
    }
