"""A world model behind the Env protocol: what it is shown, what is read, exact restore, what cannot be read."""

import json
import re

import pytest

from forethought.cli import main
from forethought.envs.check import check_env
from forethought.envs.env import Step
from forethought.envs.registry import find_env
from forethought.envs.world_model import (
    Context,
    Prediction,
    WorldModel,
    WorldModelEnv,
    WorldModelSettings,
    describe_world_model,
    prediction_messages,
    prediction_text,
    read_prediction,
)
from forethought.errors import ConfigError, EnvError
from forethought.learn.episodes import EpisodeRules, Players, episode_metrics
from forethought.models.chat import ChatRenderer
from forethought.models.engine import Sampling
from forethought.models.load import save_pretrained
from forethought.models.scripted_engine import ScriptedEngine
from forethought.models.tiny import byte_tokenizer, tiny_model


class Corridor:
    """Cells 0 to 3; only where it begins is asked of it."""

    def reset(self, task=None, seed=0):
        return Step("cell 0")

    def step(self, action):
        raise AssertionError("the real world is not to be stepped")

    def snapshot(self): ...

    def restore(self, snapshot): ...

    def state_key(self):
        return None


def knows(before, _):
    """A perfect model of the corridor, that writes no tags for the action "odd"."""
    action = re.search(r"Next action: (.*)", before)[1].strip()
    cell = int(re.findall(r"cell (\d)", before)[-1]) + {"r": 1, "l": -1}.get(action, 0)
    if action == "odd":
        return "<next_state>cell 1"
    return "<think>to <next_state>cell 9</next_state></think>" + prediction_text(
        Prediction(f"cell {max(cell, 0)}", True if cell == 3 else None)
    )


def model(script=knows, **settings):
    renderer = ChatRenderer(byte_tokenizer())
    sampling = Sampling(max_tokens=200, temperature=0.0)
    return WorldModel(ScriptedEngine(script, renderer), renderer, settings.pop("context", 5000), sampling, **settings)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<next_state> a\nb </next_state>", Prediction("a\nb")),
        ("<next_state>a</next_state> or <next_state>b</next_state><end>lost</end>", Prediction("b", False)),
        ("<think><next_state>a</next_state></think>then <next_state>b</next_state>", Prediction("b")),
        ("<end>won</end><next_state>a</next_state>", Prediction("a")),
        ("<think><next_state>a</next_state>", None),
        ("<next_state>a", None),
        ("<next_state> </next_state>", None),
        ("cell 3", None),
    ],
)
def test_what_is_read(text, want):
    assert read_prediction(text) == want
    if want:
        assert read_prediction(prediction_text(want)) == want


def test_what_the_model_is_shown():
    context = Context("begin", (("a", "first cell"), ("b", "two")))
    (message,) = prediction_messages(context.seen(1), "c")
    assert message["content"].endswith("It begins:\nbegin\n\nAction: b\ntwo\n\nNext action: c")
    assert "first cell" not in message["content"] and context.current == "two"


def test_an_episode_in_the_model():
    env = WorldModelEnv(model(), Corridor, step_reward=-0.1)
    assert env.reset().observation == "cell 0"
    assert env.step("r") == Step("cell 1", -0.1, False, False, {"success": False, "unparsable": False})
    kept = env.snapshot()
    assert env.step("r").observation == "cell 2"
    assert env.step("r") == Step("cell 3", 1.0, True, False, {"success": True, "unparsable": False})
    with pytest.raises(EnvError, match="step after the end"):
        env.step("r")
    env.restore(kept)
    assert env.step("l").observation == "cell 0" and env.model.asked == 4
    env.restore(kept)
    assert env.step("r").observation == "cell 2" and env.model.asked == 4  # remembered


def test_what_cannot_be_read_is_counted_and_ends_the_episode():
    world = model()
    env = WorldModelEnv(world, Corridor)
    env.reset()
    step = env.step("odd")
    assert step.truncated and not step.terminated and step.info == {"success": False, "unparsable": True}
    assert (world.asked, world.unparsable) == (1, 1)
    with pytest.raises(ConfigError, match="max_steps=0"):
        WorldModelEnv(world, Corridor, max_steps=0)


def test_old_turns_are_left_out_where_they_do_not_fit():
    seen = []

    def script(before, _):
        seen.append(before.count("Action: "))
        return "<next_state>cell 1</next_state>"

    room = len(prediction_messages(Context("cell 0", (("r", "cell 1"),)), "r")[0]["content"]) + 2 + 200
    env = WorldModelEnv(model(script, context=room), Corridor)
    env.reset()
    for _ in range(3):
        env.step("r")
    assert seen == [0, 1, 1]


def test_the_checker_finds_no_broken_rule():
    report = check_env(lambda: WorldModelEnv(model(), Corridor, max_steps=5), actions=["r", "l", "odd"])
    assert report.ok, report.render()


def test_a_policy_cannot_tell_it_from_the_world_and_all_step_in_one_call():
    world = model()
    calls = []
    extend = world.engine.extend
    world.engine.extend = lambda leaves, *args, **kwargs: calls.append(len(leaves)) or extend(leaves, *args, **kwargs)
    policy = ScriptedEngine(lambda before, _: "r", world.renderer)
    players = Players(policy, world.renderer, lambda: WorldModelEnv(world, Corridor), EpisodeRules(), 1000)
    tasks = [({"id": "a"}, 3), ({"id": "b"}, 1)]
    episodes = [e for group in players.play(tasks, Sampling()) for e in group]
    assert [e.stop for e in episodes] == ["won"] * 4 and calls == [1, 1, 1]  # equal states are asked once
    odd = Players(
        ScriptedEngine(lambda before, _: "odd", world.renderer), world.renderer, players.make, EpisodeRules(), 1000
    )
    episodes = [e for group in odd.play(tasks, Sampling()) for e in group]
    assert {e.stop for e in episodes} == {"unparsable"} and not any(e.failed for e in episodes)
    assert episode_metrics(episodes)["stop/unparsable"] == 1


def test_a_folder_as_an_environment(tmp_path, capsys, monkeypatch):
    """An untrained model writes no tags: every episode ends at its first step, and says why."""
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer(context=1024)
    save_pretrained(tiny_model(len(tokenizer), width=16, layers=1, heads=2, context=1024), tokenizer, tmp_path / "wm")
    with pytest.raises(ConfigError, match="world_model.json is not there; it says which environment"):
        find_env("wm:wm")
    settings = WorldModelSettings(env="sokoban:rules=false", max_new_tokens=4, max_steps=5)
    describe_world_model("wm", settings)
    source = find_env("wm:wm")
    (task,) = source.tasks(1, split="heldout")
    assert task["id"].startswith("sokoban/") and source().reset(task).observation.startswith("#")
    command = ["eval", "--env", "wm:wm", "--model", "wm", "--tasks", "3", "--max-new-tokens", "2", "--dtype", "fp32"]
    assert main([*command, "--out", "run"]) == 0
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert found["coverage"]["stops"] == {"unparsable": 3} and found["coverage"]["failed"] == 0
    assert "unparsable 3" in capsys.readouterr().err
    (tmp_path / "wm" / "world_model.json").write_text('{"env": "wm:wm"}')
    with pytest.raises(ConfigError, match="a world model begins in a real environment"):
        find_env("wm:wm")
