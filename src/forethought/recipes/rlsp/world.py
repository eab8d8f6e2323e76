"""What the arms work on: the miniature (puzzles and a base model pretrained here), or problem files and a pretrained model."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forethought.data import load_tasks, read_jsonl
from forethought.envs.congruence import Mix, PuzzleConfig, mixture, pieces, puzzles, search_traces
from forethought.errors import ConfigError, DataError
from forethought.rundir import RunDir

Task = dict[str, Any]

STEPS_TEMPLATE = (
    "Solve the following math problem efficiently and clearly. For a simple problem (two steps or fewer), give a short "
    "solution with little explanation. For a complex one, number your steps as `## Step 1: [short description]`, each with "
    "a brief explanation and its calculation.\nEnd in every case with: Therefore, the final answer is: "
    "$\\boxed{{answer}}$. I hope it is correct.\n\nProblem: {problem}"
)
"""A step format in our words, of the kind that a start model is usually evaluated with."""
TEMPLATES = {"short": "Problem: {problem}", "steps": STEPS_TEMPLATE, "plain": "{problem}"}
"""User turns. "short" is the one of training: it says nothing about how to think, nor that the answer is to be boxed."""
Template = Literal["short", "steps", "plain"]


@dataclass(frozen=True, kw_only=True)
class MiniatureConfig:
    """The puzzles, the base model that is pretrained on the mixture, and the demonstrations of search."""

    puzzle: PuzzleConfig = field(default_factory=PuzzleConfig)
    mix: Mix = field(default_factory=Mix)
    spelled: bool = False
    """Write the sum out in every try."""
    train: int = 1000
    """Puzzles for pretraining, demonstrations and PPO."""
    split: Literal["heldout", "validation"] = "heldout"
    """What is evaluated on; tuning used the validation puzzles and other seeds."""
    heldout: int = 500
    samples: int = 4
    """Sampled responses to each of them; greedily there is one."""
    demonstrations: int = 400
    """Search traces for supervised fine-tuning."""
    demo_min_tries: int = 2
    demo_max_tries: int = 5
    """Tries after which a demonstration gives up; fewer than there are numbers, so that search has room to grow."""
    width: int = 96
    layers: int = 3
    heads: int = 4
    pretrain_steps: int = 3000
    pretrain_batch: int = 64
    pretrain_rows: int = 40_000
    """Rows of the mixture, seen again and again."""
    pretrain_lr: float = 3e-3


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """An evaluation file. Columns are named; template: see `TEMPLATES`."""

    name: str
    path: str
    prompt_column: str = "problem"
    answer_column: str = "answer"
    samples: int = 1
    temperature: float = 0.7
    template: Template = "short"


@dataclass(frozen=True, kw_only=True)
class FilesConfig:
    """Files for a pretrained model (the paper profile)."""

    train: str = ""
    """Problems, JSONL or parquet."""
    prompt_column: str = "problem"
    answer_column: str = "answer"
    template: Template = "short"
    demonstrations: str = ""
    """Records for supervised fine-tuning: `messages`, or `prompt` and `completion`."""
    suites: tuple[SuiteConfig, ...] = ()
    limit: int | None = None
    """Use the first N problems of every file."""
    near_duplicate: float = 0.5
    """A training problem that shares this share of its word 8-grams with an evaluation problem is left out."""


@dataclass(frozen=True)
class Suite:
    """Problems to evaluate on."""

    name: str
    tasks: list[Task]
    temperature: float
    samples: int = 1


@dataclass
class World:
    """Tasks with id, prompt, answer; what is evaluated; and where the start model lies."""

    train: list[Task]
    suites: list[Suite]
    model: str
    puzzles: bool
    dropped: dict[str, int] = field(default_factory=dict)
    """Training problems left out, by why."""


def miniature(config: MiniatureConfig, model: str) -> World:
    """The generated world; `model`: folder of the base that `pretrain` left."""
    tasks = puzzles(config.heldout, 0, config.split, config=config.puzzle)
    return World(
        train=puzzles(config.train, 0, "train", config=config.puzzle),
        suites=[Suite("heldout", tasks, 0.7, config.samples), Suite("heldout greedy", tasks, 0.0)],
        model=model,
        puzzles=True,
    )


def from_files(config: FilesConfig, model: str) -> World:
    """Training problems and suites from files; the former without what stands in the latter.

    Raises:
        ConfigError: no training file named. DataError: a file or column is missing, or nothing is left to train on.
    """
    if not config.train:
        raise ConfigError("files.train is empty: name the problems, e.g. files.train=data/math_train.jsonl")
    suites, seen = [], []
    for suite in config.suites:
        rows = load_tasks(suite.path, suite.prompt_column, suite.answer_column, config.limit)
        seen += [str(r["prompt"]) for r in rows]
        tasks = [_templated(r, suite.template) for r in rows]
        suites.append(Suite(suite.name, tasks, suite.temperature, suite.samples))
    rows = load_tasks(config.train, config.prompt_column, config.answer_column, config.limit)
    answered = [r for r in rows if str(r.get("answer") or "").strip()]
    leaks = overlap([str(r["prompt"]) for r in answered], seen, share=config.near_duplicate)
    kept = [_templated(r, config.template) for i, r in enumerate(answered) if i not in leaks]
    dropped = {"no answer": len(rows) - len(answered), "also in evaluation": len(leaks)}
    if not kept:
        raise DataError(f"files.train={config.train}: none of its {len(rows)} problems is left ({dropped})")
    return World(train=kept, suites=suites, model=model, puzzles=False, dropped=dropped)


def _templated(row: Mapping[str, Any], template: Template) -> Task:
    text = TEMPLATES[template].replace("{{", "{").replace("}}", "}").replace("{problem}", str(row["prompt"]))
    return {**row, "prompt": [{"role": "user", "content": text}]}


def overlap(train: Sequence[str], tests: Iterable[str], *, share: float = 0.5, n: int = 8) -> set[int]:
    """Training texts that are an evaluation text, or nearly one.

    Equal after normalisation (case, blanks; signs and digits count), or at least `share` of its word n-grams stand in one
    evaluation text. Texts shorter than n words are compared as a whole.
    """
    exact, index = set(), {}
    for number, text in enumerate(tests):
        words = _words(text)
        exact.add(tuple(words))
        for gram in _grams(words, n):
            index.setdefault(gram, set()).add(number)
    out = set()
    for i, text in enumerate(train):
        words = _words(text)
        grams = _grams(words, n)
        counts: dict[int, int] = {}
        for gram in grams:
            for number in index.get(gram, ()):
                counts[number] = counts.get(number, 0) + 1
        if tuple(words) in exact or (grams and max(counts.values(), default=0) >= share * len(grams)):
            out.add(i)
    return out


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.casefold())


def _grams(words: Sequence[str], n: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def demonstration_records(config: MiniatureConfig | FilesConfig) -> list[dict[str, Any]]:
    """Records for stage 1.

    Raises:
        ConfigError: no file named. DataError: the file has no records, or a response is empty; names the record.
    """
    if isinstance(config, MiniatureConfig):
        tasks = puzzles(config.train, 0, "train", config=config.puzzle)[: config.demonstrations]
        return search_traces(
            tasks, min_tries=config.demo_min_tries, max_tries=config.demo_max_tries, spelled=config.spelled
        )
    if not config.demonstrations:
        raise ConfigError("files.demonstrations is empty: arms that begin with supervised fine-tuning need records")
    return read_jsonl(config.demonstrations)[: config.limit]


def record_trees(renderer: Any, records: Sequence[Mapping[str, Any]], *, max_length: int | None = None) -> list[Any]:
    """Records as token trees: the prompt is context, the response and its end token are the targets.

    Raises:
        DataError: no records, an empty response, or a record that cannot be used; names the record.
    """
    from forethought.models.chat import sft_trees

    if not records:
        raise DataError("demonstrations: no records: the data is empty")
    for i, record in enumerate(records):
        if "completion" in record and not record["completion"]:
            _empty(record, i)
        if isinstance(record.get("completion"), str) and not record["completion"].strip():
            _empty(record, i)
        for message in record.get("messages", ()):
            if message.get("role") == "assistant" and not str(message.get("content") or "").strip():
                _empty(record, i)
    return sft_trees(renderer, records, max_length=max_length)


def _empty(record: Mapping[str, Any], i: int) -> None:
    raise DataError(f"record {record.get('id', i)!r}: its response is empty; give text to learn, or leave it out")


def pretrain(config: MiniatureConfig, run: RunDir) -> dict[str, float]:
    """Train the base model from scratch on the mixture and save it as an HF folder; resumes from checkpoints."""
    from forethought.learn.offline import SFTConfig, SFTTrainer
    from forethought.learn.optim import OptimConfig
    from forethought.learn.session import fit
    from forethought.models.chat import ChatRenderer
    from forethought.models.policy import Policy
    from forethought.models.tiny import piece_tokenizer, tiny_model

    began = time.perf_counter()
    tokenizer = piece_tokenizer(pieces(config.puzzle))
    policy = Policy(
        tiny_model(
            len(tokenizer), width=config.width, layers=config.layers, heads=config.heads, kv_heads=config.heads,
            context=256, seed=0,
        ),
        tokenizer,
    )  # fmt: skip
    tasks = puzzles(config.train, 0, "train", config=config.puzzle)
    n = min(config.pretrain_steps * config.pretrain_batch, config.pretrain_rows)
    rows = mixture(tasks, config.mix, n=n, spelled=config.spelled)
    trees = record_trees(ChatRenderer(tokenizer), rows)
    settings = SFTConfig(
        steps=config.pretrain_steps,
        batch_size=config.pretrain_batch,
        micro_tokens=4096,
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
