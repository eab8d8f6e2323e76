"""`forethought train dpo` and `ipo`: offline preference learning on the user's records.

Records are TRL's: `prompt`, `chosen` and `rejected` (all text, or all messages), or `chosen` and `rejected` alone, two
conversations that begin alike. A prompt that is text beside two conversations is taken to be in them already, as in
TRL. Records that teach nothing (equal answers, an empty one, different prompts, too long) are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from forethought.data import read_rows
from forethought.errors import ConfigError, DataError
from forethought.evaluate.stats import bootstrap_ci, paired_bootstrap
from forethought.learn.optim import OptimConfig
from forethought.learn.pair_losses import Form
from forethought.learn.pairs import (
    PairConfig,
    PairTrainer,
    PreferencePair,
    annotate,
    left_out,
    measure_pairs,
    usable_pairs,
)
from forethought.models.chat import preference_tree
from forethought.models.load import load_model
from forethought.models.policy import Policy
from forethought.recipes.inputs import Columns, Say, load_prompts
from forethought.recipes.own_job import (
    Job,
    Place,
    Session,
    cell,
    difference,
    load,
    overlap,
    overlap_note,
    rule,
    verdict,
    without_held_out,
)
from forethought.recipes.session import Workbench

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class OfflinePairsJob(Job):
    """Settings that DPO and IPO share."""

    method: Literal["dpo", "ipo"]
    beta: float = 0.1
    """Strength of the tie to the reference, per nat of the whole answer."""
    base: Literal["reference", "none"] = "reference"
    """What the margin is measured against; none is reference-free."""
    reference_model: str | None = None
    """The reference, with the same tokenizer; by default the model as it is before training."""
    labels: Literal["hard", "soft"] = "hard"
    """soft: weigh both orders of a pair by the record's `p`."""
    max_length: int | None = None
    """Leave out pairs with more tokens than this in a prompt and answer (default: the context)."""
    epochs: int = 1
    steps: int = 0
    batch_size: int = 8
    """Pairs a step."""
    micro_tokens: int = 4096
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6))

    def __post_init__(self):
        self.config()
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length={self.max_length}: give at least 1, or none")
        if self.reference_model and self.base == "none":
            raise ConfigError(f"reference_model={self.reference_model!r}: base=none reads no reference; leave one out")
        if self.answer_column is not None:
            raise ConfigError("answer_column: a preference record has its answers in `chosen` and `rejected`")

    def config(self) -> PairConfig:
        """The trainer's settings. Raises: ConfigError."""
        own = {f.name: getattr(self, f.name) for f in fields(PairConfig) if f.name in self.__dataclass_fields__}
        return PairConfig(loss=self.method, **own)


@dataclass(frozen=True, kw_only=True)
class DPOJob(OfflinePairsJob):
    """Settings of `forethought train dpo`."""

    method: Literal["dpo"] = "dpo"
    form: Form = "sigmoid"
    """sigmoid, hinge, or robust (with label_smoothing)."""
    label_smoothing: float = 0.0
    """Share of labels taken to be flipped."""


@dataclass(frozen=True, kw_only=True)
class IPOJob(OfflinePairsJob):
    """Settings of `forethought train ipo`."""

    method: Literal["ipo"] = "ipo"


# -- records -----------------------------------------------------------------------------------------------------------


def load_preferences(path: str, columns: Columns, say: Say) -> list[Record]:
    """The records of a file as `preference_tree` takes them, without those that teach nothing (said, with counts).

    Raises:
        DataError: a column is missing (file and line are named), a `p` is no probability, or no record is left.
        ConfigError: a suffix for records that have no prompt of their own.
    """
    rows = read_rows(path, required=("chosen", "rejected"), limit=columns.limit)
    if _conversations(rows[0], columns):
        if columns.suffix:
            raise ConfigError(f"{path}: suffix: the prompts stand in the conversations of `chosen` and `rejected`")
        prompts: list[dict[str, Any]] = [{} for _ in rows]
    else:
        if columns.prompt_column == "prompt" and "prompt" not in rows[0]:
            raise DataError(
                f"{path}: a preference record has `prompt`, `chosen` and `rejected` (all text, or all messages), or two "
                f"conversations `chosen` and `rejected`; the columns here are {', '.join(rows[0])}"
            )
        prompts = [{"prompt": task["prompt"]} for task in load_prompts(path, columns, id_column=None)]
    dropped: Counter[str] = Counter()
    records: list[Record] = []
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        record: dict[str, Any] = {"id": str(row.get("id", number)), **prompt}
        for side in ("chosen", "rejected"):
            answer = row[side]
            text = isinstance(answer, str) and not isinstance(prompt.get("prompt", ""), str)
            record[side] = [{"role": "assistant", "content": answer}] if text else answer
        if "p" in row:
            record["p"] = _p(row["p"], f"{path}: record {number}")
        wrong = _wrong(record)
        if wrong:
            dropped[wrong] += 1
        else:
            records.append(record)
    _say_dropped(path, len(rows), dropped, records, say)
    return records


def _conversations(row: Record, columns: Columns) -> bool:
    """Do the answers hold their prompts? Then a prompt that is text beside them is a copy, as in TRL."""
    if columns.prompt_column != "prompt" or not isinstance(row["chosen"], list) or isinstance(row.get("prompt"), list):
        return False
    users = [m for m in row["chosen"] if isinstance(m, Mapping) and m.get("role") == "user"]
    return "prompt" not in row or bool(users)


def _p(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DataError(f"{what}: column 'p' is {value!r}; give the probability that chosen wins, in [0, 1]")
    return float(value)


def _wrong(record: Record) -> str | None:
    """What makes a record useless, by the names of `learn.pairs.REASONS`; types are checked later."""
    chosen, rejected = record["chosen"], record["rejected"]
    if chosen == rejected:
        return "identical"
    if any(_blank(side) for side in (chosen, rejected)):
        return "empty"
    if "prompt" not in record and chosen[0] != rejected[0]:
        return "prompts differ"
    return None


def _blank(answer: Any) -> bool:
    if isinstance(answer, list):
        last = answer[-1] if answer else {}
        answer = last.get("content") if isinstance(last, Mapping) else None
        return not last or (isinstance(answer, str) and not answer.strip())
    return isinstance(answer, str) and not answer.strip()


def _say_dropped(path: str, count: int, dropped: Mapping[str, int], left: Sequence[Any], say: Say) -> None:
    if dropped and not left:
        raise DataError(f"{path}: no pair is left of {count} records; left out: {left_out(dropped)}")
    if dropped:
        say(f"{path}: left out {left_out(dropped)}; {len(left)} of {count} records stay")


def pairs_of(
    bench: Workbench, records: Sequence[Record], what: str, max_length: int | None, say: Say
) -> list[PreferencePair]:
    """Records as pairs on trees, without those that are too long or equal as tokens.

    Raises:
        DataError: a record cannot be rendered (it is named), or none is left.
    """
    pairs = []
    for record in records:
        name = record["id"]
        try:
            tree = preference_tree(bench.renderer, record, task=name)
        except DataError as err:
            raise DataError(f"{what}: record {name}: {err}") from err
        nodes = {tree.meta[n].get("label"): n for n in range(tree.n_nodes)}
        task = {"id": name, **({"prompt": record["prompt"]} if "prompt" in record else {})}
        pairs.append(PreferencePair(tree, nodes["chosen"], nodes["rejected"], record.get("p", 1.0), task))
    context = bench.policy.context
    kept, dropped = usable_pairs(pairs, context=context if max_length is None else min(context, max_length))
    _say_dropped(what, len(pairs), dropped, kept, say)
    return kept


# -- the job -----------------------------------------------------------------------------------------------------------


def offline_pairs(job: OfflinePairsJob, at: Place, say: Say) -> Path:
    """The job from its files to its results."""
    records = load_preferences(job.data, job, say)
    held_out = load_preferences(job.eval_data, job, say) if job.eval_data else []
    if job.labels == "soft" and not any("p" in record for record in records):
        raise DataError(f"{job.data}: labels=soft weighs both orders by the column 'p', which no record has")
    shared = overlap([_whole(r) for r in records], [_whole(r) for r in held_out], say)
    bench = load(job, job.seed, say)
    config = job.config()
    pairs = pairs_of(bench, records, job.data, job.max_length, say)
    watched = pairs_of(bench, held_out, str(job.eval_data), job.max_length, say) if held_out else []
    reference = _reference(job, bench, say)
    trainer = PairTrainer(bench.policy, pairs, config, reference=reference, compute=bench.compute)
    if watched and config.columns():
        trainer.prepare()  # casts the reference
        annotate(reference or bench.policy, watched, config.columns()[0], micro_tokens=job.micro_tokens)
    reference = None
    tokens = sum(len(side) for pair in pairs for side in pair.answers())
    say(
        f"{len(pairs)} pairs ({tokens:,} tokens of answers), {min(job.batch_size, len(pairs))} a step: "
        f"{trainer.total} updates"
    )
    run = at.open(bench)
    session = Session(trainer, run, job, job.method, trainer.total, say)

    def measure(step: int) -> tuple[dict[str, float], dict[str, Any]]:
        found = measure_pairs(bench.policy, watched, config, soft=job.labels == "soft", micro_tokens=job.micro_tokens)
        rows = {name: [float(v) for v in values] for name, values in found.items()}
        numbers = {f"eval/{name}": value for name, value in _means(rows, watched).items()}
        return numbers, {"rows": rows}

    session.fit(measure if watched else None)
    found = _results(session, watched)
    session.finish(found | {"notes": [*found["notes"], *overlap_note(shared).get("notes", [])]})
    return run.path


def _whole(record: Record) -> dict[str, Any]:
    """A record as `overlap` compares them: by its prompt, or by the messages before the answers differ."""
    if "prompt" in record:
        return {"prompt": record["prompt"]}
    both = zip(record["chosen"], record["rejected"], strict=False)
    return {"prompt": [a for a, b in both if a == b]}


def _reference(job: OfflinePairsJob, bench: Workbench, say: Say) -> Policy | None:
    if not job.reference_model:
        return None
    model, tokenizer = load_model(job.reference_model, dtype=torch.float32, device=bench.policy.device, say=say)
    if tokenizer.get_vocab() != bench.policy.tokenizer.get_vocab():
        raise ConfigError(
            f"reference_model={job.reference_model!r} has another tokenizer than the model, so its log-probs are of other "
            "tokens: choose a model of the same family"
        )
    return Policy(model.requires_grad_(False), tokenizer, end_ids=bench.policy.eos_ids)


def _share(margins: Sequence[float], pairs: Sequence[PreferencePair]) -> list[float]:
    """1 where the margin has the sign of the label, 0 where it has the other, 1/2 where it is 0 (nothing moved)."""
    signs = [m if pair.p >= 0.5 else -m for m, pair in zip(margins, pairs, strict=True)]
    return [0.5 if abs(s) < 1e-3 else float(s > 0) for s in signs]


def _means(rows: Mapping[str, Sequence[float]], pairs: Sequence[PreferencePair]) -> dict[str, float]:
    return {
        "loss": float(np.mean(rows["loss"])),
        "margin": float(np.mean(rows["margin"])),
        "margin_accuracy": float(np.mean(_share(rows["margin"], pairs))),
        "ranking_accuracy": float(np.mean(_share(rows["policy"], pairs))),
    }


def _results(session: Session, pairs: Sequence[PreferencePair]) -> dict[str, Any]:
    if not session.before or not session.after:
        advice = "--eval-data FILE measures the margins of held-out pairs"
        return without_held_out(session, "rewards/accuracies", "training_accuracy", advice)
    sides = {"before": session.before["rows"], "after": session.after["rows"]}
    shares = {side: _share(rows["margin"], pairs) for side, rows in sides.items()}
    change = paired_bootstrap(shares["after"], shares["before"])
    arms = {
        side: {
            "margin_accuracy": cell(bootstrap_ci(shares[side])),
            "ranking_accuracy": cell(bootstrap_ci(_share(rows["policy"], pairs))),
            "margin": cell(bootstrap_ci(rows["margin"])),
            "loss": cell(bootstrap_ci(rows["loss"])),
        }
        for side, rows in sides.items()
    }
    return {
        "claim": f"Training raises the margin accuracy on {len(pairs)} held-out pairs: the share of pairs in which the "
        "chosen answer gained on the rejected one, measured against the reference (a pair that did not move counts half).",
        "arms": arms,
        "verdict": verdict(change, better=1),
        "verdict_rule": rule("margin accuracy", "above", "below"),
        "difference": difference(change),
        "notes": [
            "ranking_accuracy: share of pairs whose chosen answer has the higher log-prob; long answers have lower ones."
        ],
        "headline": {"arm": "after", "metric": "margin_accuracy"},
    }
