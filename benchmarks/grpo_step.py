"""One GRPO step (sampling, credit, forward, backward, AdamW) against TRL's GRPOTrainer in one run.

    python benchmarks/grpo_step.py [--peer none] [--dtype bf16|fp32|both] [--case 256/32 ...]

4 prompts x 8 samples; cases are prompt/response tokens. TRL runs at its best micro-batch of those tried, without
gradient checkpointing, in both precisions (bf16: its own autocast over fp32 weights and pure bf16 weights, the faster
counts). Both sides sample exactly the response length. That both have the same loss and gradient norm on the same batch
is tested in tests/learn/test_trl_parity.py. The last line is one JSON object with the ratios (peer over ours).
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time

import common
import torch

from forethought.learn.online import OnlineConfig, OnlineTrainer
from forethought.learn.optim import OptimConfig
from forethought.models.load import load_model
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine
from forethought.rewards.reward import Reward

PROMPTS, SAMPLES = 4, 8


def apart(function, *arguments):
    """Run in a fresh process, so that each side's peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def ours(args, dtype: torch.dtype, texts: list[str], response: int) -> dict:
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model, dtype=torch.float32, device="cpu")
    policy = Policy(model, tokenizer)
    policy.eos_ids = ()  # every row runs to the full length
    tasks = [{"id": str(i), "prompt": t} for i, t in enumerate(texts)]
    config = OnlineConfig(
        steps=args.repeats + 1,
        prompts_per_step=PROMPTS,
        group_size=SAMPLES,
        max_new_tokens=response,
        micro_tokens=args.micro_tokens,
        optim=OptimConfig(lr=1e-6),
    )
    judge = lambda items: [Reward(float(i % 2)) for i in range(len(items))]  # noqa: E731
    trainer = OnlineTrainer(
        policy, TorchEngine(policy), tasks, lambda t: tokenizer(t["prompt"])["input_ids"], judge, config, compute=dtype
    )
    with common.PeakMemory() as memory:
        seconds, (metrics, _) = common.timed(trainer.train_step, args.repeats)
    overhead = metrics["time/pack"] + metrics["time/credit"]
    return {
        "ours_s": round(seconds, 2),
        "ours_sampling_s": round(metrics["time/rollout"], 2),
        "ours_peak_mib": round(memory.peak),
        "ours_loss": metrics["loss"],
        "pack_and_credit_share": round(overhead / metrics["time/step"], 4),
    }


def peer(
    args, dtype: torch.dtype, texts: list[str], response: int, micro: int, pure: bool
) -> tuple[float, float, float]:
    """Seconds a step, peak MiB and loss of TRL at one setting."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from forethought.models.registry import resolve

    torch.set_num_threads(args.threads)
    folder = resolve(args.model).path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype if pure else torch.float32)
    model.generation_config.eos_token_id = None
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *a, **k):
            times.append(time.perf_counter())

        def on_step_end(self, *a, **k):
            times.append(time.perf_counter())

    steps = 1 + args.peer_repeats
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            max_steps=steps,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=PROMPTS * SAMPLES // micro,
            num_generations=SAMPLES,
            max_completion_length=response,
            generation_kwargs={"min_new_tokens": response},
            learning_rate=1e-6,
            gradient_checkpointing=False,
            bf16=dtype == torch.bfloat16 and not pure,
            use_cpu=True,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": t} for t in texts] * steps),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        with common.PeakMemory() as memory:
            trainer.train()
    spans = [b - a for a, b in zip(times[::2], times[1::2], strict=True)]
    # Sampling happens when the step's first batch is fetched, before on_step_begin of that step: count from the end of
    # the step before.
    ends = times[1::2]
    whole = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    loss = trainer.state.log_history[0].get("loss", float("nan"))
    assert spans
    return sorted(whole)[len(whole) // 2], memory.peak, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_arguments(parser)
    parser.add_argument("--case", action="append", help="prompt/response tokens; default 256/32, 512/128 and 64/256")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="our packed tokens per forward")
    parser.add_argument("--peer-micro", type=int, nargs="+", default=[8, 32], help="TRL micro-batches to try")
    parser.add_argument("--peer-repeats", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: dict = {"benchmark": "grpo_step", "cases": {}}
    if args.peer == "auto":
        import trl

        result["peer"] = f"trl {trl.__version__}"
    _, tokenizer = load_model(args.model, dtype=torch.float32, device="cpu")
    for case in args.case or ["256/32", "512/128", "64/256"]:
        prompt, response = (int(x) for x in case.split("/"))
        texts = common.word_prompts(tokenizer, PROMPTS, prompt)
        for name, dtype in common.dtypes(args.dtype).items():
            row = apart(ours, args, dtype, texts, response)
            print(f"{name} {case}: {row}", flush=True)
            if args.peer == "auto":
                tried = {}
                for micro in args.peer_micro:
                    for pure in (False, True) if dtype == torch.bfloat16 else (False,):
                        key = f"micro {micro}" + (", pure bf16" if pure else "")
                        tried[key] = apart(peer, args, dtype, texts, response, micro, pure)
                        print(f"  trl {key}: {tried[key][0]:.2f} s, {tried[key][1]:.0f} MiB", flush=True)
                best = min(tried, key=tried.__getitem__)  # seconds stand first
                seconds, memory, loss = tried[best]
                row |= {
                    "peer_s": round(seconds, 2),
                    "peer_setting": best,
                    "peer_peak_mib": round(memory),
                    "peer_loss": loss,
                    "ratio": round(seconds / row["ours_s"], 2),
                }
            result["cases"][f"{name} {case}"] = row
    common.finish(result)


if __name__ == "__main__":
    main()
