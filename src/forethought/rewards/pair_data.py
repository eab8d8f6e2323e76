"""What preference pairs are made of and counted by: samples, pairs, counts of what was left out, and records.

The functions that make pairs stand in `pairs.py`, which also passes on these names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forethought.errors import DataError
from forethought.rewards.oracles import Task

Verdict = Literal["right", "wrong", "unknown"]

REASONS = {
    "sample/failed": "samples that could not be made",
    "sample/empty": "empty samples",
    "sample/truncated": "samples cut at the token limit",
    "sample/too long": "samples over the length limit",
    "sample/unknown": "samples whose verdict is unknown",
    "sample/repeated": "samples with the text of another one",
    "sample/not judged": "samples without a reward",
    "sample/odd": "samples left without a partner",
    "sample/surplus": "samples beyond the largest power of two",
    "prompt/too few": "prompts with fewer than two usable samples",
    "prompt/all right": "prompts without a wrong sample",
    "prompt/all wrong": "prompts without a right sample",
    "prompt/not judged": "prompts with a comparison that failed",
    "pair/not judged": "pairs whose comparison failed",
    "pair/identical": "pairs of two equal answers",
    "pair/tie": "pairs without a winner",
    "pair/upset": "pairs whose final loser beat the final winner",
    "pair/duplicate": "pairs that stood there already",
}
"""Why something is left out, by the name it is counted under."""


@dataclass(frozen=True)
class Sample:
    """One response to a prompt, as far as pairs need to know it.

    length: tokens, the end token included; None where not known. truncated: cut at the token limit. failed: why it
    could not be made, "" for a sound one. verdict, reward: what a verifier or a reward said, None where not asked.
    """

    text: str
    length: int | None = None
    truncated: bool = False
    failed: str = ""
    verdict: Verdict | None = None
    reward: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Pair:
    """Indices of two samples, and the oracle's probability `p` that the chosen one wins (1 where it was verified).

    A hard label is a draw, so `p` may lie below 1/2; a soft pair's "chosen" is just its first answer.
    """

    chosen: int
    rejected: int
    p: float = 1.0


@dataclass
class PairCounts:
    """What was looked at, what came of it, and what was left out, by the names in `REASONS`.

    failure: the first comparison that failed, in words.
    """

    prompts: int = 0
    samples: int = 0
    queries: int = 0
    pairs: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    failure: str = ""

    def drop(self, name: str, count: int = 1) -> None:
        if count:
            self.dropped[name] += count

    def add(self, other: PairCounts) -> None:
        self.prompts += other.prompts
        self.samples += other.samples
        self.queries += other.queries
        self.pairs += other.pairs
        self.dropped.update(other.dropped)
        self.failure = self.failure or other.failure

    def metrics(self) -> dict[str, float]:
        """Flat numbers: pairs/made, pairs/queries, and the dropped ones as pairs/dropped/sample_truncated ..."""
        out: dict[str, float] = {"pairs/made": self.pairs, "pairs/queries": self.queries}
        for name, count in self.dropped.items():
            out[f"pairs/dropped/{name.replace('/', '_').replace(' ', '_')}"] = count
        return out

    def to_json(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "samples": self.samples,
            "queries": self.queries,
            "pairs": self.pairs,
            "dropped": {name: self.dropped[name] for name in REASONS if self.dropped[name]},
            **({"failure": self.failure} if self.failure else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PairCounts:
        numbers = {name: value[name] for name in ("prompts", "samples", "queries", "pairs")}
        return cls(**numbers, dropped=Counter(value["dropped"]), failure=value.get("failure", ""))

    def __str__(self) -> str:
        """One sentence with every count.

        >>> print(PairCounts(2, 8, 0, 1, Counter({"prompt/all right": 1})))
        1 pair from 2 prompts, 8 samples; left out: 1 prompts without a wrong sample
        """
        unit = "pair" if self.pairs == 1 else "pairs"
        text = f"{self.pairs} {unit} from {self.prompts} prompts, {self.samples} samples"
        if self.queries:
            text += f", {self.queries} comparisons"
        left = [f"{self.dropped[name]} {words}" for name, words in REASONS.items() if self.dropped[name]]
        text += f"; left out: {', '.join(left)}" if left else ""
        return text + (f"; the first failure: {self.failure}" if self.failure else "")

    def require(self, what: str = "pairs") -> None:
        """Raises: DataError where no pair is left; it names every filter with what it removed."""
        if not self.pairs:
            most = max(self.dropped, key=lambda name: self.dropped[name], default=None)
            hint = "" if most is None else f". Most were removed as: {REASONS.get(most, most)}"
            raise DataError(f"{what}: nothing is left: {self}{hint}")


def as_samples(samples: Sequence[Sample | str]) -> list[Sample]:
    return [Sample(s) if isinstance(s, str) else s for s in samples]


def usable(
    samples: Sequence[Sample | str],
    *,
    keep_truncated: bool = False,
    keep_empty: bool = False,
    max_length: int | None = None,
    counts: PairCounts | None = None,
) -> list[int]:
    """Indices of the samples that pairs may be made of; the others are counted.

    A truncated answer has no end, so a loss that reads its end token would teach never to stop: left out unless asked.
    """
    counts = counts if counts is not None else PairCounts()
    out = []
    for i, sample in enumerate(as_samples(samples)):
        if sample.failed:
            counts.drop("sample/failed")
        elif not sample.text.strip() and not keep_empty:
            counts.drop("sample/empty")
        elif sample.truncated and not keep_truncated:
            counts.drop("sample/truncated")
        elif max_length is not None and sample.length is not None and sample.length > max_length:
            counts.drop("sample/too long")
        else:
            out.append(i)
    return out


# -- records -----------------------------------------------------------------------------------------------------------


def preference_records(task: Task, samples: Sequence[Sample | str], pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Pairs as records in TRL's preference format, with what is known of them in further columns.

    `prompt`, `chosen` and `rejected` are text, or messages where the task's prompt is a list of messages.
    """
    samples = as_samples(samples)
    chat = not isinstance(task["prompt"], str)
    out = []
    for pair in pairs:
        row: dict[str, Any] = {"prompt": task["prompt"]}
        sides = {"chosen": pair.chosen, "rejected": pair.rejected}
        for side, i in sides.items():
            row[side] = [{"role": "assistant", "content": samples[i].text}] if chat else samples[i].text
        row |= {"p": pair.p, "id": task["id"]}
        for name in ("sample", "length", "reward", "verdict", "why"):
            for side, i in sides.items():
                value = i if name == "sample" else getattr(samples[i], name)
                if value is not None and value != "":
                    row[f"{side}_{name}"] = value
        out.append(row)
    return out


def distinct_records(records: Sequence[dict[str, Any]], counts: PairCounts | None = None) -> list[dict[str, Any]]:
    """Records without those whose prompt, chosen and rejected stood there before; these are counted.

    Raises:
        DataError: a record's chosen and rejected are equal, or one is empty.
    """
    counts = counts if counts is not None else PairCounts()
    seen, out = set(), []
    for n, record in enumerate(records):
        if record["chosen"] == record["rejected"]:
            raise DataError(
                f"record {n} (prompt {record.get('id', '?')!r}): chosen equals rejected; it teaches nothing"
            )
        for side in ("chosen", "rejected"):
            if not record[side]:
                raise DataError(f"record {n} (prompt {record.get('id', '?')!r}): {side} is empty")
        what = repr((record["prompt"], record["chosen"], record["rejected"]))
        if what in seen:
            counts.drop("pair/duplicate")
            counts.pairs -= 1
        else:
            seen.add(what)
            out.append(record)
    return out
