"""`forethought train sft`: supervised fine-tuning on the user's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forethought.data import read_rows
from forethought.errors import ConfigError, DataError
from forethought.evaluate.stats import bootstrap_ci, paired_bootstrap
from forethought.learn.offline import SFTConfig, SFTTrainer
from forethought.models.chat import sft_trees
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
from forethought.tree.pack import write_back
from forethought.tree.tree import TokenTree


@dataclass(frozen=True, kw_only=True)
class SFTJob(SFTConfig, Job):
    """Settings of `forethought train sft`."""

    method: Literal["sft"] = "sft"
    max_length: int | None = None
    """Longest record in tokens; longer ones are cut. None: a record longer than the context is an error."""
    keep: Literal["start", "end"] = "start"
    """Which end of a record that is cut stays."""
    save_every: int = 50


def load_records(path: str, job: SFTJob) -> list[Mapping[str, Any]]:
    """Training records in TRL's columns: `messages`, `prompt` and `completion`, or `text`.

    With --prompt-column or --answer-column the named columns are prompt and completion.

    Raises:
        DataError: names file and line of what lacks a column.
    """
    own_names = job.prompt_column != "prompt" or job.answer_column is not None
    if not own_names:
        first = read_rows(path, limit=1)[0]
        kinds = [("messages",), ("prompt", "completion"), ("text",)]
        kind = next((k for k in kinds if all(c in first for c in k)), None)
        if kind is None and "prompt" in first:
            kind = ("prompt", "completion")  # and the error below says that it has no completion
        if kind is None:
            raise DataError(
                f"{path}: a record for sft has `messages`, `prompt` and `completion`, or `text`; the columns here are "
                f"{', '.join(first)}: name them with --prompt-column and --answer-column"
            )
        rows = read_rows(path, required=kind, limit=job.limit)
        if kind == ("text",):
            if job.chat or job.suffix:
                raise ConfigError(f"{path}: records of `text` have no prompt for --chat or --suffix")
            return [{"id": str(i), "text": row["text"]} for i, row in enumerate(rows)]
        if kind == ("messages",):
            if job.suffix:
                raise ConfigError(f"{path}: --suffix goes behind a prompt; write it into the `messages`")
            return [{"id": str(i), "messages": row["messages"]} for i, row in enumerate(rows)]
        answer = "completion"
    else:
        answer = job.answer_column or "completion"
    records = []
    for task in load_prompts(path, _with_answer(job, answer)):
        completion = task["answer"]
        if not isinstance(task["prompt"], str) and not isinstance(completion, list):
            completion = [{"role": "assistant", "content": str(completion)}]
        elif isinstance(task["prompt"], str) and not isinstance(completion, list):
            completion = str(completion)
        records.append({"id": task["id"], "prompt": task["prompt"], "completion": completion})
    return records


def _with_answer(job: SFTJob, answer: str) -> Columns:
    return Columns(
        prompt_column=job.prompt_column, answer_column=answer, suffix=job.suffix, chat=job.chat, limit=job.limit
    )


def sft(job: SFTJob, at: Place, say: Say) -> Path:
    records = load_records(job.data, job)
    held_out = load_records(job.eval_data, job) if job.eval_data else []
    shared = overlap(records, held_out, say)
    bench = load(job, job.seed, say)
    trees = _trees(bench, records, job, job.data)
    eval_trees = [t for t in _trees(bench, held_out, job, str(job.eval_data)) if t.weight.any()] if held_out else []
    trainer = SFTTrainer(bench.policy, trees, job, compute=bench.compute)
    targets = int(sum(t.weight.sum() for t in trees))
    say(
        f"{len(trees)} records ({sum(t.n_tokens for t in trees):,} tokens, {targets:,} of them targets), "
        f"{min(job.batch_size, len(trainer.units))} {'bins' if trainer.packing else 'records'} a step: {trainer.total} updates"
    )
    if (packed := trainer.packing) is not None:
        say(
            f"{len(packed.bins)} bins of {job.bin_length} tokens, {packed.efficiency:.0%} full; "
            f"{len(packed.dropped)} longer records dropped"
        )
    run = at.open(bench)
    session = Session(trainer, run, job, "sft", trainer.total, say)

    def measure(step: int) -> tuple[dict[str, float], dict[str, Any]]:
        losses = record_losses(bench, eval_trees)
        return {"eval/loss": float(np.mean(losses))}, {"losses": losses}

    session.fit(measure if eval_trees else None)
    session.finish(_sft_results(session, len(eval_trees)) | overlap_note(shared))
    return run.path


def _trees(bench: Workbench, records: Sequence[Mapping[str, Any]], job: SFTJob, what: str) -> list[TokenTree]:
    try:
        trees = sft_trees(bench.renderer, records, max_length=job.max_length, keep=job.keep)
    except DataError as err:
        raise DataError(f"{what}: {err}") from err
    for number, tree in enumerate(trees):
        longest = max(tree.path_length(n) for n in tree.leaves())
        if longest > bench.policy.context:
            raise DataError(
                f"{what}: record {number} has {longest} tokens, the model's context is {bench.policy.context}: "
                f"leave it out, or cut such records with max_length={bench.policy.context}"
            )
    return trees


def record_losses(bench: Workbench, trees: Sequence[TokenTree]) -> list[float]:
    """Per record, its share of the mean loss per target: sum of its losses x records / all targets. Their mean is the
    token-mean loss, so intervals over records are intervals of the number that training minimises."""
    model = bench.policy.model
    training = model.training
    model.eval()
    try:
        for batch, values in bench.policy.score_tokens(trees):
            write_back(trees, batch, "eval_logprob", values)
    finally:
        model.train(training)
    targets = sum(float(t.weight.sum()) for t in trees)
    out = []
    for tree in trees:
        where = np.flatnonzero(tree.weight)
        loss = -float((tree.column("eval_logprob")[where].astype(np.float64) * tree.weight[where]).sum())
        out.append(loss * len(trees) / targets)
    return out


def _sft_results(session: Session, records: int) -> dict[str, Any]:
    if not session.before or not session.after:
        return without_held_out(session, "loss", "training_loss", "--eval-data FILE measures the held-out loss")
    before, after = session.before["losses"], session.after["losses"]
    change = paired_bootstrap(after, before)
    return {
        "claim": f"Training lowers the loss per target token on {records} held-out records.",
        "arms": {"before": {"loss": cell(bootstrap_ci(before))}, "after": {"loss": cell(bootstrap_ci(after))}},
        "verdict": verdict(change, better=-1),
        "verdict_rule": rule("loss", "below", "above"),
        "difference": difference(change),
        "headline": {"arm": "after", "metric": "loss"},
    }
