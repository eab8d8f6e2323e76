"""The reward of an arm: which signals are paid, with which weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from forethought.envs.congruence import parse_puzzle, parse_trace
from forethought.errors import ConfigError
from forethought.rewards.combine import Combiner, FaultWatch, MissingPolicy, PartsReward, Schedule, Term
from forethought.rewards.exploration import RUBRIC, Correctness, Creativity, Form, GradedCreativity, Length, NoBox, Unit
from forethought.rewards.judge import Audit, Budget, ChatJudge, Grader
from forethought.rewards.parts import RewardPart
from forethought.rewards.split import Scope, Splitter, Which
from forethought.rewards.verify import Extract, Mode

Exploration = Literal["none", "length", "creativity", "both"]


@dataclass(frozen=True, kw_only=True)
class GraderConfig:
    """A language model that grades creativity, over an OpenAI-compatible endpoint."""

    base_url: str = ""
    """Empty: creativity is counted by the rule of the miniature."""
    model: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    cache: str = ""
    """File that keeps replies; empty: memory only."""
    calls: int | None = None
    """Largest number of requests; what is asked beyond is missing."""
    seconds: float | None = None
    audit_model: str = ""
    """Second judge that grades a share anew; empty: no audit."""
    audit_share: float = 0.05


@dataclass(frozen=True, kw_only=True)
class SignalConfig:
    """Correctness, exploration, and how they are combined."""

    w_c: float = 1.0
    """Weight of correctness."""
    w_e: float = 1.0
    """Weight of exploration."""
    mix: float = 0.2
    """With both kinds of exploration: R = (1 - mix) * (correctness + length) + mix * creativity, as published."""
    decay: Literal["linear", "cosine", "plateau"] = "linear"
    """How the weight of exploration falls in an arm with decay (an extension; the paper's is constant)."""
    decay_steps: int = 100
    decay_patience: int = 20
    form: Form = "inverse"
    c: float = 20.0
    """Strength of the inverse length, in units; near 0.2 to 0.5 of the median length, or it drowns correctness."""
    unit: Unit = "tokens"
    cap: float | None = 100.0
    """Longest length that is paid; below the limit of generation."""
    floor: float = 4.0
    scope: Scope = "all"
    creativity_cap: int = 10
    """Different tries that are paid."""
    no_box: float = -0.5
    no_box_rule: NoBox = "replace"
    answer: Which = "last"
    """Which box is graded."""
    fallback: Extract | None = None
    """How an answer is read where no box gives one (for no_box_rule=subtract)."""
    mode: Mode = "train-strict"
    clip: float = 10.0
    """R is cut to this size; 0 is off."""
    standardise: bool = False
    separate: bool = False
    """An advantage of its own for correctness and for exploration, in place of one reward (an extension)."""
    missing: MissingPolicy = "drop"
    missing_creativity: float = 0.5
    """For missing=constant, as the released server does."""
    fault_alert: float = 0.01
    fault_stop: float = 0.1
    grader: GraderConfig = field(default_factory=GraderConfig)

    def problems(self, max_new_tokens: int) -> list[str]:
        """What is wrong with the settings, each with its fix."""
        bad = []
        if not 0 <= self.mix <= 1:
            bad.append(f"signals.mix={self.mix}: give a share from 0 to 1")
        if self.clip < 0:
            bad.append(f"signals.clip={self.clip}: give 0 (off) or a positive number")
        if self.unit == "tokens" and self.cap is not None and self.cap >= max_new_tokens:
            bad.append(
                f"signals.cap={self.cap:g} tokens with ppo.max_new_tokens={max_new_tokens}: cap the paid length below the "
                "limit, or a response that never ends is paid best"
            )
        if self.separate and self.standardise:
            bad.append("signals.separate and signals.standardise: separate advantages are whitened already; choose one")
        if bool(self.grader.base_url) != bool(self.grader.model):
            bad.append("signals.grader: give base_url and model, or neither")
        try:  # the parts know their own ranges
            Length(self.form, c=self.c, cap=self.cap, floor=self.floor, unit=self.unit, scope=self.scope)
            Creativity(lambda problem, response: 0, cap=self.creativity_cap)
            self.schedule(True)
            FaultWatch(self.fault_alert, self.fault_stop)
        except ConfigError as err:
            bad.append(f"signals: {err}")
        return bad

    def schedule(self, decay: bool) -> Schedule:
        """The weight of exploration."""
        if not decay:
            return Schedule(weight=self.w_e)
        return Schedule(kind=self.decay, weight=self.w_e, steps=self.decay_steps, patience=self.decay_patience)

    def splitter(self, thinking_end: str | None = None) -> Splitter:
        return Splitter(self.answer, fallback=self.fallback, thinking_end=thinking_end)


def distinct_tries(problem: str, response: str) -> int:
    """The rule of the miniature: different numbers tried, whatever is said about them."""
    return parse_trace(response, parse_puzzle(problem)).distinct


def make_reward(
    config: SignalConfig,
    decode: Callable[[list[int]], str],
    *,
    outcome: bool,
    exploration: Exploration,
    decay: bool,
    puzzles: bool,
    thinking_end: str | None = None,
) -> PartsReward:
    """The judge of an arm. What an arm does not pay for stands in it with weight 0, so that it is logged.

    outcome: correctness is paid. puzzles: the tasks are the miniature's, so that a rule can count tries.

    Raises:
        ConfigError: creativity without puzzles needs a grader.
    """
    correctness = Correctness(mode=config.mode, no_box=config.no_box, rule=config.no_box_rule)
    length = Length(
        config.form,
        c=config.c,
        cap=config.cap,
        floor=config.floor,
        unit=config.unit,
        scope=config.scope,
        step_mark=r"\btry\b" if puzzles else None,
    )
    pays = config.schedule(decay)
    w_c = config.w_c if outcome else 0.0
    terms = []
    if exploration == "both":
        base = Schedule(weight=1 - config.mix)
        terms.append(Term((correctness, length), base))
        terms.append(Term((_creativity(config, puzzles),), Schedule(weight=config.mix)))
    else:
        terms.append(Term((correctness,), Schedule(weight=w_c)))
        terms.append(Term((length,), pays if exploration == "length" else Schedule(weight=0.0)))
        if exploration == "creativity" or puzzles:
            weight = pays if exploration == "creativity" else Schedule(weight=0.0)
            terms.append(Term((_creativity(config, puzzles),), weight))
    clip = (-config.clip, config.clip) if config.clip else None
    constants = {"creativity": config.missing_creativity, "length": 0.0} if config.missing == "constant" else {}
    combiner = Combiner(
        terms,
        clip=clip,
        standardise=config.standardise,
        missing=config.missing,
        constants={k: v for k, v in constants.items() if k in [p.name for t in terms for p in t.parts]},
    )
    watch = FaultWatch(config.fault_alert, config.fault_stop)
    return PartsReward(combiner, decode, splitter=config.splitter(thinking_end), watch=watch)


def _creativity(config: SignalConfig, puzzles: bool) -> RewardPart:
    grader = config.grader
    if grader.base_url:
        server: dict[str, Any] = {"api_key_env": grader.api_key_env}
        budget = Budget(calls=grader.calls, seconds=grader.seconds)
        audit = None
        if grader.audit_model:
            second = ChatJudge(grader.base_url, grader.audit_model, budget=budget, **server)
            audit = Audit(second, share=grader.audit_share)
        judge = ChatJudge(grader.base_url, grader.model, budget=budget, cache=grader.cache or None, **server)

        def counts() -> dict[str, float]:
            asked = {"grader/calls": float(judge.calls), "grader/missing_share": judge.stats.missing_share}
            return asked | ({f"grader/{k}": v for k, v in audit.metrics().items()} if audit else {})

        return GradedCreativity(Grader(judge, RUBRIC, audit=audit), counts)
    if not puzzles:
        raise ConfigError(
            "an arm that pays creativity needs a grader for these problems: give signals.grader.base_url and "
            "signals.grader.model"
        )
    return Creativity(distinct_tries, cap=config.creativity_cap)


def separate_parts(reward: PartsReward) -> tuple[str, ...]:
    """Parts that have an advantage of their own: those with a weight at the beginning, correctness first."""
    return tuple(name for name, weight in reward.combiner.weights().items() if weight)
