"""Gymnasium in and out."""

import math

import numpy as np
import pytest

from forethought.envs.check import check_env
from forethought.envs.env import Step
from forethought.errors import ConfigError, EnvError, MissingExtraError

gymnasium = pytest.importorskip("gymnasium", reason="the extra `gym` is not installed")

from gymnasium.utils import env_checker  # noqa: E402

from forethought.envs.adapters.gymnasium import GymnasiumEnv, plain, to_gymnasium, to_text  # noqa: E402
from forethought.envs.problem import ProblemEnv  # noqa: E402


class Corridor(gymnasium.Env):
    """Walk right `length` times; the dice make a step fail at times."""

    observation_space = gymnasium.spaces.Dict({"place": gymnasium.spaces.Discrete(10)})
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=3, slip=0.0):
        self.length, self.slip = length, slip

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = (options or {}).get("place", 0)
        return {"place": self.place}, {}

    def step(self, action):
        if self.np_random.random() >= self.slip:
            self.place += 1 if action else -1
        won = self.place >= self.length
        info = {"is_success": np.bool_(won), "speed": np.float32(0.5), "lost": math.inf}
        return {"place": self.place}, np.float32(won), won, False, info


def corridor(limit=30, **settings):
    return lambda: gymnasium.wrappers.TimeLimit(Corridor(**settings), max_episode_steps=limit)


def play(env, actions, **reset):
    env.reset(**reset)
    return [env.step(a) for a in actions]


def test_text_in_and_out():
    env = GymnasiumEnv(corridor(), actions=["left", "right"])
    first = env.reset({"place": 2}, 0)
    assert first == Step("place: 2", info={"actions": ["left", "right"]})
    step = env.step(" Right\n")
    assert step == Step(
        "place: 3",
        1.0,
        True,
        False,
        {"is_success": True, "success": True, "speed": 0.5, "lost": None, "actions": ["left", "right"]},
    )
    assert type(step.reward) is float
    with pytest.raises(EnvError, match="step after the end"):
        env.step("right")
    with pytest.raises(EnvError, match="step before reset"):
        GymnasiumEnv(corridor()).step("1")


def test_done_is_not_won_also_when_the_limit_is_met_in_the_same_step():
    """Case H19 (alfworld/alfworld#51): limit 30; won at 12, never, won exactly at 30."""
    ends = []
    for place in (12, None, 30):
        env = GymnasiumEnv(corridor(limit=30, length=place or 100), actions=["left", "right"])
        steps = play(env, ["right"] * (place or 30))
        assert not any(s.done for s in steps[:-1])
        ends.append(steps[-1])
    assert [s.terminated for s in ends] == [True, False, True]
    assert [s.truncated for s in ends] == [False, True, False]
    assert sum(s.info["success"] for s in ends) / 3 == pytest.approx(2 / 3)
    # Gymnasium itself reports both flags in the third episode
    raw = corridor(limit=30, length=30)()
    raw.reset()
    assert [raw.step(1) for _ in range(30)][-1][2:4] == (True, True)


@pytest.mark.parametrize("text", ["", "2", "-1", "up", "1.5", "9" * 5000, "nan", "٣", "1 0", "\x00"])
def test_what_is_no_action_is_answered_without_a_step_of_the_world(text):
    env = GymnasiumEnv(corridor())
    env.reset()
    step = env.step(text)
    assert step.info == {"invalid": True, "actions": ["0", "1"]} and step.reward == 0 and not step.done
    assert step.observation.endswith("is not an action. Choose one of: 0, 1.") and len(step.observation) < 120
    assert env.step("1").observation == "place: 1"


def test_unreadable_actions_count_as_turns():
    env = GymnasiumEnv(corridor(), max_turns=3)
    steps = play(env, ["1", "no", "no"])
    assert [s.truncated for s in steps] == [False, False, True]
    env = GymnasiumEnv(corridor(length=2), max_turns=2)
    assert [(s.terminated, s.truncated) for s in play(env, ["1", "1"])] == [(False, False), (True, False)]


@pytest.mark.parametrize("snapshot", ["deepcopy", "replay"])
def test_snapshots_are_exact_with_dice_and_clocks(snapshot):
    env = GymnasiumEnv(corridor(limit=12, length=8, slip=0.5), snapshot=snapshot)
    play(env, ["1", "x", "1"], seed=7)
    saved = env.snapshot()
    ahead = ["1", "0", "1", "1"]
    first = [env.step(a) for a in ahead]
    for _ in range(2):
        env.restore(saved)
        assert [env.step(a) for a in ahead] == first
    other = GymnasiumEnv(corridor(limit=12, length=8, slip=0.5), snapshot=snapshot)
    other.restore(saved)
    assert [other.step(a) for a in ahead] == first


def slippery():
    return GymnasiumEnv(
        corridor(limit=6, length=3, slip=0.3), actions=["left", "right"], key=lambda e: str(e.unwrapped.place)
    )


def frozen_lake():
    names = ["left", "down", "right", "up"]
    return GymnasiumEnv("FrozenLake-v1", actions=names, snapshot="replay", key=lambda e: str(e.unwrapped.s))


def cart_pole():
    return GymnasiumEnv("CartPole-v1", max_turns=12)


@pytest.mark.parametrize("factory", [slippery, frozen_lake, cart_pole])
def test_the_checker_passes_adapted_environments(factory):
    report = check_env(factory)
    assert report.ok and report.ended >= 1, report.render()


def test_the_checker_points_from_a_bare_gymnasium_environment_to_the_adapter():
    report = check_env(Corridor)
    assert (
        "protocol" in report.broken() and "Corridor has no snapshot, restore, state_key" in report["protocol"].message
    )


def test_a_world_that_cannot_be_copied_says_what_to_do():
    class Stuck(Corridor):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle a window")

    env = GymnasiumEnv(Stuck)
    env.reset()
    with pytest.raises(EnvError, match="cannot pickle a window.*; use snapshot='replay'"):
        env.snapshot()


def test_a_reward_that_is_not_finite_is_an_error():
    class Broken(Corridor):
        def step(self, action):
            return {"place": 0}, math.nan, False, False, {}

    with pytest.raises(EnvError, match="gave the reward nan"):
        play(GymnasiumEnv(Broken), ["1"])


class Spaces(Corridor):
    def __init__(self, space):
        super().__init__()
        self.action_space = space

    def step(self, action):
        self.action = action
        return {"place": 0}, 0.0, False, False, {}


def test_other_action_spaces():
    spaces = gymnasium.spaces
    env = GymnasiumEnv(lambda: Spaces(spaces.Box(-1, 1, (2,), np.float32)))
    valid, shape, bounds, no_json = play(env, ["[0.5, -1]", "[1]", "[2, 0]", "left"])
    assert not valid.info.get("invalid") and env.env.action.tolist() == [0.5, -1.0]
    assert shape.info["invalid"] and bounds.info["invalid"] and no_json.info["invalid"]
    assert no_json.observation == "'left' is not an action. Write a JSON list of shape [2]."
    env = GymnasiumEnv(lambda: Spaces(spaces.MultiDiscrete([3, 2])))
    valid, fraction = play(env, ["[2, 1]", "[0.5, 1]"])
    assert "invalid" not in valid.info and fraction.info["invalid"]
    env = GymnasiumEnv(lambda: Spaces(spaces.Text(5)))
    assert ["invalid" in s.info for s in play(env, ["abc", "abcdef"])] == [False, True]
    env = GymnasiumEnv(lambda: Spaces(spaces.Discrete(3, start=5)))
    assert ["invalid" in s.info for s in play(env, ["5", "7", "0"])] == [False, False, True]
    env = GymnasiumEnv(lambda: Spaces(spaces.Discrete(1000)))
    assert "actions" not in play(env, ["999"])[0].info
    with pytest.raises(ConfigError, match="give act=, a function from text to an action"):
        GymnasiumEnv(lambda: Spaces(spaces.Sequence(spaces.Discrete(2))))
    env = GymnasiumEnv(lambda: Spaces(spaces.Sequence(spaces.Discrete(2))), act=lambda text: tuple(map(int, text)))
    valid, bad = play(env, ["101", "x"])
    assert "invalid" not in valid.info and bad.info["invalid"]


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="3 names for 2 actions"):
        GymnasiumEnv(corridor(), actions=["a", "b", "c"])
    with pytest.raises(ConfigError, match="snapshot='pickle': 'deepcopy' or 'replay'"):
        GymnasiumEnv(corridor(), snapshot="pickle")
    with pytest.raises(ConfigError, match="Gymnasium environment 'FrozenLaek-v1'"):
        GymnasiumEnv("FrozenLaek-v1")
    with pytest.raises(ConfigError, match="max_turns=0"):
        GymnasiumEnv(corridor(), max_turns=0)


def test_a_missing_extra_names_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'forethought\[gym\]'"):
        GymnasiumEnv("FrozenLake-v1")


def test_observations_as_text_and_infos_as_plain_values():
    assert to_text(np.array([0.123456, 2.0], np.float32)) == "[0.1235, 2.    ]"
    assert to_text({"a": 1, "b": (np.int64(2), 0.5)}) == "a: 1\nb: 2, 0.5"
    assert to_text("as it is") == "as it is"
    assert plain({"x": np.arange(2), "y": math.nan, 3: {4}}) == {"x": [0, 1], "y": None, "3": "{4}"}


# -- out ---------------------------------------------------------------------------------------------------------------

TASKS = [{"id": str(i), "prompt": f"{i}+1?", "answer": str(i + 1)} for i in range(4)]


def test_our_environments_pass_gymnasiums_own_checker():
    env = to_gymnasium(lambda: ProblemEnv(TASKS, lambda text, task: float(text == task["answer"]), attempts=2))
    env_checker.check_env(env, skip_render_check=True)


def test_out_keeps_the_five_values_tasks_and_seeds():
    make = lambda: ProblemEnv(TASKS, lambda text, task: float(text == task["answer"]))  # noqa: E731
    env = to_gymnasium(make, TASKS)
    observation, info = env.reset(options={"task": TASKS[2]})
    assert observation == "2+1?" and info["task"] == "2"
    assert env.step("3") == ("Right.", 1.0, True, False, {"task": "2", "success": True, "parts": {}})
    drawn = [env.reset(seed=s)[0] for s in range(20)]
    assert drawn == [env.reset(seed=s)[0] for s in range(20)] and len(set(drawn)) == 4


def test_there_and_back_again():
    def make():
        return ProblemEnv(TASKS, lambda text, task: float(text == task["answer"]))

    env = GymnasiumEnv(lambda: to_gymnasium(make, TASKS), act=str)
    first = env.reset({"task": TASKS[1]}, 0)
    assert first.observation == "1+1?"
    assert env.step("2").info["success"] is True
