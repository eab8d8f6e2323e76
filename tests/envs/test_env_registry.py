"""Environments by name: settings read by type, tasks with seeds, and errors that say what to write."""

import importlib.util
import re

import pytest

from forethought.envs import registry
from forethought.envs.check import check_env, load_env
from forethought.envs.household import HouseholdEnv, room_of
from forethought.envs.registry import ENVS, find_env
from forethought.envs.sokoban import SokobanEnv, parse_level
from forethought.errors import ConfigError

OWN = """
from forethought.envs.sokoban import SokobanEnv

class Env(SokobanEnv):
    @staticmethod
    def tasks(n, seed, split):
        return [{"id": f"{split}-{i}", "prompt": "p", "level": "#PXO#", "seed": 7} for i in range(n)]

class Bare(SokobanEnv):
    pass

class Odd(SokobanEnv):
    tasks = ["a"]

text = "no factory"
"""


def test_settings_are_read_by_their_types():
    source = find_env("sokoban: boxes=2, size=[6,7], text=coordinates, rules=false, step_reward=-5e-2")
    assert source.settings == {"size": (6, 7), "boxes": 2, "text": "coordinates", "rules": False, "step_reward": -0.05}
    env = source()
    assert isinstance(env, SokobanEnv) and env.difficulty.size == (6, 7) and source() is not env
    assert find_env("sokoban:size=7").settings == {"size": 7} and find_env("sokoban").settings == {}
    for spec in ("household:mini,max_steps=9", "household:rooms=mini,max_steps=9", "household:[mini],max_steps=9"):
        assert find_env(spec).settings == {"rooms": ("mini",), "max_steps": 9}
    env = find_env("household:[kitchen,bathroom],goals=pick_two_obj_and_place")()
    assert isinstance(env, HouseholdEnv)
    assert env.what.rooms == ("kitchen", "bathroom") and env.what.goals == ("pick_two_obj_and_place",)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "sokobann",
            "environment 'sokobann': no such name; did you mean 'sokoban'?; for your own write 'file.py:NAME'",
        ),
        ("zzz", "no such name; one of sokoban, household,"),
        ("housold:mini", "there is no module 'housold'; did you mean 'household'?"),
        ("sokoban:box=2", "box: unknown setting; did you mean 'boxes'?"),
        ("sokoban:boxes=two", "environment 'sokoban:boxes=two': boxes='two': give a whole number"),
        ("sokoban:boxes=9", "boxes=9: give 1 to 6"),
        ("sokoban:text=html", "text='html'"),
        ("sokoban:2", "'2': write name=value"),
        ("household:mini,kitchen", "'kitchen': write name=value"),
        ("household:kitchn", "did you mean 'kitchen'?"),
        ("gym", "environment 'gym': make is missing; write gym:make=..."),
        ("nowhere.py:Env", "file nowhere.py does not exist"),
    ],
)
def test_errors_say_what_to_write(spec, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_env(spec)


def test_tasks_of_the_worlds_start_what_they_say():
    source = find_env("sokoban:boxes=2,size=7,text=coordinates")
    tasks = source.tasks(3, seed=5, split="heldout")
    assert tasks == source.tasks(4, seed=5, split="heldout")[:3] and len({t["seed"] for t in tasks}) == 3
    for task in tasks:
        level, start = parse_level(task["level"])
        assert source().reset(task, task["seed"]).observation.endswith(level.text(start, "coordinates"))
        assert len(start.boxes) == 2 and task["prompt"].startswith("You are the player in a room of cells")
    source = find_env("household:mini,rules=false")
    for task in source.tasks(3, split="validation"):
        assert task["split"] == "validation"
        assert source().reset(task, task["seed"]).observation == room_of(task).introduction()
    with pytest.raises(ConfigError, match="n=0: give at least 1"):
        source.tasks(0)


def test_an_environment_of_ones_own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    source = find_env(f"{file}:Env")
    tasks = source.tasks(2, split="validation")
    assert [t["id"] for t in tasks] == ["validation-0", "validation-1"] and tasks[0]["seed"] == 7
    assert source().reset(tasks[0], 7).observation.endswith("#\tP\tX\tO\t#")
    bare = find_env(f"{file}:Bare")
    train, held = bare.tasks(3), bare.tasks(3, split="heldout")
    assert set(train[0]) == {"id", "prompt", "seed"} and train[0]["id"] == "train/0/0"
    assert len({t["seed"] for t in train + held}) == 6 and train == bare.tasks(5)[:3]
    first = bare().reset(train[0], train[0]["seed"]).observation
    assert first == bare().reset(None, train[0]["seed"]).observation
    with pytest.raises(ConfigError, match=r"its tasks are no function; make it tasks\(n, seed, split\)"):
        find_env(f"{file}:Odd")
    with pytest.raises(ConfigError, match=r"'no factory' \(str\) cannot be called to make an environment"):
        find_env(f"{file}:text")


def test_gymnasium_by_id():
    pytest.importorskip("gymnasium")
    env = find_env("gym:FrozenLake-v1,max_turns=2")()
    env.reset(None, 1)
    assert not env.step("0").done and env.step("0").truncated
    with pytest.raises(ConfigError, match="Gymnasium environment 'Nope-v9'"):
        find_env("gym:Nope-v9")


def test_the_checker_takes_names():
    for spec in ("sokoban:boxes=2,max_steps=8", "household:mini,max_steps=8"):
        report = check_env(spec, seeds=1, max_steps=10)
        assert report.ok and report.env == spec and report["portable"].status == "pass"
    assert check_env(load_env("sokoban:max_steps=4"), seeds=1).ok
    assert check_env("sokoban:boxes=9").broken() == ["load"]
    if importlib.util.find_spec("alfworld") is None:
        assert "pip install 'forethought[alfworld]'" in check_env("alfworld")["load"].message


def test_entries_name_what_exists():
    for name, entry in ENVS.items():
        assert entry.line and (entry.tasks is None or callable(registry.load_object(entry.tasks, name)))
        assert callable(registry.load_object(entry.make, name))
