"""Settings of `forethought pairs`: what samples, what judges, and how pairs are made."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Literal

from forethought.config import apply_overrides, from_dict
from forethought.errors import ConfigError
from forethought.recipes.inputs import Columns, Sampled
from forethought.rewards.pairs import check_tournament

Mode = Literal["verified", "iid", "soft", "tournament", "max_min"]


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """The chat model that compares two answers (`oracle=judge`)."""

    url: str = ""
    """Address of its OpenAI-compatible server, such as http://localhost:8000/v1."""
    model: str = ""
    """The name that the server knows."""
    criteria: str = ""
    """What makes an answer better, in place of the built-in words."""
    logprobs: bool = True
    """Read the probability off the log-probs of its choice, where the server tells them."""
    samples: int = 1
    """Replies to each question where it does not; several need a temperature."""
    temperature: float = 0.0
    max_tokens: int = 16
    """Longest reply; a judge that thinks before it chooses needs more."""
    calls: int | None = None
    """Requests at most; what is left over stays unjudged."""
    parallel: int = 8
    """Requests under way at once."""


@dataclass(frozen=True, kw_only=True)
class OracleSettings:
    """What compares two answers."""

    oracle: str | None = None
    """FILE.py:NAME, `judge` (a chat model), or `reward` (Bradley-Terry on the reward)."""
    scale: float = 1.0
    """oracle=reward: P = sigmoid(scale * difference of the rewards)."""
    both_orders: bool = False
    """Ask a function both ways round and average (a judge always is)."""
    judge: JudgeSettings = field(default_factory=JudgeSettings)

    def oracle_problems(self, reward: tuple[str, ...]) -> list[str]:
        """What of the oracle is missing, or does not go with the reward, each with its fix."""
        bad = []
        if self.oracle == "reward" and not reward:
            bad.append("oracle=reward compares by a reward: give --reward, too")
        if self.oracle not in (None, "reward") and reward:
            bad.append(f"oracle={self.oracle}: it judges alone; leave --reward out, or give --oracle reward")
        if self.oracle == "judge":
            given = {"judge.url": self.judge.url, "judge.model": self.judge.model}
            bad += [f"oracle=judge: give {name}=..." for name, value in given.items() if not value]
        return bad


@dataclass(frozen=True, kw_only=True)
class PairsJob(Columns, Sampled, OracleSettings):
    """Settings of `forethought pairs`."""

    model: str = ""
    """Registry name, Hugging Face id or local folder; with an endpoint, the name that its server knows."""
    data: str = ""
    """JSONL or parquet file of prompts."""
    endpoint: str | None = None
    """Address of an OpenAI-compatible server that samples, in place of a local model."""
    rollouts: str | None = None
    """File of samples that are there already (`prompt` or its column, and `samples`), in place of model and data."""
    samples: int = 8
    """Samples a prompt."""
    temperature: float = 1.0
    device: str | None = None
    dtype: Literal["fp32", "bf16"] | None = None
    reward: tuple[str, ...] = ()
    """Rewards by name; several are added up."""
    reward_weights: tuple[float, ...] = ()
    reward_timeout: float = 60.0
    """Seconds for one call of a reward or oracle function."""
    mode: Mode | None = None
    """How pairs are made (default: verified with a reward alone, tournament with an oracle)."""
    right_at: float = 1.0
    """verified: a reward of at least this is right."""
    no_answer: Literal["unknown", "wrong"] = "unknown"
    """verified: what a sample counts as in which no answer was found."""
    pairs_per_prompt: int = 1
    """verified: pairs of one prompt at most."""
    keep_truncated: bool = False
    """Use samples that were cut at the token limit."""
    max_length: int | None = None
    """Leave out samples of more tokens than this."""
    max_queries: int | None = None
    """Comparisons at most; prompts that are left over stay unjudged."""

    def __post_init__(self):
        bad = []
        if self.samples < 2:
            bad.append(f"samples={self.samples}: a pair needs at least 2 samples of a prompt")
        if not self.temperature > 0 and not self.rollouts:
            bad.append(f"temperature={self.temperature}: equal samples make no pairs; give a positive number")
        for name in ("pairs_per_prompt", "max_length", "max_queries", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                bad.append(f"{name}={value}: give at least 1")
        if not 0 < self.reward_timeout < float("inf"):
            bad.append(f"reward_timeout={self.reward_timeout}: give a positive number of seconds")
        if self.how == "tournament" and not self.rollouts:
            try:
                check_tournament(self.samples)
            except ConfigError as err:
                bad.append(str(err))
        if bad:
            raise ConfigError("pairs: " + "; ".join(bad))

    @property
    def how(self) -> Mode:
        return self.mode or ("tournament" if self.oracle else "verified")

    def require(self) -> None:
        """Raises: ConfigError where what has no default is missing, or does not fit together."""
        bad = []
        if self.rollouts is None:
            bad += [f"{n}: give --{n}" for n in ("model", "data") if not getattr(self, n)]
        elif self.model or self.data or self.endpoint:
            bad.append("rollouts: these have prompts and samples already; leave --model, --data and --endpoint out")
        if not self.reward and not self.oracle:
            bad.append(
                "no judge: give --reward FILE.py:NAME (or math) for verified right and wrong pairs, or --oracle "
                "FILE.py:NAME, reward or judge for comparisons"
            )
        bad += self.oracle_problems(self.reward)
        if self.how == "verified" and self.oracle:
            bad.append("mode=verified reads a reward, not an oracle: leave --oracle out, or choose another mode")
        if self.how != "verified" and not self.oracle:
            bad.append(f"mode={self.how} compares: give --oracle (--oracle reward compares by --reward)")
        if bad:
            raise ConfigError("pairs: " + "; ".join(bad))

    def cost(self, samples: int) -> int:
        """Comparisons that one prompt takes at most."""
        if self.how == "max_min":
            return 1 if self.oracle == "reward" else samples * (samples - 1) // 2
        return 3 * samples // 2 - 1 if self.how == "tournament" else samples // 2


def job_of(args: argparse.Namespace) -> PairsJob:
    """The job that the command line describes. Raises: ConfigError."""
    names = PairsJob.__dataclass_fields__
    given = {k: v for k, v in vars(args).items() if k in names and k != "judge" and v is not None}
    judge = {"url": args.judge_url, "model": args.judge_model}
    given["judge"] = {k: v for k, v in judge.items() if v is not None}
    return apply_overrides(from_dict(PairsJob, given, source="command line"), args.settings)
