"""ALFWorld's engine: the household plays exactly as it does, snapshots, published game files, and what is missing."""

import gc
import importlib.util
import json
import pickle
import random
import sys

import pytest

from forethought.envs.adapters import alfworld
from forethought.envs.adapters.alfworld import AlfworldEnv, alfworld_tasks, published_names, read_game, to_pddl
from forethought.envs.check import check_env
from forethought.envs.household import Expert, Goal, HouseholdEnv, Room, household_tasks
from forethought.envs.registry import find_env
from forethought.errors import ConfigError, DataError, EnvError, MissingExtraError

HERE = all(importlib.util.find_spec(name) for name in ("alfworld", "textworld", "fast_downward"))
needs_alfworld = pytest.mark.skipif(not HERE, reason="needs the extra alfworld")

CONTENTS = {
    "countertop 1": ["apple 1", "mug 1", "knife 1"],
    "fridge 1": ["apple 2"],
    "microwave 1": [],
    "sinkbasin 1": [],
    "sidetable 1": ["desklamp 1"],
    "cabinet 1": [],
    "cabinet 10": [],
    "cabinet 9": ["mug 2"],
}
GOALS = {
    "pick_and_place_simple": ("mug", "sidetable"),
    "pick_clean_then_place_in_recep": ("mug", "cabinet"),
    "pick_heat_then_place_in_recep": ("apple", "countertop"),
    "pick_cool_then_place_in_recep": ("apple", "sidetable"),
    "pick_two_obj_and_place": ("apple", "sidetable"),
    "look_at_obj_in_light": ("mug", "desklamp"),
}


def task(family, wording=0):
    thing, place = GOALS[family]
    told = {"family": family, "object": thing, "receptacle": place, "wording": wording}
    return {"id": family, "contents": CONTENTS, "goal": told}


def test_problems_are_written_in_the_order_of_the_household():
    problem, names = to_pddl(Room(CONTENTS, Goal("pick_two_obj_and_place", "apple", "sidetable")))
    assert problem.count("(") == problem.count(")")
    assert [names[i] for i in sorted(names) if i[0] == "r"][:4] == [
        "cabinet 10",
        "cabinet 9",
        "cabinet 1",
        "countertop 1",
    ]
    assert "(inReceptacle o000_apple_1 r003_countertop_1)" in problem and "(openable r000_cabinet_10)" in problem
    assert "(toggleable o002_desklamp_1)" in problem and "(pickupable o002_desklamp_1)" not in problem
    assert "(canContain cabinetType mugType)" in problem and "(canContain fridgeType mugType)" in problem
    assert "(canContain microwaveType knifeType)" not in problem and "(not (= ?o ?p))" in problem


def test_published_ids_are_numbered_as_alfworld_does():
    ids = [
        "cabinet_bar_0",
        "cabinet_bar_1",
        "cabinet_bar_2",
        "mug_bar_7",
        "sink_bar_3_bar_sinkbasin",
        "agent1",
        "cabinettype",
    ]
    names = {
        "cabinet_bar_0": "cabinet 3",
        "cabinet_bar_1": "cabinet 2",
        "cabinet_bar_2": "cabinet 1",
        "mug_bar_7": "mug 1",
    }
    assert published_names(ids[::-1]) == {**names, "sink_bar_3_bar_sinkbasin": "sinkbasin 1"}


def test_a_missing_extra_says_what_to_install_and_what_to_use_instead(monkeypatch):
    monkeypatch.setattr(alfworld.importlib.util, "find_spec", lambda name: None)
    message = (
        "need alfworld, textworld, fast_downward: pip install 'forethought.alfworld.'.*cmake.*environment 'household'"
    )
    for start in (AlfworldEnv, lambda: find_env("alfworld")):
        with pytest.raises(MissingExtraError, match=message):
            start()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "holds no object"),
        ('{"grammar": ""}', "it has no pddl_domain, pddl_problem; give a game.tw-pddl file"),
    ],
)
def test_bad_game_files(tmp_path, content, message):
    file = tmp_path / "game.tw-pddl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message):
        read_game(str(file))


@needs_alfworld
class TestEngine:
    @pytest.mark.parametrize("family", list(GOALS))
    def test_the_household_plays_exactly_as_alfworld_does(self, family):
        """Observations, admissible commands, rewards and infos of whole episodes, with detours."""
        settings = {"rules": False, "max_steps": 45}
        ours, theirs = HouseholdEnv(**settings), AlfworldEnv(**settings)
        a, b = ours.reset(task(family)), theirs.reset(task(family))
        assert a == b
        expert, rng = Expert(ours), random.Random(family)
        while not a.done:
            command = expert.action() if rng.random() < 0.4 else rng.choice([*a.info["actions"], "dance"])
            a, b = ours.step(command), theirs.step(command)
            assert a == b, command
        assert a.info["success"] or a.truncated
        with pytest.raises(EnvError, match="after the end"):
            theirs.step("look")

    def test_also_slices_states_of_things_and_generated_rooms(self):
        ours, theirs = HouseholdEnv(rules=False), AlfworldEnv(rules=False)
        ours.reset(task("look_at_obj_in_light", 1))
        theirs.reset(task("look_at_obj_in_light", 1))
        commands = [
            "go to countertop 1",
            "take knife 1 from countertop 1",
            "slice apple 1 with knife 1",
            "examine knife 1",
        ]
        commands += [
            "move knife 1 to countertop 1",
            "take apple 1 from countertop 1",
            "examine apple 1",
            "go to fridge 1",
        ]
        commands += [
            "cool apple 1 with fridge 1",
            "examine apple 1",
            "go to sinkbasin 1",
            "clean apple 1 with sinkbasin 1",
        ]
        commands += [
            "examine apple 1",
            "go to microwave 1",
            "heat apple 1 with microwave 1",
            "examine apple 1",
            "help",
            "look",
        ]
        commands += [
            "move apple 1 to microwave 1",
            "open microwave 1",
            "move apple 1 to microwave 1",
            "close microwave 1",
        ]
        for command in commands:
            assert ours.step(command) == theirs.step(command), command
        for rooms in ("bathroom", "bedroom"):
            ours, theirs = HouseholdEnv(rooms=rooms), AlfworldEnv(rooms=rooms)
            assert ours.reset(None, 4) == theirs.reset(None, 4)
            assert ours.step("inventory") == theirs.step("inventory")

    def test_restore_is_exact_also_in_another_object(self):
        env = AlfworldEnv(rules=False)
        env.reset(task("pick_cool_then_place_in_recep"))
        for command in ["go to fridge 1", "open fridge 1", "dance"]:
            env.step(command)
        held, key = env.snapshot(), env.state_key()
        ahead = [
            "take apple 2 from fridge 1",
            "cool apple 2 with fridge 1",
            "go to sidetable 1",
            "move apple 2 to sidetable 1",
        ]
        first = [env.step(command) for command in ahead]
        assert first[-1].terminated and first[-1].info["success"] and env.state_key() != key
        env.restore(held)
        assert env.state_key() == key and [env.step(command) for command in ahead] == first
        other = AlfworldEnv(rules=False)
        fresh = other.snapshot()
        other.restore(pickle.loads(pickle.dumps(held)))
        assert other.state_key() == key and [other.step(command) for command in ahead] == first
        other.restore(fresh)
        assert other.state_key() is None
        with pytest.raises(EnvError, match="before reset"):
            other.step("look")

    def test_done_is_not_won(self):
        """Case H19, with a limit of 6."""
        win = ["go to countertop 1", "take mug 1 from countertop 1", "go to sidetable 1", "move mug 1 to sidetable 1"]
        env = AlfworldEnv(max_steps=6)
        ends = []
        for commands in (win, ["look"] * 6, ["look"] * 2 + win):
            env.reset(task("pick_and_place_simple"))
            steps = [env.step(c) for c in commands]
            ends.append((len(steps), steps[-1].terminated, steps[-1].truncated, steps[-1].info["success"]))
        assert ends == [(4, True, False, True), (6, False, True, False), (6, True, False, True)]

    def test_engines_are_used_again_and_the_process_is_left_as_it_was(self):
        argv = list(sys.argv)
        gc.collect()
        first = AlfworldEnv()
        first.reset(task("pick_and_place_simple"))
        engine = first.engine.env
        assert sys.argv == argv
        second = AlfworldEnv()
        second.reset(task("pick_and_place_simple"))
        assert second.engine.env is not engine  # two that are alive share nothing
        first.step("go to countertop 1")
        assert second.step("look").observation.startswith("You are in the middle of a room.")
        del first
        gc.collect()
        third = AlfworldEnv()
        third.reset(task("pick_two_obj_and_place"))
        assert third.engine.env is engine
        assert third.step("look").observation.startswith("You are in the middle of a room.")

    @pytest.mark.slow
    def test_by_name_and_through_the_checker(self):
        source = find_env("alfworld:mini,max_steps=5,rules=false")
        assert source.tasks(2, seed=3)[0]["id"] == household_tasks(1, 3, what=source().like.what)[0]["id"]
        report = check_env("alfworld:mini,max_steps=4", seeds=1, max_steps=5, call_limit=60)
        assert report.ok and report["portable"].status == "pass" and report.ended == 1, report.render()

    def test_published_games(self, tmp_path):
        """The published layout and form, with a game of our own in it: ids with _bar_, no table of names."""
        game = alfworld.to_game(Room(CONTENTS, Goal("pick_and_place_simple", "mug", "sidetable")))
        for old, name in game.pop("names").items():
            kind, _, number = name.partition(" ")
            game["pddl_problem"] = game["pddl_problem"].replace(old, f"{kind}_bar_{int(number):02d}")
        for split, folder, change in [
            ("valid_seen", "pick_and_place_simple-Mug-None-SideTable-1/trial_1", {}),
            ("valid_seen", "pick_and_place_with_movable_recep-Mug-1/trial_1", {}),
            ("valid_seen", "pick_and_place_simple-AppleSliced-None-SideTable-1/trial_1", {}),
            ("valid_seen", "pick_two_obj_and_place-Mug-None-SideTable-1/trial_1", {"solvable": False}),
        ]:
            place = tmp_path / "json_2.1.1" / split / folder
            place.mkdir(parents=True)
            (place / "game.tw-pddl").write_text(json.dumps({**game, **change}))
        (found,) = alfworld_tasks(str(tmp_path), 1, split="validation")
        assert found["goal"] == "pick_and_place_simple" and found["id"].startswith("alfworld/pick_and_place_simple-Mug")
        env = AlfworldEnv(games=str(tmp_path), rules=False)
        first = env.reset(found)
        assert first.info["goal"] == "pick_and_place_simple"
        assert "you see a cabinet 3, a cabinet 2, a cabinet 1, a countertop 1" in first.observation
        assert first.observation.endswith("Your task is to: put a mug in sidetable.")
        steps = [env.step(c) for c in ["go to countertop 1", "take mug 2 from countertop 1", "go to sidetable 1"]]
        assert not steps[-1].info["invalid"] and env.step("move mug 2 to sidetable 1").info["success"]
        with pytest.raises(DataError, match=r"n=2, but there are 1 games in .*alfworld-download"):
            alfworld_tasks(str(tmp_path), 2, split="validation")
        with pytest.raises(DataError, match=r"there is no folder train in .*leave games= out to play generated rooms"):
            find_env(f"alfworld:games={tmp_path}").tasks(1)
        with pytest.raises(ConfigError, match="split='valid'; one of|split='valid': one of"):
            alfworld_tasks(str(tmp_path), 1, split="valid")
