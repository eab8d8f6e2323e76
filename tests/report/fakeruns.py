"""Run folders made up for tests: the files as a recipe writes them, with numbers that a test can predict."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from forethought.tree.store import TreeStore
from forethought.tree.tree import Kind, Stop, TokenTree

ARMS = ("pool", "one problem", "format only")
METRICS = ("reward/mean", "reward/format", "entropy", "kl", "completions/mean_length", "logprob_gap/mean", "time/step")
ANSWERS = (
    "12 + 7 = 19, and 19 - 4 = 15.\nThe answer is 15.",
    "12 + 7 is 19. Then 4 less: 15.",
    "First 7 - 4 = 3, so 12 + 3 = 15.",
    "12 + 7 = 18, so 14.",
)


def cell(mean: float | None, per_seed: list[float | None], half: float = 0.04, n: int = 192) -> dict[str, Any]:
    ci = None if mean is None else [mean - half, mean + half]
    return {"mean": mean, "ci95": ci, "n": n, "per_seed": per_seed}


def results(**changes: Any) -> dict[str, Any]:
    arms = {}
    for k, arm in enumerate(ARMS):
        before, after = 0.5625, (0.8333, 0.7292, 0.5781)[k]
        arms[arm] = {
            "heldout_accuracy/before": cell(before, [0.5625, 0.5781, 0.5469]),
            "heldout_accuracy/after": cell(after, [after + 0.02, after, after - 0.02]),
            "boxed_share": cell((0.4, 0.35, 0.99)[k], [0.4, 0.3, 0.5]),
            "mean_length": cell((17.25, 15.5, 9.125)[k], [17.0, 17.5, 17.25], half=1.5),
        }
    out = {
        "schema": 1,
        "recipe": "one-shot-rlvr",
        "profile": "mini",
        "model": "SmolLM2-135M-Instruct",
        "seeds": [0, 1, 2],
        "claim": "Reinforcement learning with a verifiable reward on a pool of arithmetic problems raises held-out "
        "accuracy beyond what a format-only reward gives, at the same budget.",
        "arms": arms,
        "budget": {
            arm: {
                "tokens_generated": 46_080 + 1000 * k,
                "tokens_trained": 46_000,
                "env_steps": 0,
                "verifier_calls": 1920,
                "wall_s": 187.25 + 10 * k,
            }
            for k, arm in enumerate(ARMS)
        },
        "verdict": "shown",
        "verdict_rule": "pool minus format only on held-out accuracy: the 95% paired bootstrap interval lies above 0",
        "versions": {"forethought": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "git": None},
        "examples": [
            {
                "arm": "pool",
                "prompt": "Tom has 12 apples, gets 7 and gives 4 away. How many has he?",
                "answer": "15",
                "before": "Tom has 12 apples. He gets 7 apples. He has 12 apples left.",
                "after": "12 + 7 = 19, and 19 - 4 = 15. The answer is 15.",
                "correct_before": False,
                "correct_after": True,
            },
            {
                "arm": "pool",
                "prompt": "What is 9 times 8?",
                "answer": "72",
                "before": "9 times 8 is 72.",
                "after": "9 * 8 = 72.",
                "correct_before": True,
                "correct_after": True,
            },
        ],
    }
    return out | changes


def metrics(steps: int = 30, arms=ARMS, seeds=(0, 1, 2)) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    lines = []
    for step in range(steps):
        for k, arm in enumerate(arms):
            for seed in seeds:
                rise = (1 - math.exp(-step / 9)) * (0.72, 0.5, 0.1)[k % 3]
                noise = rng.normal(size=len(METRICS)) * 0.02
                line = {
                    "step": step,
                    "arm": arm,
                    "seed": seed,
                    "reward/mean": 0.22 + rise + noise[0],
                    "reward/format": 0.4 + rise / 2 + noise[1],
                    "entropy": 1.4 - rise + noise[2],
                    "kl": 0.3 * rise + abs(noise[3]),
                    "completions/mean_length": 22 - 8 * rise + 20 * noise[4],
                    "logprob_gap/mean": 0.003 + abs(noise[5]) / 50,
                    "time/step": 8 + 10 * noise[6],
                }
                if step % 10 == 0:
                    line["eval/accuracy"] = 0.5625 + rise / 2.4
                lines.append(line)
    return lines


def tokenizer() -> Tokenizer:
    """Byte-level BPE trained on the answers: every text can be written, rare characters take several tokens."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        show_progress=False,
        vocab_size=420,
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tok.train_from_iterator([*ANSWERS, "What is 12 plus 7 minus 4? <|im_end|>\n"] * 20, trainer)
    return tok


def group(tok: Tokenizer, *, answers=ANSWERS, prompt="What is 12 plus 7 minus 4?", seed: int = 0) -> TokenTree:
    """A prompt with one sample per answer; the last one is wrong."""
    rng = np.random.default_rng(seed)
    tree = TokenTree(tok.encode(prompt).ids, task="17", seed=seed)
    rewards = np.array([1.0] * (len(answers) - 1) + [0.0])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    for k, answer in enumerate(answers):
        ids = [*tok.encode(answer).ids, tok.token_to_id("<|im_end|>")]
        node = tree.add(
            0,
            ids,
            sampled=True,
            logprobs=-np.abs(rng.normal(size=len(ids)) * 1.2),
            stop=Stop.EOS,
            reward=float(rewards[k]),
            meta={
                "parts": {"correct": float(rewards[k]), "format": 1.0},
                "why": f"last number {15 if rewards[k] else 14}, right is 15",
            },
        )
        tree.advantage[tree.span(node)] = advantages[k]
        tree.weight[tree.span(node)] = 1
    return tree


def search_tree(width: int = 3, depth: int = 4, tok: Tokenizer | None = None) -> TokenTree:
    """A full tree with visits, values and priors; the reward stands at the leaves."""
    tok = tok or tokenizer()
    tree = TokenTree(tok.encode("Find 24 from 3, 7, 25, 50.").ids, task="search")
    tree.visits[0] = width**depth
    level = [0]
    for d in range(depth):
        below = []
        for parent in level:
            for k in range(width):
                ids = tok.encode(f"step {d}.{k} ").ids
                node = tree.add(parent, ids, kind=Kind.THOUGHT, sampled=True, logprobs=[-0.5] * len(ids))
                tree.visits[node] = width ** (depth - d - 1)
                tree.value[node], tree.prior[node] = 0.5 - 0.1 * k, 1 / width
                below.append(node)
        level = below
    for node in level:
        tree.reward[node] = float(node % 2)
    return tree


def write_run(
    path: Path,
    *,
    results_: dict[str, Any] | None = None,
    lines: list[dict[str, Any]] | None = None,
    trees: list[tuple[TokenTree, dict[str, Any]]] | None = None,
    config: dict[str, Any] | None = None,
    tok: Tokenizer | None = None,
) -> Path:
    """Write the parts that are given."""
    path.mkdir(parents=True, exist_ok=True)
    if results_ is not None:
        (path / "results.json").write_text(json.dumps(results_))
    if lines is not None:
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        (path / "config.yaml").write_text("# forethought run; forethought 0.1.0\n" + yaml.safe_dump(config))
    if trees is not None:
        with TreeStore(path / "trees.sqlite") as store:
            for tree, where in trees:
                store.append(tree, **({"task": tree.task, "step": 0, "arm": ""} | where))
    if tok is not None:
        tok.save(str(path / "tokenizer.json"))
    return path


def full_run(path: Path) -> Path:
    """A run with everything."""
    tok = tokenizer()
    trees = [(group(tok, seed=k), {"step": step, "arm": arm}) for k, arm in enumerate(ARMS) for step in (0, 15, 29)]
    trees.append((search_tree(tok=tok), {"step": 29, "arm": "pool", "kind": "search"}))
    config = {
        "recipe": "one-shot-rlvr",
        "profile": "mini",
        "online": {"steps": 30, "optim": {"lr": 1e-5}},
        "seeds": [0, 1, 2],
    }
    return write_run(path, results_=results(), lines=metrics(), trees=trees, config=config, tok=tok)
