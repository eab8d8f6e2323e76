"""The demo: a real pretrained model gets better at arithmetic on a laptop CPU, and the page says how much of it is
real.

SmolLM2-135M-Instruct is post-trained by GRPO on a pool of one-operation problems with numbers up to 12; the reward is a
check of the last number that it writes. It is evaluated greedily on held-out problems that share none with the pool.
Beside the method stand what would expose a fake effect, at the same counted budget:

- `base`: the untouched model. `majority vote`: the untouched model voting over as many sampled tokens as training used;
- `format only`: the same training, paid for writing any number at all, right or wrong;
- `one problem`: the same training on a single problem, shown for what it is at this size.

Two readers are reported: lenient (the last number of the response counts, which is what the reward sees) and strict
(the response is the bare number).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from forethought.config import derive_seed
from forethought.envs.families import families
from forethought.errors import ConfigError
from forethought.evaluate.stats import Estimate, paired_bootstrap, wilson
from forethought.evaluate.suites import EvalResult, evaluate
from forethought.files import remove_whole
from forethought.learn.online import OnlineConfig, OnlineTrainer
from forethought.learn.optim import OptimConfig
from forethought.learn.session import fit
from forethought.models.engine import Sampling
from forethought.models.load import cast_weights
from forethought.recipes.results import Verdict, results
from forethought.recipes.session import Workbench, open_model
from forethought.rewards.math_rewards import FormatReward, OutcomeReward
from forethought.rewards.verify import Extract, Verifier, check, extract_answer
from forethought.rundir import RunDir

CLAIM = (
    "GRPO with a verifiable reward on a pool of problems raises held-out accuracy beyond format repair and beyond "
    "majority vote at the same number of sampled tokens"
)
RULE = (
    "shown: the 95% paired bootstrap intervals of GRPO minus base, minus format only and minus majority vote, over held-out "
    "problems (last number counts), all lie above 0; reversed: that of GRPO minus base lies below 0; otherwise not shown"
)
MODE: Literal["eval-qwen"] = "eval-qwen"


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Settings of the demo."""

    model: str = "smollm2-135m-instruct"
    family: str = "small-operation"
    """A family of envs.families (benchmarks/demo_families.py measures what a model can do on each)."""
    pool: int = 128
    heldout: int = 64
    seed: int = 0
    arms: tuple[str, ...] = ("grpo", "format only", "one problem")
    device: str | None = None
    dtype: str | None = None
    online: OnlineConfig = field(
        default_factory=lambda: OnlineConfig(
            steps=20,
            prompts_per_step=8,
            group_size=8,
            max_new_tokens=24,
            eval_every=20,
            optim=OptimConfig(lr=1e-5),
        )
    )

    def __post_init__(self):
        known = families()
        if self.family not in known:
            raise ConfigError(f"family={self.family!r}: one of {', '.join(known)}")
        extra = set(self.arms) - {"grpo", "format only", "one problem"}
        if extra or "grpo" not in self.arms:
            raise ConfigError(f"arms={self.arms}: 'grpo', and of 'format only' and 'one problem' those you want")
        if self.dtype not in (None, "fp32", "bf16"):
            raise ConfigError(f"dtype={self.dtype!r}: fp32, bf16 or nothing (chosen by device)")


@dataclass
class _Arm:
    result: EvalResult
    tokens_generated: int = 0
    tokens_trained: int = 0
    verifier_calls: int = 0
    wall_s: float = 0.0


class _Readers:
    """Accuracy of one set of responses under several readers."""

    def __init__(self, tasks: Sequence[dict[str, Any]]):
        self.golds = {t["id"]: t["answer"] for t in tasks}

    def right(self, result: EvalResult, extract: Extract) -> list[float]:
        return [float(check(r.text, self.golds[r.task], MODE, extract=extract).correct) for r in result.rows]

    def metrics(self, result: EvalResult) -> dict[str, Any]:
        rows = result.rows
        counts = {
            "accuracy, last number": sum(self.right(result, "last_number")),
            "accuracy, bare number": sum(self.right(result, "bare")),
            "a number is given": sum(extract_answer(r.text, extract="last_number") is not None for r in rows),
            "truncated": sum(r.stop.name == "LENGTH" for r in rows),
        }
        return {name: _entry(wilson(int(k), len(rows))) for name, k in counts.items()}


def _entry(e: Estimate, n: int | None = None) -> dict[str, Any]:
    return {"mean": e.mean, "ci95": [e.low, e.high], "n": n or e.n, "per_seed": [e.mean]}


def run(config: DemoConfig, run: RunDir, *, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train the arms, evaluate them on the same held-out problems, and return results.json."""
    make = families()[config.family]
    pool = make(config.pool, config.seed, "train")
    heldout = make(config.heldout, config.seed, "heldout")
    bench = open_model(config.model, device=config.device, dtype=config.dtype, train=True, say=say)
    bench.policy.tokenizer.save_pretrained(run.path)
    start = {k: v.detach().clone() for k, v in bench.policy.model.state_dict().items()}
    greedy = Sampling(max_tokens=config.online.max_new_tokens, temperature=0)
    readers = _Readers(heldout)
    online = config.online
    say(
        f"{config.family}: {len(pool)} problems to train on, {len(heldout)} held out; {online.prompts_per_step} problems x "
        f"{online.group_size} samples = {online.prompts_per_step * online.group_size} rollouts a step, {online.steps} steps"
    )

    def judge_outcome(items):
        return [OutcomeReward(bench.decode, mode=MODE, extract="last_number")(*item) for item in items]

    def look(b: Workbench, name: str, samples: int = 1, sampling: Sampling = greedy, tasks=heldout) -> EvalResult:
        return evaluate(
            b.engine,
            tasks,
            judge_outcome,
            prompt_ids=b.prompt_ids,
            decode=b.decode,
            samples=samples,
            sampling=sampling,
            extract=lambda text: extract_answer(text, extract="last_number"),
            name=name,
        )

    arms: dict[str, _Arm] = {}
    with Verifier(workers=1, mode=MODE, extract="last_number") as verifier:
        for name in config.arms:
            tasks = pool[:1] if name == "one problem" else pool
            settings = replace(online, seed=derive_seed(config.seed, name) % 2**31)
            cast_weights(bench.policy.model, torch.float32)
            bench.policy.model.load_state_dict(start)
            reward = (
                FormatReward(bench.decode, extract="last_number")
                if name == "format only"
                else OutcomeReward(bench.decode, verifier)
            )
            trainer = OnlineTrainer(
                bench.policy, bench.engine, tasks, bench.prompt_ids, reward.judge_many, settings, compute=bench.compute
            )
            if not arms:
                arms["base"] = _Arm(look(bench, "base"))
            began = time.perf_counter()
            fit(
                trainer,
                run,
                steps=settings.steps,
                name=name.replace(" ", "-"),
                tags={"arm": name, "seed": config.seed},
                title=name,
                evaluate=lambda step: {"eval/accuracy": look(bench, "eval").accuracy().mean},
                eval_every=settings.eval_every,
                save_every=settings.save_every,
                store_groups=1,
            )
            arms[name] = _Arm(
                look(bench, name),
                trainer.counts["tokens_generated"],
                trainer.counts["tokens_trained"],
                0 if name == "format only" else trainer.counts["verifier_calls"],
                time.perf_counter() - began,
            )
            if name == "grpo":
                with run.save_folder("model") as folder:
                    trainer.learner.save_model(folder)
            del trainer
    bench.policy.model.load_state_dict(start)
    cast_weights(bench.policy.model, bench.compute)
    arms["majority vote"] = _vote(look, bench, arms["grpo"].tokens_generated, config)
    remove_whole(run.path / "checkpoints")  # each arm was kept so that --resume need not train it again
    return _results(config, arms, readers, heldout)


def _vote(look, bench: Workbench, tokens: int, config: DemoConfig) -> _Arm:
    """The base model votes over about as many sampled tokens as GRPO generated in training (both are counted)."""
    began = time.perf_counter()
    mean = 0.8 * config.online.max_new_tokens
    samples = max(2, round(tokens / (config.heldout * mean)))
    sampling = Sampling(
        max_tokens=config.online.max_new_tokens, temperature=1.0, seed=derive_seed(config.seed, "vote") % 2**31
    )
    result = look(bench, "majority vote", samples, sampling)
    return _Arm(result, result.n_tokens, 0, len(result.rows), time.perf_counter() - began)


def _results(
    config: DemoConfig, arms: dict[str, _Arm], readers: _Readers, heldout: list[dict[str, Any]]
) -> dict[str, Any]:
    table: dict[str, dict[str, Any]] = {}
    correct: dict[str, list[float]] = {}
    for name in ("grpo", "base", "majority vote", "format only", "one problem"):
        if name not in arms:
            continue
        arm = arms[name]
        if name == "majority vote":
            votes = _majority(arm.result, readers)
            correct[name] = votes
            table[name] = {"accuracy, last number": _entry(wilson(int(sum(votes)), len(votes)))}
        else:
            correct[name] = readers.right(arm.result, "last_number")
            table[name] = readers.metrics(arm.result)
    verdict, differences = judge(correct, config.seed)
    rows = {name: {r.task: r for r in arms[name].result.rows} for name in ("base", "grpo")}
    examples = [
        {
            "question": t["problem"],
            "answer": t["answer"],
            "before": rows["base"][t["id"]].text,
            "after": rows["grpo"][t["id"]].text,
            "correct_before": bool(rows["base"][t["id"]].right),
            "correct_after": bool(rows["grpo"][t["id"]].right),
            "arm": "grpo",
        }
        for t in heldout[:12]
    ]
    return results(
        recipe="demo",
        profile="demo",
        model=config.model,
        seeds=[config.seed],
        claim=CLAIM,
        arms=table,
        budget={
            name: {
                "tokens_generated": arm.tokens_generated,
                "tokens_trained": arm.tokens_trained,
                "env_steps": arm.verifier_calls,
                "verifier_calls": arm.verifier_calls,
                "wall_s": round(arm.wall_s, 1),
            }
            for name, arm in arms.items()
        },
        verdict=verdict,
        verdict_rule=RULE,
        headline={"arm": "grpo", "metric": "accuracy, last number"},
        differences=differences,
        notes=[
            "One seed; intervals are over held-out problems (Wilson for a share, paired bootstrap for a difference).",
            "One problem: at this size a single problem is learnt by heart; the arm stands here to show it.",
        ],
        examples=examples,
    )


def judge(correct: Mapping[str, Sequence[float]], seed: int) -> tuple[Verdict, dict[str, dict[str, Any]]]:
    """RULE applied to each arm's right (1) and wrong (0) held-out problems; also the paired differences."""
    differences: dict[str, dict[str, Any]] = {}
    for other in correct:
        if other != "grpo":
            d = paired_bootstrap(correct["grpo"], correct[other], seed=seed)
            differences[f"grpo minus {other}"] = {"mean": d.mean, "ci95": [d.low, d.high], "n": d.n}
    controls = [f"grpo minus {o}" for o in ("base", "format only", "majority vote")]
    known = [differences[c]["ci95"] for c in controls if c in differences and differences[c]["ci95"][0] is not None]
    if len(known) == len(controls) and all(low > 0 for low, _ in known):  # a control that was left out shows nothing
        return "shown", differences
    base = differences["grpo minus base"]["ci95"]
    return ("reversed" if base[1] is not None and base[1] < 0 else "not shown"), differences


def _majority(result: EvalResult, readers: _Readers) -> list[float]:
    """1 for every problem whose most frequent answer (ties: seen first; no answer does not vote) is right."""
    out = []
    for task in result.tasks:
        voted = [(answer, count) for answer, count in result.answers(task) if answer is not None]
        best = voted[0][0] if voted else ""
        out.append(float(check(best or "", readers.golds[task], MODE, form="final").correct))
    return out
