"""What an arm is measured by: exact values in the miniature, win rates on held-out prompts with a real oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forethought.config import derive_seed
from forethought.errors import RewardError
from forethought.learn.online import merge_metrics
from forethought.recipes.inpo.games import FLOOR, dual_gap, kl
from forethought.recipes.inpo.world import Words, game_of, tasks

if TYPE_CHECKING:
    from forethought.learn.preference_game import GameConfig, GameTrainer
    from forethought.models.torch_engine import TorchEngine
    from forethought.recipes.inpo import INPOConfig
    from forethought.recipes.inpo.world import FilesWorld
    from forethought.rewards.oracles import Oracle

LATE = 10
"""Last iterates over which the mean gap and the swing are taken."""
GAP = "gap, last 10"


class ByIteration:
    """A preference game whose step is a whole iteration: one line and one look for each iterate."""

    def __init__(self, trainer: GameTrainer):
        self.trainer = trainer
        self.learner, self.counts, self.step = trainer.learner, trainer.counts, trainer.iteration

    def train_step(self, progress: Callable[[int, int], None] | None = None) -> tuple[dict[str, float], list]:
        rows, shown, target = [], [], self.trainer.iteration + 1
        while self.trainer.iteration < target:
            metrics, more = self.trainer.train_step(progress)
            rows.append(metrics)
            shown += more
        self.counts, self.step = self.trainer.counts, target
        return merge_metrics(rows), shown

    def state_dict(self) -> dict[str, Any]:
        return self.trainer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.load_state_dict(state)
        self.counts, self.step = self.trainer.counts, self.trainer.iteration


class Exact:
    """Exact values of the miniature's policy, means over the prompts; call it once after each iteration.

    The policy at construction is the reference. Values are always those of the true preferences, also where the arm's
    oracle is a scalar reward.
    """

    def __init__(self, config: INPOConfig, policy: Any):
        self.policy, self.tau = policy, config.tau
        self.P = game_of(config.miniature)
        self.words = Words(tasks(config.miniature), policy.tokenizer)
        self.reference = self.words.log_probs(policy)
        self.ref_roles = self.words.by_role(self.reference)
        self.tokens = 0
        """Nothing is sampled for measurement."""
        self.played: list[np.ndarray] = []
        """Log-probs [X, 4] of the roles, of the reference and of every iterate."""
        self.last: dict[str, float] = {}

    def __call__(self, step: int) -> dict[str, float]:
        log_probs = self.words.log_probs(self.policy)
        roles = self.words.by_role(log_probs)
        self.played.append(roles)
        p = np.exp(roles)
        self.last = {
            "eval/dual_gap": self.gap(roles),
            "eval/dual_gap_answers": self._gap_of_answers(log_probs, roles),
            "eval/dual_gap_tau0": self.gap(roles, 0.0),
            "eval/kl_reference": float(np.mean(kl(log_probs, self.reference))),
            "eval/win_rate_reference": float(np.einsum("xi,ij,xj->x", p, self.P, np.exp(self.ref_roles)).mean()),
            **{f"eval/role_{k + 1}": float(p[:, k].mean()) for k in range(p.shape[1] - 1)},
            "eval/stray": float(p[:, -1].mean()),
        }
        return dict(self.last)

    def gap(self, roles: np.ndarray, tau: float | None = None) -> float:
        """Duality gap of the distribution over roles."""
        tau = self.tau if tau is None else tau
        return float(np.mean(dual_gap(self.P, roles, self.ref_roles, tau)))

    def _gap_of_answers(self, log_probs: np.ndarray, roles: np.ndarray) -> float:
        """Duality gap of the distribution over answers: that over roles, and what drifted within them.

        An answer's chance to win depends on its role alone, so the best reply is that over roles.
        """
        within = kl(log_probs, self.reference) - kl(roles, self.ref_roles)
        return self.gap(roles) + 2 * self.tau * float(np.mean(within))

    def final(self) -> dict[str, float]:
        late = np.array(self.played[1:][-LATE:] or self.played)  # the reference alone where nothing was learnt
        mixture = np.log(np.maximum(FLOOR, np.exp(np.array(self.played)).mean(0)))
        return {
            GAP: float(np.mean([self.gap(roles) for roles in late])),
            "gap, last": self.gap(late[-1]),
            "gap, mixture": self.gap(mixture),
            "swing, last 10": float(np.ptp(np.exp(late), axis=0).max(-1).mean()),
            "gap at tau 0, last 10": float(np.mean([self.gap(roles, 0.0) for roles in late])),
            "gap of answers, last": self.last["eval/dual_gap_answers"],
            "win rate against the reference": self.last["eval/win_rate_reference"],
            "KL to the reference": self.last["eval/kl_reference"],
            "stray answers": self.last["eval/stray"],
        }

    def state_dict(self) -> dict[str, Any]:
        return {"played": self.played, "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.played, self.last = list(state["played"]), dict(state["last"])

    def close(self) -> None:
        pass


class Versus:
    """How often answers to held-out prompts win against those of the reference, one sampled answer each.

    By the oracle that trains and, where there is one, by another that does not. Lengths stand beside it, and the win
    rate among answers of nearly the same length: an oracle may simply like long ones.
    """

    def __init__(
        self,
        world: FilesWorld,
        engine: TorchEngine,
        encode: Callable[[Mapping[str, Any]], list[int]],
        decode: Callable[[Sequence[int]], str],
        settings: GameConfig,
        seed: int,
    ):
        self.world, self.engine, self.encode, self.decode = world, engine, encode, decode
        self.settings, self.seed = settings, seed
        self.before: list[tuple[str, int]] = []
        self.tokens = 0
        """Generated for measurement."""
        self.last: dict[str, float] = {}

    def __call__(self, step: int) -> dict[str, float]:
        answers, cut = self._answers(step)
        self.before = self.before or answers
        out = {"eval/length": float(np.mean([n for _, n in answers])), "eval/truncated": cut}
        out |= self._wins("eval/win_rate", self.world.oracle, answers)
        if self.world.judge is not None:
            out |= self._wins("eval/win_rate_held_out_oracle", self.world.judge, answers)
        self.last = {name: value for name, value in out.items() if math.isfinite(value)}
        return dict(self.last)

    def _answers(self, step: int) -> tuple[list[tuple[str, int]], float]:
        """(text, tokens) of an answer to each held-out prompt, and the share that was cut."""
        from forethought.models.engine import Sampling
        from forethought.tree.tree import Kind, Stop, TokenTree

        seed = derive_seed("inpo", self.seed, "held out", step)
        trees = [TokenTree(self.encode(t), kind=Kind.PROMPT, task=str(t["id"]), seed=seed) for t in self.world.held_out]
        sampling = Sampling(
            max_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            stop=self.settings.stop,
            seed=seed,
        )
        nodes = [node for (node,) in self.engine.extend([(tree, 0) for tree in trees], 1, sampling)]
        made = list(zip(trees, nodes, strict=True))
        self.tokens += sum(int(tree.length[node]) for tree, node in made)
        cut = sum(Stop(int(tree.stop[node])) is Stop.LENGTH for tree, node in made)
        return [(self.decode(t.node_ids(n)), int(t.length[n])) for t, n in made], cut / len(made)

    def _wins(self, name: str, oracle: Oracle, answers: Sequence[tuple[str, int]]) -> dict[str, float]:
        from forethought.rewards.oracles import ask_oracle

        rows = list(zip(self.world.held_out, answers, self.before, strict=True))
        differ = [(task, new[0], old[0]) for task, new, old in rows if new[0] != old[0]]
        given = iter(ask_oracle(oracle, differ) if differ else [])
        wins, alike = [], []
        for _, (text, length), (other, before) in rows:
            p = 0.5 if text == other else next(given)
            if isinstance(p, RewardError):
                continue
            wins.append(p)
            if abs(length - before) <= 0.2 * before:
                alike.append(p)
        if not wins:
            raise RewardError("every comparison on the held-out prompts failed")
        out = {name: float(np.mean(wins)), f"{name}_missing": 1 - len(wins) / len(rows)}
        return out | ({f"{name}_same_length": float(np.mean(alike))} if alike else {})

    def final(self) -> dict[str, float]:
        return {name.removeprefix("eval/").replace("_", " "): value for name, value in self.last.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before, "last": self.last, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before, self.last = [tuple(row) for row in state["before"]], dict(state["last"])
        self.tokens = state["tokens"]

    def close(self) -> None:
        self.world.close()
