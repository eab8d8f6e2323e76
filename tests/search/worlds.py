"""Small environments for tests of search."""

from __future__ import annotations

from forethought.envs.env import Step
from forethought.errors import EnvError


class Heap:
    """Take 1 to 3 from a heap in turn; who takes the last wins. Multiples of 4 are lost for the player to move."""

    def __init__(self, heap: int = 5):
        self.start = heap

    def reset(self, task=None, seed=0) -> Step:
        self.heap, self.player = self.start if task is None else task["heap"], 0
        return self._step(0.0)

    def _step(self, reward: float) -> Step:
        done = self.heap == 0
        actions = [f"take {k}" for k in (1, 2, 3) if k <= self.heap]
        info = {"actions": actions, "player": self.player, "success": done}
        return Step(f"{self.heap} left", reward, terminated=done, info=info)

    def step(self, action: str) -> Step:
        self.heap -= int(action.split()[1])
        self.player = 1 - self.player
        return self._step(float(self.heap == 0))

    def snapshot(self):
        return self.heap, self.player

    def restore(self, snapshot):
        self.heap, self.player = snapshot

    def state_key(self):
        return f"{self.heap}/{self.player}"


LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class TicTacToe:
    """Actions are the free fields "0" to "8"; the winning move pays 1 to who makes it."""

    def reset(self, task=None, seed=0) -> Step:
        self.board = (task or {}).get("board", ".........")
        return self._step(0.0)

    @property
    def player(self) -> int:
        return (9 - self.board.count(".")) % 2

    def _step(self, reward: float) -> Step:
        won = any(self.board[a] == self.board[b] == self.board[c] != "." for a, b, c in LINES)
        free = [str(i) for i, x in enumerate(self.board) if x == "."]
        info = {"actions": [] if won else free, "player": self.player}
        return Step(self.board, reward, terminated=won or not free, info=info)

    def step(self, action: str) -> Step:
        at = int(action)
        self.board = self.board[:at] + "xo"[self.player] + self.board[at + 1 :]
        step = self._step(0.0)
        won = (
            step.terminated
            and not step.info["actions"]
            and any(self.board[a] == self.board[b] == self.board[c] != "." for a, b, c in LINES)
        )
        return Step(step.observation, float(won), terminated=step.terminated, info=step.info)

    def snapshot(self):
        return self.board

    def restore(self, snapshot):
        self.board = snapshot

    def state_key(self):
        return self.board


class Ring:
    """A circle of places, for ever: "left", "right", or "stay"; place 3 pays 1 each time it is entered."""

    size = 5

    def reset(self, task=None, seed=0) -> Step:
        self.at = 0
        self.steps = 0
        return self._step()

    def _step(self) -> Step:
        reward = float(self.at == 3 and self.steps > 0)
        return Step(f"place {self.at}", reward, info={"actions": ["left", "right", "stay"]})

    def step(self, action: str) -> Step:
        self.steps += 1
        self.at = (self.at + {"left": -1, "right": 1, "stay": 0}[action]) % self.size
        return self._step()

    def snapshot(self):
        return self.at, self.steps

    def restore(self, snapshot):
        self.at, self.steps = snapshot

    def state_key(self):
        return str(self.at)


class Counted:
    """Wraps an environment and counts calls, over all its objects."""

    def __init__(self, make):
        self.make = make
        self.calls = {"reset": 0, "step": 0, "restore": 0}

    def __call__(self):
        env, calls = self.make(), self.calls

        class Proxy:
            def reset(self, task=None, seed=0):
                calls["reset"] += 1
                return env.reset(task, seed)

            def step(self, action):
                calls["step"] += 1
                return env.step(action)

            def snapshot(self):
                return env.snapshot()

            def restore(self, snapshot):
                calls["restore"] += 1
                env.restore(snapshot)

            def state_key(self):
                return env.state_key()

        return Proxy()


class NoSnapshots:
    """The heap game without snapshots."""

    def __init__(self):
        self.env = Heap()

    def reset(self, task=None, seed=0):
        return self.env.reset(task, seed)

    def step(self, action):
        return self.env.step(action)

    def snapshot(self):
        raise NotImplementedError

    def restore(self, snapshot):
        raise NotImplementedError

    def state_key(self):
        return self.env.state_key()


class Drifting(NoSnapshots):
    """Its observations change from object to object: it cannot be replayed."""

    made = 0

    def __init__(self):
        super().__init__()
        Drifting.made += 1
        self.number = Drifting.made

    def step(self, action):
        step = self.env.step(action)
        return Step(f"{step.observation} ({self.number})", step.reward, step.terminated, step.truncated, step.info)


class Flaky(Heap):
    """Raises at every third step, over all its objects."""

    calls = 0

    def step(self, action):
        Flaky.calls += 1
        if Flaky.calls % 3 == 0:
            raise EnvError("the server is away")
        return super().step(action)
