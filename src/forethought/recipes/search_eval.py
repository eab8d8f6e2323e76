"""`forethought eval --search`: ways to answer, compared at the same counted number of generated tokens a problem.

Each method is an arm; see `search.inference`. The critic that best-of-n, weighted votes, beam and tree search choose by is
yours (`--critic FILE.py:NAME`: leaves -> numbers), or the model's own mean token probability of an answer, which needs
no label. Gold answers are read by the judge only, when everything has been answered.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forethought.config import from_dict
from forethought.errors import ConfigError, DataError, RewardError, nearest
from forethought.evaluate.stats import bootstrap_ci, paired_bootstrap
from forethought.files import from_json, to_json, write_atomic
from forethought.learn.session import Interrupted
from forethought.models.engine import Sampling
from forethought.progress import Progress
from forethought.recipes.inputs import Columns, Judge, Say, Task, encode_prompts, load_prompts
from forethought.recipes.own_job import cell, check_place, difference, share_estimate, verdict
from forethought.recipes.results import results
from forethought.recipes.session import Workbench, open_model
from forethought.rewards.loading import load_object
from forethought.rewards.verify import Extract, Mode, extract_answer
from forethought.rundir import RunDir
from forethought.search.inference import METHODS, NEEDS_CRITIC, Answered, Inference, answer
from forethought.search.mcts import SearchConfig
from forethought.search.rules import UCT, FixedWidth
from forethought.search.text_world import Option, TextLeaf
from forethought.tree.store import TreeStore
from forethought.tree.tree import Kind, TokenTree

CHUNK = 64
"""Problems answered together."""
_STORED = 8


@dataclass(frozen=True, kw_only=True)
class SearchEval(Columns):
    """Settings of `forethought eval --search`."""

    model: str
    data: str
    search: tuple[str, ...] = METHODS
    """Methods; the first one is compared with each other."""
    budget: int
    """Generated tokens a problem, at most, for every method."""
    critic: str | None = None
    """FILE.py:NAME; by default the mean token probability."""
    option_tokens: int = 32
    """Longest step of beam and tree search; a line ends one earlier."""
    width: int = 4
    """Options a prefix, of beam and tree search."""
    depth: int = 16
    """Steps of the longest path of tree search."""
    c: float = 1.0
    """Exploration of tree search (UCT)."""
    reward: tuple[str, ...] = ()
    mode: Mode = "math-verify"
    extract: Extract = "box"
    max_new_tokens: int = 256
    temperature: float = 0.8
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    device: str | None = None
    dtype: str | None = None

    def __post_init__(self):
        unknown = [m for m in self.search if m not in METHODS]
        if unknown:
            raise ConfigError(f"search={unknown[0]!r}: give some of {', '.join(METHODS)}{nearest(unknown[0], METHODS)}")
        if not self.search or len(set(self.search)) < len(self.search):
            raise ConfigError(f"search={list(self.search)}: give each method once")
        if self.budget < 1 or self.option_tokens < 1 or self.depth < 1 or self.width < 1:
            raise ConfigError(
                f"budget={self.budget}, option_tokens={self.option_tokens}, depth={self.depth}, width={self.width}: each "
                "must be at least 1"
            )
        if self.budget <= self.option_tokens and {"mcts", "beam"} & set(self.search):
            raise ConfigError(
                f"budget={self.budget}: a step of tree search may take option_tokens={self.option_tokens}; give a larger "
                "--budget or a smaller --option-tokens"
            )
        if self.temperature == 0:
            raise ConfigError("temperature=0: all samples of a method would be the same; greedy is a method of its own")
        self.inference()

    def inference(self) -> Inference:
        whole = Sampling(
            max_tokens=min(self.max_new_tokens, self.budget),
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop,
            seed=self.seed,
        )
        step = Sampling(
            max_tokens=self.option_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=(*self.stop, "\n"),
            seed=self.seed,
        )
        config = SearchConfig(
            select=UCT(c=self.c), width=FixedWidth(k=self.width), max_depth=self.depth, seed=self.seed
        )
        return Inference(
            tokens=self.budget,
            sampling=whole,
            option=Option(sampling=step),
            beam=self.width,
            expand=self.width,
            config=config,
        )


def mean_probability(leaves: Sequence[TextLeaf]) -> list[float]:
    """The model's own view of an answer: geometric mean probability of its sampled tokens; no label is needed."""
    out = []
    for leaf in leaves:
        path = leaf.tree.path(leaf.node)
        spans = [leaf.tree.span(n) for n in path[path.index(leaf.root) + 1 :]]
        logs = np.concatenate([leaf.tree.logprob[s] for s in spans]) if spans else np.zeros(0)
        logs = logs[np.isfinite(logs)]
        out.append(float(np.exp(logs.mean())) if len(logs) else 0.0)
    return out


@dataclass
class _Arm:
    """What a method answered: one row a problem."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    wall_s: float = 0.0
    trees: list[TokenTree] = field(default_factory=list)

    def right(self) -> list[float]:
        return [float(r["right"]) for r in self.rows]


def compare_methods(args: argparse.Namespace, say: Say) -> Path:
    """Run the comparison that the command line describes; returns its folder. Finished methods are kept for --resume.

    Raises:
        ForethoughtError: bad input, before the model is loaded where possible. Interrupted: Ctrl-C.
    """
    given = {k: v for k, v in vars(args).items() if k in SearchEval.__dataclass_fields__ and v is not None}
    for name, why in (("against", "methods are compared with each other"), ("samples", "the budget says how many")):
        if getattr(args, name, None) is not None:
            raise ConfigError(f"--{name} does not go with --search: {why}")
    if "budget" not in given:
        raise ConfigError("--search needs --budget TOKENS: what every method may generate for a problem")
    names = tuple(str(given["search"]).split(","))
    given["search"] = ("mcts", *(m for m in METHODS if m != "mcts")) if names == ("all",) else names
    job = from_dict(SearchEval, given, source="eval --search")
    critic: Callable[[Sequence[TextLeaf]], Any] = load_object(job.critic, "critic") if job.critic else mean_probability
    check_place(args)
    with Judge(job.reward or ("math",)) as judge:
        for math in filter(None, judge.math if not job.reward else ()):
            math.mode, math.extract = job.mode, job.extract
        tasks = load_prompts(job.data, job)
        judge.check(tasks, say)
        bench = open_model(job.model, device=job.device, dtype=job.dtype, train=False, say=say)
        judge.bind(bench.decode)
        prompts = encode_prompts(bench, tasks, job.data, job.max_new_tokens, say)
        run = RunDir.create(args.out, job, resume=args.resume, overwrite=args.overwrite)
        with run:
            arms: dict[str, _Arm] = {}
            try:
                with Progress(len(tasks) * len(job.search), "answering") as bar:
                    for number, method in enumerate(job.search):
                        kept = run.path / f"rows_{method}.json"
                        if run.resumed and kept.is_file():
                            arms[method] = _Arm(**from_json(kept.read_text()))
                        else:
                            arms[method] = _arm(method, job, bench, tasks, prompts, judge, critic, bar, number)
                            made = {"rows": arms[method].rows, "wall_s": arms[method].wall_s}
                            write_atomic(kept, to_json(made))
                        bar.update((number + 1) * len(tasks), accuracy=float(np.mean(arms[method].right())))
            except KeyboardInterrupt:
                done = ", ".join(arms) or "none"
                raise Interrupted(f"stopped; finished methods ({done}) are kept; add --resume to go on") from None
            _store(job, run, arms)
            found = _results(job, arms)
            run.write_json("results.json", found)
            for name, arm in found["arms"].items():
                low, high = arm["accuracy"]["ci95"]
                say(f"{name:10} accuracy {arm['accuracy']['mean']:.3f} [{low:.3f}, {high:.3f}]  tokens "
                    f"{arm['tokens']['mean']:.0f} of {job.budget}")  # fmt: skip
            return run.path


def _arm(method, job, bench: Workbench, tasks, prompts, judge: Judge, critic, bar: Progress, number: int) -> _Arm:
    arm = _Arm()
    began = time.perf_counter()
    math = None if job.reward else judge.math[0]

    def extract(text: str) -> str | None:
        return extract_answer(text, extract=math.extract) if math else text.strip() or None

    for first in range(0, len(tasks), CHUNK):
        chunk: list[Task] = list(tasks[first : first + CHUNK])
        trees = [
            TokenTree(ids, kind=Kind.PROMPT, task=str(t["id"]), seed=job.seed)
            for t, ids in zip(chunk, prompts[first : first + CHUNK], strict=True)
        ]
        public = [{k: v for k, v in t.items() if k in ("id", "prompt")} for t in chunk]  # the gold stays with the judge
        got = answer(
            method,
            bench.engine,
            trees,
            job.inference(),
            decode=bench.decode,
            critic=critic if method in NEEDS_CRITIC else None,
            extract=extract,
            tasks=public,
        )
        flat = [_flat(a) for a in got]
        verdicts = judge([(tree, leaf, task) for (tree, leaf), task in zip(flat, chunk, strict=True)])
        for a, task, v in zip(got, chunk, verdicts, strict=True):
            score = None if isinstance(v, RewardError) or not np.isfinite(v.value) else float(v.value)
            row = {"task": str(task["id"]), "right": bool(score is not None and score >= 1), "score": score}
            row |= {"text": a.text, "tokens": a.spent, "candidates": a.candidates, "complete": a.complete}
            arm.rows.append(row | {"error": str(v) if isinstance(v, RewardError) else None})
            a.tree.reward[a.node] = np.nan if score is None else score
        arm.trees += [a.tree for a in got][: _STORED - len(arm.trees)]
        bar.update(number * len(tasks) + len(arm.rows))
    arm.wall_s = time.perf_counter() - began
    return arm


def _flat(a: Answered) -> tuple[TokenTree, int]:
    """The answer as one node below its prompt, for judges that read one node."""
    tokens = a.tree.path_tokens(a.node)[int(a.tree.length[0]) :]
    tree = TokenTree(a.tree.node_ids(0), kind=Kind.PROMPT, task=a.tree.task, seed=a.tree.seed)
    leaf = tree.add(0, a.tree.ids[tokens], sampled=True, logprobs=a.tree.logprob[tokens], stop=int(a.tree.stop[a.node]))  # type: ignore[arg-type]
    return tree, leaf


def _store(job: SearchEval, run: RunDir, arms: dict[str, _Arm]) -> None:
    with TreeStore(run.path / "trees.sqlite") as store:
        for name, arm in arms.items():
            for tree in arm.trees:
                store.append(tree, task=tree.task, step=0, arm=name, seed=job.seed, kind="search")


def _results(job: SearchEval, arms: dict[str, _Arm]) -> dict[str, Any]:
    first, *others = arms
    if any(len(arm.rows) != len(arms[first].rows) for arm in arms.values()):
        raise DataError("the methods answered different numbers of problems; run again with --overwrite")
    table = {
        name: {
            "accuracy": cell(share_estimate(arm.right())),
            "tokens": cell(bootstrap_ci([float(r["tokens"]) for r in arm.rows])),
            "candidates": cell(bootstrap_ci([float(r["candidates"]) for r in arm.rows])),
            "complete": cell(share_estimate([float(r["complete"]) for r in arm.rows])),
        }
        for name, arm in arms.items()
    }
    changes = {name: paired_bootstrap(arms[first].right(), arms[name].right()) for name in others}
    verdicts = [verdict(change, 1) for change in changes.values()]
    shown = (
        "reversed" if "reversed" in verdicts else "shown" if verdicts and set(verdicts) == {"shown"} else "not shown"
    )
    return results(
        recipe="eval",
        profile="search",
        model=job.model,
        seeds=[job.seed],
        claim=f"{first} has a higher accuracy than every other method at {job.budget} generated tokens a problem.",
        arms=table,
        budget={
            name: {
                "tokens_generated": sum(r["tokens"] for r in arm.rows),
                "tokens_trained": 0,
                "env_steps": 0,
                "verifier_calls": len(arm.rows),
                "wall_s": arm.wall_s,
            }
            for name, arm in arms.items()
        },
        verdict=shown,
        verdict_rule="95% intervals (bootstrap over problems) of the paired differences in accuracy between the first "
        "method and each other: all above 0 is shown, any below 0 is reversed, else not shown",
        headline={"arm": first, "metric": "accuracy"},
        differences={name: difference(change) for name, change in changes.items()},
        settings={
            k: v for k, v in asdict(job).items() if k in ("budget", "option_tokens", "width", "depth", "c", "critic")
        },
    )
