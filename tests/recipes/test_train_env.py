"""`forethought train grpo --env` and `forethought eval --env`: they learn, count, resume exactly, and refuse."""

import json
import shutil
from pathlib import Path

import pytest

from forethought.cli import main
from forethought.models.load import save_pretrained
from forethought.models.tiny import char_tokenizer, tiny_model
from forethought.recipes.env_eval import coverage_of, estimates, notes_on
from forethought.tree.store import TreeStore
from tinyjob import metrics, results, write

WORLD = '''
import time
from forethought.envs.env import Step

class Corridor:
    """Cells 0 to 3; a right, b left; the end is cell 3."""

    def reset(self, task=None, seed=0):
        self.at, self.steps, self.fault = 0, 0, (task or {}).get("fault")
        return Step("0")

    def step(self, action):
        self.steps += 1
        if self.fault:
            raise OSError("the door is jammed")
        self.at = max(0, self.at + {"a": 1, "b": -1}.get(action, 0))
        won = self.at == 3
        return Step(str(self.at), float(won), won, self.steps == 6 and not won, {"success": won, "invalid": action not in "ab"})

    def snapshot(self):
        return self.at, self.steps

    def restore(self, snapshot):
        self.at, self.steps = snapshot

    def state_key(self):
        return str(self.at)

class Silent(Corridor):
    def step(self, action):
        step = super().step(action)
        return Step(step.observation, step.reward, step.terminated, step.truncated)

Instance = Corridor()
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    tokenizer = char_tokenizer("0123abc\n", context=64)
    save_pretrained(tiny_model(len(tokenizer), width=32, layers=1, heads=2, context=64), tokenizer, folder / "model")
    (folder / "world.py").write_text(WORLD)
    rows = [{"id": f"t{i}", "fault": i == 1} for i in range(4)]
    write(folder / "tasks.jsonl", rows)
    return folder


@pytest.fixture
def job(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "job")
    monkeypatch.chdir(tmp_path / "job")
    return tmp_path / "job"


def train(*args, env="world.py:Corridor"):
    settings = ["prompts_per_step=4", "group_size=8", "max_new_tokens=1", "optim.lr=0.01", "invalid_penalty=0.1"]
    command = ["train", "grpo", "--model", "model", "--env", env, "--dtype", "fp32", "--out", "run"]
    return main([*command, *settings, "train_tasks=8", "eval_tasks=6", *args])


def ev(*args, env="world.py:Corridor", model="model"):
    command = ["eval", "--model", model, "--env", env, "--dtype", "fp32", "--max-new-tokens", "1", "--out", "eval"]
    return main([*command, *args])


def test_training_ends_with_a_comparison_and_the_model_acts(job, capsys):
    assert train("steps=24", "credit=gigpo", "eval_every=12") == 0
    said = capsys.readouterr()
    assert "4 tasks x 8 episodes = 32 episodes a step, at most 30 turns each; 24 steps over 8 tasks" in said.err
    found = results("run")
    assert found["recipe"] == "train grpo" and found["verdict"] == "shown"
    assert found["arms"]["before"]["success"]["mean"] == 0 and found["arms"]["after"]["success"]["mean"] == 1
    assert (
        found["arms"]["after"]["turns of successes"]["mean"] == 3
        and found["arms"]["after"]["invalid actions"]["mean"] == 0
    )
    assert found["arms"]["after"]["success"]["ci95"][0] == pytest.approx(0.6097, abs=1e-4)  # Wilson, 6 of 6
    assert found["coverage"]["after"]["ran"] == 6 and found["coverage"]["before"]["stops"] == {"truncated": 6}
    lines = metrics("run")
    assert lines[0]["eval/success"] == 0 and lines[-1]["eval/success"] == 1 and lines[12]["eval/success"] is not None
    steps = sum(line["env/steps"] for line in lines[1:])
    assert found["budget"]["before"]["env_steps"] == 36
    evaluated = 18 if lines[12]["eval/success"] == 1 else None
    if evaluated:
        assert found["budget"]["after"]["env_steps"] == steps + 2 * 18
    assert ev("--tasks", "5", model="run/model") == 0
    own = results("eval")
    assert own["arms"]["run/model"]["success"] == {
        "mean": 1.0,
        "ci95": pytest.approx([0.5655, 1], abs=1e-4),
        "n": 5,
        "per_seed": [1.0],
    }
    assert own["budget"]["run/model"]["env_steps"] == 15 and own["coverage"]["stops"] == {"won": 5}


def test_episodes_are_shown_turn_by_turn(job, capsys):
    assert train("steps=2") == 0
    assert main(["show", "run", "--trees", "8"]) == 0
    shown = capsys.readouterr().out
    assert "observation: 0" in shown and "assistant: " in shown and "truncated after 6 turns" in shown
    page = (job / "run" / "report.html").read_text()
    assert "truncated after 6 turns" in page and '<span class="kind">observation</span>' in page
    with TreeStore(job / "run" / "trees.sqlite", readonly=True) as store:
        rows = store.query(kind="eval")
        assert {r.reward for r in rows if r.step == 0} == {0.0} and len(rows) == 12


def test_a_resumed_job_equals_an_unbroken_one(job):
    assert train("steps=4", "kl_coef=0.01") == 0
    whole = metrics("run")
    shutil.rmtree("run")
    assert train("steps=2", "kl_coef=0.01") == 0
    assert train("steps=4", "kl_coef=0.01", "--resume") == 0
    assert [line for line in metrics("run") if line["step"] != 2] == [line for line in whole if line["step"] != 2]


def test_h23_an_evaluation_shows_its_coverage(job, capsys):
    assert ev("--data", "tasks.jsonl", "--samples", "4", "--temperature", "1") == 0
    found = results("eval")
    assert found["coverage"] | {"stops": None} == {
        "episodes": 16,
        "ran": 12,
        "failed": 4,
        "tasks": 4,
        "tasks_evaluated": 3,
        "not_evaluated": ["t1"],
        "stops": None,
    }
    arm = found["arms"]["model"]
    assert arm["success"]["n"] == 3 and arm["success, failed as lost"]["n"] == 4 and arm["failed"]["mean"] == 0.25
    said = capsys.readouterr()
    assert "12 of 16 episodes ran, on 3 of 4 tasks" in said.err
    text = " ".join(said.out.split())
    assert "4 episodes failed to run and are in no denominator; the first: task 't1', turn 1: OSError" in text
    assert "Not evaluated: t1." in text
    assert main(["show", "eval", "--trees", "1"]) == 0
    assert "observation: 0" in capsys.readouterr().out  # texts, not ids


def rows(task, *outcomes):
    made = []
    for i, o in enumerate(outcomes):
        stop = {"S": "won", "F": "truncated", "E": "error"}[o]
        row = {
            "task": task,
            "episode": i,
            "stop": stop,
            "success": None if o == "E" else o == "S",
            "return": float(o == "S"),
        }
        made.append(row | {"turns": 4, "invalid": 1, "tokens": 4} | ({"error": "down"} if o == "E" else {}))
    return made


def test_h23_by_hand():
    """The case's table: errors left out 0.8333 over 2 of 3 tasks and 7 of 12 trials; errors as failures 0.5."""
    all_rows = [*rows("A", *"SSFE"), *rows("B", *"EEEE"), *rows("C", *"SSSS")]
    found = estimates(all_rows)
    assert found["success"].mean == pytest.approx(0.833333, abs=1e-6) and found["success"].n == 2
    assert found["success, failed as lost"].mean == pytest.approx(0.5) and found["success, failed as lost"].n == 3
    assert coverage_of(all_rows)["ran"] == 7 and coverage_of(all_rows)["not_evaluated"] == ["B"]
    assert notes_on(all_rows)[0].startswith("7 of 12 episodes ran, on 2 of 3 tasks")
    assert found["invalid actions"].mean == 0.25 and found["turns of successes"].mean == 4


def test_a_resumed_evaluation_has_the_rows_of_an_unbroken_one(job):
    assert ev("--tasks", "40", "--temperature", "1", "--seed", "3") == 0
    path = Path("eval/rows.jsonl")
    whole = path.read_text()
    kept = whole.splitlines(keepends=True)
    path.write_text("".join(kept[:5]) + kept[5][:20])  # a kill inside a write
    assert ev("--tasks", "40", "--temperature", "1", "--seed", "3", "--resume") == 0
    assert path.read_text() == whole and len(kept) == 40
    assert json.loads(kept[0])["actions"] and results("eval")["coverage"]["episodes"] == 40


def test_without_a_success_the_return_is_compared(job, capsys):
    assert train("steps=2", env="world.py:Silent") == 0
    found = results("run")
    assert found["headline"]["metric"] == "return" and "success" not in found["arms"]["after"]
    assert "mean return" in found["verdict_rule"]
    assert "never says info['success']" in " ".join(capsys.readouterr().out.split())


def test_without_evaluation_nothing_is_claimed(job):
    assert train("steps=2", "eval_tasks=0") == 0
    assert results("run")["claim"] == "None: no records were held out."


def test_a_config_file_names_the_environment(job):
    Path("job.yaml").write_text(
        "model: model\nenv: world.py:Corridor\nmax_turns: 3\neval_tasks: 0\nmax_new_tokens: 1\n"
    )
    assert main(["train", "grpo", "--config", "job.yaml", "steps=1", "--dtype", "fp32", "--out", "run"]) == 0
    assert {k: v for k, v in metrics("run")[0].items() if k.startswith("stop/")} == {"stop/turns": 1.0}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "ppo", "--env", "sokoban"], "--env: ppo does not act in environments; grpo does"),
        (["train", "grpo", "--env", "sokobn"], "no such name; did you mean 'sokoban'?"),
        (["train", "grpo", "--env", "sokoban", "--suffix", "!"], "suffix='!': an environment writes the prompts"),
        (["train", "grpo", "--env", "sokoban", "--reward", "math"], "--reward: grpo has no reward"),
        (["train", "grpo", "--env", "world.py:Instance"], "cannot be called to make an environment"),
        (["train", "grpo", "--env", "sokoban", "max_turn=3"], "did you mean 'max_turns'?"),
        (["train", "grpo", "--env", "sokoban", "eval_split=valid_seen"], "valid_seen"),
        (["train", "grpo", "--env", "world.py:Corridor", "--data", "tasks.jsonl", "--limit", "0"], "has no tasks"),
        (["eval", "--env", "sokoban", "--reward", "math"], "--reward: not with --env, where the environment judges"),
        (["eval", "--env", "sokoban", "--samples", "2"], "samples=2 at temperature 0 would all be the same"),
        (["eval", "--env", "sokoban", "max_turns=0"], "max_turns=0: give at least 1"),
        (["eval", "--tasks", "3", "--data", "tasks.jsonl"], "belong to episodes; add --env NAME"),
        (["eval"], "give --data FILE (problems with answers), or --env NAME (episodes)"),
    ],
)
def test_wrong_commands_are_refused(job, capsys, command, message):
    assert main([*command, "--model", "model", "--out", "run"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("run").exists()
