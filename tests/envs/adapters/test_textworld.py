"""TextWorld's generated games: texts, commands, winning, exact restore, and what is missing."""

import importlib.util
import json
import pickle
from pathlib import Path

import pytest

from forethought.envs.adapters import textworld
from forethought.envs.adapters.textworld import TextWorldEnv, make_game
from forethought.envs.check import check_env
from forethought.envs.registry import find_env
from forethought.errors import ConfigError, DataError, EnvError, MissingExtraError

needs_textworld = pytest.mark.skipif(importlib.util.find_spec("textworld") is None, reason="needs the extra textworld")


def test_a_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr(textworld.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'forethought\[textworld\]'.*'household' needs no extra"):
        TextWorldEnv()


def test_the_interpreters_own_lines_are_taken_off():
    text = "You win.\n\n\n*** The End ***\n\nWould you like to RESTART, RESTORE a saved game, QUIT?\n>   -= Attic =-0/1"
    assert TextWorldEnv._text(text) == "You win.\n\n\n*** The End ***"
    assert TextWorldEnv._text("A room.\n\n>          -= Attic =-0/1") == "A room."


@needs_textworld
class TestGames:
    @pytest.fixture
    def solution(self):
        """The shortest solution that the package gives for the game of seed 5."""
        env = TextWorldEnv()
        env.reset(None, 5)
        data = json.loads(Path(make_game(env.what, *env.generated)).with_suffix(".json").read_text())
        return data["metadata"]["walkthrough"]

    def test_the_solution_wins(self, solution):
        env = TextWorldEnv(rules=False)
        first = env.reset(None, 5)
        assert (
            first.observation[:4] not in ("____", "    ")
            and "-= " in first.observation
            and "$$" not in first.observation
        )
        assert 1 <= len(solution) <= 6 and solution[0] in first.info["actions"]
        assert env.reset(None, 5) == first == TextWorldEnv(rules=False).reset(None, 5)
        nonsense = env.step("dance with me")
        assert nonsense.observation == "That's not possible here." and nonsense.reward == pytest.approx(-0.1)
        assert nonsense.info["invalid"] and nonsense.info["family"] == "invalid" and not nonsense.info["effective"]
        steps = [env.step(command.upper()) for command in solution]
        assert [s.terminated for s in steps] == [False] * (len(steps) - 1) + [True]
        assert steps[-1].info["success"] and steps[-1].reward == 10.0 and steps[-1].observation.endswith("turns.")
        assert not any(s.info["invalid"] for s in steps) and steps[0].info["family"] == solution[0].split()[0]
        with pytest.raises(EnvError, match="after the end"):
            env.step("look")

    def test_done_is_not_won(self, solution):
        n = len(solution) + 2
        ends = []
        for commands in (solution, ["look"] * n, ["look"] * 2 + solution):
            env = TextWorldEnv(max_steps=n)
            env.reset(None, 5)
            steps = [env.step(c) for c in commands]
            ends.append((len(steps), steps[-1].terminated, steps[-1].truncated, steps[-1].info["success"]))
        assert ends == [(n - 2, True, False, True), (n, False, True, False), (n, True, False, True)]

    def test_restore_is_exact_also_in_another_object(self, solution):
        env = TextWorldEnv(rules=False)
        env.reset(None, 5)
        env.step(solution[0])
        held, key = env.snapshot(), env.state_key()
        first = [env.step(c) for c in solution[1:]]
        env.restore(held)
        assert env.state_key() == key and [env.step(c) for c in solution[1:]] == first
        other = TextWorldEnv(rules=False)
        fresh = other.snapshot()
        other.restore(pickle.loads(pickle.dumps(held)))
        assert other.state_key() == key and [other.step(c) for c in solution[1:]] == first
        other.restore(fresh)
        assert other.state_key() is None
        with pytest.raises(EnvError, match="before reset"):
            other.step("look")

    def test_settings_and_files(self, tmp_path):
        for settings, message in [
            (dict(world_size=0), "world_size=0: give 1 to 50"),
            (dict(max_steps=0), "max_steps=0"),
            (dict(invalid_penalty=-1), "invalid_penalty=-1"),
        ]:
            with pytest.raises(ConfigError, match=message):
                TextWorldEnv(**settings)
        with pytest.raises(DataError, match="none.z8: there is no such file; give a .z8 file"):
            TextWorldEnv(game=str(tmp_path / "none.z8")).reset()
        (tmp_path / "bad.z8").write_text("no game")
        with pytest.raises(DataError, match="bad.z8: it is no Z-machine game"):
            TextWorldEnv().reset({"game": str(tmp_path / "bad.z8")})
        env = TextWorldEnv()
        first = env.reset(None, 5)
        assert TextWorldEnv(game=make_game(env.what, *env.generated)).reset(None, 9) == first

    @pytest.mark.slow
    def test_by_name_and_through_the_checker(self):
        assert find_env("textworld:quest_length=2").tasks(2)[0]["prompt"] == ""
        report = check_env("textworld:max_steps=6", seeds=1, max_steps=8, call_limit=60)
        assert report.ok and report["portable"].status == "pass" and report.ended == 1, report.render()
