"""One DPO step (reference log-probs, forward, backward, AdamW) against TRL's DPOTrainer in one run, and an INPO step.

    python benchmarks/dpo_step.py [--peer none] [--dtype bf16|fp32|both] [--case 256/64 ...]

8 pairs; cases are tokens of prompt and of each answer (its end token included). The reference is another model than the
policy, so that the losses say something; its log-probs are counted on both sides (ours: the pass over the pairs that
stands before the first step, in full). INPO reads the previous iterate, too, so it is one more pass; TRL has no INPO, and
its ratio is to the same DPO step. TRL runs at its best micro-batch of those tried, without gradient checkpointing, in both
precisions (bf16: its own autocast over fp32 weights and pure bf16 weights, the faster counts). That both have the same
losses and gradients on the same batch is tested in tests/learn/test_trl_parity.py; the losses of the first step stand
here, too. The last line is one JSON object with the ratios (peer over ours).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import common
import torch
from grpo_step import apart

from forethought.learn.optim import OptimConfig
from forethought.learn.pairs import PairConfig, PairTrainer, PreferencePair
from forethought.models.chat import ChatRenderer, preference_tree
from forethought.models.load import load_model
from forethought.models.policy import Policy

BETA = 0.1
REFERENCE = 1.002  # the reference's weights are the policy's times this


def records(tokenizer, pairs: int, prompt: int, answer: int) -> list[dict[str, str]]:
    texts = [common.word_prompts(tokenizer, pairs, n, seed) for seed, n in enumerate((prompt, answer - 1, answer - 1))]
    return [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in zip(*texts, strict=True)]


def reference_of(model: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(REFERENCE)
    return model


def ours(args, dtype: torch.dtype, rows: list[dict[str, str]], loss: str) -> dict:
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model, dtype=torch.float32, device="cpu")
    other, _ = load_model(args.model, dtype=torch.float32, device="cpu")
    renderer = ChatRenderer(tokenizer)
    pairs = []
    for number, row in enumerate(rows):
        tree = preference_tree(renderer, row, task=str(number))
        nodes = {tree.meta[n].get("label"): n for n in range(tree.n_nodes)}
        pairs.append(PreferencePair(tree, nodes["chosen"], nodes["rejected"]))
    numbers = {"beta": BETA} if loss == "dpo" else {"eta": BETA, "tau": BETA / 3}
    config = PairConfig(
        loss=loss,  # type: ignore[arg-type]
        epochs=args.repeats + 1,
        batch_size=len(pairs),
        micro_tokens=args.micro_tokens,
        optim=OptimConfig(lr=1e-6),
        **numbers,
    )
    reference = Policy(reference_of(other), tokenizer)
    with common.PeakMemory() as memory:
        trainer = PairTrainer(Policy(model, tokenizer), pairs, config, reference=reference, compute=dtype)
        del reference, other
        began = time.perf_counter()
        trainer.prepare()
        annotated = time.perf_counter() - began
        first = trainer.train_step()[0]
        seconds, (metrics, _) = common.timed(trainer.train_step, args.repeats, warmup=0)
    return {
        "s": round(annotated + seconds, 2),
        "reference_s": round(annotated, 2),
        "peak_mib": round(memory.peak),
        "loss": first["loss"],
        "tokens_packed": int(metrics["tokens/packed"]),
    }


def peer(args, dtype: torch.dtype, rows: list[dict[str, str]], micro: int, pure: bool) -> tuple[float, float, float]:
    """Seconds a step, peak MiB and the first step's loss of TRL at one setting."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    from forethought.models.registry import resolve

    torch.set_num_threads(args.threads)
    folder = resolve(args.model).path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    weights = dtype if pure else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=weights)
    reference = reference_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).to(weights)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *a, **k):
            ends.append(time.perf_counter())

        def on_step_end(self, *a, **k):
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        config = DPOConfig(
            output_dir=out,
            max_steps=1 + args.peer_repeats,  # every step is an epoch: all pairs, whatever their order
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=len(rows) // micro,
            beta=BETA,
            learning_rate=1e-6,
            gradient_checkpointing=False,
            bf16=dtype == torch.bfloat16 and not pure,
            use_cpu=True,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = DPOTrainer(
            model=model,
            ref_model=reference,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        with common.PeakMemory() as memory:
            trainer.train()
    whole = sorted(b - a for a, b in zip(ends[1:], ends[2:], strict=False))
    return whole[len(whole) // 2], memory.peak, trainer.state.log_history[0].get("loss", float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_arguments(parser)
    parser.add_argument("--case", action="append", help="prompt/answer tokens; default 256/64")
    parser.add_argument("--pairs", type=int, default=8, help="pairs a step")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="our packed tokens per forward")
    parser.add_argument("--peer-micro", type=int, nargs="+", default=[2, 8], help="TRL micro-batches (pairs) to try")
    parser.add_argument("--peer-repeats", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: dict = {"benchmark": "dpo_step", "pairs": args.pairs, "cases": {}}
    if args.peer == "auto":
        import trl

        result["peer"] = f"trl {trl.__version__}"
    _, tokenizer = load_model(args.model, dtype=torch.float32, device="cpu")
    for case in args.case or ["256/64"]:
        rows = records(tokenizer, args.pairs, *(int(x) for x in case.split("/")))
        for name, dtype in common.dtypes(args.dtype).items():
            found = {loss: apart(ours, args, dtype, rows, loss) for loss in ("dpo", "inpo")}
            row = {f"ours_{k}": v for k, v in found["dpo"].items()}
            row |= {f"ours_inpo_{k}": found["inpo"][k] for k in ("s", "reference_s", "loss")}
            print(f"{name} {case}: {row}", flush=True)
            if args.peer == "auto":
                tried = {}
                for micro in args.peer_micro:
                    for pure in (False, True) if dtype == torch.bfloat16 else (False,):
                        key = f"micro {micro}" + (", pure bf16" if pure else "")
                        tried[key] = apart(peer, args, dtype, rows, micro, pure)
                        print(f"  trl {key}: {tried[key][0]:.2f} s, {tried[key][1]:.0f} MiB", flush=True)
                best = min(tried, key=tried.__getitem__)  # seconds stand first
                seconds, memory, loss = tried[best]
                row |= {
                    "peer_s": round(seconds, 2),
                    "peer_setting": best,
                    "peer_peak_mib": round(memory),
                    "peer_loss": loss,
                    "ratio": round(seconds / row["ours_s"], 2),
                    "inpo_ratio": round(seconds / row["ours_inpo_s"], 2),
                }
            result["cases"][f"{name} {case}"] = row
    common.finish(result)


if __name__ == "__main__":
    main()
