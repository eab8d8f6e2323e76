"""Small games for tests and benchmarks, each as arrays (many states at once) and as plain Python."""

from __future__ import annotations

import numpy as np

from forethought.search.arrays import ArrayStep

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """splitmix64 of one number."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def mix_many(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class HashGame:
    """A state is a 64-bit number, the next one a hash of it and the action. Everything else is read from its bits:
    value and reward in eighths (so that sums are exact in any order), priors, the player, and whether it has ended.
    """

    def __init__(self, roots, *, actions=4, players=1, rewards=True, end_share=16, uniform=False, bits=3):
        self.actions, self.players, self.rewards = actions, players, rewards
        self.end_share, self.uniform, self.bits = end_share, uniform, bits  # bits of a prior's weight
        self.start = [mix(r) for r in roots]
        while any(ended := [self.read(s)["ended"] for s in self.start]):
            self.start = [mix(s) if e else s for s, e in zip(self.start, ended, strict=True)]

    # -- one state --
    def step_one(self, state: int, action: int) -> dict:
        return self.read(mix((state + action + 1) & MASK))

    def read(self, state: int) -> dict:
        bits = [1 + (state >> (8 + self.bits * a)) % (1 << self.bits) for a in range(self.actions)]
        total = float(sum(bits))
        ended = bool(self.end_share) and state % self.end_share == 3
        return {
            "state": state,
            "value": 0.0 if ended else ((state >> 40) % 256) / 128 - 1,
            "reward": ((state >> 50) % 8 - 4) / 8 if self.rewards else 0.0,
            "ended": ended,
            "player": (state >> 60) % self.players,
            "prior": [1 / self.actions] * self.actions if self.uniform else [b / total for b in bits],
        }

    # -- many --
    def roots(self) -> ArrayStep:
        return self._read(np.array(self.start, np.uint64))

    def step(self, states: np.ndarray, actions: np.ndarray) -> ArrayStep:
        return self._read(mix_many(states + actions.astype(np.uint64) + np.uint64(1)))

    def _read(self, states: np.ndarray) -> ArrayStep:
        u = np.uint64
        ended = (states % u(self.end_share) == u(3)) if self.end_share else np.zeros(len(states), bool)
        value = ((states >> u(40)) & u(255)).astype(float) / 128 - 1
        prior = None
        if not self.uniform:
            shifts = (8 + self.bits * np.arange(self.actions)).astype(u)
            bits = 1.0 + ((states[:, None] >> shifts) & u((1 << self.bits) - 1))
            prior = bits / bits.sum(1, keepdims=True)
        return ArrayStep(
            states=states,
            value=np.where(ended, 0.0, value),
            reward=((states >> u(50)) & u(7)).astype(float) / 8 - 0.5 if self.rewards else 0.0,
            ended=ended,
            player=((states >> u(60)) % u(self.players)).astype(np.int8),
            prior=prior,
        )
