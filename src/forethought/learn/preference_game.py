"""Preference games: iterative learning from pairs that the policy samples and an oracle compares.

    for t in 1..T:
        new prompts; K samples of each from the policy as it is (the previous iterate of this iteration)
        pairs of them by the oracle; their log-probs under the reference and the previous iterate, once
        minimise the loss over the pairs, from the policy as it is, with a fresh optimiser

INPO: Zhang et al., arXiv 2407.00617; its baselines on the same loop: iterative DPO (base: the reference, or the previous
iterate, as RLHFlow's script has it), IPO, SPPO (arXiv 2405.00675), Nash-MD (arXiv 2312.00886). The previous iterate needs
no model of its own: its log-probs are read before the first step. Log-probs are those of the sampling temperature, so
that the pairs are samples of the policy that is learnt.

Departures. The paper tells neither passes per iteration nor when to stop; here either a number of passes, or the best on
held-out pairs. Nash-MD's opponent, the geometric mixture of policy and reference, is not sampled by mixing logits token by
token (TRL), see `game_pairs`. SPPO trains on all samples in pairs (`pair_mode="iid"`), or on the best and the worst as
published (`"max_min"`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from forethought.config import derive_seed
from forethought.data import BatchSampler
from forethought.errors import ConfigError, DataError, RewardError, RunError
from forethought.learn.game_pairs import Group, compared, pair_metrics, with_wins
from forethought.learn.learner import Learner
from forethought.learn.optim import OptimConfig
from forethought.learn.pairs import (
    PREVIOUS,
    REFERENCE,
    Numbers,
    PairLoss,
    PairLossConfig,
    PreferencePair,
    annotate,
    measure_pairs,
    update_pairs,
)
from forethought.models.engine import Engine, Sampling
from forethought.models.policy import Policy
from forethought.rewards.oracles import Oracle, Task, ask_oracle
from forethought.rewards.pairs import PairCounts, PairMode, check_tournament
from forethought.tree.tree import Kind, Stop, TokenTree

# Largest change of a pair's margin before the first step that rounding explains, for one token.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True, kw_only=True)
class GameConfig(PairLossConfig):
    """Settings of the loop. Batch arithmetic: an iteration has prompts_per_iteration x samples answers."""

    method_name: ClassVar[str] = "preference game"

    loss: PairLoss = "inpo"
    iterations: int = 3
    prompts_per_iteration: int = 64
    """Fresh prompts of an iteration; when all were used, they come again in another order."""
    samples: int = 8
    """Answers a prompt (K)."""
    pair_mode: PairMode = "iid"
    """How pairs are made: iid (drawn labels), soft (both orders, weighed), tournament, max_min."""
    eta_schedule: Literal["constant", "growing"] = "constant"
    """inpo: growing sets eta to tau (t + 2) / 2 in iteration t."""
    mixture: float = 0.5
    """nash_md: share of the reference in the opponent, a geometric mixture."""
    max_new_tokens: int = 64
    temperature: float = 1.0
    """Of the samples and of all log-probs."""
    stop: tuple[str, ...] = ()
    keep_truncated: bool = False
    """Use answers that were cut at the token limit (they have no end token)."""
    max_length: int | None = None
    """Leave out answers of more tokens than this."""
    epochs: int = 1
    """Passes over the pairs of an iteration, at most."""
    batch_size: int = 32
    """Pairs a step."""
    valid_share: float = 0.0
    """Share of an iteration's prompts whose pairs are held out; above 0 the passes end early and the best is restored."""
    patience: int = 1
    """valid_share: passes without a better held-out loss before the iteration ends."""
    monitor_prompts: int = 16
    """Prompts on which each new iterate is compared with the one before and with the first (win rate, KL, one answer
    each); above 0 it keeps a copy of the trained weights."""
    micro_tokens: int = 4096
    """Packed tokens per forward."""
    seed: int = 0
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-7))

    def problems(self) -> list[str]:
        growing = self.loss == "inpo" and self.eta_schedule == "growing"
        if growing and (self.eta is not None or not self.tau):
            return [f"eta_schedule=growing: eta is tau (t + 2) / 2, so give tau > 0 and no eta (tau={self.tau})"]
        bad = super().problems()
        for name in ("iterations", "prompts_per_iteration", "max_new_tokens", "epochs", "batch_size", "micro_tokens"):
            if getattr(self, name) < 1:
                bad.append(f"{name}={getattr(self, name)}: give at least 1")
        if self.samples < 2:
            bad.append(f"samples={self.samples}: a pair needs at least 2 answers of a prompt")
        elif self.pair_mode == "tournament":
            try:
                check_tournament(self.samples)
            except ConfigError as err:
                bad.append(str(err))
        if not 0 < self.temperature < math.inf:
            bad.append(f"temperature={self.temperature}: equal answers make no pairs, so give a positive number")
        modes = {"sppo": ("iid", "max_min"), "nash_md": ("iid",)}.get(
            self.loss, ("iid", "soft", "tournament", "max_min")
        )
        if self.pair_mode not in modes:
            bad.append(f"pair_mode={self.pair_mode!r}: with loss={self.loss} give one of {', '.join(modes)}")
        if self.eta_schedule not in ("constant", "growing"):
            bad.append(f"eta_schedule={self.eta_schedule!r}: 'constant' or 'growing'")
        elif self.eta_schedule == "growing" and self.loss != "inpo":
            bad.append(f"eta_schedule=growing: loss={self.loss} has no eta")
        if not 0 <= self.mixture <= 1 or (self.mixture != 0.5 and self.loss != "nash_md"):
            bad.append(f"mixture={self.mixture}: a share in [0, 1], which only nash_md reads")
        if self.loss == "nash_md" and self.epochs != 1:
            bad.append(f"epochs={self.epochs}: nash_md is REINFORCE, whose samples are good for one pass; give 1")
        if not 0 <= self.valid_share < 1:
            bad.append(f"valid_share={self.valid_share}: give a share in [0, 1)")
        elif self.valid_share and self.loss == "nash_md":
            bad.append("valid_share: the loss of nash_md is no measure of progress; give 0")
        if self.patience < 1 or (self.patience != 1 and not self.valid_share):
            bad.append(f"patience={self.patience}: at least 1; it needs valid_share > 0")
        if self.monitor_prompts < 0:
            bad.append(f"monitor_prompts={self.monitor_prompts}: give 0 (off) or more")
        if self.max_length is not None and self.max_length < 1:
            bad.append(f"max_length={self.max_length}: give at least 1, or none")
        return bad

    def numbers(self, t: int = 1) -> Numbers:
        """The loss's numbers in iteration t, from 1."""
        if self.loss == "inpo" and self.eta_schedule == "growing":
            tau = self.tau or math.nan
            return Numbers(math.nan, tau * (t + 2) / 2, tau)
        return super().numbers()

    @property
    def pairs_per_prompt(self) -> int:
        """At most; fewer where answers are equal or left out."""
        return self.samples // 2 if self.pair_mode in ("iid", "soft") else 1

    @property
    def inner_steps(self) -> int:
        """Optimiser steps of an iteration, at most."""
        return self.epochs * -(-self.prompts_per_iteration * self.pairs_per_prompt // self.batch_size)

    @property
    def total_steps(self) -> int:
        return self.iterations * self.inner_steps


@dataclass
class Compared:
    """A prompt whose answers were compared: for the tree store."""

    tree: TokenTree
    task: Task


@dataclass
class _Iteration:
    """The iteration under way."""

    pairs: list[PreferencePair]
    train: list[int]
    valid: list[int]
    sampler: BatchSampler
    began: bool = False
    best: float = math.inf
    waited: int = 0
    best_weights: dict[str, torch.Tensor] | None = None
    start: dict[str, torch.Tensor] | None = None
    """Weights at its beginning, for the comparison at its end."""


class GameTrainer:
    """The loop, one optimiser step at a time: `train_step()`, or `session.fit(steps=config.total_steps)`.

    A step is a place in the budget of `total_steps`: an iteration that ends early (fewer pairs, no better held-out
    loss) moves on to the beginning of the next one. The metrics of an iteration's beginning (samples, pairs) and end
    (comparison with the previous iterate) stand in the lines of its first and last step.

    Args:
        policy, engine: what is trained and what samples it (the torch engine shares the policy's weights).
        tasks: dicts with "id" and whatever `encode` and the oracle read.
        encode: task -> prompt ids.
        oracle: see `rewards.oracles`.
        config: see `GameConfig`.
        decode: ids of an answer -> the text that the oracle sees; by default the tokenizer's, without special tokens.
        compute: dtype of forward and backward; masters are fp32.
        reference: by default a frozen copy of the initial weights, made only if something reads it.
        on_iteration: called with (t, policy) at the end of iteration t, from 1; what it returns joins the metrics.

    Raises:
        ConfigError, DataError: see `GameConfig`; no tasks, or fewer than an iteration has prompts; a prompt that is empty
        or fills the context.
    """

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        tasks: Sequence[Task],
        encode: Callable[[Task], Sequence[int]],
        oracle: Oracle,
        config: GameConfig,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        compute: torch.dtype = torch.float32,
        reference: Policy | None = None,
        on_iteration: Callable[[int, Policy], Mapping[str, float] | None] | None = None,
    ):
        if not engine.trainable:
            raise ConfigError(
                f"{type(engine).__name__} does not sample the policy, so its samples cannot be learnt from"
            )
        if not tasks:
            raise DataError("no tasks: the data is empty")
        if config.prompts_per_iteration > len(tasks):
            raise ConfigError(
                f"prompts_per_iteration={config.prompts_per_iteration} exceeds the {len(tasks)} prompts of the data: "
                "lower it, and raise samples for more pairs"
            )
        self.policy, self.engine, self.oracle, self.config = policy, engine, oracle, config
        self.tasks = [dict(task) for task in tasks]
        self.prompts = [list(encode(task)) for task in self.tasks]
        for task, ids in zip(self.tasks, self.prompts, strict=True):
            if not ids or len(ids) + 1 > policy.context:
                raise DataError(
                    f"task {task['id']!r}: its prompt has {len(ids)} tokens; give at least 1, and less than the context "
                    f"of {policy.context}"
                )
        self.decode = decode or (lambda ids: policy.tokenizer.decode(ids, skip_special_tokens=True))
        self.learner = Learner(
            policy, config.optim, total_steps=config.inner_steps, compute=compute, micro_tokens=config.micro_tokens
        )
        if self.learner.distributed.world > 1:
            raise ConfigError(f"WORLD_SIZE={self.learner.distributed.world}: the preference loop runs in one process")
        self.reference = reference
        if reference is None and (config.monitor_prompts or REFERENCE in config.columns(config.numbers())):
            self.reference = policy.frozen_copy()
        self.compute = compute
        self.sampler = BatchSampler(len(self.tasks), config.prompts_per_iteration, derive_seed(config.seed, "tasks"))
        self.on_iteration = on_iteration
        self.step = 0
        self.iteration = 0
        """Iterations that are complete."""
        self.counts = {"tokens_generated": 0, "tokens_trained": 0, "verifier_calls": 0}
        self._now: _Iteration | None = None
        order = np.random.default_rng(derive_seed(config.seed, "monitor")).permutation(len(self.tasks))
        self._watched: list[int] = order[: config.monitor_prompts].tolist()
        self._answers: list[list[str]] = []
        """Answers to the watched prompts, of the first iterate and of the last complete one."""

    # -- one step --
    def train_step(self, progress: Callable[[int, int], None] | None = None) -> tuple[dict[str, float], list[Compared]]:
        """One optimiser step, with the beginning or the end of an iteration where it is due.

        Raises:
            RewardError: every comparison failed. DataError: the first iteration has no pair (says what removed them).
            RunError: before the first step the policy was not the one that sampled.
        """
        began = time.perf_counter()
        metrics: dict[str, float] = {"iteration": self.iteration + 1}
        shown: list[Compared] = []
        if self._now is None:
            before = self.sampler.state_dict(), dict(self.counts)
            try:
                more, shown = self._begin(progress)
            except RewardError:  # so that the step can be made again
                self.sampler.load_state_dict(before[0])
                self.counts = before[1]
                raise
            metrics |= more
        now = self._now
        if now is not None:
            metrics |= self._update(now)
        if now is None or self._is_over(now, metrics):
            metrics |= self._end(now)
        self.counts["tokens_trained"] = self.learner.tokens_trained
        metrics["time/step"] = time.perf_counter() - began
        return metrics, shown

    def _numbers(self) -> Numbers:
        return self.config.numbers(self.iteration + 1)

    def _update(self, now: _Iteration) -> dict[str, float]:
        config = self.config
        mine = [now.pairs[now.train[i]] for i in next(now.sampler)]
        soft, numbers = config.pair_mode == "soft", self._numbers()
        metrics = update_pairs(
            self.learner, mine, config, numbers, soft=soft, temperature=config.temperature, watch=[PREVIOUS]
        )
        if not now.began:
            now.began = True
            tokens = max(sum(len(side) for side in pair.answers()) for pair in mine)
            most = _ROUNDING.get(self.compute, 0.1) * math.sqrt(tokens)
            if not metrics["moved/max"] <= most:
                raise RunError(
                    f"iteration {self.iteration + 1}: before its first step the policy's log-probs differ from those of "
                    f"the previous iterate by {metrics['moved/max']:.3g} nats (rounding explains {most:.2g}): its weights "
                    "were changed meanwhile, or its forward is not deterministic"
                )
        self.step += 1
        return metrics

    def _is_over(self, now: _Iteration, metrics: dict[str, float]) -> bool:
        """After a pass: measure the held-out pairs; is this iteration over?"""
        passes, rest = divmod(now.sampler.step, now.sampler.batches_per_epoch)
        if rest:
            return False
        if now.valid:
            loss = metrics["valid/loss"] = self._held_out(now)
            if loss < now.best:
                now.best, now.waited, now.best_weights = loss, 0, self._weights()
            else:
                now.waited += 1
        return passes >= self.config.epochs or (bool(now.valid) and now.waited >= self.config.patience)

    def _held_out(self, now: _Iteration) -> float:
        config = self.config
        pairs = [now.pairs[i] for i in now.valid]
        found = measure_pairs(
            self.policy,
            pairs,
            config,
            self._numbers(),
            soft=config.pair_mode == "soft",
            temperature=config.temperature,
            micro_tokens=config.micro_tokens,
        )
        return float(found["loss"].mean())

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: master.clone() for name, master in self.learner.optimizer.master_state().items()}

    # -- the beginning of an iteration --
    def _begin(self, progress: Callable[[int, int], None] | None) -> tuple[dict[str, float], list[Compared]]:
        """Sample, compare, annotate; `self._now` stays None if no pair came of it."""
        began = time.perf_counter()
        config = self.config
        drawn = next(self.sampler)
        if config.monitor_prompts and not self._answers:
            self._answers = [self._watched_texts()[0]] * 2
        sampled = self._sample(drawn, config.samples, "rollout", progress)
        metrics = self._sample_metrics(sampled)
        done = time.perf_counter()
        before = self.oracle.queries
        pairs, counts = self._compare([(self.tasks[i], tree) for i, tree in zip(drawn, sampled, strict=True)])
        self.counts["verifier_calls"] += self.oracle.queries - before
        judged = time.perf_counter()
        if not self.iteration:
            counts.require("iteration 1")
        nominal = len(drawn) * config.pairs_per_prompt
        metrics |= counts.metrics() | {"pairs/dropped_share": 1 - len(pairs) / nominal}
        metrics |= {"time/rollout": done - began, "time/reward": judged - done}
        if not pairs:
            return metrics, []
        self._annotate(pairs)
        metrics |= pair_metrics(pairs)
        train, valid = self._split(pairs)
        size = min(config.batch_size, len(train))
        batches = BatchSampler(
            len(train), size, derive_seed(config.seed, "pairs", self.iteration), epochs=config.epochs
        )
        self.learner.optimizer.reset(len(batches))
        now = self._now = _Iteration(pairs, train, valid, batches)
        if valid:
            now.best, now.best_weights = self._held_out(now), self._weights()
            metrics["valid/loss_before"] = now.best
        if config.monitor_prompts:
            now.start = self._weights()
        metrics["time/annotate"] = time.perf_counter() - judged
        trees = {id(pair.tree): Compared(pair.tree, pair.task) for pair in pairs}
        return metrics, list(trees.values())

    def _sample(self, drawn: Sequence[int], count: int, what: str, progress: Any = None) -> list[TokenTree]:
        config = self.config
        seed = derive_seed(config.seed, what, self.iteration)
        trees = [TokenTree(self.prompts[i], kind=Kind.PROMPT, task=str(self.tasks[i]["id"]), seed=seed) for i in drawn]
        sampling = Sampling(
            max_tokens=config.max_new_tokens, temperature=config.temperature, stop=config.stop, seed=seed
        )
        nodes = self.engine.extend([(tree, 0) for tree in trees], count, sampling, progress=progress)
        lengths = [int(tree.length[node]) for tree, mine in zip(trees, nodes, strict=True) for node in mine]
        self.counts["tokens_generated"] += sum(lengths)
        return trees

    def _compare(self, groups: Sequence[Group]) -> tuple[list[PreferencePair], PairCounts]:
        config = self.config
        filters: dict[str, Any] = {"keep_truncated": config.keep_truncated, "max_length": config.max_length}
        if config.loss in ("sppo", "nash_md"):
            if config.loss == "nash_md":
                filters |= {"annotate": self._annotate, "mixture": config.mixture}
            return with_wins(self.oracle, groups, self.decode, config.pair_mode, **filters)
        key = ("iteration", self.iteration + 1)
        return compared(self.oracle, groups, self.decode, config.pair_mode, seed=config.seed, key=key, **filters)

    def _annotate(self, pairs: Sequence[PreferencePair]) -> None:
        ties = {PREVIOUS: self.policy} | ({REFERENCE: self.reference} if self.reference is not None else {})
        for column, policy in ties.items():
            annotate(
                policy,
                pairs,
                column,
                temperature=self.config.temperature,
                micro_tokens=self.config.micro_tokens,
            )

    def _split(self, pairs: Sequence[PreferencePair]) -> tuple[list[int], list[int]]:
        """Indices of the pairs that are trained on and of those held out; the pairs of a prompt stay together."""
        every = list(range(len(pairs)))
        trees = list(dict.fromkeys(id(pair.tree) for pair in pairs))
        count = min(len(trees) - 1, math.ceil(self.config.valid_share * len(trees)))
        if not self.config.valid_share or not count:
            return every, []
        order = np.random.default_rng(derive_seed(self.config.seed, "valid", self.iteration)).permutation(len(trees))
        held = {trees[i] for i in order[:count]}
        valid = [i for i in every if id(pairs[i].tree) in held]
        return [i for i in every if id(pairs[i].tree) not in held], valid

    def _sample_metrics(self, sampled: Sequence[TokenTree]) -> dict[str, float]:
        nodes = [(tree, node) for tree in sampled for node in tree.children(0)]
        lengths = [int(tree.length[node]) for tree, node in nodes]
        cut = sum(Stop(int(tree.stop[node])) is Stop.LENGTH for tree, node in nodes)
        return {
            "prompts/epoch": float(self.sampler.epoch),
            "completions/mean_length": float(np.mean(lengths)),
            "completions/clipped_ratio": cut / len(nodes),
            "tokens/generated": float(sum(lengths)),
        }

    # -- the end of an iteration --
    def _end(self, now: _Iteration | None) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if now is not None:
            if now.best_weights is not None:
                self.learner.optimizer.load_masters(now.best_weights)
                metrics["valid/loss_best"] = now.best
            if now.start is not None:
                metrics |= self._against_previous(now.start)
        if self.on_iteration is not None:
            metrics |= self.on_iteration(self.iteration + 1, self.policy) or {}
        self._now = None
        self.iteration += 1
        self.step = self.iteration * self.config.inner_steps
        return metrics

    def _against_previous(self, start: dict[str, torch.Tensor]) -> dict[str, float]:
        """Fresh answers of the new iterate to the watched prompts: how often they win against those of the iterate before
        and of the first one, how long they are, and how far it went (KL, by the mean log-ratio of its own answers)."""
        began = time.perf_counter()
        config, optimizer = self.config, self.learner.optimizer
        texts, answers = self._watched_texts()
        metrics = {"monitor/mean_length": float(np.mean([int(a.tree.length[a.chosen]) for a in answers]))}
        told = [a for a in answers if a.tree.length[a.chosen]]
        if told:
            settings: dict[str, Any] = {"temperature": config.temperature, "micro_tokens": config.micro_tokens}
            annotate(self.policy, told, "own_logprob", **settings)
            if self.reference is not None:
                annotate(self.reference, told, REFERENCE, **settings)
                metrics["kl/reference"] = _mean_ratio(told, REFERENCE)
            mine = self._weights()
            optimizer.load_masters(start)
            try:
                annotate(self.policy, told, PREVIOUS, **settings)
            finally:
                optimizer.load_masters(mine)
            metrics["kl/previous"] = _mean_ratio(told, PREVIOUS)
        first, last = self._answers
        metrics |= self._win_rate("win_rate/previous", texts, last) | self._win_rate("win_rate/first", texts, first)
        self._answers = [first, texts]
        return metrics | {"time/monitor": time.perf_counter() - began}

    def _watched_texts(self) -> tuple[list[str], list[PreferencePair]]:
        """An answer to each watched prompt: its text, and as a pair with itself."""
        trees = self._sample(self._watched, 1, "monitor")
        answers = []
        for index, tree in zip(self._watched, trees, strict=True):
            (node,) = tree.children(0)
            tree.weight[tree.span(node)] = 1
            answers.append(PreferencePair(tree, node, node, task=self.tasks[index]))
        return [self.decode(a.tree.node_ids(a.chosen)) for a in answers], answers

    def _win_rate(self, name: str, mine: Sequence[str], theirs: Sequence[str]) -> dict[str, float]:
        """Mean probability that an answer of mine wins; equal ones are even, failed comparisons are left out."""
        items = [(self.tasks[i], a, b) for i, a, b in zip(self._watched, mine, theirs, strict=True)]
        asked = [item for item in items if item[1] != item[2]]
        before = self.oracle.queries
        given = ask_oracle(self.oracle, asked) if asked else []
        self.counts["verifier_calls"] += self.oracle.queries - before
        wins = [p for p in given if not isinstance(p, RewardError)] + [0.5] * (len(items) - len(asked))
        return {name: float(np.mean(wins))} if wins else {}

    # -- resume --
    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "iteration": self.iteration,
            "learner": self.learner.state_dict(),
            "sampler": self.sampler.state_dict(),
            "counts": dict(self.counts),
            "answers": self._answers,
            "inner_steps": self.config.inner_steps,
            "now": None if self._now is None else self._packed(self._now),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["inner_steps"] != self.config.inner_steps:
            raise ConfigError(
                f"an iteration of this run has {state['inner_steps']} steps, with these settings {self.config.inner_steps}: "
                "only `iterations` may change"
            )
        self.step, self.iteration = state["step"], state["iteration"]
        self.sampler.load_state_dict(state["sampler"])
        self.counts = dict(state["counts"])
        self._answers = state["answers"]
        self._now = None if state["now"] is None else self._unpacked(state["now"])
        if self._now is not None:
            self.learner.optimizer.reset(len(self._now.sampler))
        self.learner.load_state_dict(state["learner"])

    def _packed(self, now: _Iteration) -> dict[str, Any]:
        place = {id(task): i for i, task in enumerate(self.tasks)}
        trees = list({id(pair.tree): pair for pair in now.pairs}.values())
        number = {id(pair.tree): i for i, pair in enumerate(trees)}
        names = ("chosen", "rejected", "p", "win_chosen", "win_rejected")
        kept = ("train", "valid", "began", "best", "waited", "best_weights", "start")
        return {
            "trees": [(place[id(pair.task)], pair.tree.to_arrays()) for pair in trees],
            "pairs": [(number[id(p.tree)], {name: getattr(p, name) for name in names}) for p in now.pairs],
            "sampler": now.sampler.state_dict(),
            **{name: getattr(now, name) for name in kept},
        }

    def _unpacked(self, state: dict[str, Any]) -> _Iteration:
        state = dict(state)
        trees = [(TokenTree.from_arrays(arrays), self.tasks[i]) for i, arrays in state.pop("trees")]
        pairs = [PreferencePair(trees[i][0], task=trees[i][1], **values) for i, values in state.pop("pairs")]
        saved = state.pop("sampler")
        batches = BatchSampler(saved["n"], saved["batch_size"], saved["seed"], epochs=self.config.epochs)
        batches.load_state_dict(saved)
        return _Iteration(pairs, sampler=batches, **state)


def _mean_ratio(answers: Sequence[PreferencePair], column: str) -> float:
    """Mean over answers of their log-prob minus that in `column`."""
    out = []
    for answer in answers:
        tokens = answer.answers()[0]
        own = answer.tree.column("own_logprob")[tokens].astype(float)
        out.append((own - answer.tree.column(column)[tokens]).sum())
    return float(np.mean(out))
