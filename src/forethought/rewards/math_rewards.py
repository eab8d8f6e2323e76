"""Rewards for problems with a checkable answer, and their controls: outcome, format, random, fixed label.

Each judges the response only: the text of the sampled nodes on the leaf's path, never the prompt (which may itself
hold a box). Each follows the protocol of `reward.py` and has a batch path, `judge_many`. The controls are those of
One-Shot RLVR (arXiv 2504.20571): a format reward shows how much of a gain is format repair, a random reward and a
fixed wrong label show how much does not need the right answer at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forethought.errors import ConfigError, RewardError
from forethought.rewards.reward import Reward
from forethought.rewards.verify import Extract, Gold, Mode, Verdict, Verifier, check, extract_answer, gold_texts
from forethought.tree.tree import TokenTree

Item = tuple[TokenTree, int, Mapping[str, Any]]
Decode = Callable[[list[int]], str]


def response_text(tree: TokenTree, leaf: int, decode: Decode) -> str:
    """What the policy wrote on the path to `leaf`: the ids of its sampled nodes, decoded; "" where there are none."""
    ids = [i for node in tree.path(leaf) if tree.sampled[node] for i in tree.node_ids(node)]
    return decode(ids) if ids else ""


class _Batched:
    """One item is a batch of one."""

    def __call__(self, tree: TokenTree, leaf: int, task: Mapping[str, Any]) -> Reward:
        return self.judge_many([(tree, leaf, task)])[0]

    def judge_many(self, items: Sequence[Item]) -> list[Reward]:
        raise NotImplementedError


class OutcomeReward(_Batched):
    """1.0 where the answer of the response is right, else 0.0; parts: outcome, extracted, timed_out.

    Args:
        decode: ids -> text (without special tokens). verifier: the pool to use (its mode, reader and limits count, and
            the settings below must be left alone); None checks in this process (symbolic answers in one worker).
        answer_column: column of the task that holds the gold answer(s); dots reach into nested columns.
        mode, extract, thinking_end, timeout: as in `verify.check`.

    `verifier_calls` counts the checks; `last_verdicts` holds those of the latest call, for logging.

    Raises:
        RewardError: a task without a gold answer.
    """

    def __init__(
        self,
        decode: Decode,
        verifier: Verifier | None = None,
        *,
        answer_column: str = "answer",
        mode: Mode | None = None,
        extract: Extract | None = None,
        thinking_end: str | None = None,
        timeout: float | None = None,
    ):
        given = {"mode": mode, "extract": extract, "thinking_end": thinking_end, "timeout": timeout}
        clash = [name for name, value in given.items() if value is not None]
        if verifier is not None and clash:
            raise ConfigError(f"{', '.join(clash)}: set on the Verifier, not on the reward, when a verifier is given")
        self.decode, self.verifier, self.answer_column = decode, verifier, answer_column
        self._check = {name: value for name, value in given.items() if value is not None}
        self.verifier_calls = 0
        self.last_verdicts: list[Verdict] = []

    def golds(self, task: Mapping[str, Any]) -> Gold | Sequence[Gold]:
        """The gold answer(s) of a task."""
        return _column(task, self.answer_column)

    def judge_many(self, items: Sequence[Item]) -> list[Reward]:
        """Rewards of many leaves, through the pool where there is one."""
        pairs = [(response_text(tree, leaf, self.decode), self.golds(task)) for tree, leaf, task in items]
        if self.verifier is not None:
            verdicts = self.verifier.check_many(pairs)
        else:
            verdicts = [check(text, golds, **self._check) for text, golds in pairs]
        self.verifier_calls += len(pairs)
        self.last_verdicts = verdicts
        return [self.reward(v) for v in verdicts]

    def reward(self, verdict: Verdict) -> Reward:
        parts = {
            "outcome": float(verdict.correct),
            "extracted": float(verdict.extracted),
            "timed_out": float(verdict.timed_out),
        }
        return Reward(parts["outcome"], parts, verdict.reason)


class FixedLabelReward(OutcomeReward):
    """The outcome reward against one label for all tasks, right or not: the wrong-label control.

    Args:
        label: text or number that counts as right. The rest as in `OutcomeReward`.
    """

    def __init__(self, decode: Decode, label: Gold, verifier: Verifier | None = None, **settings: Any):
        super().__init__(decode, verifier, **settings)
        gold_texts(label)  # refuse an empty label now, not at the first response
        self.label = label

    def golds(self, task: Mapping[str, Any]) -> Gold:
        return self.label


class FormatReward(_Batched):
    """1.0 where an answer could be read from the response, right or wrong; part: extracted. Makes no verifier calls.

    Args:
        decode: ids -> text. extract, thinking_end: as in `verify.check`.
    """

    def __init__(self, decode: Decode, *, extract: Extract = "box", thinking_end: str | None = None):
        extract_answer("", extract=extract)  # refuse an unknown reader now, not at the first response
        self.decode, self.thinking_end = decode, thinking_end
        self.extract: Extract = extract
        self.verifier_calls = 0

    def judge_many(self, items: Sequence[Item]) -> list[Reward]:
        """Rewards of many leaves."""
        out = []
        for tree, leaf, _ in items:
            text = response_text(tree, leaf, self.decode)
            found = extract_answer(text, thinking_end=self.thinking_end, extract=self.extract) is not None
            out.append(
                Reward(float(found), {"extracted": float(found)}, "answer found" if found else "no answer found")
            )
        return out


class RandomReward(_Batched):
    """1.0 with probability p, drawn from (seed, task, episode seed, node), never from the response.

    The same sample slot of the same episode gets the same reward in a resumed run; another episode seed another one.

    Args:
        p: probability of 1.0. seed: of the run.
    """

    def __init__(self, p: float = 0.5, *, seed: int = 0):
        if not 0 <= p <= 1:
            raise ConfigError(f"p={p}: give a probability in [0, 1]")
        self.p, self.seed = p, seed
        self.verifier_calls = 0

    def judge_many(self, items: Sequence[Item]) -> list[Reward]:
        """Rewards of many leaves."""
        out = []
        for tree, leaf, task in items:
            key = f"{self.seed}\x1f{task.get('id', tree.task)}\x1f{tree.seed}\x1f{leaf}".encode()
            draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") / 2.0**64
            value = float(draw < self.p)
            out.append(Reward(value, {"random": value}, f"random, p = {self.p:g}"))
        return out


def _column(task: Mapping[str, Any], name: str) -> Any:
    """A column of the task; "a.b" reaches into nested columns unless a column has that very name."""
    if name in task:
        return task[name]
    value: Any = task
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(map(str, task))
            raise RewardError(
                f"task {task.get('id', '?')!r} has no column {name!r} for the gold answer (it has {known})"
            )
        value = value[part]
    return value
