"""A sound environment and its faulty relatives, one fault each: material of test_check.py (not a test)."""

import copy
import os
import random
import re
import time

from forethought.envs.env import Step
from forethought.errors import EnvError


class Good:
    """A counter to 5: "up" adds 1 or (by the dice) 2, "wait" nothing; won at 5 or more, cut after 8 actions."""

    LIMIT = 8

    def reset(self, task=None, seed=0):
        self.rng = random.Random(seed)
        self.count, self.turns, self.over = 0, 0, False
        return Step("The counter is 0.", info={"actions": ["up", "wait"]})

    def step(self, action):
        if self.over:
            raise EnvError("the episode is over")
        self.turns += 1
        known = action in ("up", "wait")
        if known:
            self.count += self.rng.choice((1, 2)) if action == "up" else 0
        won = self.count >= 5
        cut = self.turns >= self.LIMIT and not won
        self.over = won or cut
        text = f"The counter is {self.count}." if known else "Write up or wait."
        return Step(text, float(won), won, cut, {"success": won, "actions": ["up", "wait"], "turns": [self.turns]})

    def snapshot(self):
        return copy.deepcopy(self.__dict__)

    def restore(self, snapshot):
        self.__dict__ = copy.deepcopy(snapshot)

    def state_key(self):
        return f"{self.count}/{self.turns}"

    def changed(self, step, **fields):
        return Step(**{**step.__dict__, **fields})


class Answers(Good):
    """Answers after the end instead of raising."""

    def step(self, action):
        if self.over:
            return Step("It is over.", 0.0, self.count >= 5, self.count < 5)
        return super().step(action)


# -- form --


class NoSnapshot:
    reset, step, state_key = Good.reset, Good.step, Good.state_key
    LIMIT = 8


class NeedsArgument(Good):
    def __init__(self, size):
        self.size = size


class ResetReturnsText(Good):
    def reset(self, task=None, seed=0):
        return super().reset(task, seed).observation


class ResetIsOver(Good):
    def reset(self, task=None, seed=0):
        return self.changed(super().reset(task, seed), terminated=True)


class ResetPays(Good):
    def reset(self, task=None, seed=0):
        return self.changed(super().reset(task, seed), reward=1.0)


class Gymnasium(Good):
    def step(self, action):
        s = super().step(action)
        return s.observation, s.reward, s.terminated, s.truncated, s.info


class NumberObservation(Good):
    def step(self, action):
        return self.changed(super().step(action), observation=self.count)


class Surrogate(Good):
    def step(self, action):
        return self.changed(super().step(action), observation="\ud83d")


class LongObservation(Good):
    def step(self, action):
        return self.changed(super().step(action), observation="x" * 50_000)


class NanReward(Good):
    def step(self, action):
        return self.changed(super().step(action), reward=float("nan"))


class TextReward(Good):
    def step(self, action):
        return self.changed(super().step(action), reward="1")


class IntFlags(Good):
    def step(self, action):
        return self.changed(super().step(action), terminated=int(self.count >= 5))


class BothFlags(Good):
    """A win is reported as cut, too."""

    def step(self, action):
        s = super().step(action)
        return self.changed(s, truncated=s.done)


class DoneIsWon(Good):
    """Case H19: an episode that ran into the limit counts as solved."""

    def step(self, action):
        s = super().step(action)
        return self.changed(s, info={**s.info, "success": s.done})


class NumberSuccess(Good):
    def step(self, action):
        s = super().step(action)
        return self.changed(s, info={**s.info, "success": int(s.terminated)})


class ListInfo(Good):
    def step(self, action):
        return self.changed(super().step(action), info=[1])


class ObjectInfo(Good):
    def step(self, action):
        s = super().step(action)
        return self.changed(s, info={**s.info, "rng": {1, 2}})


class LiveInfo(Good):
    def reset(self, task=None, seed=0):
        self.notes = {"actions": ["up", "wait"]}
        return self.changed(super().reset(task, seed), info=self.notes)

    def step(self, action):
        s = super().step(action)
        self.notes["turns"] = self.turns
        return self.changed(s, info=self.notes)


# -- failures --


class RaisesInReset(Good):
    def reset(self, task=None, seed=0):
        return Step(task["question"])


class RaisesInStep(Good):
    def step(self, action):
        if self.turns == 2:
            return {}["missing"]
        return super().step(action)


class RaisesOnUnknown(Good):
    def step(self, action):
        if action not in ("up", "wait"):
            raise ValueError(f"illegal action {action}")
        return super().step(action)


class ParsesNumbers(Good):
    def step(self, action):
        if action.isdigit():
            int(action)  # Python refuses more than 4,300 digits
        return super().step(action)


class RunsCode(Good):
    def step(self, action):
        try:
            eval(action)
        except Exception:
            pass
        return super().step(action)


class Hangs(Good):
    """Holds the interpreter on long actions."""

    def step(self, action):
        if len(action) > 50_000:
            re.match("(a+)+$", "a" * 60 + "b")
        return super().step(action)


class HangsInReset(Good):
    def reset(self, task=None, seed=0):
        time.sleep(60)


class HangsAlways(Good):
    def step(self, action):
        time.sleep(60)


class Exits(Good):
    def step(self, action):
        os._exit(0)


class GoesOn(Good):
    def step(self, action):
        if self.over:
            return Step("On and on.")
        return super().step(action)


class PaysAgain(Good):
    def step(self, action):
        if self.over:
            return Step("It is over.", 1.0, self.count >= 5, self.count < 5)
        return super().step(action)


class RaisesAfterTheEnd(Good):
    def step(self, action):
        if self.over:
            raise IndexError("no more turns")
        return super().step(action)


# -- state --


class GlobalDice(Good):
    def reset(self, task=None, seed=0):
        step = super().reset(task, seed)
        self.rng = random
        return step

    def step(self, action):
        return self.changed(super().step(action), observation=f"dice {random.random()}")

    def snapshot(self):
        return dict(self.__dict__)

    def restore(self, snapshot):
        self.__dict__ = dict(snapshot)


class HashDice(Good):
    """Deterministic in one process, another episode in the next."""

    def reset(self, task=None, seed=0):
        return super().reset(task, hash(f"episode {seed}"))

    def step(self, action):
        return self.changed(super().step(action), observation=f"dice {self.rng.random()}")


class ClassState(Good):
    shared = {"count": 0}

    def reset(self, task=None, seed=0):
        self.shared["count"] = 0
        return super().reset(task, seed)

    def step(self, action):
        self.shared["count"] += 1
        s = super().step(action)
        return self.changed(s, observation=f"{s.observation} Steps: {self.shared['count']}")


_ONE = Good()


def one_object():
    return _ONE


class ForgetsDice(Good):
    def snapshot(self):
        return {k: v for k, v in self.__dict__.items() if k != "rng"}

    def restore(self, snapshot):
        self.__dict__ = {**snapshot, "rng": self.rng}


class ForgetsReward(Good):
    """The reward for the first time at 2 is not part of the snapshot."""

    def reset(self, task=None, seed=0):
        self.paid = [False]
        return super().reset(task, seed)

    def step(self, action):
        s = super().step(action)
        first = self.count >= 2 and not self.paid[0]
        self.paid[0] |= first
        return self.changed(s, reward=s.reward + first)

    def snapshot(self):
        return {**super().snapshot(), "paid": self.paid}

    def restore(self, snapshot):
        self.__dict__ = {**copy.deepcopy(snapshot), "paid": snapshot["paid"]}


class ForgetsInfo(Good):
    def reset(self, task=None, seed=0):
        self.log = []
        return super().reset(task, seed)

    def step(self, action):
        s = super().step(action)
        self.log.append(action)
        return self.changed(s, info={**s.info, "log": list(self.log)})

    def snapshot(self):
        return {k: v for k, v in super().snapshot().items() if k != "log"}

    def restore(self, snapshot):
        self.__dict__ = {**copy.deepcopy(snapshot), "log": self.log}


class ShallowRestore(Good):
    """Works once: the second restore finds what the first continuation left."""

    def reset(self, task=None, seed=0):
        self.cells = [0, 0]
        return super().reset(task, seed)

    def step(self, action):
        self.cells[self.turns % 2] += 1
        s = super().step(action)
        return self.changed(s, observation=f"{s.observation} {self.cells}")

    def restore(self, snapshot):
        self.__dict__ = snapshot


class OneSlot(Good):
    """Keeps only the newest snapshot."""

    def snapshot(self):
        self.__dict__["slot"] = None
        self.slot = copy.deepcopy(self.__dict__)
        return "newest"

    def restore(self, snapshot):
        slot = self.slot
        self.__dict__ = copy.deepcopy(slot)
        self.slot = slot


class SnapshotRaises(Good):
    def snapshot(self):
        raise NotImplementedError("later")


class IdKey(Good):
    def state_key(self):
        return f"{id(self)}/{self.count}"


class CountingKey(Good):
    def state_key(self):
        self.asked = getattr(self, "asked", 0) + 1
        return f"{self.count}/{self.asked}"


class NumberKey(Good):
    def state_key(self):
        return self.count


class NoKey(Good):
    def state_key(self):
        return None


class BoundSnapshot(Good):
    def snapshot(self):
        return (lambda state: lambda: state)(copy.deepcopy(self.__dict__))

    def restore(self, snapshot):
        self.__dict__ = copy.deepcopy(snapshot())


instance = Good()
