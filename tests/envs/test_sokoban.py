"""Sokoban: levels with known solutions, exact texts, exact distances, dead squares, frozen boxes, and the environment."""

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.envs.check import RULES, check_env
from forethought.envs.env import Env
from forethought.envs.pools import split_of
from forethought.envs.sokoban import (
    ACTIONS,
    Difficulty,
    SokobanEnv,
    State,
    generate,
    oracle,
    parse_level,
    sokoban_tasks,
    solve,
)
from forethought.envs.sokoban.generate import RULES as INSTRUCTIONS
from forethought.envs.sokoban.generate import canonical
from forethought.envs.sokoban.level import reach
from forethought.envs.sokoban.solver import SearchLimit, dead_squares, distances, is_stuck
from forethought.errors import ConfigError, DataError, EnvError

ROW = "#####\n#PXO#\n#####"
CORNER = "######\n#X___#\n#_P_O#\n######"
TWO = "#######\n#P_X_O#\n#__X_O#\n#_____#\n#######"
# Microban 1 by David W. Skinner: 33 moves, 8 pushes.
MICROBAN = """
####
# .#
#  ###
#*@  #
#  $ #
#  ###
####
"""


def brute_force(level, start):
    """Fewest moves by plain breadth-first search without any pruning; None where there is no solution."""
    queue, far = deque([start]), {start: 0}
    while queue:
        state = queue.popleft()
        if level.solved(state.boxes):
            return far[state]
        for action in range(4):
            after = level.move(state, action)
            if after not in far:
                far[after] = far[state] + 1
                queue.append(after)
    return None


def play(level, state, actions):
    for action in actions:
        state = level.move(state, ACTIONS.index(action))
    return state


class TestLevels:
    def test_the_row_of_the_specification(self):
        level, state = parse_level("# P X O #")
        assert level.text(level.move(state, 3)) == "#\t_\tP\t√\t#"
        assert level.move(state, 2) is state and level.move(state, 0) is state
        assert level.solved(level.move(state, 3).boxes) and not level.solved(state.boxes)

    def test_texts(self):
        level, state = parse_level("######\n#OX_P#\n#_#_X#\n#O___#\n######")
        grid = "#\t#\t#\t#\t#\t#\n#\tO\tX\t_\tP\t#\n#\t_\t#\t_\tX\t#\n#\tO\t_\t_\t_\t#\n#\t#\t#\t#\t#\t#"
        assert level.text(state) == grid
        told = "player r1c4\nbox r1c2 r2c4\ntarget r1c1 r3c1\nwalls r2c2\nsize 5x6"
        assert level.text(state, "coordinates") == told
        moved = play(level, state, ["left", "left"])
        assert level.rows(moved).split("\n")[1] == "#√P__#"
        assert level.text(moved, "coordinates").startswith("player r1c2\nbox r1c1 r2c4\n")
        on_target = parse_level("#####\n#SX_#\n#_O_#\n#_X_#\n#####")
        assert on_target[0].rows(on_target[1]).split("\n")[1] == "#SX_#"
        row, start = parse_level(ROW)
        assert row.text(start, "coordinates").endswith("walls none\nsize 3x5")

    def test_pushes_into_walls_and_boxes_change_nothing(self):
        level, state = parse_level("#######\n#PXX_O#\n#____O#\n#######")
        assert level.move(state, 3) is state
        level, state = parse_level("#####\n#OPX#\n#####")
        assert level.move(state, 3) is state

    def test_both_symbol_sets_and_all_spacings_read_the_same(self):
        level, state = parse_level(MICROBAN)
        assert level.rows(state).split("\n")[3] == "#√P__#"
        again = parse_level(level.text(state))
        assert again == (level, state) == parse_level(level.rows(state))
        assert hash(again[0]) == hash(level) and pickle.loads(pickle.dumps(level)) == level

    def test_what_the_player_cannot_get_to_is_wall(self):
        level, state = parse_level("########\n#PXO##_#\n########")
        assert level.rows(state).split("\n")[1] == "#PXO####"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("#####\n#PX?#", r"row 1, column 3: '\?' is no symbol; use # _ O X √ P S"),
            ("#XO#", "0 players"),
            ("#PPXO#", "2 players"),
            ("#PXXO#", "2 boxes and 1 targets"),
            ("#P___#", "0 boxes and 0 targets; give as many, and at least one"),
            ("#P_#XO#", "the player cannot get to the box at r0c4"),
            ("", "level of 0 rows"),
            ("#" * 51, "51 columns"),
        ],
    )
    def test_bad_levels_name_the_place(self, text, message):
        with pytest.raises(DataError, match=message):
            parse_level(text)

    def test_predictions_are_read_back_only_when_they_fit_the_level(self):
        level, state = parse_level(CORNER)
        for kind in ("grid", "coordinates"):
            assert level.read(level.text(state, kind)) == state
        assert level.read(level.text(state, "coordinates").replace("r2c2", "r2c3")) == State(15, (7,))
        wrong = ["", "player", "#####", level.text(state).replace("O", "_", 1), "player r1c1\nbox r1c1" + level._still]
        wrong += [
            level.text(state, "coordinates").replace("size 4x6", "size 6x6"),
            "player r0c0\nbox r1c1" + level._still,
        ]
        wrong += [level.text(state) + "\nand more", level.text(state, "coordinates") + "\n", "x" * 100_000]
        assert [level.read(text) for text in wrong[:-2]] == [None] * (len(wrong) - 2)
        assert level.read(wrong[-1]) is None and level.read(wrong[-2]) == state  # blanks at the ends are forgiven


class TestSolver:
    @pytest.mark.parametrize(
        ("text", "moves", "pushes"),
        [
            (ROW, 1, 1),
            ("#######\n#PX__O#\n#######", 3, 3),
            ("#####\n#O__#\n#_XP#\n#___#\n#####", 4, 2),  # push left, walk down and left, push up
            (TWO, 8, 4),  # 3 to store the upper box, 3 to get behind the lower one, 2 to store it
            (MICROBAN, 33, 8),
        ],
    )
    def test_known_lengths(self, text, moves, pushes):
        level, start = parse_level(text)
        shortest = solve(level, start)
        assert shortest is not None and shortest.moves == moves == brute_force(level, start)
        assert level.solved(play(level, start, shortest.actions).boxes)
        fewest = solve(level, start, "pushes")
        assert fewest is not None and fewest.pushes == pushes
        assert level.solved(play(level, start, fewest.actions).boxes)
        assert shortest.pushes >= pushes and fewest.moves >= moves
        assert distances(level, len(start.boxes))[start] == moves

    def test_no_solution_and_solved_already(self):
        level, start = parse_level(CORNER)
        assert solve(level, start) is None and solve(level, start, "pushes") is None
        assert start not in distances(level, 1)
        level, start = parse_level(ROW)
        done = level.move(start, 3)
        assert solve(level, done).actions == () and solve(level, done, "pushes").moves == 0

    def test_limits_and_names(self):
        level, start = parse_level(MICROBAN)
        for metric in ("moves", "pushes"):
            with pytest.raises(SearchLimit, match="max_states=2 states; raise max_states"):
                solve(level, start, metric, max_states=2)
        with pytest.raises(SearchLimit, match="more than max_states=10 solvable states"):
            distances(level, 2, 10)
        with pytest.raises(ConfigError, match="metric='steps': 'moves' or 'pushes'"):
            solve(level, start, "steps")

    def test_dead_squares(self):
        level, _ = parse_level("#######\n#P____#\n#__X__#\n#____O#\n#######")
        names = sorted(map(level.name, dead_squares(level)))
        # A box at the upper or the left wall stays there; the target is in the corner of the other two.
        assert names == ["r1c1", "r1c2", "r1c3", "r1c4", "r1c5", "r2c1", "r3c1"]
        alive = level.floor - dead_squares(level)
        for cell in level.floor:
            boxes = (cell,)
            solvable = any(brute_force(level, State(player, boxes)) is not None for player in level.floor - set(boxes))
            assert solvable == (cell in alive)

    @pytest.mark.parametrize(
        ("text", "stuck"),
        [
            (CORNER, True),  # one box in a corner
            ("######\n#_XX_#\n#_P__#\n#O__O#\n######", True),  # two at a wall hold each other
            ("######\n#____#\n#_XX_#\n#_XX_#\n#P_OO#\n#__OO#\n######", True),  # a square of four
            ("######\n#_√√_#\n#_P__#\n#X__O#\n######", True),  # the third is in a corner
            ("######\n#_√√_#\n#_P__#\n#__XO#\n######", False),  # frozen, but on their targets
            ("######\n#____#\n#_XX_#\n#_P__#\n#O__O#\n######", False),
            (TWO, False),
        ],
    )
    def test_stuck(self, text, stuck):
        level, start = parse_level(text)
        assert is_stuck(level, start.boxes) is stuck
        assert (brute_force(level, start) is None) == stuck

    @settings(max_examples=25, deadline=None)
    @given(seed=st.integers(0, 10_000), boxes=st.integers(1, 2))
    def test_stuck_is_sound_and_distances_are_exact(self, seed, boxes):
        level = generate(seed, Difficulty((5, 6), boxes, 2, 12)).level
        table = distances(level, boxes)
        rng = random.Random(seed)
        for _ in range(12):
            cells = rng.sample(sorted(level.floor), boxes + 1)
            state = State(cells[0], tuple(sorted(cells[1:])))
            exact = brute_force(level, state)
            assert table.get(state) == exact
            found = solve(level, state)
            assert (found and found.moves) == exact
            if is_stuck(level, state.boxes):
                assert exact is None


class TestGenerator:
    @pytest.mark.parametrize(
        "difficulty",
        [Difficulty(), Difficulty((7, 7), 1, 5, 12), Difficulty((6, 8), 2, 8, 20), Difficulty((9, 9), 3, 10, 25)],
        ids=str,
    )
    def test_difficulty_is_what_was_asked_for(self, difficulty):
        seen = set()
        for seed in range(12):
            room = generate(seed, difficulty)
            level, start = room.level, room.start
            assert (level.height, level.width) == difficulty.size and len(start.boxes) == difficulty.boxes
            assert difficulty.min_moves <= room.moves <= difficulty.max_moves
            assert solve(level, start).moves == room.moves
            assert reach(level, start.player, ()) == level.floor and len(level.targets) == difficulty.boxes
            assert parse_level(level.rows(start)) == (level, start)
            seen.add(level.rows(start))
        assert len(seen) == 12

    def test_a_seed_gives_this_room_for_ever(self):
        text = "\n\n".join(generate(seed).level.rows(generate(seed).start) for seed in range(50))
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == "c47a686842bf4614"
        assert generate(0).level.rows(generate(0).start) == "######\n#_O__#\n#__X_#\n#P___#\n####_#\n######"

    @pytest.mark.parametrize("hash_seed", ["0", "1"])
    def test_and_so_does_another_process(self, hash_seed):
        program = (
            "from forethought.envs.sokoban import *\n"
            "print([generate(s, Difficulty((7, 7), 2, 5, 15)).level.rows(generate(s, Difficulty((7, 7), 2, 5, 15)).start)"
            " for s in range(5)])"
        )
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=env)
        here = [generate(s, Difficulty((7, 7), 2, 5, 15)) for s in range(5)]
        assert done.stdout.strip() == repr([room.level.rows(room.start) for room in here]), done.stderr

    def test_what_cannot_be_made_is_refused(self):
        for settings_, message in [
            (dict(size=(3, 6)), "size=.*give rows and columns from 4 to 16"),
            (dict(boxes=0), "boxes=0: give 1 to 6"),
            (dict(min_moves=9, max_moves=5), "give 1 <= min_moves <= max_moves"),
            (dict(size=(4, 4), boxes=2), "too many for the 4 inner cells"),
        ]:
            with pytest.raises(ConfigError, match=message):
                Difficulty(**settings_)
        with pytest.raises(
            ConfigError, match="no Sokoban room of size 4x4 with boxes=1 and 30 to 40 moves.*raise size"
        ):
            generate(0, Difficulty((4, 4), 1, 30, 40))

    def test_tasks_of_the_splits_never_share_a_room_not_even_mirrored(self):
        splits = {split: sokoban_tasks(60, seed=3, split=split) for split in ("train", "validation", "heldout")}
        keys = {split: {canonical(task["level"]) for task in tasks} for split, tasks in splits.items()}
        assert all(len(k) == 60 for k in keys.values())
        assert not keys["train"] & keys["heldout"] and not keys["train"] & keys["validation"]
        assert all(split_of("sokoban", key) == split for split, ks in keys.items() for key in ks)
        turned = ["#####\n#PXO#\n#####", "#####\n#OXP#\n#####", "###\n#P#\n#X#\n#O#\n###", "###\n#O#\n#X#\n#P#\n###"]
        assert len(set(map(canonical, turned))) == 1
        task = splits["heldout"][0]
        assert json.loads(json.dumps(task)) == task and task["prompt"] == INSTRUCTIONS
        level, start = parse_level(task["level"])
        assert solve(level, start).moves == task["moves"] == len(task["solution"])
        assert solve(level, start, "pushes").pushes == task["pushes"]
        assert sokoban_tasks(5, seed=3) == splits["train"][:5]
        assert sokoban_tasks(5, seed=4) != splits["train"][:5]


class TestEnvironment:
    def test_an_episode_to_the_letter(self):
        env = SokobanEnv(rules=False)
        assert isinstance(env, Env)
        first = env.reset({"id": "row", "level": "######\n#PX_O#\n######"})
        assert first.observation == "#\t#\t#\t#\t#\t#\n#\tP\tX\t_\tO\t#\n#\t#\t#\t#\t#\t#"
        assert first.info == {"actions": ["up", "down", "left", "right"]} and first.reward == 0 and not first.done
        blocked = env.step("up")
        assert blocked.observation == first.observation and blocked.reward == pytest.approx(-0.1)
        assert blocked.info == {
            "actions": ["up", "down", "left", "right"],
            "success": False,
            "invalid": False,
            "effective": False,
            "family": "blocked",
            "steps": 1,
            "invalid_actions": 0,
        }
        pushed = env.step("<think>not up, right</think> <action> Right </action>")
        assert pushed.observation.split("\n")[1] == "#\t_\tP\tX\tO\t#"
        assert pushed.info["family"] == "push" and pushed.info["effective"] and pushed.reward == pytest.approx(-0.1)
        invalid = env.step("I go right")
        text = "That is no action: write up, down, left or right.\n" + pushed.observation
        assert invalid.observation == text and invalid.reward == pytest.approx(-0.2)
        assert invalid.info["invalid"] and invalid.info["invalid_actions"] == 1 and invalid.info["steps"] == 3
        won = env.step("RIGHT")
        assert won.observation.split("\n")[1] == "#\t_\t_\tP\t√\t#"
        assert (won.reward, won.terminated, won.truncated) == (10.0, True, False)
        assert won.info["success"] and won.info["family"] == "store"
        with pytest.raises(EnvError, match="after the end"):
            env.step("left")
        with pytest.raises(EnvError, match="before reset"):
            SokobanEnv().step("up")

    def test_returns_of_the_paper(self):
        """Solved at step 6: 9.5; unsolved after 30: -2.9."""
        env = SokobanEnv(max_steps=30)
        task = {"level": "#######\n#P_X_O#\n#######"}
        env.reset(task)
        rewards = [env.step(a).reward for a in ["left", "left", "up", "right", "right", "right"]]
        assert sum(rewards) == pytest.approx(9.5) and rewards[-1] == 10
        env.reset(task)
        rewards = [env.step("left").reward for _ in range(30)]
        assert sum(rewards) == pytest.approx(-2.9) and rewards[-1] == 0
        env = SokobanEnv(box_reward=1.0)
        env.reset({"level": "#######\n#PXO_O#\n#__X__#\n#_____#\n#######"})
        assert env.step("right").reward == pytest.approx(0.9)
        assert env.step("right").reward == pytest.approx(-1.1)

    def test_done_is_not_won(self):
        """Case H19: limit 30; won at 12, never, won exactly at 30."""
        task = {"level": "#######\n#P_X_O#\n#######"}
        ends = []
        for idle, win in ((9, True), (30, False), (27, True)):
            env = SokobanEnv(max_steps=30)
            env.reset(task)
            steps = [env.step(a) for a in ["left"] * idle + ["right"] * 3 * win]
            assert not any(s.done for s in steps[:-1])
            ends.append((len(steps), steps[-1].terminated, steps[-1].truncated, steps[-1].info["success"]))
        assert ends == [(12, True, False, True), (30, False, True, False), (30, True, False, True)]

    def test_an_episode_of_nothing_but_nonsense_ends(self):
        env = SokobanEnv(max_steps=5)
        env.reset(None, 1)
        steps = [env.step(text) for text in ["", "<action>", "go\nup", "x" * 100_000, "<action>up</action>" * 2]]
        assert [s.info["invalid"] for s in steps] == [True] * 5
        assert steps[-1].truncated and not steps[-1].terminated and steps[-1].info["invalid_actions"] == 5
        assert sum(s.reward for s in steps) == pytest.approx(4 * -0.2 - 0.1)

    def test_stuck_ends_the_episode_only_on_request(self):
        task = {"level": "######\n#_P__#\n#_X_O#\n#____#\n######"}
        for end in (False, True):
            env = SokobanEnv(end_when_stuck=end)
            env.reset(task)
            step = env.step("down")
            assert (step.terminated, step.truncated, step.info["success"]) == (end, False, False)
            assert step.reward == (0 if end else -0.1)

    def test_rules_come_first_and_fit_the_text(self):
        grid, coordinates = SokobanEnv().reset(None, 5), SokobanEnv(text="coordinates").reset(None, 5)
        bare = SokobanEnv(rules=False).reset(None, 5)
        assert grid.observation == f"{INSTRUCTIONS}\n\n{bare.observation}"
        assert "r2c3 is row 2" in coordinates.observation and "\n\nplayer r" in coordinates.observation

    @pytest.mark.parametrize(
        ("settings_", "message"),
        [
            (dict(max_steps=0), "max_steps=0: give at least 1"),
            (dict(text="json"), "text='json': 'grid' or 'coordinates'"),
            (dict(invalid_penalty=-1), "invalid_penalty=-1: give 0 or more"),
            (dict(success_reward=float("nan")), "success_reward=nan: give a finite number"),
            (dict(size=2), "give rows and columns"),
        ],
    )
    def test_settings_are_checked_when_it_is_made(self, settings_, message):
        with pytest.raises(ConfigError, match=message):
            SokobanEnv(**settings_)

    def test_a_solved_level_is_no_task(self):
        with pytest.raises(DataError, match="task 't': its level is solved already"):
            SokobanEnv().reset({"id": "t", "level": "#P√#"})

    @settings(max_examples=40, deadline=None)
    @given(
        seed=st.integers(0, 500),
        actions=st.lists(st.sampled_from([*ACTIONS, "jump", "<action>up</action>"]), max_size=14),
        at=st.integers(0, 14),
        text=st.sampled_from(["grid", "coordinates"]),
        boxes=st.integers(1, 2),
    )
    def test_restore_is_exact(self, seed, actions, at, text, boxes):
        env = SokobanEnv(boxes=boxes, max_moves=16, text=text, end_when_stuck=boxes == 2)
        env.reset(None, seed)

        def go(some):
            out = []
            for action in some:
                if out and out[-1].done:
                    break
                out.append(env.step(action))
            return out

        before = go(actions[:at])
        if before and before[-1].done:
            return
        held, key = env.snapshot(), env.state_key()
        after = go(actions[at:])
        env.restore(pickle.loads(pickle.dumps(held)))
        assert env.state_key() == key and env.steps == len(before)
        assert go(actions[at:]) == after
        other = SokobanEnv(boxes=boxes, max_moves=16, text=text, end_when_stuck=boxes == 2)
        other.restore(held)
        assert other.state_key() == key

    def test_the_key_is_the_state_not_the_way_to_it(self):
        env = SokobanEnv()
        assert env.state_key() is None
        env.reset({"level": "#####\n#P__#\n#_X_#\n#__O#\n#####"})
        key = env.state_key()
        env.step("down")
        assert env.state_key() != key
        env.step("up")
        assert env.state_key() == key == "#####\n#P__#\n#_X_#\n#__O#\n#####"

    def test_it_passes_the_checker(self):
        report = check_env(SokobanEnv, max_steps=20)
        assert {f.rule: f.status for f in report.findings} == dict.fromkeys(RULES, "pass")
        tasks = sokoban_tasks(2, split="heldout")
        assert check_env("forethought.envs.sokoban:SokobanEnv", tasks=tasks, max_steps=20).ok


class TestOracle:
    def setup_method(self):
        self.level, self.state = parse_level("######\n#P___#\n#_X_O#\n#____#\n######")

    def test_best_actions_and_plan(self):
        assert oracle.moves_left(self.level, self.state) == 3
        assert oracle.best_actions(self.level, self.state) == ["down"]
        assert oracle.plan(self.level, self.state) == ["down", "right", "right"]
        lost = parse_level(CORNER)
        assert oracle.moves_left(*lost) is None and oracle.best_actions(*lost) == [] and oracle.plan(*lost) is None
        solved = play(self.level, self.state, ["down", "right", "right"])
        assert oracle.plan(self.level, solved) == [] and oracle.best_actions(self.level, solved) == []

    def test_quality_of_actions(self):
        def quality(state, action):
            return oracle.quality(self.level, state, action)

        assert quality(self.state, "down") == "best" and quality(self.state, "up") == "blocked"
        assert quality(self.state, "right") == "wasted"
        beside = play(self.level, self.state, ["down", "right"])
        assert quality(beside, "right") == "solves"
        above = play(self.level, self.state, ["right"])
        assert quality(above, "down") == "ruins"  # the box comes to the bottom wall, the target is not there
        assert quality(play(self.level, above, ["down"]), "up") == "lost"
        with pytest.raises(KeyError, match="'jump' is no action"):
            quality(self.state, "jump")

    def test_differences(self):
        def told(actions, action):
            before = play(self.level, self.state, actions)
            return oracle.difference(self.level, before, oracle.next_state(self.level, before, action))

        assert told([], "up") == "No changes."
        assert told([], "down") == "The player is now at r2c1."
        assert told(["down"], "right") == "The player is now at r2c2. A box moved from r2c2 to r2c3."
        assert told(["down", "right"], "right") == (
            "The player is now at r2c3. A box moved from r2c3 to r2c4 onto a target. The room is solved."
        )
        assert told(["right"], "down").endswith("A box moved from r2c2 to r3c2. A box is stuck.")

    def test_critiques_are_exact(self):
        right = oracle.next_state(self.level, self.state, "down")
        good = oracle.critique(self.level, self.state, "down", self.level.text(right))
        assert good.correct and good.hint == "Yes, down puts me at r2c1 with the box at r2c2."
        bad = oracle.critique(self.level, self.state, "right", State(9, (13,)))
        assert not bad.correct
        assert bad.hint == "Wait, after right I would be at r1c2, not r1c3 and the box would be at r2c2, not r2c1."
        none = oracle.critique(self.level, self.state, "up", "no idea")
        assert not none.correct and none.hint.startswith("Wait, I have not worked out what happens: up puts me at r1c1")

    def test_large_rooms_are_searched(self, monkeypatch):
        monkeypatch.setattr(oracle, "TABLE_STATES", 5)
        oracle._table.cache_clear()
        assert oracle._table(self.level, 1) is None and oracle.moves_left(self.level, self.state) == 3
        assert oracle.plan(self.level, self.state) == ["down", "right", "right"]
        oracle._table.cache_clear()
