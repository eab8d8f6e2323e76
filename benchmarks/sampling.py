"""Sampling: our engine against transformers' `generate` at the same precision; prompt 256 tokens, 64 new tokens.

    python benchmarks/sampling.py [--peer none] [--dtype bf16|fp32|both]

The last line is one JSON object: per case seconds of both, the ratio (peer over ours) and our share of the floor, which
is the larger of (weight bytes per step / measured read bandwidth) and (operations per step / measured matrix rate),
times the steps, plus the prefill's operations at the matrix rate.
"""

from __future__ import annotations

import argparse

import common
import torch

from forethought.models.engine import Sampling
from forethought.models.load import cast_weights, load_model
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine
from forethought.tree.tree import TokenTree

PROMPT, NEW = 256, 64
CASES = {"4 prompts x 8 samples": (4, 8), "1 row": (1, 1), "8 different prompts": (8, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model, dtype=torch.float32, device="cpu")
    weights = sum(p.numel() for p in model.parameters())
    bandwidth = common.memory_bandwidth()
    result: dict = {"benchmark": "sampling", "cases": {}, "read_bandwidth_gb_s": round(bandwidth / 1e9, 1)}
    if args.peer == "auto":
        import transformers

        result["peer"] = f"transformers {transformers.__version__} generate"
    for name, dtype in common.dtypes(args.dtype).items():
        cast_weights(model, dtype)
        policy = Policy(model, tokenizer)
        for case, (prompts, samples) in CASES.items():
            ids = [tokenizer(t)["input_ids"] for t in common.word_prompts(tokenizer, prompts, PROMPT)]
            rows = prompts * samples

            def ours(ids=ids, samples=samples, policy=policy):
                trees = [TokenTree(x, task=str(i)) for i, x in enumerate(ids)]
                engine = TorchEngine(policy)
                engine.extend([(t, 0) for t in trees], samples, Sampling(max_tokens=NEW, ignore_eos=True))
                return engine.stats.tokens_generated

            def peer(ids=ids, samples=samples):
                batch = torch.tensor(ids)
                with torch.inference_mode():
                    model.generate(
                        batch,
                        attention_mask=torch.ones_like(batch),
                        do_sample=True,
                        top_k=0,
                        max_new_tokens=NEW,
                        min_new_tokens=NEW,
                        num_return_sequences=samples,
                        pad_token_id=tokenizer.pad_token_id,
                    )

            seconds, tokens = common.timed(ours, args.repeats)
            assert tokens == rows * NEW
            rate = common.matrix_rate(dtype, max(rows, 1))
            bulk = common.matrix_rate(dtype, 1024)
            step = max(weights * dtype.itemsize / bandwidth, 2 * weights * rows / rate)
            floor = step * (NEW - 1) + 2 * weights * prompts * PROMPT / bulk
            row = {
                "ours_s": round(seconds, 3),
                "tokens_per_s": round(tokens / seconds, 1),
                "floor_s": round(floor, 3),
                "share_of_floor": round(floor / seconds, 3),
            }
            if args.peer == "auto":
                theirs, _ = common.timed(peer, args.repeats)
                row |= {"peer_s": round(theirs, 3), "ratio": round(theirs / seconds, 2)}
            result["cases"][f"{name}: {case}"] = row
            print(f"{name}: {case}: {row}", flush=True)
    common.finish(result)


if __name__ == "__main__":
    main()
