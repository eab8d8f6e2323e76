"""reasoning-gym tasks and their verifiers, which never execute a response."""

import json
import time

import pytest

from forethought.data import write_jsonl
from forethought.envs.adapters import reasoning_gym as adapter
from forethought.envs.problem import problem_factory
from forethought.errors import ConfigError, DataError, MissingExtraError, RewardError
from forethought.rewards.adapters import RewardRunner, adapt
from forethought.tree.tree import TokenTree

pytest.importorskip("reasoning_gym", reason="the extra `reasoning-gym` is not installed")

from forethought.envs.adapters.reasoning_gym import (  # noqa: E402
    ReasoningGymScorer,
    read_answer,
    reasoning_gym_tasks,
)


@pytest.fixture(scope="module")
def scorer():
    with ReasoningGymScorer(timeout=5) as made:
        yield made


def test_tasks_are_different_stable_and_survive_a_file(tmp_path, scorer):
    tasks = reasoning_gym_tasks("basic_arithmetic", 30, 1, min_terms=2, max_terms=2)
    assert len({t["prompt"] for t in tasks}) == len({t["id"] for t in tasks}) == 30
    assert tasks[0]["id"] == "reasoning-gym/basic_arithmetic,max_terms=2,min_terms=2/1/0"
    assert tasks == reasoning_gym_tasks("basic_arithmetic", 30, 1, min_terms=2, max_terms=2)
    write_jsonl(tmp_path / "tasks.jsonl", tasks)
    env = problem_factory(tmp_path / "tasks.jsonl", scorer)()
    for task in env.tasks[:5]:
        assert env.reset(task).observation == task["prompt"]
        assert env.step(f"<answer>{task['answer']}</answer>").info["success"] is True


def test_a_held_out_set_shares_no_question_with_the_pool():
    pool = reasoning_gym_tasks("chain_sum", 80, 1, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    plain = reasoning_gym_tasks("chain_sum", 100, 2, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    held = reasoning_gym_tasks("chain_sum", 30, 2, min_terms=2, max_terms=2, min_digits=1, max_digits=1, exclude=pool)
    questions = {t["prompt"] for t in pool}
    assert questions & {t["prompt"] for t in plain}  # another seed alone is not enough
    assert not questions & {t["prompt"] for t in held}
    with pytest.raises(DataError, match="dataset 'chain_sum', seed 2: n=400, but only .* different questions"):
        reasoning_gym_tasks("chain_sum", 400, 2, min_terms=2, max_terms=2, min_digits=1, max_digits=1)


def test_entries_are_the_same_in_every_process(scorer):
    """Five datasets of reasoning-gym 0.1.25 depend on the order of sets: their tasks differed from run to run."""
    tasks = reasoning_gym_tasks("polynomial_multiplication", 5, 2)
    assert tasks == reasoning_gym_tasks("polynomial_multiplication", 5, 2)
    assert [scorer(f"<answer>{t['answer']}</answer>", t).value for t in tasks] == [1.0] * 5


def test_a_task_whose_question_comes_out_differently_is_an_error(scorer):
    (task,) = reasoning_gym_tasks("leg_counting", 1)
    other = {**task, "reasoning_gym": {**task["reasoning_gym"], "index": 1}}
    with pytest.raises(RewardError, match="its question came out differently: make the tasks again"):
        scorer("<answer>1</answer>", other)
    gone = {**task, "reasoning_gym": {**task["reasoning_gym"], "name": "leg_countings"}}
    with pytest.raises(RewardError, match="verifier of 'leg_countings' gave None: ValueError"):
        scorer("<answer>1</answer>", gone)


def test_faults_are_named():
    with pytest.raises(ConfigError, match="has no dataset 'basic_arithmetics'; did you mean 'basic_arithmetic'"):
        reasoning_gym_tasks("basic_arithmetics", 1)
    with pytest.raises(ConfigError, match="settings {'min_trems': 2}: TypeError.*min_trems"):
        reasoning_gym_tasks("basic_arithmetic", 1, min_trems=2)
    with pytest.raises(ConfigError, match="settings {'min_terms': 0}: AssertionError"):
        reasoning_gym_tasks("basic_arithmetic", 1, min_terms=0)
    with pytest.raises(ConfigError, match="settings must be plain values"):
        reasoning_gym_tasks("basic_arithmetic", 1, min_terms={2})
    with pytest.raises(ConfigError, match="n=0"):
        reasoning_gym_tasks("basic_arithmetic", 0)
    with pytest.raises(ConfigError, match="timeout=0"):
        ReasoningGymScorer(timeout=0)


def test_a_missing_extra_names_the_command(monkeypatch):
    adapter._generator.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'forethought\[reasoning-gym\]'"):
        reasoning_gym_tasks("basic_arithmetic", 1)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer> 4 </answer> or <answer>5\n</answer>", "5"),
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("first\n\nlast line \n", "last line"),
        ("", None),
        (" \n ", None),
    ],
)
def test_answers_are_read(text, answer):
    assert read_answer(text) == answer


def test_no_answer_scores_nothing(scorer):
    (task,) = reasoning_gym_tasks("basic_arithmetic", 1)
    assert scorer("", task).value == 0 and scorer("", task).why == "no answer"


@pytest.mark.parametrize(
    "name, right",
    [
        ("leg_counting", None),
        ("spiral_matrix", None),
        ("string_insertion", None),
        ("propositional_logic", None),
        ("number_sorting", None),
        ("simple_integration", None),
        ("polynomial_multiplication", None),
    ],
)
def test_the_verifiers_own_answers_are_right(scorer, name, right):
    for task in reasoning_gym_tasks(name, 3, 5):
        if task["answer"] is not None:
            assert scorer(f"<answer>{task['answer']}</answer>", task).value == 1.0, (name, task["answer"])
        assert scorer("<answer>zzz</answer>", task).value < 0.5


EVIL = "open({path!r}, 'w').write('x')"


@pytest.mark.parametrize(
    "name",
    [
        "spiral_matrix",
        "string_insertion",
        "n_queens",
        "binary_matrix",
        "simple_integration",
        "polynomial_multiplication",
    ],
)
@pytest.mark.parametrize(
    "wrap",
    [
        "{0}",
        "[{0}]",
        "[x for x in [{0}]]",
        "(lambda: {0})()",
        "[].__class__.__base__.__subclasses__() or {0}",
        "sin({0})",
        "f'{{{0}}}'",
        'S("{0}")',
    ],
)
def test_responses_are_never_executed(scorer, tmp_path, name, wrap):
    (task,) = reasoning_gym_tasks(name, 1)
    path = tmp_path / "written"
    answer = wrap.format(EVIL.format(path=str(path)))
    reward = scorer(f"<answer>{answer}</answer>", task)
    assert reward.value == 0.0 and not path.exists()
    if wrap in ("{0}", "[{0}]"):
        assert reward.why == "the answer is not a plain value or formula"


def test_plain_lists_and_formulas_still_get_their_credit(scorer):
    (task,) = reasoning_gym_tasks("spiral_matrix", 1)
    assert scorer(f"<answer>{json.dumps(task['answer'].split())}</answer>", task).value == 0.1
    (task,) = reasoning_gym_tasks("polynomial_multiplication", 1, 2)
    assert scorer(f"<answer>0 + {task['answer']}</answer>", task).value == 1.0
    assert scorer("<answer>x!</answer>", task).value == 0.0


def test_countdown_pays_only_given_numbers(scorer):
    """Case H36 in this library's own task: its verifier takes any numbers of the right multiset and evaluates text."""
    (task,) = reasoning_gym_tasks("countdown", 1, 3)
    entry = task["prompt"]
    assert scorer("<answer>__import__('os').getpid()</answer>", task).value == 0.0
    target = int("".join(c for c in entry.split("target")[0][-40:] if c.isdigit()) or 0) or None
    reward = scorer(f"<answer>{target or 1}</answer>", task)
    assert reward.value == 0.0 and "number not given" in reward.why
    assert scorer(f"<answer>{task['answer']}</answer>", task).value == 1.0


def test_an_answer_on_which_the_verifier_hangs_costs_its_limit():
    with ReasoningGymScorer(timeout=1.0) as scorer:
        (task,) = reasoning_gym_tasks("simple_integration", 1, 5)
        assert scorer(f"<answer>{task['answer']}</answer>", task).value == 1.0
        begin = time.monotonic()
        reward = scorer("<answer>7**7**7**7**7 + x</answer>", task)
        assert time.monotonic() - begin < 10
        assert reward.value == 0.0 and reward.why == "limit: the verifier did not end within 1 s"
        assert scorer(f"<answer>{task['answer']}</answer>", task).value == 1.0
        assert "limit: the answer is longer" in scorer("9" * 20_000, task).why


def test_it_is_a_reward_for_training(scorer):
    (task,) = reasoning_gym_tasks("basic_arithmetic", 1)
    tree = TokenTree(task=task["id"])
    right = tree.add(0, map(ord, task["answer"]), sampled=True)
    wrong = tree.add(0, map(ord, "no"), sampled=True)
    runner = RewardRunner(adapt(scorer.reward, decode=lambda ids: "".join(map(chr, ids))))
    assert [r.value for r in runner([(tree, right, task), (tree, wrong, task)])] == [1.0, 0.0]
