"""Reward adapters: TRL, verl and native functions, weighted sums, time limits, and everything that is no reward."""

import asyncio
import functools
import importlib.util
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from forethought.errors import ConfigError, DataError, RewardError
from forethought.rewards.adapters import (
    RewardRunner,
    adapt,
    combine,
    from_trl,
    from_verl,
    load_reward,
    response_messages,
    response_nodes,
    response_text,
    style_of,
)
from forethought.rewards.reward import Reward
from forethought.tree.tree import Kind, Stop, TokenTree


def decode(ids):
    return "".join(map(chr, ids))


def item(response, prompt="Q?", **task):
    text = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
    tree = TokenTree(map(ord, text), task="t")
    leaf = tree.add(0, map(ord, response), sampled=True, logprobs=[-1.0] * len(response), stop=Stop.EOS)
    return tree, leaf, {"id": "t", "prompt": prompt, **task}


def items(*responses, **columns):
    return [item(r, **{k: v[i] for k, v in columns.items()}) for i, r in enumerate(responses)]


def values(outcomes):
    return [o if isinstance(o, RewardError) else o.value for o in outcomes]


# -- what a function sees ----------------------------------------------------------------------------------------------


def test_a_response_never_holds_the_prompt():
    tree, leaf, _ = item("no box here", prompt=r"Put it in \boxed{}.")
    assert response_text(tree, leaf, decode) == "no box here"


def test_a_response_begins_at_the_first_sampled_node_and_holds_observations():
    tree = TokenTree([])
    user = tree.add(0, map(ord, "hi"), kind=Kind.USER)
    a = tree.add(user, map(ord, "call"), sampled=True)
    b = tree.add(a, map(ord, "er"), sampled=True)
    tool = tree.add(b, map(ord, "42"), kind=Kind.OBSERVATION)
    leaf = tree.add(tool, map(ord, "done"), sampled=True)
    assert response_nodes(tree, leaf) == [a, b, tool, leaf]
    assert response_text(tree, leaf, decode) == "caller42done"
    assert response_messages(tree, leaf, decode) == [
        {"role": "assistant", "content": "caller"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "done"},
    ]


# -- TRL ---------------------------------------------------------------------------------------------------------------


def test_trl_is_called_once_with_the_batch_its_columns_and_ids():
    calls = []

    def score(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs):
        calls.append((prompts, completions, completion_ids, answer, kwargs))
        log_extra("seen", completions)
        log_metric("longest", max(map(len, completions)))
        return [1.0 if c == a else 0 for c, a in zip(completions, answer, strict=True)]

    runner = RewardRunner(from_trl(score, decode=decode), timeout=5)
    batch = items("5", "66", answer=["5", "7"], difficulty=["easy", "hard"])
    assert values(runner(batch)) == [1.0, 0.0]
    ((prompts, completions, ids, answer, kwargs),) = calls
    assert prompts == ["Q?", "Q?"] and completions == ["5", "66"] and answer == ["5", "7"]
    assert ids == [[ord("5")], [ord("6"), ord("6")]]
    assert kwargs == {"difficulty": ["easy", "hard"], "id": ["t", "t"]}
    logs = runner.take_logs()
    assert logs.columns == {"seen": ["5", "66"]} and logs.metrics == {"longest": [2.0]}
    assert runner.take_logs().metrics == {}


def test_trl_gets_message_lists_where_the_prompt_is_conversational():
    seen = {}

    def score(prompts, completions, **kwargs):
        seen.update(prompts=prompts, completions=completions)
        return [0.5]

    chat = [{"role": "user", "content": "2+2?"}]
    assert adapt(score, decode=decode)(*item("4", prompt=chat)).value == 0.5
    assert seen == {"prompts": [chat], "completions": [[{"role": "assistant", "content": "4"}]]}


def test_trl_functions_without_kwargs_get_what_they_name():
    assert adapt(lambda completions: [len(c) for c in completions], decode=decode)(*item("four")).value == 4


def test_trl_trainer_state_follows_the_run():
    steps = []

    def score(completions, trainer_state, **kwargs):
        steps.append(trainer_state.global_step)
        return [0.0] * len(completions)

    runner = RewardRunner(score, decode=decode, timeout=5)
    runner(items("a"))
    runner(items("a"))
    runner.state.global_step = 40
    runner(items("a"))
    assert steps == [0, 1, 40]


def test_trl_environments_are_handed_on_and_their_lack_is_an_error():
    class World:
        def __init__(self, won):
            self.won = won

    def score(completions, environments, **kwargs):
        return [float(e.won) for e in environments]

    runner = RewardRunner(score, decode=decode, timeout=5)
    assert values(runner(items("a", "b"), environments=[World(True), World(False)])) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="'score' reads `environments`, but this run has none"):
        runner(items("a"))


def test_trl_none_means_not_applicable():
    outcome = adapt(lambda completions, **k: [None], decode=decode)(*item("a"))
    assert math.isnan(outcome.value) and outcome.why == "not applicable"


async def _later(completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0] * len(completions)


class _AsyncCallable:
    async def __call__(self, completions, **kwargs):
        return [2.0] * len(completions)


@pytest.mark.parametrize("fn, value", [(_later, 1.0), (_AsyncCallable(), 2.0), (functools.partial(_later, x=1), 1.0)])
@pytest.mark.parametrize("timeout", [None, 5])
def test_asynchronous_functions_are_awaited(fn, value, timeout):
    assert values(RewardRunner(fn, decode=decode, timeout=timeout)(items("a", "b"))) == [value, value]


def test_an_asynchronous_function_is_awaited_inside_a_running_loop():
    async def main():
        return RewardRunner(_later, decode=decode, timeout=None)(items("a"))

    assert values(asyncio.run(main())) == [1.0]


@pytest.mark.parametrize(
    "returned, message",
    [
        ([1.0], "'score': returned 1 rewards for 2 completions; return one per completion"),
        ([1.0, 2.0, 3.0], "'score': returned 3 rewards for 2 completions"),
        (1.0, r"'score': returned 1.0 \(float\), not a list; return a list of 2, one reward per completion"),
        (None, r"'score': returned None \(NoneType\), not a list"),
        ({"a": 1, "b": 2}, "not a list"),
        ("12", "not a list"),
        (np.zeros((2, 2)), "not a list"),
    ],
)
def test_a_trl_result_of_the_wrong_form_fails_the_batch(returned, message):
    def score(completions, **kwargs):
        return returned

    outcomes = RewardRunner(score, decode=decode, timeout=5)(items("a", "b"))
    assert len(outcomes) == 2
    for outcome in outcomes:
        with pytest.raises(RewardError, match=message):
            raise outcome


@pytest.mark.parametrize(
    "entry, message",
    [
        (math.nan, "is nan; return a finite number, or None"),
        (math.inf, "is inf; return a finite number"),
        (-math.inf, "is -inf; return a finite number"),
        ("0.5", r"is '0.5' \(str\), not a number"),
        ([0.5], "is \\[0.5\\] \\(list\\), not a number"),
        (1 + 2j, r".*\(complex\), not a number"),
        (np.float32("nan"), "is nan"),
        (np.zeros(1), r".*\(ndarray\), not a number"),
    ],
)
def test_one_bad_entry_fails_its_sample_only(entry, message):
    def score(completions, **kwargs):
        return [1.0, entry, 0.25]

    good, bad, other = RewardRunner(score, decode=decode, timeout=5)(items("a", "b", "c"))
    assert (good.value, other.value) == (1.0, 0.25)
    with pytest.raises(RewardError, match=f"the result of reward function 'score' {message}"):
        raise bad


@pytest.mark.parametrize("returned", [[True, np.float32(0.5)], (1, 0.5), np.array([1.0, 0.5])])
def test_numbers_of_any_kind_are_numbers(returned):
    assert values(RewardRunner(lambda completions: returned, decode=decode, timeout=5)(items("a", "b"))) == [1.0, 0.5]


def test_tensors_are_numbers():
    torch = pytest.importorskip("torch")
    for returned in (torch.tensor([1.0, 0.5]), [torch.tensor(1.0), torch.tensor(0.5)]):
        fn = lambda completions, r=returned: r  # noqa: E731
        assert values(RewardRunner(fn, decode=decode, timeout=5)(items("a", "b"))) == [1.0, 0.5]


@pytest.mark.parametrize("timeout", [None, 5])
@pytest.mark.parametrize(
    "error, message",
    [
        (KeyError("answer"), "'score' raised KeyError: 'answer'"),
        (SystemExit(0), "'score' raised SystemExit: 0"),
        (asyncio.CancelledError(), "'score' raised CancelledError"),
        (AssertionError(), "'score' raised AssertionError"),
    ],
)
def test_a_function_that_raises_fails_its_samples(error, message, timeout):
    def score(completions, **kwargs):
        raise error

    for outcome in RewardRunner(score, decode=decode, timeout=timeout)(items("a", "b")):
        with pytest.raises(RewardError, match=message):
            raise outcome


def test_a_missing_column_is_found_before_compute_and_fails_only_its_row():
    def score(completions, answer, **kwargs):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    runner = RewardRunner(score, decode=decode, timeout=5)
    tasks = [{"id": "0", "prompt": "", "answer": "1"}, {"id": "1", "prompt": "", "anwser": "1"}]
    with pytest.raises(
        DataError, match=r"'score' needs the column\(s\) 'answer', which 1 of 2 tasks lack; .* task '1'"
    ):
        runner.check(tasks)
    runner.check(tasks[:1])
    good, bad = runner([item("5", answer="5"), item("5")])
    assert good.value == 1.0
    with pytest.raises(RewardError, match=r"'score': task 't' lacks the column\(s\) 'answer'"):
        raise bad


def test_text_without_decode_is_an_error():
    with pytest.raises(ConfigError, match="'score' reads text: give decode="):

        def score(completions, **kwargs):
            return [0.0]

        RewardRunner(score)(items("a"))


def test_positional_only_parameters_are_refused():
    def score(completions, /):
        return [0.0]

    with pytest.raises(ConfigError, match="completions is positional-only"):
        from_trl(score)


# -- verl --------------------------------------------------------------------------------------------------------------


def test_verl_gets_its_four_columns():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return float(solution_str == ground_truth)

    task = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 7}}
    batch = [item("4", **task), item("5", answer="4"), item("4", ground_truth="4", answer="9")]
    assert values(RewardRunner(compute_score, decode=decode, timeout=5)(batch)) == [1.0, 0.0, 1.0]
    assert seen == [("gsm8k", "4", "4", {"index": 7}), ("", "5", "4", {}), ("", "4", "4", {})]


def test_verl_dicts_keep_their_parts():
    def compute_score(solution_str, ground_truth):
        return {"score": np.float64(0.5), "acc": True, "pred": "4", "skipped": None}

    assert adapt(compute_score, decode=decode)(*item("4", answer="4")) == Reward(0.5, {"acc": 1.0}, "pred=4")
    older = from_verl(lambda solution_str, ground_truth: {"reward": 2}, decode=decode)
    assert older(*item("4", answer="4")).value == 2.0


def test_verl_faults_are_named():
    def compute_score(solution_str, ground_truth):
        return {"acc": 1.0} if solution_str == "a" else {"score": math.nan}

    keys, nan = RewardRunner(compute_score, decode=decode, timeout=5)(items("a", "b", answer=["1", "1"]))
    with pytest.raises(RewardError, match=r"returned a dict with the keys \['acc'\]; it needs a \"score\""):
        raise keys
    with pytest.raises(RewardError, match="'compute_score' is nan"):
        raise nan
    with pytest.raises(DataError, match=r"'reward_model.ground_truth \(or ground_truth, or answer\)'.* 1 of 1 tasks"):
        RewardRunner(compute_score, decode=decode).check([{"id": "0", "prompt": ""}])


def test_one_raising_verl_sample_leaves_the_others():
    def compute_score(solution_str, ground_truth):
        return 1.0 / float(solution_str)

    outcomes = RewardRunner(compute_score, decode=decode, timeout=5)(items("2", "0", "4", answer=["x"] * 3))
    assert [o.value for o in (outcomes[0], outcomes[2])] == [0.5, 0.25]
    assert "ZeroDivisionError" in str(outcomes[1])


def test_verl_batch_functions_are_called_once():
    calls = []

    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        calls.append(solution_strs)
        return [{"score": float(s == g)} for s, g in zip(solution_strs, ground_truths, strict=True)]

    assert values(RewardRunner(from_verl(compute_score, decode=decode))(items("4", "5", answer=["4", "4"]))) == [
        1.0,
        0.0,
    ]
    assert calls == [["4", "5"]]


# -- native ------------------------------------------------------------------------------------------------------------


def test_native_functions_return_a_reward_a_number_or_none():
    results = iter([Reward(0.5, {"a": np.float32(1)}, "fine"), 2, None, Reward(math.nan)])

    def score(tree, leaf, task):
        return next(results)

    outcomes = RewardRunner(score, timeout=5)(items("a", "b", "c", "d"))
    assert outcomes[:2] == [Reward(0.5, {"a": 1.0}, "fine"), Reward(2.0)]
    assert math.isnan(outcomes[2].value) and math.isnan(outcomes[3].value)


@pytest.mark.parametrize(
    "result, message",
    [
        (math.nan, "is nan"),
        (Reward(math.inf), "value is inf"),
        (Reward("1"), r"value is '1' \(str\), not a number"),
        (Reward(1.0, {"length": math.nan}), "part 'length' is nan"),
        ([1.0], "not a number"),
    ],
)
def test_native_results_that_are_no_reward_fail_their_sample(result, message):
    with pytest.raises(RewardError, match=message):
        adapt(lambda tree, leaf, task: result)(*item("a"))


def test_native_functions_may_ask_for_the_text():
    def score(tree, leaf, task, text):
        return Reward(float(text == task["answer"]))

    assert values(RewardRunner(score, decode=decode)(items("4", "5", answer=["4", "4"]))) == [1.0, 0.0]


def test_a_native_object_with_batch_is_called_once():
    class Verifier:
        calls = 0

        def batch(self, batch):
            self.calls += 1
            return [RewardError("child lost") if t["id"] == "x" else Reward(1.0) for _, _, t in batch]

    verifier = Verifier()
    first, second = RewardRunner(verifier)([item("a"), (*item("b")[:2], {"id": "x", "prompt": ""})])
    assert first.value == 1.0 and "child lost" in str(second) and verifier.calls == 1


# -- detection and loading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn, style",
    [
        (lambda completions, **kw: 0, "trl"),
        (lambda prompts, completions, completion_ids, **kw: 0, "trl"),
        (lambda environments, **kw: 0, "trl"),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, "verl"),
        (lambda data_sources, solution_strs, ground_truths, extra_infos: 0, "verl-batch"),
        (lambda tree, leaf, task: 0, "native"),
    ],
)
def test_styles_are_detected(fn, style):
    assert style_of(fn) == style == adapt(fn).style


def test_an_unknown_signature_is_an_error_that_shows_the_known_ones():
    def score(text, answer):
        return 0

    with pytest.raises(ConfigError, match=r"score\(text, answer\): its parameters fit no known style.*f\(completions"):
        adapt(score)
    with pytest.raises(ConfigError, match="this is a class"):
        adapt(dict)


@pytest.fixture
def rewards_file(tmp_path):
    (tmp_path / "neighbour.py").write_text("BONUS = 0.5\n")
    path = tmp_path / "my.py"
    path.write_text(
        "import os, re, subprocess, sys, time\n"
        "from neighbour import BONUS\n"
        "CALLS = []\n"
        "def score(completions, answer, trainer_state, log_metric, log_extra, **kw):\n"
        "    print('a print does no harm')\n"
        "    CALLS.append(1)\n"
        "    log_metric('calls', len(CALLS)); log_extra('object', [object()])\n"
        "    return [BONUS + (c == a) for c, a in zip(completions, answer)]\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'hang': re.match('(a+)+$', 'a' * 40 + 'b')\n"  # holds the interpreter
        "    if solution_str == 'sleep': subprocess.Popen(['sleep', '300.817']); time.sleep(60)\n"
        "    if solution_str == 'exit': os._exit(0)\n"
        "    if solution_str == 'kill': os.kill(os.getpid(), 9)\n"
        "    if solution_str == 'read': return float(len(sys.stdin.read()))\n"
        "    return float(os.getpid())\n"
        "def native(tree, leaf, task):\n"
        "    return float(tree.length[leaf])\n"
        "not_callable = 3\n"
    )
    return path


def test_a_loaded_function_runs_in_one_child_that_keeps_its_state(rewards_file):
    with RewardRunner(load_reward(f"{rewards_file}:score", decode=decode), timeout=20) as runner:
        assert values(runner(items("4", "5", answer=["4", "4"]))) == [1.5, 0.5]
        assert values(runner(items("4", answer=["4"]))) == [1.5]
        logs = runner.take_logs()
        assert logs.metrics == {"calls": [1.0, 2.0]}
        assert len(logs.columns["object"]) == 2 and logs.columns["object"][0].startswith("<object")


def test_native_functions_get_the_tree_in_the_child(rewards_file):
    with RewardRunner(load_reward(f"{rewards_file}:native"), timeout=20, isolation="process") as runner:
        assert values(runner(items("four", "seven77"))) == [4.0, 7.0]


def test_a_hang_an_exit_and_a_crash_cost_their_own_sample(rewards_file):
    scorer = load_reward(f"{rewards_file}:compute_score", decode=decode)
    with RewardRunner(scorer, timeout=1.0) as runner:
        responses = ("a", "hang", "b", "exit", "kill", "read", "c")
        begin = time.monotonic()
        out = runner(items(*responses, answer=["x"] * 7))
        assert time.monotonic() - begin < 20
        assert out[0].value != os.getpid() and out[0].value > 0
        assert [isinstance(o, RewardError) for o in out] == [False, True, False, True, True, False, False]
        assert out[5].value == 0.0  # stdin is empty
        assert "'compute_score' did not answer within its time limit of 1 s" in str(out[1])
        assert "exited with 0" in str(out[3]) and "SIGKILL" in str(out[4])


def test_ctrl_c_in_a_batch_does_not_shift_the_answers_of_the_next(rewards_file, monkeypatch):
    with RewardRunner(load_reward(f"{rewards_file}:native"), timeout=20) as runner:
        runner(items("a"))
        worker = next(iter(runner._workers.values()))
        receive = iter([KeyboardInterrupt])

        def interrupted(timeout):
            raise next(receive)

        monkeypatch.setattr(worker, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner(items("aa", "aaa"))
        assert values(runner(items("aaaa", "aaaaa"))) == [4.0, 5.0]


def test_a_killed_child_takes_its_children_with_it_and_leaves_no_zombie(rewards_file):
    psutil = pytest.importorskip("psutil")
    before = psutil.Process().children()
    scorer = load_reward(f"{rewards_file}:compute_score", decode=decode)
    with RewardRunner(scorer, timeout=0.5) as runner:
        (out,) = runner(items("sleep", answer=["x"]))
    assert isinstance(out, RewardError)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(
        p.info["cmdline"] == ["sleep", "300.817"] for p in psutil.process_iter(["cmdline"])
    ):
        time.sleep(0.05)
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "300.817"]]
    assert psutil.Process().children() == before


def test_the_child_dies_with_its_parent_even_while_it_hangs(rewards_file, tmp_path):
    psutil = pytest.importorskip("psutil")
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys, threading, time\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, *{[p for p in sys.path if p]!r}]\n"
        "from test_adapters import RewardRunner, decode, items, load_reward\n"
        f"runner = RewardRunner(load_reward({str(rewards_file)!r} + ':compute_score', decode=decode), timeout=60)\n"
        "pid = int(runner(items('a', answer=['x']))[0].value)\n"
        "threading.Thread(target=lambda: runner(items('hang', answer=['x'])), daemon=True).start()\n"
        "time.sleep(0.5); print(pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    pid = int(out.stdout.split()[-1])
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_a_hang_in_a_thread_is_reported_and_siblings_are_judged():
    def score(tree, leaf, task, text):
        if text == "slow":
            time.sleep(3)
        return 1.0

    out = RewardRunner(score, decode=decode, timeout=0.2)(items("a", "slow", "b"))
    assert [out[0].value, out[2].value] == [1.0, 1.0]
    with pytest.raises(RewardError, match="'score' did not answer within its time limit of 0.2 s; make it faster"):
        raise out[1]


def test_a_hanging_trl_batch_fails_as_a_whole():
    def score(completions, **kwargs):
        time.sleep(3)

    out = RewardRunner(score, decode=decode, timeout=0.2)(items("a", "b"))
    assert all("time limit of 0.2 s" in str(o) for o in out) and len(out) == 2


@pytest.mark.parametrize(
    "spec, message",
    [
        ("my.py", "write 'file.py:NAME' or 'package.module:NAME'"),
        ("{dir}/none.py:score", "none.py does not exist"),
        ("{dir}/my.py:scores", r"has no 'scores'; did you mean 'score'\?.* It defines: score, compute_score, native"),
        ("{dir}/my.py:not_callable", r"3 \(int\) cannot be called"),
        ("{dir}/my.txt:score", "is not a Python file"),
        ("no_such_package.rewards:score", "there is no module 'no_such_package'"),
        ("{dir}/broken.py:score", r"loading .*broken.py failed at line 2: SyntaxError"),
        ("{dir}/raises.py:score", r"loading .*raises.py failed at line 2: ZeroDivisionError: division by zero"),
        ("{dir}/exits.py:score", r"loading .*exits.py failed at line 1: SystemExit: 0"),
        ("{dir}/imports.py:score", r"loading .*imports.py failed at line 1: ModuleNotFoundError.*no_such_thing"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_an_error_that_says_where(rewards_file, spec, message):
    folder = rewards_file.parent
    (folder / "broken.py").write_text("x = 1\ndef score(:\n")
    (folder / "raises.py").write_text("x = 1\ny = x / 0\n")
    (folder / "exits.py").write_text("raise SystemExit(0)\n")
    (folder / "imports.py").write_text("import no_such_thing\n")
    with pytest.raises(ConfigError, match=message):
        load_reward(spec.format(dir=folder))


def test_a_scorer_that_a_file_makes_gets_the_decoder_and_its_name(tmp_path):
    (tmp_path / "made.py").write_text(
        "from forethought.rewards.adapters import from_trl\n"
        "score = from_trl(lambda completions: [len(c) for c in completions], name='length')\n"
    )
    with RewardRunner(load_reward(f"{tmp_path}/made.py:score", decode=decode), isolation="process") as runner:
        assert values(runner(items("four"))) == [4.0] and runner.fn.name == "length"


def test_runner_settings_are_checked(rewards_file):
    for timeout in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="give a positive number of seconds"):
            RewardRunner(lambda completions: [0.0], timeout=timeout)
    with pytest.raises(ConfigError, match="'auto', 'thread' or 'process'"):
        RewardRunner(lambda completions: [0.0], isolation="fork")
    with pytest.raises(ConfigError, match="needs a function that the child can load by name"):
        RewardRunner(lambda completions: [0.0], isolation="process")


def test_what_cannot_be_sent_to_a_child_is_an_error(rewards_file):
    with RewardRunner(load_reward(f"{rewards_file}:score", decode=decode), timeout=20) as runner:
        with pytest.raises(ConfigError, match="cannot be sent to another process .* use isolation='thread'"):
            runner(items("4", answer=[lambda: 0]))
        assert values(runner(items("4", answer=["4"]))) == [1.5]


def test_an_empty_batch_is_an_empty_list():
    assert RewardRunner(lambda completions: [0.0], decode=decode)([]) == []


# -- sums --------------------------------------------------------------------------------------------------------------


def two_parts(weights=(0.8, 0.2)):
    first = from_trl(lambda completions, a, **k: a, decode=decode)
    second = adapt(lambda tree, leaf, task: task["b"])
    return combine([("first", first, weights[0]), ("second", second, weights[1])])


def test_the_logged_reward_is_the_weighted_sum_that_is_trained_on():
    """Case H24 (huggingface/trl#5352)."""
    outcomes = RewardRunner(two_parts(), timeout=5)([item("x", a=0.5, b=2.0), item("x", a=1.0, b=0.0)])
    total = np.array([o.value for o in outcomes])
    assert total == pytest.approx([0.8, 0.8], abs=1e-12)
    assert total.mean() == pytest.approx(0.8) and total.std() == pytest.approx(0.0, abs=1e-12)
    assert np.mean([o.parts["first"] for o in outcomes]) == 0.75
    assert np.mean([o.parts["second"] for o in outcomes]) == 1.0


def test_a_part_that_does_not_apply_is_left_out_of_the_sum_and_of_the_parts():
    outcome = two_parts()(*item("x", a=0.5, b=None))
    assert outcome.value == pytest.approx(0.4) and outcome.parts == {"first": 0.5}
    outcome = two_parts()(*item("x", a=None, b=None))
    assert math.isnan(outcome.value) and outcome.parts == {}


def test_a_failed_part_fails_the_sample_and_names_itself():
    reward = combine([("good", lambda tree, leaf, task: 1.0, 1), ("bad", lambda tree, leaf, task: 1 / 0, 0)])
    with pytest.raises(RewardError, match="part 'bad': .*ZeroDivisionError"):
        reward(*item("x"))


def test_parts_of_parts_and_reasons_keep_their_names():
    inner = combine([("a", lambda tree, leaf, task: Reward(1.0, why="yes"), 2.0)])
    outer = combine([("inner", inner, 0.5), ("b", lambda tree, leaf, task: Reward(3.0, {"raw": 9.0}), 1.0)])
    outcome = RewardRunner(outer, timeout=5)(items("x"))[0]
    assert outcome == Reward(4.0, {"inner/a": 1.0, "inner": 2.0, "b/raw": 9.0, "b": 3.0}, "inner: a: yes")


def test_sums_are_checked():
    f = lambda tree, leaf, task: 1.0  # noqa: E731
    with pytest.raises(ConfigError, match="no parts"):
        combine([])
    with pytest.raises(
        ConfigError,
        match="part 'a' stands twice; .*'mean' is reserved for a metric; choose another; .*weight of part 'b' is nan",
    ):
        combine([("a", f, 1), ("a", f, 1), ("mean", f, 1), ("b", f, math.nan)])


def test_the_sum_is_that_of_trl():
    """TRL's formula, `nansum(weight * reward)`, NaN where no function applies."""
    rows = [(0.5, 2.0), (None, 1.0), (1.0, None), (None, None)]
    weights = np.array([0.8, 0.2])
    table = np.array([[np.nan if v is None else v for v in row] for row in rows])
    expected = np.where(np.isnan(table).all(1), np.nan, np.nansum(table * weights, axis=1))
    got = [o.value for o in two_parts().batch([item("x", a=a, b=b) for a, b in rows])]
    np.testing.assert_allclose(got, expected)


def test_trls_own_functions_run_as_they_are():
    """The functions that TRL ships give through the adapter what TRL says of them."""
    rewards = pytest.importorskip("trl.rewards", reason="the extra `trl` is not installed")
    chat = [{"role": "user", "content": "2+2?"}]
    batch = [item("<think>\nsum\n</think>\n4", prompt=chat), item("4", prompt=chat)]
    think = from_trl(rewards.think_format_reward, decode=decode)
    assert values(RewardRunner(think, timeout=30)(batch)) == [1.0, 0.0]
    overlong = from_trl(
        rewards.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10), decode=decode
    )
    out = RewardRunner(overlong, timeout=30)([item("x" * n, prompt=chat) for n in (5, 15, 25)])
    assert values(out) == [0.0, -0.5, -1.0]
    if importlib.util.find_spec("math_verify") is None:
        return  # TRL's accuracy reward stands on it
    accuracy = from_trl(rewards.accuracy_reward, decode=decode)
    batch = [item(r"\boxed{4}", prompt=chat, solution=s) for s in ("$4$", "$5$", "no formula")]
    right, wrong, unreadable = RewardRunner(accuracy, timeout=60)(batch)
    assert (right.value, wrong.value) == (1.0, 0.0) and math.isnan(unreadable.value)
