"""Problems as environments, and Countdown with its scorer that never evaluates a response as code."""

import json
import math
import os

import pytest

from forethought.envs.check import check_env
from forethought.envs.countdown import countdown_score, countdown_tasks
from forethought.envs.problem import ProblemEnv, problem_factory
from forethought.errors import ConfigError, DataError, EnvError, RewardError
from forethought.rewards.reward import Reward

TASKS = [{"id": str(i), "prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(5)]


def exact(text, task):
    return float(text.strip() == task["answer"])


def factory():
    return ProblemEnv(TASKS, exact, attempts=2, shots=TASKS[:3], n_shots=1)


def test_one_problem_one_step():
    env = ProblemEnv(TASKS, exact)
    first = env.reset(TASKS[3])
    assert first.observation == "What is 3 + 1?" and not first.done
    assert first.info == {"task": "3", "messages": [{"role": "user", "content": "What is 3 + 1?"}]}
    step = env.step(" 4\n")
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)
    assert step.info == {"task": "3", "success": True, "parts": {}}
    with pytest.raises(EnvError, match="the episode is over; make a new environment"):
        env.step("4")


def test_a_wrong_answer_ends_the_episode_without_success():
    env = ProblemEnv(TASKS, exact)
    env.reset(TASKS[3])
    step = env.step("5")
    assert (step.reward, step.terminated, step.truncated, step.info["success"]) == (0.0, True, False, False)


def test_further_attempts_get_the_reason():
    def score(text, task):
        return Reward(float(text == "4"), {"length": len(text)}, "" if text == "4" else "too small")

    env = ProblemEnv(TASKS, score, attempts=3)
    env.reset(TASKS[3])
    step = env.step("2")
    assert step.observation == "That is not right (too small). Try again; attempts left: 2."
    assert step.reward == 0.0 and not step.done and step.info["success"] is False
    step = env.step("4")
    assert step.reward == 1.0 and step.terminated and step.info["parts"] == {"length": 1}


def test_the_last_attempt_ends_it():
    env = ProblemEnv(TASKS, exact, attempts=2)
    env.reset(TASKS[0])
    assert [env.step("x").done, env.step("x").done] == [False, True]


def test_a_partial_score_is_paid_but_no_success_below_the_mark():
    env = ProblemEnv(TASKS, lambda text, task: 0.5)
    env.reset(TASKS[0])
    step = env.step("x")
    assert step.reward == 0.5 and step.info["success"] is False
    env = ProblemEnv(TASKS, lambda text, task: 0.5, success_at=0.5)
    env.reset(TASKS[0])
    assert env.step("x").info["success"] is True


def test_tasks_are_drawn_by_the_seed():
    drawn = [ProblemEnv(TASKS, exact).reset(None, seed).info["task"] for seed in range(30)]
    assert drawn == [ProblemEnv(TASKS, exact).reset(None, seed).info["task"] for seed in range(30)]
    assert set(drawn) == {"0", "1", "2", "3", "4"}


def test_shots_stand_before_the_problem_and_never_show_the_task_itself():
    shots = [TASKS[0], TASKS[3], {"id": "w", "prompt": "What is 9 + 1?", "solution": "9 + 1 = 10. So 10."}]
    first = ProblemEnv(TASKS, exact, shots=shots).reset(TASKS[3])
    assert first.info["messages"] == [
        {"role": "user", "content": "What is 0 + 1?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "What is 9 + 1?"},
        {"role": "assistant", "content": "9 + 1 = 10. So 10."},
        {"role": "user", "content": "What is 3 + 1?"},
    ]
    assert first.observation.startswith("user: What is 0 + 1?\n\nassistant: 1\n\nuser: What is 9")
    picked = {
        ProblemEnv(TASKS, exact, shots=shots, n_shots=1).reset(TASKS[4], s).info["messages"][0]["content"]
        for s in range(20)
    }
    assert picked == {"What is 0 + 1?", "What is 3 + 1?", "What is 9 + 1?"}


def test_message_prompts_are_taken_as_they_are():
    prompt = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}]
    first = ProblemEnv([{"id": "a", "prompt": prompt}], exact).reset()
    assert first.info["messages"] == prompt and first.observation == "system: Be short.\n\nuser: 2+2?"


@pytest.mark.parametrize(
    "scorer, message",
    [
        (lambda text, task: 1 / 0, "scorer of task '0' raised ZeroDivisionError"),
        (lambda text, task: math.nan, "scorer of task '0' returned nan; return a finite number"),
        (lambda text, task: "1", "scorer of task '0' returned '1'"),
        (lambda text, task: Reward(math.nan), "scorer of task '0' returned nan"),
    ],
)
def test_a_failing_scorer_is_an_error_never_a_zero(scorer, message):
    env = ProblemEnv(TASKS, scorer)
    env.reset(TASKS[0])
    with pytest.raises(RewardError, match=message):
        env.step("x")


def test_bad_input_is_found_at_construction():
    with pytest.raises(DataError, match="no tasks"):
        ProblemEnv([], exact)
    with pytest.raises(DataError, match=r"task 'q' has no column 'prompt'; it has \['id', 'question'\]"):
        ProblemEnv([{"id": "q", "question": ""}], exact)
    with pytest.raises(DataError, match="shot 's' has neither 'solution' nor 'answer'"):
        ProblemEnv(TASKS, exact, shots=[{"id": "s", "prompt": ""}])
    with pytest.raises(ConfigError, match="attempts=0"):
        ProblemEnv(TASKS, exact, attempts=0)
    with pytest.raises(ConfigError, match="n_shots=2: give a number from 0 to 1"):
        ProblemEnv(TASKS, exact, shots=TASKS[:1], n_shots=2)
    with pytest.raises(EnvError, match="step before reset"):
        ProblemEnv(TASKS, exact).step("x")


def test_the_checker_passes_it():
    report = check_env(factory, actions=["1", "2", "3"])
    assert report.ok and report.ended == 2, report.render()
    assert {f.rule for f in report.findings if f.status != "pass"} == set()


def test_tasks_come_from_a_file_with_named_columns(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"q": f"{i}+1?", "gold": {"value": str(i + 1)}}) + "\n" for i in range(3)))
    make = problem_factory(path, exact, prompt_column="q", answer_column="gold.value", attempts=2)
    env = make()
    assert make() is not env
    assert env.reset(env.tasks[2]).observation == "2+1?" and env.step("3").info["success"] is True
    with pytest.raises(ConfigError, match="attempts=0"):
        problem_factory(path, exact, prompt_column="q", answer_column="gold.value", attempts=0)


def test_shared_word_problems_become_environments(shared):
    make = problem_factory(
        shared / "data/math/mawps_singleop.jsonl",
        lambda text, task: float(text) == task["answer"],
        prompt_column="input",
        answer_column="target",
    )
    env = make()
    first = env.reset(None, 1)
    task = next(t for t in env.tasks if t["prompt"] == first.observation)
    assert env.step(str(task["answer"])).info["success"] is True


# -- Countdown ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value",
    [
        ("50+25+3", 1),
        ("75+3", 0),
        ("25+25+25+3", 0),
        ("78", 0),
        ("50+25+3.0000001", 0),
        ('__import__("os").getpid()', 0),
    ],
)
def test_numbers_that_were_not_given_pay_nothing(text, value, monkeypatch):
    """Case H36 (open-thought/reasoning-gym#265)."""
    monkeypatch.setattr(os, "getpid", lambda: pytest.fail("a response was executed"))
    reward = countdown_score(f"I think <answer>{text}</answer>", {"numbers": [3, 7, 25, 50], "target": 78})
    assert reward.value == value and bool(reward.why) == (value == 0)


def test_countdown_tasks_are_solvable_and_their_answers_right():
    tasks = countdown_tasks(150, 2)
    for task in tasks:
        assert countdown_score(f"<answer>{task['answer']}</answer>", task).value == 1
        assert task["target"] not in task["numbers"] and len(task["numbers"]) == 4
        assert str(task["target"]) in task["prompt"]
    held_out = countdown_tasks(150, 3, "heldout")
    assert not {t["id"] for t in tasks} & {t["id"] for t in held_out}
    with pytest.raises(ConfigError, match="count=9: give 2 to 6 numbers"):
        countdown_tasks(1, count=9)


def test_the_answer_is_the_last_tag_else_the_last_line():
    task = {"numbers": [3, 7, 25, 50], "target": 78}
    assert countdown_score("<answer>75+3</answer> no: <answer>50+25+3</answer>", task).value == 1
    assert countdown_score("Let me see.\n50+25+3\n\n", task).value == 1
    assert countdown_score("", task).value == 0


def test_countdown_is_an_environment_that_the_checker_passes():
    report = check_env(countdown_factory, actions=["1+1", "50+25+3"])
    assert report.ok, report.render()


def countdown_factory():
    return ProblemEnv(countdown_tasks(3), countdown_score, attempts=2)
