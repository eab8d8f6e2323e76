"""How the demo's task was chosen: what the untouched model can do on every generated family.

    python benchmarks/demo_families.py [--model ...] [--problems 48]

Greedy accuracy when the last number counts and when a bare number is demanded, sampled accuracy and pass@8 at
temperature 1 (last number), 24 new tokens, held-out problems. Wanted: latent ability (pass@8 well above greedy) and
clear headroom.
"""

from __future__ import annotations

import argparse

import common
import numpy as np
import torch

from forethought.envs.families import families
from forethought.models.engine import Sampling
from forethought.recipes.session import open_model
from forethought.rewards.verify import check
from forethought.tree.tree import TokenTree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = open_model(args.model, train=False, say=print)
    result: dict = {"benchmark": "demo_families", "model": args.model, "problems": args.problems, "families": {}}
    print("| family | greedy, last number | greedy, bare number | sampled | pass@8 |\n|---|---|---|---|---|")
    for name, make in families().items():
        tasks = make(args.problems, 0, "heldout")
        trees = [TokenTree(bench.prompt_ids(t), task=t["id"]) for t in tasks]
        leaves = [(tree, 0) for tree in trees]
        greedy = bench.engine.extend(leaves, 1, Sampling(max_tokens=24, temperature=0))
        sampled = bench.engine.extend(leaves, 8, Sampling(max_tokens=24))

        def right(nodes, extract, trees=trees, tasks=tasks):
            return np.array(
                [
                    [
                        check(bench.decode(tree.node_ids(n)), t["answer"], "eval-qwen", extract=extract).correct
                        for n in mine
                    ]
                    for tree, t, mine in zip(trees, tasks, nodes, strict=True)
                ]
            )

        drawn = right(sampled, "last_number")
        row = [right(greedy, "last_number").mean(), right(greedy, "bare").mean(), drawn.mean(), drawn.any(1).mean()]
        result["families"][name] = [round(float(x), 3) for x in row]
        print(f"| {name} | " + " | ".join(f"{x:.2f}" for x in row) + " |", flush=True)
    common.finish(result)


if __name__ == "__main__":
    main()
