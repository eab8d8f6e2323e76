"""What the arms work on: the miniature (a base model pretrained here), or problem files and a pretrained model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forethought.config import derive_seed
from forethought.data import load_tasks
from forethought.envs.arithmetic import ALPHABET, ChainConfig, Shares, chains, demonstrations, worked
from forethought.errors import ConfigError, DataError
from forethought.rundir import RunDir

Task = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MiniatureConfig:
    """The procedural world and the base model that is pretrained on its mixture of careful work and guesses."""

    chain: ChainConfig = field(
        default_factory=lambda: ChainConfig(max_number=9, max_value=20, max_modulus=7, min_steps=2, max_steps=3)
    )
    shifted_chain: ChainConfig = field(default_factory=lambda: ChainConfig(max_value=9, max_number=9, max_steps=2))
    """The shifted family: other operators, which the base model knows and the reward never sees."""
    shares: Shares = field(default_factory=Shares)
    pool: int = 256
    heldout: int = 1000
    shifted: int = 250
    width: int = 128
    layers: int = 4
    heads: int = 4
    pretrain_steps: int = 1500
    pretrain_batch: int = 48
    pretrain_lr: float = 3e-3
    pretrain_problems: int = 4500
    """Problems that the demonstrations are about; the pool is drawn from what is left, so nothing in it was shown."""
    pretrain_shifted: int = 1500
    """Problems of the shifted family among the demonstrations, each shown as often as the others."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """An evaluation file. Columns are named; `system` is the system turn (empty: none)."""

    name: str
    path: str
    prompt_column: str = "problem"
    answer_column: str = "answer"
    samples: int = 1
    temperature: float = 0.0
    system: str = ""


@dataclass(frozen=True, kw_only=True)
class FilesConfig:
    """Problem files for a pretrained model (the paper profile): the pool, its accuracy history, evaluation suites."""

    train: str = ""
    """Pool, JSONL or parquet; the published pool is dsr_sub.parquet of the paper's repository."""
    prompt_column: str = "prompt"
    answer_column: str = "reward_model.ground_truth"
    index_column: str = "extra_info.index"
    """Stable index of a problem: the key of the accuracy history."""
    history: str = ""
    """Accuracy history (index -> shares); empty: recorded by a run on the whole pool first."""
    suites: tuple[Suite, ...] = ()
    limit: int | None = None
    """Use the first N problems of every file."""


@dataclass
class World:
    """Tasks with id, index (stable), prompt, answer; and how a model of this world is loaded and spoken to."""

    pool: list[Task]
    suites: dict[str, tuple[list[Task], int, float]]
    """name -> (tasks, samples a task, temperature)."""
    model: str
    chat: bool
    dropped: list[str] = field(default_factory=list)
    """Pool rows that cannot be judged (no gold answer), by index."""

    def by_index(self, index: str) -> Task:
        """The problem of the pool with this index.

        Raises:
            DataError: the pool has none (the accuracy history is of another pool, or the pool was cut).
        """
        for task in self.pool:
            if str(task["index"]) == str(index):
                return task
        why = (
            "its row has no gold answer: take it out of the accuracy history"
            if str(index) in self.dropped
            else "the accuracy history (files.history) must be of this pool: give the history of these problems, leave it "
            "empty to record one, or raise files.limit"
        )
        raise DataError(f"problem index {index} is not among the {len(self.pool)} problems of the pool; {why}")


def miniature(config: MiniatureConfig, heldout_sampled: float, model: str) -> World:
    """The generated world; `model`: folder of the base that `pretrain` left."""
    every = chains(config.pretrain_problems + config.pool, 0, "train", config=config.chain)
    pool = every[config.pretrain_problems :]
    heldout = chains(config.heldout, 0, "heldout", config=config.chain)
    shifted = chains(config.shifted, 0, "heldout", family="chain-shifted", config=config.shifted_chain)
    return World(
        pool=[{**t, "index": str(i)} for i, t in enumerate(pool)],
        suites={
            "heldout": (heldout, 1, heldout_sampled),
            "heldout greedy": (heldout, 1, 0.0),
            "shifted": (shifted, 1, heldout_sampled),
        },
        model=model,
        chat=False,
    )


def from_files(config: FilesConfig, model: str) -> World:
    """The pool and the suites from files.

    Raises:
        ConfigError: no pool named. DataError: a file or column is missing, or an index is given twice.
    """
    if not config.train:
        raise ConfigError("files.train is empty: name the pool, e.g. files.train=data/dsr_sub.parquet")
    rows = load_tasks(
        config.train, config.prompt_column, config.answer_column, config.limit, id_column=config.index_column
    )
    pool, dropped = [], []
    for row in rows:
        task = {**row, "index": str(row["id"])}
        if str(task.get("answer") or "").strip():
            pool.append(task)
        else:
            dropped.append(task["index"])
    suites = {}
    for suite in config.suites:
        tasks = load_tasks(suite.path, suite.prompt_column, suite.answer_column, config.limit)
        if suite.system:
            tasks = [{**t, "prompt": _with_system(suite.system, t["prompt"])} for t in tasks]
        suites[suite.name] = (tasks, suite.samples, suite.temperature)
    return World(pool=pool, suites=suites, model=model, chat=True, dropped=dropped)


def _with_system(system: str, prompt: Any) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [{"role": "system", "content": system}, *turns]


def in_context(task: Task) -> Callable[[Task], Task]:
    """Puts one worked example in front of a problem of the miniature."""
    example = f"{task['prompt']}{worked(task)}\n"
    return lambda t: {**t, "prompt": example + t["prompt"]}


def pretrain(config: MiniatureConfig, folder: Path, run: RunDir) -> dict[str, float]:
    """Train the base model from scratch on the demonstrations and save it as an HF folder; resumes from checkpoints."""
    from forethought.learn.offline import SFTConfig, SFTTrainer
    from forethought.learn.optim import OptimConfig
    from forethought.learn.session import fit
    from forethought.models.policy import Policy
    from forethought.models.tiny import char_tokenizer, tiny_model
    from forethought.tree.tree import TokenTree

    began = time.perf_counter()
    tokenizer = char_tokenizer(ALPHABET)
    policy = Policy(
        tiny_model(len(tokenizer), width=config.width, layers=config.layers, heads=config.heads, context=192, seed=0),
        tokenizer,
    )
    tasks = chains(config.pretrain_problems, 0, "train", config=config.chain)
    tasks += chains(config.pretrain_shifted, 0, "train", family="chain-shifted", config=config.shifted_chain)
    per_task = math.ceil(config.pretrain_steps * config.pretrain_batch / len(tasks))
    trees = []
    for row in demonstrations(tasks, config.shares, 0, per_task=per_task):
        # The endless ones are cut, and no end token is invented for them.
        tree = TokenTree(tokenizer(row["prompt"], add_special_tokens=False)["input_ids"], task=row["id"])
        ids = tokenizer(row["completion"][:64], add_special_tokens=False)["input_ids"]
        node = tree.add(0, ids + ([tokenizer.eos_token_id] if row["ended"] else []))
        tree.weight[tree.span(node)] = 1
        trees.append(tree)
    settings = SFTConfig(
        steps=config.pretrain_steps,
        batch_size=config.pretrain_batch,
        micro_tokens=100_000,
        optim=OptimConfig(lr=config.pretrain_lr, schedule="cosine", warmup_steps=50, weight_decay=0.01),
    )
    trainer = SFTTrainer(policy, trees, settings)
    fit(
        trainer,
        run,
        steps=settings.steps,
        tags={"arm": "pretraining", "seed": 0},
        title="pretraining the base model",
        save_every=500,
        save_last=False,
    )
    with run.save_folder("model") as place:
        trainer.learner.save_model(place)
    return {
        "pretraining_s": time.perf_counter() - began,
        "parameters": float(sum(p.numel() for p in policy.model.parameters())),
    }


Reward = Literal["outcome", "format", "random"]


def seeded(seed: int, *parts: Any) -> int:
    """A seed that fits every generator."""
    return derive_seed("one-shot-rlvr", seed, *parts) % 2**31


def check_world(pool: Sequence[Mapping[str, Any]], k: int) -> None:
    if k > len(pool):
        raise ConfigError(f"k={k}: the pool has only {len(pool)} problems")
