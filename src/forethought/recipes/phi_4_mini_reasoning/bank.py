r"""The rollout bank: questions with the teacher's rollouts and three-valued verdicts, and what each stage takes from it.

Record: {qid, source, question, gold, domain, level, rollouts: [{text, tokens, answer, verdict, repeated, truncated}]}.
Right rollouts feed stages 1 and 2, right against wrong ones stage 3. A verdict is "unknown" where the gold answer cannot
be read or the check ran into a limit: such a rollout is neither a demonstration nor a negative.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from forethought.config import derive_seed
from forethought.envs.modular import ModularConfig, rollout
from forethought.errors import ConfigError, DataError, RewardError
from forethought.rewards.pair_data import PairCounts, Sample
from forethought.rewards.pairs import verified_pairs
from forethought.rewards.split import find_boxes
from forethought.rewards.verify import check

Verdict = Literal["right", "wrong", "unknown"]
Tokens = Callable[[str], Sequence[Any]]
"""Text -> its tokens."""

_WHOLE = re.compile(r"-?\d{1,15}")


@dataclass(frozen=True)
class Grade:
    """verdict; reason: why; answer: the text in the box."""

    verdict: Verdict
    reason: str
    answer: str | None = None


def grade(response: str, gold: str, *, one_box: bool = True, timeout: float = 2.0) -> Grade:
    """Is the boxed answer right?

    The last box counts. With `one_box`, several different boxed answers are wrong: listing answers is no answer.
    """
    boxes, _ = find_boxes(response)
    answers = [b.content.strip() for b in boxes]
    if not answers:
        return Grade("wrong", "no_answer")
    if one_box and len(set(answers)) > 1:
        return Grade("wrong", "several answers", answers[-1])
    answer = answers[-1]
    if _WHOLE.fullmatch(answer) and _WHOLE.fullmatch(gold.strip()):
        return Grade("right" if int(answer) == int(gold) else "wrong", "number", answer)
    try:
        found = check(answer, gold, form="final", timeout=timeout)
    except RewardError as err:
        return Grade("unknown", f"gold: {err}", answer)
    if found.timed_out or found.reason.startswith("limit"):
        return Grade("unknown", found.reason or "time-out", answer)
    return Grade("right" if found.correct else "wrong", found.tier or found.reason, answer)


def is_repetitive(tokens: Sequence[Any], *, n: int = 20, times: int = 4, ratio: float = 8.0) -> bool:
    """A run of n tokens occurs at least `times` times, or the text compresses more than `ratio` times.

    The paper names the attribute and not the method; both rules are choices.
    """
    if len(tokens) >= n:
        grams = Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
        if max(grams.values()) >= times:
            return True
    raw = " ".join(map(str, tokens)).encode()
    return len(raw) > 200 and len(raw) > ratio * len(zlib.compress(raw))


def teach(
    questions: Sequence[dict[str, Any]], config: ModularConfig, tokens: Tokens, *, rollouts: int, cut: int, seed: int
) -> list[dict[str, Any]]:
    """The miniature's bank: the rule teacher's rollouts, judged by their answers alone."""
    bank = []
    for task in questions:
        generator = np.random.default_rng(derive_seed("teacher", seed, task["prompt"]))
        rows = []
        for _ in range(rollouts):
            text, ended = rollout(task, generator, config)
            ids = list(tokens(text))
            truncated = not ended or len(ids) > cut
            found = grade(text, task["answer"])
            rows.append(
                {
                    "text": text,
                    "tokens": len(ids),
                    "answer": found.answer,
                    "verdict": found.verdict,
                    "repeated": is_repetitive(ids, n=5, times=4),  # answers of this world have 6 tokens a step
                    "truncated": truncated,
                }
            )
        bank.append(
            {
                "qid": task["id"],
                "source": "modular",
                "question": task["prompt"],
                "gold": task["answer"],
                "domain": "arithmetic",
                "level": task["level"],
                "rollouts": rows,
            }
        )
    return bank


def check_bank(bank: Sequence[Mapping[str, Any]]) -> None:
    """Raises: DataError naming the record and field that is missing or wrong; a question that stands twice."""
    if not bank:
        raise DataError("the rollout bank is empty")
    seen: set[str] = set()
    for number, record in enumerate(bank):
        missing = [n for n in ("qid", "question", "gold", "level", "rollouts") if n not in record]
        if missing:
            raise DataError(f"bank record {number}: {', '.join(missing)} is missing")
        if str(record["qid"]) in seen:
            raise DataError(f"bank record {number}: qid {record['qid']!r} stands twice")
        seen.add(str(record["qid"]))
        for place, row in enumerate(record["rollouts"]):
            if row.get("verdict") not in ("right", "wrong", "unknown") or not isinstance(row.get("text"), str):
                raise DataError(
                    f"bank record {number} ({record['qid']!r}), rollout {place}: it needs `text` and a `verdict` "
                    "(right, wrong or unknown)"
                )


def demonstrations(bank: Sequence[Mapping[str, Any]], *, limit: int | None = None) -> list[dict[str, Any]]:
    """Every usable right rollout as a record for stage 1: right, not repetitive, not cut.

    Raises:
        DataError: none is left; says what removed them.
    """
    out, dropped = [], Counter()
    for record in bank:
        for number, row in enumerate(record["rollouts"]):
            if why := _unfit(row):
                dropped[why] += 1
            else:
                out.append(_record(record, number))
    _require(out, "demonstrations", dropped)
    return out[:limit]


def subset(
    bank: Sequence[Mapping[str, Any]],
    *,
    least_level: int,
    quota: int,
    per_question: int = 1,
    pick: Literal["shortest", "random"] = "random",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Records for stage 2: right, clean, hard enough; as many of every level (domain), few of a question.

    Args:
        quota: records of each (domain, level). per_question: rollouts of a question.
        pick: which rollouts of a question.

    Raises:
        DataError: none is left; says what removed them.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    dropped: Counter[str] = Counter()
    for record in bank:
        if record["level"] < least_level:
            dropped["level too low"] += 1
            continue
        fit = [i for i, row in enumerate(record["rollouts"]) if not _unfit(row)]
        if not fit:
            dropped["no fit rollout"] += 1
            continue
        generator = np.random.default_rng(derive_seed("subset", seed, record["qid"]))
        order = sorted(fit, key=lambda i: len(record["rollouts"][i]["text"]))
        chosen = order if pick == "shortest" else [fit[i] for i in generator.permutation(len(fit))]
        key = (record.get("domain"), record["level"])
        groups.setdefault(key, []).extend(_record(record, i) for i in chosen[:per_question])
    out = [row for key in sorted(groups, key=str) for row in groups[key][:quota]]
    _require(out, "records of the subset", dropped)
    return out


def preference_records(
    bank: Sequence[Mapping[str, Any]],
    *,
    cap: int = 1,
    least_level: int = 0,
    keep_truncated: bool = False,
    seed: int = 0,
) -> tuple[list[dict[str, Any]], PairCounts]:
    """Right against wrong rollouts of one question: {id, prompt, chosen, rejected, lengths}, and what was left out.

    Raises:
        DataError: no pair is left; says what removed them.
    """
    counts = PairCounts()
    out = []
    for record in bank:
        if record["level"] < least_level:
            continue
        samples = [
            Sample(r["text"], length=r.get("tokens"), truncated=bool(r.get("truncated")), verdict=r["verdict"])
            for r in record["rollouts"]
        ]
        key = [str(record["qid"])]
        for pair in verified_pairs(samples, cap=cap, seed=seed, key=key, keep_truncated=keep_truncated, counts=counts):
            good, bad = samples[pair.chosen], samples[pair.rejected]
            out.append(
                {
                    "id": f"{record['qid']}/{pair.chosen}/{pair.rejected}",
                    "prompt": record["question"],
                    "chosen": good.text,
                    "rejected": bad.text,
                    "lengths": [good.length, bad.length],
                }
            )
    _require(out, "preference pairs", Counter(counts.dropped))
    return out, counts


def _unfit(row: Mapping[str, Any]) -> str | None:
    if row["verdict"] != "right":
        return row["verdict"]
    if row.get("repeated"):
        return "repeated"
    return "truncated" if row.get("truncated") else None


def _record(record: Mapping[str, Any], number: int) -> dict[str, Any]:
    row = record["rollouts"][number]
    return {"id": f"{record['qid']}/{number}", "prompt": record["question"], "completion": row["text"]}


def _require(found: Sequence[Any], what: str, dropped: Mapping[str, int]) -> None:
    if not found:
        reasons = ", ".join(f"{name}: {count}" for name, count in dropped.items()) or "the bank has none"
        raise DataError(f"no {what} left: {reasons}")


def check_fit(least_level: int, levels: Sequence[int]) -> None:
    """Raises: ConfigError where a level floor leaves nothing."""
    if least_level > max(levels):
        raise ConfigError(f"least_level={least_level}: the hardest questions are of level {max(levels)}")
