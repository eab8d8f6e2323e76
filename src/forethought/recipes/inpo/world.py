"""The small neural game: prompts that order three classes, answers whose class a rule reads, and exact values.

A prompt is an id and an order of the letters a, b, c, such as "Kcab=". An answer is a word of 3 to 5 of these letters
and an end token; its class is its most frequent letter (of several, the one that stands first), and the prompt's order
says which role of the game that class plays: in "Kcab=" the letter c plays role 1, a role 2, b role 3. A word without
a letter, with another character, or without an end plays a fourth role that loses to the others.

All words can be listed, so a policy's distribution over roles, and with it its duality gap, is exact: no sampling noise
in what is reported.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forethought.config import derive_seed
from forethought.errors import ConfigError, DataError
from forethought.recipes.inpo.games import (
    CYCLE,
    FLOOR,
    bradley_terry,
    check_preferences,
    dpo_fit,
    log_policy,
    pair_weights,
)
from forethought.recipes.inputs import Columns, load_prompts
from forethought.recipes.judging import close_oracle, open_oracle, trial
from forethought.recipes.preference_job import JudgeSettings
from forethought.rundir import RunDir

log = logging.getLogger(__name__)

Task = Mapping[str, Any]
LETTERS = "abc"
IDS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHORTEST, LONGEST = 3, 5
MAX_TOKENS = LONGEST + 1
"""Longest answer: five letters and the end."""
ALPHABET = IDS + LETTERS + "="
KINDS = ("preferences", "bradley-terry")
"""Oracles of the miniature; see `game_of`."""
STRAY = 0.05
"""Probability of an answer that is no word to beat one that is."""


@dataclass(frozen=True, kw_only=True)
class MiniatureConfig:
    """The game and the policy that plays it."""

    prompts: int = 16
    preferences: tuple[tuple[float, ...], ...] = field(default_factory=lambda: tuple(map(tuple, CYCLE.tolist())))
    """P [3, 3] over roles."""
    shares: tuple[float, ...] = (0.15, 0.7, 0.15)
    """How often the reference policy plays each role. Far from the equilibrium, so that there is something to learn."""
    purity: float = 0.7
    """Probability of a letter of the reference's words to be that of the word's class."""
    width: int = 64
    layers: int = 2
    heads: int = 4
    pretrain_steps: int = 500
    pretrain_batch: int = 64
    pretrain_lr: float = 3e-3

    def __post_init__(self):
        bad = []
        if not 1 <= self.prompts <= len(IDS):
            bad.append(f"prompts={self.prompts}: give 1 to {len(IDS)}")
        if len(self.preferences) != len(LETTERS):
            bad.append(f"preferences: {len(self.preferences)} rows; the miniature has {len(LETTERS)} roles")
        if len(self.shares) != len(LETTERS) or not all(0 < s < 1 for s in self.shares):
            bad.append(f"shares={self.shares}: give {len(LETTERS)} positive numbers")
        elif not math.isclose(sum(self.shares), 1, abs_tol=1e-6):
            bad.append(f"shares={self.shares}: they sum to {sum(self.shares):g}; give numbers that sum to 1")
        if not 1 / len(LETTERS) < self.purity <= 1:
            bad.append(f"purity={self.purity}: give more than 1/{len(LETTERS)}, at most 1")
        for name in ("pretrain_steps", "pretrain_batch"):
            if getattr(self, name) < 1:
                bad.append(f"{name}={getattr(self, name)}: give at least 1")
        if bad:
            raise ConfigError("miniature: " + "; ".join(bad))
        check_preferences(self.preferences)


# -- the game ----------------------------------------------------------------------------------------------------------


def tasks(config: MiniatureConfig) -> list[dict[str, Any]]:
    """One task for each id; the six orders in turn."""
    orders = ["".join(o) for o in itertools.permutations(LETTERS)]
    return [
        {"id": IDS[i], "order": orders[i % len(orders)], "prompt": f"{IDS[i]}{orders[i % len(orders)]}="}
        for i in range(config.prompts)
    ]


def letter(word: str) -> str | None:
    """The class of a word: its most frequent letter, the first of several; None where it is no word.

    >>> letter("abcc"), letter("ba"), letter("a=b"), letter("")
    ('c', 'b', None, None)
    """
    if not 1 <= len(word) <= LONGEST or set(word) - set(LETTERS):
        return None
    return max(word, key=lambda c: (word.count(c), -word.index(c)))


def role(task: Task, word: str) -> int:
    """The role that an answer plays: 0, 1, 2, or 3 for what is no word."""
    found = letter(word)
    return len(LETTERS) if found is None else str(task["order"]).index(found)


def with_stray(P: np.ndarray) -> np.ndarray:
    """The game [4, 4] with the fourth role."""
    out = np.full((len(P) + 1, len(P) + 1), 1 - STRAY)
    out[:-1, :-1] = P
    out[-1] = STRAY
    out[-1, -1] = 0.5
    return out


def game_of(config: MiniatureConfig, kind: str = "preferences") -> np.ndarray:
    """P [4, 4] that the oracle answers by.

    "preferences": the table as it is. "bradley-terry": the best scalar reward for its i.i.d. pairs from the reference,
    i.e. what a reward model would make of the same preferences.
    """
    P = check_preferences(config.preferences)
    if kind == "bradley-terry":
        ref = log_policy(config.shares)
        P = bradley_terry(dpo_fit(pair_weights(P, ref), ref, 1.0)[0])
    return with_stray(P)


@dataclass
class RoleOracle:
    """P(a beats b) by the roles that two answers play; counts its queries."""

    P: np.ndarray
    queries: int = 0

    def compare(self, items: Sequence[tuple[Task, str, str]]) -> list[float]:
        self.queries += len(items)
        return [float(self.P[role(task, a), role(task, b)]) for task, a, b in items]


def rows_of(config: MiniatureConfig, count: int) -> list[dict[str, Any]]:
    """The prompts again and again, `count` tasks with ids of their own: as many groups of samples an iteration."""
    every = tasks(config)
    return [{**every[i % len(every)], "id": f"{every[i % len(every)]['id']}{i // len(every)}"} for i in range(count)]


def answer_text(tokenizer: Any, miniature: bool) -> Callable[[Sequence[int]], str]:
    """Ids of an answer -> the text that is compared. In the miniature an empty answer plays, too (and loses)."""
    nothing = "-" if miniature else ""
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True) or nothing


# -- exact values ------------------------------------------------------------------------------------------------------


class Words:
    """All words of 1 to 5 letters at every prompt, and a policy's exact distribution over them.

    X prompts, W = 3 + 9 + ... + 243 = 363 words.
    """

    def __init__(self, tasks: Sequence[Task], tokenizer: Any):
        self.tasks = list(tasks)
        self.levels = [["".join(w) for w in itertools.product(LETTERS, repeat=n)] for n in range(1, LONGEST + 1)]
        self.words = [word for level in self.levels for word in level]
        self.roles = np.array([[role(task, word) for word in self.words] for task in self.tasks])
        """[X, W]"""
        self._prompts = [tokenizer.encode(task["prompt"]) for task in self.tasks]
        self._letters = tokenizer.encode(LETTERS)
        self._end = tokenizer.eos_token_id

    def log_probs(self, policy: Any) -> np.ndarray:
        """[X, W + 1] log-probs of all words at the X prompts; the last column is everything else.

        The words of n letters are computed together from the stored keys and values of those of n - 1.
        """
        import torch
        from transformers import DynamicCache

        policy.model.eval()
        cache, count = DynamicCache(config=policy.config), len(self.tasks)
        # Its name in transformers before 5.24.
        old = "cache" not in inspect.signature(policy.core.forward).parameters
        stored: dict[str, Any] = {"past_key_values" if old else "cache": cache}
        ids = torch.tensor(self._prompts, device=policy.device)
        letters = torch.tensor(self._letters, device=policy.device)
        prefix = torch.zeros(count, 1, dtype=torch.float64)
        out = []
        with torch.no_grad():
            for n in range(LONGEST + 1):
                if n:
                    cache.batch_repeat_interleave(len(LETTERS))
                    ids = letters.repeat(count * len(LETTERS) ** (n - 1))[:, None]
                logits = policy.model(input_ids=ids, use_cache=True, **stored).logits[:, -1]
                here = logits.double().log_softmax(-1).cpu().view(count, -1, logits.shape[-1])
                if n:
                    out.append(prefix + here[:, :, self._end])
                prefix = (prefix[:, :, None] + here[:, :, self._letters]).flatten(1)
        words = torch.cat(out, 1).numpy()
        rest = np.maximum(FLOOR, 1 - np.exp(words).sum(1, keepdims=True))
        return np.concatenate([words, np.log(rest)], 1)

    def by_role(self, log_probs: np.ndarray) -> np.ndarray:
        """[X, W + 1] -> log-probs [X, 4] of the roles."""
        p = np.exp(log_probs)
        played = [(p[:, :-1] * (self.roles == k)).sum(1) for k in range(len(LETTERS))]
        return np.log(np.maximum(FLOOR, np.stack([*played, p[:, -1]], 1)))


# -- the reference policy ----------------------------------------------------------------------------------------------


def demonstrations(config: MiniatureConfig, count: int, seed: int) -> list[tuple[Task, str]]:
    """(task, word): the prompts in turn; a role by `shares`; a word of 3 to 5 letters, each of them that of the role with
    probability `purity`, drawn again until its class is that of the role."""
    rng = np.random.default_rng(derive_seed(seed, "inpo", "demonstrations"))
    every, out = tasks(config), []
    chances = np.full((len(LETTERS), len(LETTERS)), (1 - config.purity) / (len(LETTERS) - 1))
    np.fill_diagonal(chances, config.purity)
    for i in range(count):
        task = every[i % len(every)]
        wanted = task["order"][int(rng.choice(len(LETTERS), p=np.array(config.shares) / sum(config.shares)))]
        word = ""
        while letter(word) != wanted:
            n = int(rng.integers(SHORTEST, LONGEST + 1))
            word = "".join(rng.choice(list(LETTERS), size=n, p=chances[LETTERS.index(wanted)]))
        out.append((task, word))
    return out


def new_policy(config: MiniatureConfig) -> Any:
    from forethought.models.policy import Policy
    from forethought.models.tiny import char_tokenizer, tiny_model

    tokenizer = char_tokenizer(ALPHABET)
    model = tiny_model(len(tokenizer), width=config.width, layers=config.layers, heads=config.heads, context=32, seed=0)
    return Policy(model, tokenizer)


def pretrain(config: MiniatureConfig, run: RunDir) -> dict[str, float]:
    """Train the reference policy from scratch on the demonstrations and save it as `model/`; resumes from checkpoints."""
    from forethought.learn.offline import SFTConfig, SFTTrainer
    from forethought.learn.optim import OptimConfig
    from forethought.learn.session import fit
    from forethought.tree.tree import TokenTree

    began = time.perf_counter()
    policy = new_policy(config)
    tokenizer = policy.tokenizer
    trees = []
    for task, word in demonstrations(config, config.pretrain_steps * config.pretrain_batch, 0):
        tree = TokenTree(tokenizer.encode(task["prompt"]), task=task["id"])
        node = tree.add(0, [*tokenizer.encode(word), tokenizer.eos_token_id])
        tree.weight[tree.span(node)] = 1
        trees.append(tree)
    settings = SFTConfig(
        steps=config.pretrain_steps,
        batch_size=config.pretrain_batch,
        optim=OptimConfig(lr=config.pretrain_lr, schedule="cosine", warmup_steps=20),
    )
    trainer = SFTTrainer(policy, trees, settings)
    tags = {"arm": "pretraining", "seed": 0}
    fit(trainer, run, steps=settings.steps, tags=tags, title="pretraining the reference", save_last=False)
    with run.save_folder("model") as place:
        trainer.learner.save_model(Path(place))
    return {
        "pretraining_s": time.perf_counter() - began,
        "parameters": float(sum(p.numel() for p in policy.model.parameters())),
    }


# -- files and a pretrained model ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FilesConfig:
    """Prompts and judges for a pretrained model (the paper profile)."""

    prompts: str = ""
    """JSONL or parquet; an iteration draws fresh ones until all were used."""
    held_out: str = ""
    """Prompts on which win rates against the reference are measured."""
    prompt_column: str = "prompt"
    chat: bool = True
    """Make user turns of text prompts."""
    max_prompt_tokens: int = 1000
    """Longer prompts are left out, and counted."""
    held_out_oracle: str = ""
    """FILE.py:NAME of a judge that does not train."""
    both_orders: bool = True
    """Ask an oracle both ways round and average."""
    timeout: float = 60.0
    """Seconds for one comparison by a function."""
    limit: int | None = None
    """Use the first N prompts of every file."""
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    """The chat model of oracle=judge."""


@dataclass
class FilesWorld:
    """tasks: prompts to learn on; held_out: to be measured on; oracle: trains; judge: only measures, or None."""

    tasks: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    oracle: Any
    judge: Any
    dropped: int = 0
    """Prompts that were too long."""

    def close(self) -> None:
        close_oracle(self.oracle)
        close_oracle(self.judge)


def open_files(config: FilesConfig, oracle: str, renderer: Any, seed: int) -> FilesWorld:
    """The prompts that fit (all of them without a renderer) and the oracles, asked one question before compute.

    Raises:
        ConfigError: no oracle or no files named. DataError: a file cannot be used, or no prompt fits. RewardError: the
            oracle does not answer with a probability.
    """
    if not oracle or oracle in KINDS:
        raise ConfigError(
            f"oracle={oracle!r}: a pretrained model needs a judge of pairs: name FILE.py:NAME, a function "
            "f(task, a, b) -> P(a wins), or judge with files.judge.url and files.judge.model"
        )
    for name in ("prompts", "held_out"):
        if not getattr(config, name):
            raise ConfigError(f"files.{name} is empty: name a file of prompts")
    columns = Columns(prompt_column=config.prompt_column, chat=config.chat, limit=config.limit)
    sets, dropped = [], 0
    for path in (config.prompts, config.held_out):
        found = load_prompts(path, columns)
        most = config.max_prompt_tokens
        fit = [t for t in found if renderer is None or len(renderer.prompt_ids(t["prompt"])) <= most]
        dropped += len(found) - len(fit)
        if not fit:
            raise DataError(f"{path}: all of its {len(found)} prompts exceed files.max_prompt_tokens={most}: raise it")
        sets.append(fit)
    settings: dict[str, Any] = {
        "reward": None,
        "judge": config.judge,
        "scale": 1.0,
        "both_orders": config.both_orders,
        "timeout": config.timeout,
        "seed": seeded(seed, "judge"),
        "cache": None,
    }
    trains = open_oracle(oracle, **settings)
    judge = open_oracle(config.held_out_oracle, **settings) if config.held_out_oracle else None
    for each in (trains, judge):
        if each is not None:
            trial(each, sets[0], lambda line: log.warning("%s", line))
    return FilesWorld(sets[0], sets[1], trains, judge, dropped)


def seeded(seed: int, *parts: Any) -> int:
    """A seed that fits every generator."""
    return derive_seed("inpo", seed, *parts) % 2**31
