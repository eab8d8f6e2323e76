"""The stages: what each trains on, and how a model is measured. One seed's ladder is one job; each RL arm is another."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forethought.config import derive_seed
from forethought.envs.modular import facts, pieces, questions, refuse_duplicates
from forethought.errors import ConfigError, DataError, RewardError, nearest
from forethought.recipes.jobs import Job
from forethought.recipes.phi_4_mini_reasoning import bank as banks
from forethought.recipes.stages import Stage, StageContext, run_stages
from forethought.rundir import RunDir

if TYPE_CHECKING:
    from forethought.recipes.phi_4_mini_reasoning import Phi4Config

LADDER = ("base", "few-shot SFT", "mid-training", "SFT", "SFT packed", "DPO")


@dataclass(frozen=True)
class RLArm:
    """A form of stage 4. uniform, rebalance, anneal: the fixes A, B, C; algorithm: None is that of the config."""

    uniform: bool = True
    rebalance: bool = True
    anneal: bool = True
    algorithm: str | None = None


RL_ARMS: dict[str, RLArm] = {
    "RL": RLArm(),
    "GRPO": RLArm(False, False, False, "grpo"),
    "RL without A": RLArm(uniform=False),
    "RL without B": RLArm(rebalance=False),
    "RL without C": RLArm(anneal=False),
    "PPO": RLArm(rebalance=False, algorithm="ppo"),
}


def arm_of(name: str) -> None:
    """Raises: ConfigError for a name that is no stage and no RL arm."""
    known = (*LADDER, *RL_ARMS)
    if name not in known:
        raise ConfigError(f"arms: {name!r} is not known{nearest(name, known)} known: {', '.join(known)}")


@dataclass
class Data:
    """Bank; questions for RL, validation and test; and, in the miniature, those that the base is trained on."""

    bank: list[dict[str, Any]]
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    test: list[dict[str, Any]]
    chat: bool = False

    @property
    def levels(self) -> list[Any]:
        return sorted({t["level"] for t in self.test})


@functools.lru_cache(maxsize=1)
def data_of(config: Phi4Config) -> Data:  # the same for every stage and seed
    """The miniature's world, or the files of the config.

    Raises:
        DataError: a question that stands in two splits, an unusable bank, a missing column.
    """
    if config.model == "miniature":
        from forethought.models.tiny import piece_tokenizer

        mini = config.miniature
        tokenizer = piece_tokenizer(pieces(mini.world))
        train = questions(mini.questions, 0, "train", config=mini.world)
        found = Data(
            bank=banks.teach(
                train,
                mini.world,
                lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
                rollouts=config.rollouts,
                cut=config.max_new_tokens,
                seed=0,
            ),
            train=train,
            validation=questions(mini.validation, 0, "validation", config=mini.world),
            test=questions(mini.test, 0, "test", config=mini.world),
        )
    else:
        from forethought.data import load_tasks, read_jsonl

        files = config.files
        rows = read_jsonl(files.bank)[: files.limit]
        banks.check_bank(rows)
        suites = []
        for path in (files.validation, files.test):
            tasks = load_tasks(path, files.prompt_column, files.answer_column, files.limit)
            suites.append([{"level": 0, **t, "id": f"{Path(path).stem}/{t['id']}"} for t in tasks])
        train = [{"id": r["qid"], "prompt": r["question"], "answer": r["gold"], "level": r["level"]} for r in rows]
        found = Data(bank=rows, train=train, validation=suites[0], test=suites[1], chat=True)
    refuse_duplicates(found.train, found.validation, found.test)
    return found


def prompt_of(config: Phi4Config, data: Data, question: str) -> Any:
    """What the model is asked: the bare question in the miniature, else a user turn with the instruction."""
    return [{"role": "user", "content": f"{question}\n{config.instruction}"}] if data.chat else question


# -- a model at work ---------------------------------------------------------------------------------------------------


class Workplace:
    """A model with its engine, tokenizer and data; trains by stages and measures."""

    def __init__(self, config: Phi4Config, seed: int, model: Path | str | None):
        import torch

        from forethought.models.chat import ChatRenderer
        from forethought.models.load import load_model
        from forethought.models.policy import Policy
        from forethought.models.tiny import piece_tokenizer, tiny_model
        from forethought.models.torch_engine import TorchEngine

        self.config, self.seed = config, seed
        if model is None:
            mini = config.miniature
            tokenizer: Any = piece_tokenizer(pieces(mini.world))
            weights = tiny_model(
                len(tokenizer),
                width=mini.width,
                layers=mini.layers,
                heads=mini.heads,
                context=160,
                seed=seed,
                init_std=mini.width**-0.5,  # 0.02 is for wide models: at this width it takes ten times the steps
            )
        else:
            weights, tokenizer = load_model(str(model), dtype=torch.float32, device=config.device)
        self.tokenizer = tokenizer
        self.renderer = ChatRenderer(tokenizer)
        self.policy = Policy(weights, tokenizer, end_ids=self.renderer.end_ids)
        self.engine = TorchEngine(self.policy, max_rows=config.max_rows)
        self.data = data_of(config)

    def encode(self, task: Mapping[str, Any]) -> list[int]:
        return self.renderer.prompt_ids(prompt_of(self.config, self.data, task["prompt"]))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def seed_of(self, *parts: Any) -> int:
        return derive_seed("phi-4-mini-reasoning", self.seed, *parts) % 2**31

    def judge(self, items: Sequence[Any]) -> list[Any]:
        """+1 right, -1 (or 0) wrong; an unknown verdict is a missing reward."""
        from forethought.rewards.reward import Reward

        out: list[Any] = []
        for tree, leaf, task in items:
            found = banks.grade(self.decode(tree.node_ids(leaf)), str(task["answer"]), one_box=self.config.one_box)
            if found.verdict == "unknown":
                out.append(RewardError(f"unknown verdict: {found.reason}"))
            else:
                value = 1.0 if found.verdict == "right" else self.config.wrong_reward
                out.append(Reward(value, why=found.reason))
        return out

    def measure(
        self, tasks: Sequence[Mapping[str, Any]], *, greedy: bool = True, samples: int | None = None, name: str = "eval"
    ) -> dict[str, float]:
        """Accuracy greedy and sampled, by level, share of answers that end by themselves, lengths: the same questions,
        seeds and sampling for every model. samples: by default those of the config; 0 for none."""
        from forethought.evaluate.suites import evaluate
        from forethought.models.engine import Sampling
        from forethought.rewards.reward import Reward
        from forethought.tree.tree import Stop

        def right(items):
            found = [
                banks.grade(self.decode(tree.node_ids(leaf)), str(task["answer"]), one_box=self.config.one_box)
                for tree, leaf, task in items
            ]
            return [Reward(float(g.verdict == "right")) for g in found]

        level = {str(t["id"]): t["level"] for t in tasks}
        out: dict[str, float] = {}
        samples = self.config.eval_samples if samples is None else samples
        kinds = [("greedy", 0.0, 1)] * greedy + [("sampled", self.config.eval_temperature, samples)] * (samples > 0)
        for kind, temperature, samples in kinds:
            result = evaluate(
                self.engine,
                tasks,
                right,
                prompt_ids=self.encode,
                decode=self.decode,
                samples=samples,
                sampling=Sampling(
                    max_tokens=self.config.eval_tokens or self.config.max_new_tokens,
                    temperature=temperature,
                    top_p=self.config.eval_top_p if temperature else 1.0,
                    seed=derive_seed("phi-4 evaluation", name) % 2**31,
                ),
                name=name,
            )
            rows = result.rows
            out[f"{kind} accuracy"] = float(np.mean([r.right for r in rows]))
            hard = [r.right for r in rows if level[r.task] >= self.config.hard_level]
            if hard:
                out[f"{kind} hard"] = float(np.mean(hard))
            for one in self.data.levels if kind == "greedy" else []:
                out[f"{kind} level {one}"] = float(np.mean([r.right for r in rows if level[r.task] == one]))
            out[f"{kind} ends"] = float(np.mean([r.stop == Stop.EOS for r in rows]))
            out[f"{kind} length"] = float(np.mean([r.length for r in rows]))
        return out

    # -- offline stages --
    def trees(self, records: Sequence[Mapping[str, Any]]) -> list[Any]:
        from forethought.models.chat import sft_trees

        rows = [{**r, "prompt": prompt_of(self.config, self.data, r["prompt"])} for r in records]
        if self.data.chat:
            rows = [{**r, "completion": [{"role": "assistant", "content": r["completion"]}]} for r in rows]
        trees = sft_trees(self.renderer, rows)
        if not self.config.mask_question:
            for tree in trees:
                tree.weight[1:] = 1  # standard language modelling; nothing predicts the first token
        return trees

    def fit(self, trainer: Any, run: RunDir, name: str, total: int, **more: Any) -> None:
        from forethought.learn.session import fit

        tags = {"arm": name, "seed": self.seed}
        fit(
            trainer,
            run,
            steps=total,
            tags=tags,
            title=f"{name}, seed {self.seed}",
            save_every=self.config.save_every,
            save_last=False,
            **more,
        )

    def sft(
        self, run: RunDir, name: str, records: Sequence[Mapping[str, Any]], settings: Any, *, gate: bool = False
    ) -> dict[str, Any]:
        """Supervised training; with `gate`, until the validation accuracy has stopped rising."""
        from forethought.learn.offline import SFTTrainer

        trainer = SFTTrainer(
            self.policy,
            self.trees(records),
            replace(settings, seed=self.seed_of(name)),
            compute=self.config.compute_dtype(),
        )
        watch = _Saturation(self.config.patience if gate else 0)

        def look(step: int) -> dict[str, float]:
            accuracy = self.measure(self.data.validation, samples=0, name="validation")["greedy accuracy"]
            watch.see(accuracy)
            return {"eval/accuracy": accuracy}

        every = max(1, trainer.total // self.config.gate_checks)
        gated = {"evaluate": look, "eval_every": every, "until": watch.over} if gate else {}
        self.fit(trainer, run, name, trainer.total, extra=lambda: watch.seen, restore_extra=watch.restore, **gated)
        packing = trainer.packing
        out = {"records": len(records), "steps": trainer.step, "tokens_trained": trainer.counts["tokens_trained"]}
        if packing is not None:
            out |= {"packing efficiency": packing.efficiency, "dropped": len(packing.dropped)}
        self.save(trainer, run)
        return out

    def dpo(self, run: RunDir, name: str) -> dict[str, Any]:
        """Rollout DPO: right against wrong rollouts of the teacher; the reference is the model as it comes."""
        from forethought.learn.pairs import PairTrainer, PreferencePair
        from forethought.models.chat import preference_tree

        config = self.config
        records, counts = banks.preference_records(
            self.data.bank,
            cap=config.pairs_per_question,
            least_level=config.dpo_level,
            keep_truncated=config.keep_truncated,
            seed=self.seed_of("pairs"),
        )
        pairs = []
        for record in records:
            row = {**record, "prompt": prompt_of(config, self.data, record["prompt"])}
            if self.data.chat:
                row |= {s: [{"role": "assistant", "content": record[s]}] for s in ("chosen", "rejected")}
            tree = preference_tree(self.renderer, row, task=record["id"])
            ends = {m["label"]: n for n, m in enumerate(tree.meta) if m.get("label")}
            pairs.append(PreferencePair(tree, ends["chosen"], ends["rejected"], task={"id": record["id"]}))
        trainer = PairTrainer(
            self.policy, pairs, replace(config.dpo, seed=self.seed_of(name)), compute=config.compute_dtype()
        )
        self.fit(trainer, run, name, trainer.total)
        rows = run.metrics()
        lengths = np.array([r["lengths"] for r in records], float)
        out = {
            "pairs": len(pairs),
            "steps": trainer.step,
            "tokens_trained": trainer.counts["tokens_trained"],
            "length chosen": float(lengths[:, 0].mean()),
            "length rejected": float(lengths[:, 1].mean()),
            "pairs left out": dict(counts.dropped),
        }
        for key in ("logps/chosen", "logps/rejected", "rewards/accuracies"):
            if rows and rows[-1].get(key) is not None:
                out[f"first {key}"], out[f"last {key}"] = rows[0][key], rows[-1][key]
        self.save(trainer, run)
        return out

    def save(self, trainer: Any, run: RunDir) -> None:
        with run.save_folder("model") as place:
            trainer.learner.save_model(place)


class _Saturation:
    """No new best in the last `patience` looks."""

    def __init__(self, patience: int):
        self.patience = patience
        self.seen: list[float] = []

    def see(self, value: float) -> None:
        self.seen.append(value)

    def restore(self, seen: list[float]) -> None:
        self.seen = list(seen or [])

    def over(self) -> bool:
        if not self.patience or len(self.seen) <= self.patience:
            return False
        return max(self.seen[-self.patience :]) <= max(self.seen[: -self.patience])


# -- the ladder of one seed --------------------------------------------------------------------------------------------


def ladder_job(job: Job, run: RunDir) -> Mapping[str, Any]:
    """Stages 0 to 3 of one seed; returns stage -> numbers under "stages"."""
    config: Phi4Config = job.extra["config"]
    done = run_stages(
        stages_of(config, job.seed), run.path, first_model=None if config.model == "miniature" else Path(config.model)
    )
    for place in sorted((run.path / "stages").iterdir()):
        if (place / "metrics.jsonl").is_file():
            for row in _metrics(place):
                run.log_metrics({k: v for k, v in row.items() if k != "step"}, step=row["step"])
    return {"stages": done, "wall_s": sum(d["wall_s"] for d in done.values())}


def _metrics(folder: Path) -> list[dict[str, Any]]:
    from forethought.rundir import read_metrics

    rows = [dict(r) for r in read_metrics(folder)]
    for row in rows:
        row.pop("nonfinite", None)
    return rows


def stages_of(config: Phi4Config, seed: int) -> list[Stage]:
    """The chain of one seed: the ladder, and the stages that branch off it for comparison."""

    def stage(
        name: str, work: Callable[[Workplace, StageContext], Mapping[str, Any]], start: str | None = None
    ) -> Stage:
        def function(context: StageContext) -> Mapping[str, Any]:
            place = Workplace(config, seed, context.model_in)
            place.tokenizer.save_pretrained(context.run.path)
            numbers = dict(work(place, context))
            return numbers | place.measure(place.data.test)

        return Stage(name, function, start)

    def base(place: Workplace, context: StageContext) -> Mapping[str, Any]:
        if config.model != "miniature":
            with context.run.save_folder("model") as folder:
                from forethought.models.load import save_pretrained

                save_pretrained(place.policy.model, place.tokenizer, folder)
            return {}
        mini = config.miniature
        direct = [
            {"id": t["id"], "prompt": t["prompt"], "completion": f"\\boxed{{{t['answer']}}}"} for t in place.data.train
        ]
        known = facts(round(mini.facts * len(direct)), 0, mini.world)
        return place.sft(context.run, "base", direct + known, mini.pretrain)

    def few(place: Workplace, context: StageContext) -> Mapping[str, Any]:
        records = banks.demonstrations(place.data.bank)
        chosen = np.random.default_rng(place.seed_of("few")).permutation(len(records))[: config.few_shot]
        return place.sft(context.run, "few-shot SFT", [records[i] for i in chosen], config.few)

    def mid(place: Workplace, context: StageContext) -> Mapping[str, Any]:
        records = banks.demonstrations(place.data.bank, limit=config.traces)
        return place.sft(context.run, "mid-training", records, config.mid, gate=True)

    def subset(place: Workplace) -> list[dict[str, Any]]:
        return banks.subset(
            place.data.bank,
            least_level=config.sft_level,
            quota=config.sft_quota,
            per_question=config.sft_per_question,
            pick=config.sft_pick,
            seed=place.seed_of("subset"),
        )

    every = [
        stage("base", base),
        stage("few-shot SFT", few, "base"),
        stage("mid-training", mid, "base"),
        stage("SFT packed", lambda p, c: p.sft(c.run, "SFT packed", subset(p), config.sft_packed()), "mid-training"),
        stage("SFT", lambda p, c: p.sft(c.run, "SFT", subset(p), config.sft), "mid-training"),
        stage("DPO", lambda p, c: p.dpo(c.run, "DPO"), "SFT"),
    ]
    return [s for s in every if s.name in config.ladder]


# -- stage 4 -----------------------------------------------------------------------------------------------------------


def rl_job(job: Job, run: RunDir) -> Mapping[str, Any]:
    """One form of stage 4 from the model of stage 3; the controls stop at the tokens that the method generated."""
    from forethought.learn.online import OnlineTrainer, distinct_trees
    from forethought.learn.ppo import PPOTrainer
    from forethought.learn.rebalance import RebalancedTrainer, probe_prompts

    config: Phi4Config = job.extra["config"]
    arm = RL_ARMS[job.arm]
    budget: int | None = job.extra.get("tokens", {}).get(str(job.seed))
    began = time.perf_counter()
    place = Workplace(config, job.seed, job.extra["models"][str(job.seed)])
    place.tokenizer.save_pretrained(run.path)
    tasks = list(place.data.train)
    if config.rl_questions:
        chosen = np.random.default_rng(place.seed_of("pool")).permutation(len(tasks))[: config.rl_questions]
        tasks = [tasks[i] for i in sorted(chosen)]
    steps = config.online.steps * (config.control_factor if budget else 1)
    online = replace(
        config.online,
        steps=steps,
        max_new_tokens=config.max_new_tokens,
        seed=place.seed_of(job.arm),
        temperature_end=config.temperature_end if arm.anneal else None,
        temperature_anneal=config.online.temperature_anneal * config.online.steps / steps,
    )
    algorithm = arm.algorithm or config.algorithm
    more: dict[str, Any] = {"compute": config.compute_dtype()}
    every = config.online.eval_every
    begun = place.policy.frozen_copy() if every and not online.kl_coef else None
    if begun is not None:
        begun.model.to(config.compute_dtype())

    def distance(step: int, groups: list[Any]) -> dict[str, float]:
        """KL to the stage-3 model, where it is no term of the loss, as often as the model is evaluated."""
        if begun is None or step % every or not groups:
            return {}
        trees = distinct_trees(groups)
        trainer.score(trees, begun, "stage_3_logprob")
        gaps = [(t.column("stage_3_logprob") - t.logprob)[(t.weight > 0) & np.isfinite(t.logprob)] for t in trees]
        gap = np.concatenate(gaps).astype(np.float64)
        return {"kl": float(np.mean(np.exp(gap) - 1 - gap))} if len(gap) else {}

    def make(pool: list[dict[str, Any]]) -> Any:
        more["on_groups"] = distance
        if algorithm == "ppo":
            return PPOTrainer(
                place.policy, place.engine, pool, place.encode, place.judge, config.ppo_config(online), **more
            )
        if arm.rebalance:
            return RebalancedTrainer(
                place.policy, place.engine, pool, place.encode, place.judge, online, rebalance=config.rebalance, **more
            )
        return OnlineTrainer(place.policy, place.engine, pool, place.encode, place.judge, online, **more)

    numbers: dict[str, Any] = {}
    spent = {"tokens_generated": 0, "verifier_calls": 0}
    kept = run.path / "pool.json"
    if arm.uniform:
        if not kept.is_file():
            probing = OnlineTrainer(place.policy, place.engine, tasks, place.encode, place.judge, online, **more)
            probe = probe_prompts(probing, c=config.uniform_c, samples=config.probe_samples)
            run.write_json(
                "pool.json",
                {
                    "kept": probe.kept,
                    "spent": {k: probing.counts[k] for k in spent},
                    "numbers": {
                        "pool kept": len(probe.kept) / len(tasks),
                        "pool accuracy kept": probe.accuracy_kept,
                        "pool accuracy dropped": None
                        if probe.accuracy_dropped != probe.accuracy_dropped
                        else probe.accuracy_dropped,
                    },
                },
            )
        found = json.loads(kept.read_text())
        tasks = [tasks[i] for i in found["kept"]]
        spent, numbers = dict(found["spent"]), dict(found["numbers"])
    trainer = make(tasks)

    def look(step: int) -> dict[str, float]:
        found = place.measure(place.data.validation, greedy=False, samples=1, name="validation")
        return {"eval/accuracy": found["sampled accuracy"]}

    def over() -> bool:
        return budget is not None and spent["tokens_generated"] + trainer.counts["tokens_generated"] >= budget

    place.fit(
        trainer,
        run,
        job.arm,
        steps,
        evaluate=look,
        eval_every=config.online.eval_every,
        until=over,
        store_groups=online.store_groups,
    )
    rows = run.metrics()
    norms = [r["grad_norm"] for r in rows if r.get("grad_norm")]
    numbers |= {
        "steps": trainer.step,
        "gradient spread": float(np.std(norms) / np.mean(norms)) if norms else None,
        "tokens_generated": spent["tokens_generated"] + trainer.counts["tokens_generated"],
        "tokens_trained": trainer.counts["tokens_trained"],
        "verifier_calls": spent["verifier_calls"] + trainer.counts["verifier_calls"],
    }
    if config.keep_models:
        place.save(trainer, run)
    return numbers | place.measure(place.data.test) | {"wall_s": time.perf_counter() - began}


def check_arms(config: Phi4Config) -> None:
    """Raises: DataError where the arms need a stage that is left out."""
    for name, start in (("few-shot SFT", "base"), ("mid-training", "base"), ("SFT", "mid-training"), ("DPO", "SFT")):
        if name in config.ladder and start not in config.ladder:
            raise DataError(f"arms: {name!r} begins with the model of {start!r}, which is left out")
