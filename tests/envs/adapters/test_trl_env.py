"""TRL environment classes as text environments."""

import json
import math

import pytest

from forethought.envs.adapters.trl_env import TRLEnv
from forethought.envs.check import check_env
from forethought.errors import ConfigError, EnvError, RewardError


class Counter:
    """A TRL environment: count to the target."""

    def reset(self, target=3, **kwargs) -> str | None:
        self.count, self.target = 0, target
        return f" Count to {target}."

    def add(self, amount: int) -> int:
        """Add to the counter.

        Args:
            amount: How much.

        Returns:
            The counter.
        """
        self.count += amount
        return self.count

    async def look(self) -> str:
        """Look at the counter.

        Returns:
            A sentence.
        """
        return f"It shows {self.count}."

    def get_reward(self) -> float:
        return float(self.count == self.target)

    def _hidden(self):
        return "secret"


def call(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments})


def started(**settings):
    env = TRLEnv(Counter, **settings)
    env.reset({"id": "1", "prompt": "Hello.", "target": 3})
    return env


def test_methods_are_tools_and_the_final_answer_ends_the_episode():
    env = TRLEnv(Counter, success_at=1.0)
    first = env.reset({"id": "1", "prompt": [{"role": "user", "content": "Hello."}], "target": 3})
    assert first.observation == "Hello. Count to 3." and first.info == {"tools": ["add", "look"]}
    assert env.step(call("add", amount=1)).observation == "1"
    step = env.step(f"I add.\n<tool_call>{call('add', amount=2)}</tool_call><tool_call>{call('look')}</tool_call>")
    assert step.observation == "3\nIt shows 3." and step.info == {"tool_calls": 2} and not step.done
    end = env.step("The counter shows 3.")
    assert (end.reward, end.terminated, end.truncated, end.info) == (
        1.0,
        True,
        False,
        {"tool_calls": 0, "success": True},
    )
    with pytest.raises(EnvError, match="after the end"):
        env.step("more")


def test_the_turn_limit_truncates_and_is_no_success():
    env = started(max_turns=2, success_at=1.0)
    env.step(call("add", amount=3))
    end = env.step(call("look"))
    assert (end.reward, end.terminated, end.truncated, end.info["success"]) == (1.0, False, True, False)


@pytest.mark.parametrize(
    "action, answer",
    [
        (call("ad", amount=1), "Error: no tool 'ad'; did you mean 'add'?; the tools are add, look."),
        (call("_hidden"), "Error: no tool '_hidden'"),
        (call("get_reward"), "Error: no tool 'get_reward'"),
        (call("add"), "Error: add: missing a required argument: 'amount'."),
        (call("add", amount=1, x=2), "Error: add: got an unexpected keyword argument 'x'."),
        (call("add", amount="one"), "Error: TypeError"),
        ('<tool_call>{"name": "add", </tool_call>', "Error: the tool call is not JSON"),
        ('{"name": "add", "arguments": [1]}', "Error: the arguments of add must be a JSON object."),
        ("<tool_call>[1]</tool_call>", "Error: a tool call looks like"),
        ('<tool_call>{"name": 3}</tool_call>', "Error: a tool call looks like"),
    ],
)
def test_faulty_calls_are_answered(action, answer):
    step = started().step(action)
    assert step.observation.startswith(answer) and not step.done


def test_rewards_that_are_none_are_errors():
    class NoReward(Counter):
        get_reward = None

    env = TRLEnv(NoReward)
    env.reset()
    assert env.step("done").reward == 0.0
    for result, message in ((math.nan, "returned nan"), (None, "returned None"), ("1", "returned '1'")):

        class Broken(Counter):
            def get_reward(self, result=result):
                return result

        env = TRLEnv(Broken)
        env.reset()
        with pytest.raises(RewardError, match=f"Broken.get_reward {message}; return a finite number"):
            env.step("done")

    class Raises(Counter):
        def get_reward(self):
            raise KeyError("target")

    env = TRLEnv(Raises)
    env.reset()
    with pytest.raises(RewardError, match="Raises.get_reward raised KeyError: 'target'"):
        env.step("done")


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="TRL environment object: it has no method reset"):
        TRLEnv(object)
    with pytest.raises(ConfigError, match="max_turns=0"):
        TRLEnv(Counter, max_turns=0)
    with pytest.raises(EnvError, match="step before reset"):
        TRLEnv(Counter).step("x")


def counter():
    return TRLEnv(Counter, max_turns=4)


def test_the_checker_passes_it():
    report = check_env(
        counter, tasks=[{"id": "1", "prompt": "Hi."}], actions=[call("add", amount=1), call("look"), "end"]
    )
    assert report.ok and report.ended == 2, report.render()
