"""The environment checker: each faulty relative of a sound environment breaks exactly its rule, and is told how."""

import json
import re
import time
from pathlib import Path

import faulty
import pytest

from forethought.envs.check import RULES, check_env, load_env
from forethought.envs.env import Env
from forethought.errors import ConfigError

FILE = Path(__file__).with_name("faulty.py")


def check(name, **settings):
    return check_env(f"{FILE}:{name}", **settings)


@pytest.mark.parametrize("name", ["Good", "Answers", "NoKey"])
def test_a_sound_environment_passes_every_rule(name):
    report = check(name)
    assert report.ok and report.broken() == []
    assert [f.rule for f in report.findings] == list(RULES)
    assert {f.status for f in report.findings} == {"pass"}
    assert report.ended >= 1 and report.episodes == 2 and report.steps >= 6
    assert isinstance(faulty.Good(), Env)


FAULTS = [
    ("NoSnapshot", ["protocol"], "NoSnapshot has no snapshot, restore"),
    ("NeedsArgument", ["exceptions"], "the factory raised TypeError.*'size'; it must make an environment without arg"),
    ("ResetReturnsText", ["reset"], r"reset\(task=None, seed=0\) returned 'The counter is 0.' \(str\); return Step\("),
    ("ResetIsOver", ["reset"], "returned a Step that is already over"),
    ("ResetPays", ["reset"], r"returned reward 1.0: nothing was done yet; return 0"),
    ("Gymnasium", ["step"], r"step\('(up|wait)'\) returned .*\(tuple\); return a Step; this is Gymnasium's form"),
    ("NumberObservation", ["observation"], r"observation is \d \(int\); turn it into text"),
    ("Surrogate", ["observation"], "holds half a surrogate pair"),
    ("NanReward", ["reward"], r"reward is nan \(float\); give a finite float"),
    ("TextReward", ["reward"], r"reward is '1' \(str\)"),
    ("IntFlags", ["flags"], r"terminated is [01] \(int\).*make both bool"),
    ("BothFlags", ["flags"], "terminated and truncated at once; an end of the world's own, also one on the last"),
    ("DoneIsWon", ["success"], r"info\['success'\] is True but terminated is False; done is not won"),
    ("NumberSuccess", ["success"], r"info\['success'\] is [01] \(int\)"),
    ("ListInfo", ["info"], r"info is \[1\] \(list\); give a dict"),
    ("LiveInfo", ["info"], "its info changed after it was returned; return a copy"),
    ("RaisesInReset", ["exceptions"], r"raised TypeError: .* at line \d+; give tasks= if it needs a task"),
    (
        "RaisesInStep",
        ["exceptions"],
        r"step\('(up|wait)'\) raised KeyError: 'missing' at line \d+; answer it with a Step",
    ),
    ("RaisesOnUnknown", ["hostile"], "raised ValueError: illegal action"),
    ("ParsesNumbers", ["hostile"], r"step\('9+\.\.\. \(5002 characters\)\) raised ValueError: Exceeds the limit"),
    ("RunsCode", ["hostile"], r"__import__\('os'\)._exit\(3\)\"\) ended the process \(its process exited with 3\)"),
    (
        "Exits",
        ["exceptions", "hostile"],
        r"step\('(up|wait)'\) ended the process \(its process exited with 0\); never exit",
    ),
    ("GoesOn", ["after-done"], r"after the end went on .*; raise EnvError, or return the end again with reward 0"),
    ("PaysAgain", ["after-done"], "after the end paid 1.0 again; give 0"),
    ("RaisesAfterTheEnd", ["after-done"], "after the end raised IndexError: no more turns; raise EnvError"),
    (
        "GlobalDice",
        ["seed", "snapshot"],
        r"the same seed \(0\) and actions gave another episode: .*random.Random\(seed\)",
    ),
    ("HashDice", ["seed"], r"another episode in another process: .*do not let it depend on hash\(\)"),
    (
        "ClassState",
        ["independent", "snapshot"],
        "an episode changed because another environment was used: .*none on the",
    ),
    ("one_object", ["independent"], "the factory returned one object twice"),
    ("ForgetsDice", ["snapshot"], "snapshot the full state, with its RNG and clocks"),
    ("ForgetsReward", ["snapshot"], r"reward 1.0 became 0.0; snapshot the full state"),
    ("ForgetsInfo", ["snapshot"], r"info\['log'\] .* became"),
    ("ShallowRestore", ["snapshot-alias"], r"raised EnvError: .*; copy deeply in snapshot\(\) AND in restore\(\)"),
    ("OneSlot", ["snapshot-alias"], "with two snapshots held, after restore of the first"),
    ("SnapshotRaises", ["snapshot"], r"snapshot\(\) raised NotImplementedError: later"),
    ("IdKey", ["state-key"], "in another that is in the same state; build it from the state's values only"),
    ("CountingKey", ["state-key"], r"state_key\(\) changed although only snapshot\(\) was called"),
    ("NumberKey", ["state-key"], r"state_key\(\) returned \d \(int\); return a str, or None"),
]


@pytest.mark.parametrize("name, rules, message", FAULTS, ids=[f[0] for f in FAULTS])
def test_each_fault_is_reported_by_its_rule_with_the_fix(name, rules, message):
    report = check(name, seeds=(0, 1, 2), max_steps=12)
    assert report.broken() == rules
    assert not report.ok
    assert re.search(message, report[rules[0]].message, re.DOTALL), report[rules[0]].message


def test_a_fault_does_not_hide_the_others():
    report = check("NanReward")
    assert {f.rule: f.status for f in report.findings} == {r: "fail" if r == "reward" else "pass" for r in RULES}


def test_a_hang_that_holds_the_interpreter_is_killed_and_the_check_goes_on():
    begin = time.monotonic()
    report = check("Hangs", call_limit=0.5)
    assert time.monotonic() - begin < 30
    assert report.broken() == ["time"]
    message = report["time"].message
    assert "step('go go" in message and "(100002 characters)) did not return within 0.5 s; bound its work" in message
    assert report["snapshot"].status == "pass" and report["state-key"].status == "pass"


def test_a_reset_that_hangs_ends_the_check():
    report = check("HangsInReset", call_limit=0.3)
    assert report.broken() == ["time"]
    assert report["time"].message == "reset(task=None, seed=0) did not return within 0.3 s; bound its work"
    assert report["snapshot"] == report["snapshot"].__class__("snapshot", "skip", "not reached: broken before: time")


def test_a_step_that_always_hangs_ends_the_check_after_a_few():
    begin = time.monotonic()
    report = check("HangsAlways", call_limit=0.3)
    assert time.monotonic() - begin < 30 and report.broken() == ["time"]
    assert report["seed"].status == "skip"


@pytest.mark.parametrize(
    "name, rule, message",
    [
        ("BoundSnapshot", "portable", "a snapshot cannot be pickled"),
        ("OneSlot", "portable", "does not work in another object"),
        ("ObjectInfo", "info", "info cannot be stored as JSON"),
        ("LongObservation", "observation", "observation of 50,000 characters; it fills the context"),
    ],
)
def test_warnings_break_nothing(name, rule, message):
    report = check(name)
    assert report[rule].status == "warn" and message in report[rule].message
    assert rule not in report.broken()


@pytest.mark.parametrize(
    "spec, message",
    [
        ("faulty.py", "write 'file.py:NAME'"),
        (f"{FILE}:Goood", "has no 'Goood'; did you mean 'Good'"),
        (f"{FILE}:instance", "cannot be called to make an environment; name its class"),
        (f"{FILE.parent}/none.py:Env", "does not exist"),
        ("faulty_package:Env", "there is no module 'faulty_package'"),
    ],
)
def test_what_cannot_be_loaded_is_a_finding_for_the_checker_and_an_error_for_the_loader(spec, message):
    report = check_env(spec)
    assert report.broken() == ["load"] and message in report["load"].message
    with pytest.raises(ConfigError, match=message):
        load_env(spec)


def test_a_file_that_ends_the_process_while_it_loads(tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos._exit(7)\n")
    report = check_env(f"{tmp_path}/ends.py:Env")
    assert report["load"].message == "loading failed: its process exited with 7"


def test_load_env_gives_a_factory():
    env = load_env(f"{FILE}:Good")()
    assert env.reset(None, 0).observation == "The counter is 0."
    assert check_env(load_env(f"{FILE}:Good")).ok


def test_factories_are_checked_in_a_child_where_it_can_import_them_else_in_a_thread():
    assert check_env(faulty.Exits).broken() == ["exceptions", "hostile"]  # a thread could not survive this
    assert check_env(lambda: faulty.Good()).ok
    report = check_env(lambda: faulty.HangsAlways(), call_limit=0.2)
    assert report.broken() == ["time"] and report["seed"].status == "skip"


def test_an_environment_that_never_ends_says_what_was_not_seen():
    report = check("Good", actions=["nonsense"], max_steps=3)
    assert report.ok and report.ended == 0
    assert report["after-done"].status == "skip"
    assert "no episode ended; give actions that end one" in report["after-done"].message


def test_given_actions_are_played_and_tasks_are_handed_over(tmp_path):
    (tmp_path / "echo.py").write_text(
        "from faulty import Good, Step\n"
        "class Echo(Good):\n"
        "    def reset(self, task=None, seed=0):\n"
        "        assert task['id'] in ('a', 'b')\n"
        "        return super().reset(task, seed)\n"
        "    def step(self, action):\n"
        "        s = super().step(action)\n"
        "        return self.changed(s, reward=float(action == 'up'))\n"
    )
    report = check_env(f"{tmp_path}/echo.py:Echo", tasks=[{"id": "a"}, {"id": "b"}], actions=["up"], seeds=[5])
    assert report.ok, report.render()
    assert report.episodes == 2 and report.ended == 2
    assert check_env(f"{tmp_path}/echo.py:Echo").broken() == ["exceptions"]


def test_reports_are_text_and_json():
    report = check("NanReward")
    text = report.render()
    assert text.splitlines()[0].endswith("faulty.py:NanReward: 2 episodes, 16 steps, 2 ended") or "2 episodes" in text
    assert "FAIL  reward" in text and text.endswith("broken: reward")
    assert check("Good").render().endswith("no rule is broken")
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["ok"] is False and {f["rule"] for f in data["findings"]} == set(RULES)


def test_long_lists_of_messages_are_cut():
    report = check("RaisesOnUnknown")
    assert report["hostile"].message.splitlines()[3] == "(and 11 more)"


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="give at least one task and seed, and positive limits"):
        check("Good", seeds=())
    with pytest.raises(ConfigError, match="seeds=0"):
        check("Good", seeds=0)
    assert check("Good", seeds=3).episodes == 3
