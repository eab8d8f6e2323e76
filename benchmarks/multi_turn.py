"""Multi-turn rollout: 16 episodes of 10 turns with SmolLM2-135M, against transformers' `generate` on the whole transcript.

    python benchmarks/multi_turn.py [--peer none] [--dtype bf16|fp32|both]

Peers, given the same prompts, observations and answer lengths: "loop" calls `generate` for one episode after another,
"batch" once a turn for all episodes, padded on the left. Neither keeps anything between turns. The answers of ours are
scored by a plain forward of the model, so that the sampled distribution is known to be the model's.

The last line is one JSON object: per precision seconds, episodes a minute, the ratios (peer over ours), prefilled tokens
against those that were new, and the largest difference of log-probs.
"""

from __future__ import annotations

import argparse
import time

import common
import numpy as np
import torch

from forethought.envs.env import Step
from forethought.learn.episodes import EpisodeRules, Players
from forethought.models.chat import ChatRenderer
from forethought.models.engine import Sampling
from forethought.models.load import cast_weights, load_model
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine

FIRST, LATER, NEW = 120, 40, 16
"""Tokens of the first observation, of later ones, and of an answer."""


class Talk:
    """Answers anything with its next text; the end is the last one."""

    texts: list[list[str]] = []

    def reset(self, task=None, seed=0):
        self.left = list(Talk.texts[seed])
        return Step(self.left.pop(0))

    def step(self, action):
        text = self.left.pop(0)
        return Step(text, truncated=not self.left)

    def snapshot(self):
        return list(self.left)

    def restore(self, snapshot):
        self.left = list(snapshot)

    def state_key(self):
        return None


def ours(policy: Policy, renderer: ChatRenderer, episodes: int):
    engine = TorchEngine(policy)
    players = Players(engine, renderer, Talk, EpisodeRules(), policy.context)
    began = time.perf_counter()
    played = players.play(
        [({"id": str(i), "seed": i}, 1) for i in range(episodes)], Sampling(max_tokens=NEW, ignore_eos=True)
    )
    return time.perf_counter() - began, [e for (e,) in played], engine.stats


def peer(model, renderer: ChatRenderer, episodes: int, turns: int, *, batched: bool) -> float:
    """Seconds of a loop that renders and generates on ids of the whole transcript, each turn."""
    tokenizer = renderer.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    began = time.perf_counter()
    histories = [[{"role": "user", "content": Talk.texts[i][0]}] for i in range(episodes)]
    for turn in range(turns):
        rows = [renderer.prompt_ids(h) for h in histories]
        answers = []
        for part in [rows] if batched else [[r] for r in rows]:
            longest = max(map(len, part))
            ids = torch.tensor([[pad] * (longest - len(r)) + r for r in part])
            mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in part])
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=NEW,
                    min_new_tokens=NEW,
                    pad_token_id=pad,
                )
            answers += [tokenizer.decode(row[longest:], skip_special_tokens=True) for row in out.tolist()]
        for i, (history, answer) in enumerate(zip(histories, answers, strict=True)):
            history.append({"role": "assistant", "content": answer})
            history.append({"role": "user", "content": Talk.texts[i][turn + 1]})
    return time.perf_counter() - began


def largest_gap(model, played) -> float:
    """Largest |stored log-prob - plain forward's| over all sampled tokens."""
    worst = 0.0
    for episode in played:
        tree = episode.tree
        where = tree.path_tokens(episode.turns[-1].node)
        ids = torch.tensor(tree.ids[where].astype(np.int64))[None]
        with torch.inference_mode():
            logp = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        stored = tree.logprob[where][1:]
        sampled = np.isfinite(stored)
        worst = max(worst, float(np.abs(stored[sampled] - logp[sampled]).max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_arguments(parser)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model, dtype=torch.float32, device="cpu")
    first = common.word_prompts(tokenizer, args.episodes, FIRST)
    later = common.word_prompts(tokenizer, args.episodes * args.turns, LATER, seed=1)
    Talk.texts = [[first[i], *later[i * args.turns : (i + 1) * args.turns]] for i in range(args.episodes)]
    renderer = ChatRenderer(tokenizer)
    result: dict = {"benchmark": "multi_turn", "episodes": args.episodes, "turns": args.turns, "cases": {}}
    if args.peer == "auto":
        import transformers

        result["peer"] = f"transformers {transformers.__version__} generate"
    for name, dtype in common.dtypes(args.dtype).items():
        cast_weights(model, dtype)
        policy = Policy(model, tokenizer, end_ids=renderer.end_ids)
        ours(policy, renderer, 1)
        runs = [ours(policy, renderer, args.episodes) for _ in range(args.repeats)]
        seconds = float(np.median([r[0] for r in runs]))
        _, played, stats = runs[-1]
        assert all(len(e.turns) == args.turns for e in played)
        # New to a turn: its observation with the turn's frame, and the one sampled token that was never fed.
        new = sum(int(e.tree.length[e.prompt]) + sum(len(t.after) + 1 for t in e.turns[:-1]) for e in played)
        row: dict = {
            "ours_s": round(seconds, 2),
            "episodes_per_minute": round(60 * args.episodes / seconds, 2),
            "prefilled_tokens": stats.tokens_prefilled,
            "new_tokens": new,
            "largest_logprob_difference": round(largest_gap(model, played), 6),
        }
        if args.peer == "auto":
            for kind in ("batch", "loop"):
                theirs = peer(model, renderer, args.episodes, args.turns, batched=kind == "batch")
                row |= {f"{kind}_s": round(theirs, 2), f"ratio_to_{kind}": round(theirs / seconds, 2)}
        result["cases"][name] = row
        print(f"{name}: {row}", flush=True)
    common.finish(result)


if __name__ == "__main__":
    main()
