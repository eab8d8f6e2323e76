"""Tree search bookkeeping alone: 64 trees of a toy game with 4 actions, 256 simulations each, no model.

    python benchmarks/mcts.py [--peer none]

The game is a table of 4,096 states, drawn once; a step is one look-up for everyone, so what is timed is the search. In
the same run: our search compiled (numba, if there) and in NumPy; the sequential pure-Python reference of the tests
(tests/search/oracle.py, one object a node); and mctx on the CPU after its compilation, where it is installed. All use
PUCT with the MuZero settings. The last line is one JSON object: simulations a second, and ratios of ours over each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "search"))
from oracle import Oracle

from forethought.search import kernels
from forethought.search.arrays import ArrayDomain, ArrayStep
from forethought.search.mcts import Budget, Search, SearchConfig
from forethought.search.rules import PUCT

TREES, ACTIONS, SIMULATIONS, STATES = 64, 4, 256, 4096
CONFIG = SearchConfig(
    select=PUCT(c=1.25, c_base=19652, count="node", unvisited="lowest", normalise="siblings"),
    count_root=True,
    gamma=0.97,
)


class TableGame:
    """Random transitions, values, rewards and priors."""

    actions = ACTIONS

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.next = rng.integers(STATES, size=(STATES, ACTIONS))
        self.value, self.reward = rng.uniform(-1, 1, STATES), rng.uniform(-0.1, 0.1, STATES)
        prior = rng.uniform(0.1, 1, (STATES, ACTIONS))
        self.prior = prior / prior.sum(1, keepdims=True)
        self._flat = self.next.ravel()
        self._lists = [a.tolist() for a in (self.next, self.value, self.reward, self.prior)]

    # many states
    def _at(self, states):
        return ArrayStep(states, self.value.take(states), self.prior.take(states, 0), self.reward.take(states))

    def roots(self):
        return self._at(np.arange(TREES))

    def step(self, states, actions):
        return self._at(self._flat.take(states * ACTIONS + actions))

    # one state
    def read(self, state):
        _, value, reward, prior = self._lists
        facts = {"value": value[state], "reward": reward[state], "prior": prior[state]}
        return {"state": state, "ended": False, "player": 0, **facts}

    def step_one(self, state, action):
        return self.read(self._lists[0][state][action])


def rate(run, repeats: int = 5) -> float:
    """Simulations a second: the best of some runs, after one that compiles."""
    run()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        count = run()
        best = min(best, (time.perf_counter() - began) / count)
    return 1 / best


def ours(game: TableGame, compiled: bool):
    def run() -> int:
        search = Search(ArrayDomain(game), CONFIG, compiled=compiled)
        search.run(Budget(simulations=SIMULATIONS))
        return TREES * SIMULATIONS

    return run


def reference(game: TableGame, trees: int):
    def run() -> int:
        for root in range(trees):
            Oracle(game, root, CONFIG).run(SIMULATIONS)
        return trees * SIMULATIONS

    return run


def of_mctx(game: TableGame):
    import jax
    import mctx

    jnp = jax.numpy
    following, value, reward = jnp.array(game.next), jnp.array(game.value), jnp.array(game.reward)
    logits = jnp.log(jnp.array(game.prior))

    def step(params, key, action, state):
        state = following[state, action]
        gamma = jnp.full(state.shape, CONFIG.gamma, value.dtype)
        found = {"reward": reward[state], "value": value[state], "prior_logits": logits[state]}
        return mctx.RecurrentFnOutput(discount=gamma, **found), state

    @jax.jit
    def search(key, state):
        root = mctx.RootFnOutput(prior_logits=logits[state], value=value[state], embedding=state)
        return mctx.muzero_policy({}, key, root, step, SIMULATIONS, dirichlet_fraction=0.0).action_weights

    def run() -> int:
        search(jax.random.PRNGKey(0), jnp.arange(TREES)).block_until_ready()
        return TREES * SIMULATIONS

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("auto", "none"), default="auto", help="none: ours and the reference alone")
    parser.add_argument("--reference-trees", type=int, default=16, help="trees that the reference searches")
    args = parser.parse_args()
    game = TableGame()
    rates = {"numpy": rate(ours(game, False))}
    if kernels.available():
        rates["compiled"] = rate(ours(game, True))
    rates["reference"] = rate(reference(game, args.reference_trees), 3)
    if args.peer == "auto":
        try:
            rates["mctx"] = rate(of_mctx(game))
        except ImportError:
            print("mctx: not installed", flush=True)
    search = Search(ArrayDomain(game), CONFIG)
    search.run(Budget(simulations=SIMULATIONS))
    best = max(rates["numpy"], rates.get("compiled", 0.0))
    forest = search.forest
    result = {
        "benchmark": "mcts",
        "trees": TREES,
        "actions": ACTIONS,
        "simulations": SIMULATIONS,
        "mean_depth": round(float(forest.depth.sum() / forest.size.sum()), 2),
        "simulations_per_s": {name: round(value) for name, value in rates.items()},
        "ratio": {name: round(best / value, 2) for name, value in rates.items() if name not in ("numpy", "compiled")},
        "ratio_numpy": {
            name: round(rates["numpy"] / value, 2) for name, value in rates.items() if name not in ("numpy", "compiled")
        },
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "numpy": np.__version__,
    }
    for name, value in rates.items():
        print(f"{name:22} {value:12,.0f} simulations/s", flush=True)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
