"""Tree search over a model's text against plain batched sampling of the same engine at 64 rows.

    python benchmarks/llm_search.py [--model mini|NAME] [--simulations 12] [--leaves 1]

64 trees, options of up to 16 tokens, critic free of charge. Both sides generate about the same number of tokens: plain
sampling writes one answer a prompt of (simulations x 16) tokens. The last line is one JSON object: tokens a second of
both, our share, and prefilled tokens over distinct tokens of the trees (with and without kept keys and values).
"""

from __future__ import annotations

import argparse
import contextlib

import common
import torch

from forethought.models.engine import Sampling
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine
from forethought.search.mcts import Budget, SearchConfig
from forethought.search.rules import UCT, FixedWidth
from forethought.search.search import search
from forethought.search.text_world import Option
from forethought.tree.tree import TokenTree

TREES, OPTION, PROMPT = 64, 16, 64


def load(name: str, dtype: torch.dtype):
    from forethought.models.load import cast_weights, load_model
    from forethought.models.tiny import byte_tokenizer, tiny_model

    if name == "mini":
        tokenizer = byte_tokenizer(context=1024)
        model = tiny_model(len(tokenizer), width=256, layers=6, heads=4, context=1024)
        prompts = [[1 + (7 * i + 3 * j) % 250 for j in range(PROMPT)] for i in range(TREES)]
    else:
        model, tokenizer = load_model(name, dtype=torch.float32, device="cpu")
        prompts = [tokenizer(t)["input_ids"] for t in common.word_prompts(tokenizer, TREES, PROMPT)]
    cast_weights(model, dtype)
    return Policy(model, tokenizer), prompts


class Engine(TorchEngine):
    """Without kept keys and values, where asked."""

    keeps = True

    def reuse(self, max_tokens: int = 65_536):
        return super().reuse(max_tokens) if self.keeps else contextlib.nullcontext()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_arguments(parser)
    parser.set_defaults(model="mini", repeats=1, dtype="fp32", threads=1)
    parser.add_argument("--simulations", type=int, default=12)
    parser.add_argument("--leaves", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    policy, prompts = load(args.model, common.dtypes(args.dtype)[args.dtype])
    sampling = Sampling(max_tokens=OPTION, ignore_eos=True)
    config = SearchConfig(select=UCT(c=1.0), width=FixedWidth(k=3), leaves=args.leaves)
    found: dict = {}

    def plain():
        engine = TorchEngine(policy, max_rows=TREES)
        trees = [TokenTree(ids, task=str(i)) for i, ids in enumerate(prompts)]
        longer = Sampling(max_tokens=OPTION * args.simulations, ignore_eos=True)
        engine.extend([(t, 0) for t in trees], 1, longer)
        return engine.stats.tokens_generated

    def searched(keeps=True):
        engine = Engine(policy, max_rows=TREES)
        engine.keeps = keeps
        trees = [TokenTree(ids, task=str(i)) for i, ids in enumerate(prompts)]

        def critic(leaves):
            return [(sum(leaf.tree.node_ids(leaf.node)) % 17) / 17 for leaf in leaves]

        budget = Budget(simulations=args.simulations)
        option = Option(sampling=sampling)
        search(trees, None, engine, critic, budget, config=config, option=option, decode=lambda ids: "x" * len(ids))
        distinct = sum(t.n_tokens for t in trees)
        found[keeps] = {
            "generated": engine.stats.tokens_generated,
            "prefilled": engine.stats.tokens_prefilled,
            "distinct": distinct,
            "prefilled_over_distinct": round(engine.stats.tokens_prefilled / distinct, 3),
        }
        return engine.stats.tokens_generated

    result: dict = {
        "benchmark": "llm_search",
        "model": args.model,
        "dtype": args.dtype,
        "trees": TREES,
        "option": OPTION,
    }
    result |= {"simulations": args.simulations, "leaves": args.leaves}
    rates = {}
    for name, run in (("plain", plain), ("search", searched), ("search, nothing kept", lambda: searched(False))):
        seconds, tokens = common.timed(run, args.repeats)
        rates[name] = round(tokens / seconds, 1)  # type: ignore[operator]
        print(f"{name}: {rates[name]} tokens/s ({tokens} in {seconds:.1f} s)", flush=True)
    result["tokens_per_s"] = rates
    result["share_of_plain"] = {k: round(v / rates["plain"], 3) for k, v in rates.items() if k != "plain"}
    result["kept"], result["not_kept"] = found[True], found[False]
    common.finish(result)


if __name__ == "__main__":
    main()
