"""What is measured: accuracy and behaviour on fixed problems, greedy and sampled, and votes at a token budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forethought.config import derive_seed
from forethought.envs.congruence import parse_puzzle
from forethought.evaluate.behaviour import mean_behaviour, text_behaviour, trace_behaviour

if TYPE_CHECKING:
    from forethought.evaluate.suites import EvalResult
    from forethought.recipes.rlsp import RLSPConfig
    from forethought.recipes.rlsp.world import Suite, World

VOTES = (1, 2, 4, 8, 16)


def seeded(seed: int, *parts: Any) -> int:
    """A seed that fits every generator."""
    return derive_seed("rlsp", seed, *parts) % 2**31


class Look:
    """Evaluates a policy on the world's suites. `tokens` and `samples` count what that took."""

    def __init__(
        self,
        config: RLSPConfig,
        world: World,
        engine: Any,
        encode: Callable[[Mapping[str, Any]], Sequence[int]],
        decode: Callable[[list[int]], str],
        seed: int,
    ):
        self.config, self.world, self.engine, self.encode, self.decode = config, world, engine, encode, decode
        self.seed = seed
        self.tokens = self.samples = 0

    def sample(self, suite: Suite, tasks: Sequence[Mapping[str, Any]], step: int, samples: int = 1) -> EvalResult:
        from forethought.evaluate.suites import evaluate
        from forethought.models.engine import Sampling
        from forethought.rewards.math_rewards import OutcomeReward
        from forethought.rewards.verify import extract_answer

        config = self.config
        reward = OutcomeReward(self.decode, mode=config.eval_mode, thinking_end=config.thinking_end)
        result = evaluate(
            self.engine,
            tasks,
            reward.judge_many,
            prompt_ids=self.encode,
            decode=self.decode,
            samples=samples,
            sampling=Sampling(
                max_tokens=config.eval_tokens or config.ppo.max_new_tokens,
                temperature=suite.temperature,
                seed=seeded(self.seed, "eval", suite.name, step),
            ),
            extract=lambda text: extract_answer(text, thinking_end=config.thinking_end),
            name=suite.name,
        )
        self.tokens += result.n_tokens
        self.samples += len(result.rows)
        return result

    def numbers(self, result: EvalResult, tasks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Accuracy, boxed and truncated shares, length, and behaviour."""
        summary = result.metrics()
        out = {name: summary[name] for name in ("accuracy", "boxed", "truncated", "errors")}
        out["length"] = summary["length/mean"]
        if self.world.puzzles:
            problems = {str(t["id"]): parse_puzzle(t["prompt"]) for t in tasks}
            rows = [trace_behaviour(row.text, problems[row.task]) for row in result.rows]
        else:
            rows = [text_behaviour(row.text) for row in result.rows]
        return out | mean_behaviour(rows)

    def short(self, step: int) -> dict[str, float]:
        """What a curve needs: the first `curve_problems` of every suite."""
        out: dict[str, float] = {}
        for number, suite in enumerate(self.world.suites):
            tasks = suite.tasks[: self.config.curve_problems]
            numbers = self.numbers(self.sample(suite, tasks, step), tasks)
            key = "eval" if number == 0 else f"eval {suite.name}"
            wanted = ("accuracy", "boxed", "truncated", "length", "tries", "distinct tries", "repetition", "recovered")
            out |= {f"{key}/{name}": numbers[name] for name in wanted if name in numbers}
        return out

    def final(self) -> dict[str, float]:
        """Every problem of every suite, as "<suite> <number>"."""
        out: dict[str, float] = {}
        for suite in self.world.suites:
            numbers = self.numbers(self.sample(suite, suite.tasks, -1, suite.samples), suite.tasks)
            out |= {f"{suite.name} {name}": value for name, value in numbers.items()}
        return out

    def votes(self) -> dict[str, list[float]]:
        """Self-consistency on the first suite: k -> [accuracy of the majority of the first k samples, mean tokens of
        them]."""
        suite = self.world.suites[0]
        result = self.sample(suite, suite.tasks, -1, VOTES[-1])
        return vote_curve(result)


def vote_curve(result: EvalResult) -> dict[str, list[float]]:
    """k -> [accuracy of the majority answer among the first k samples of each task, mean tokens of these k]."""
    from forethought.evaluate.stats import majority_vote

    out = {}
    for k in VOTES:
        if k > result.samples:
            break
        won, tokens = [], []
        for rows in result.by_task().values():
            first = rows[:k]
            answer = majority_vote([r.answer for r in first])
            won.append(answer is not None and any(r.right for r in first if r.answer == answer))
            tokens.append(sum(r.length for r in first))
        out[str(k)] = [float(np.mean(won)), float(np.mean(tokens))]
    return out


def at_budget(votes: Mapping[str, Sequence[float]], tokens: float) -> tuple[int, float, float]:
    """The smallest number of votes that costs at least `tokens`, its accuracy and cost; the largest where none does."""
    rows = sorted((int(k), float(a), float(t)) for k, (a, t) in votes.items())
    return next((row for row in rows if row[2] >= tokens), rows[-1])
