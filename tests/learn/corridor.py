"""Text worlds with a known optimum, and what goes wrong with worlds: for tests of episodes."""

import time

from forethought.envs.env import Step
from forethought.models.chat import ChatRenderer
from forethought.models.policy import Policy
from forethought.models.tiny import char_tokenizer, tiny_model

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 |#PXO_S.\n"


def make_policy(seed=0, context=128, width=32, layers=1, alphabet=ALPHABET, init_std=0.02):
    tokenizer = char_tokenizer(alphabet, context=context)
    model = tiny_model(
        len(tokenizer), width=width, layers=layers, heads=2, context=context, seed=seed, init_std=init_std
    )
    renderer = ChatRenderer(tokenizer)
    return Policy(model, tokenizer, end_ids=renderer.end_ids), renderer


class Corridor:
    """Cells 0 to 3; r goes right, l left. The end is cell 3: at best three steps, reward 1 at the end."""

    limit = 6

    def __init__(self):
        self.at, self.steps = 0, 0

    def reset(self, task=None, seed=0):
        return Step(str(self.at))

    def step(self, action):
        self.steps += 1
        invalid = action not in ("l", "r")
        self.at = max(0, self.at + {"l": -1, "r": 1}.get(action, 0))
        won = self.at == 3
        truncated = self.steps >= self.limit and not won
        return Step(str(self.at), float(won), won, truncated, {"success": won, "invalid": invalid})

    def snapshot(self):
        return self.at, self.steps

    def restore(self, snapshot):
        self.at, self.steps = snapshot

    def state_key(self):
        return str(self.at)


class Faulty(Corridor):
    """Fails in the way that the task's "fault" names, at its second step (or at reset)."""

    def reset(self, task=None, seed=0):
        self.fault = (task or {}).get("fault")
        if self.fault == "reset":
            raise OSError("no display")
        return super().reset()

    def step(self, action):
        step = super().step(action)
        if self.steps < 2:
            return step
        if self.fault == "raises":
            raise KeyError("drawer")
        if self.fault == "hangs":
            time.sleep(20)
        if self.fault == "number":
            return Step(7)
        if self.fault == "tuple":
            return (step.observation, 0.0)
        if self.fault == "nan":
            return Step("1", float("nan"))
        if self.fault == "both":
            return Step("1", 0.0, True, True)
        if self.fault == "alphabet":
            return Step("é")
        return step
