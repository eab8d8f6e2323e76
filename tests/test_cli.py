"""The command as a user types it: true help, refusals before compute, and nothing lost when it is stopped."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args

import pytest

import forethought
from forethought.cli import _parser, main, parse
from forethought.recipes import CATALOGUE
from forethought.recipes.env_eval import EnvEvalJob
from forethought.recipes.evaluation import EvalJob
from forethought.recipes.search_eval import SearchEval
from forethought.recipes.train import IN_WORLDS, METHODS
from forethought.rewards.verify import Extract, Mode
from tinyjob import grpo, make_job, metrics, write

COMMANDS = ("list", "run", "train", "eval", "show", "report", "check-env", "doctor", "demo")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    make_job(folder)
    return folder


@pytest.fixture
def job(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "job")
    monkeypatch.chdir(tmp_path / "job")
    return tmp_path / "job"


def start(*args):
    """The command in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(Path(forethought.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "forethought", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def flags(command):
    """Flag -> its argparse action, of one command."""
    (commands,) = (a for a in _parser()._actions if a.dest == "command")
    return {option: action for action in commands.choices[command]._actions for option in action.option_strings}


def help_of(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.split())


# -- help --------------------------------------------------------------------------------------------------------------


def test_importing_and_help_are_quick_and_load_no_torch():
    program = "import sys, forethought; from forethought.cli import main; main([]); print('torch' in sys.modules)"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("False\n") and all(re.search(rf"^ +{name}\b", done.stdout, re.M) for name in COMMANDS)
    assert time.perf_counter() - began < 10  # generous: the machine may be busy


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    text = help_of(command, capsys)
    assert text.startswith(f"usage: forethought {command}") and len(text) > 100


def test_the_help_of_eval_tells_the_defaults(capsys):
    told = {}
    for option, action in flags("eval").items():
        found = re.search(r"default: ([\w.-]+)", action.help or "")
        if found and action.dest not in ("out", "device", "dtype"):
            assert action.default is None, option  # the default stands in one place
            told[action.dest] = found[1]
    defaults = {f.name: f.default for job in (EnvEvalJob, SearchEval, EvalJob) for f in fields(job)} | {
        "answer_column": "answer"
    }
    assert told == {
        name: f"{defaults[name]:g}" if isinstance(defaults[name], float) else str(defaults[name]) for name in told
    }
    assert set(told) >= {"prompt_column", "answer_column", "samples", "temperature", "max_new_tokens", "seed", "mode"}
    assert set(flags("eval")["--mode"].choices) == set(get_args(Mode))
    assert set(flags("eval")["--extract"].choices) == set(get_args(Extract))


def test_every_flag_of_train_and_eval_is_a_setting():
    own = {"help", "out", "resume", "overwrite"}
    trained = [method.load()[0] for method in (*METHODS.values(), *IN_WORLDS.values())]
    judge = {"judge_url", "judge_model"}  # judge.url and judge.model
    for command, jobs, others in (
        ("train", trained, {"config", "dry_run", *judge}),
        ("eval", (EvalJob, SearchEval), {"env", "split", "tasks"}),  # of EnvEvalJob, which takes key=value for the rest
    ):
        known = {f.name for job in jobs for f in fields(job)}
        assert {a.dest for a in flags(command).values()} - own - others <= known
        if command == "eval":  # and every setting is a flag, or there would be no way to it
            assert known <= {a.dest for a in flags(command).values()}


def test_dry_run_prints_every_setting_with_its_default(capsys):
    for method in METHODS:
        job, _ = METHODS[method].load()
        assert main(["train", method, "--dry-run"]) == 0
        printed = capsys.readouterr().out
        for f in fields(job):
            assert re.search(rf"^{f.name}:", printed, re.M), f.name
            if isinstance(f.default, int) and f.default is not MISSING:
                assert re.search(rf"^{f.name}: {str(f.default).lower()}$", printed, re.M)


def test_settings_may_stand_anywhere():
    for words in (
        "train grpo steps=3 --model m optim.lr=1 --data d clip_high=2",
        "train grpo --model m steps=3 --data d --optim.lr=1 clip_high=2",
        "train grpo --model m --data d steps=3 optim.lr=1 clip_high=2",
    ):
        args = parse(_parser(), words.split())
        assert [s.lstrip("-") for s in args.settings] == ["steps=3", "optim.lr=1", "clip_high=2"]
        assert (args.model, args.data, args.method) == ("m", "d", "grpo")


@pytest.mark.parametrize("words", ["train grpo --modle x", "list steps=3", "trian grpo", "eval --data x", "train dp"])
def test_what_is_no_command_line(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2 and "error:" in capsys.readouterr().err


# -- bad input: refused before the model is loaded, nothing written ----------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "dta.jsonl"], "dta.jsonl: no such data file; did you mean 'data.jsonl'?"),
        (["--data", "empty.jsonl"], "empty.jsonl: has no rows that can be used"),
        (["--data", "broken.jsonl"], "line 2: column 12: not JSON"),
        (["--data", "typo.jsonl"], "line 2: no column 'prompt'; did you mean 'promt'? (columns: promt)"),
        (["--data", "."], "is a folder; give a .jsonl or .parquet file"),
        (["--eval-data", "nothing.jsonl"], "nothing.jsonl: no such data file"),
        (["--answer-column", "solution"], "no column 'solution'"),
        (["--limit", "0"], "limit=0: give at least 1"),
        (["--config", "nothing.yaml"], "nothing.yaml: no such config file"),
        (["group_size=1"], "group_size=1: advantages compare the samples of a group, so give at least 2"),
        (["max_stpes=3"], "max_stpes: unknown setting; did you mean"),
        (["steps=many"], "steps='many': give a whole number"),
        (["optim.lr=-1"], "lr=-1.0: give a positive number"),
        (["reward_weights=1,2"], "reward_weights=[1.0, 2.0]: 1 rewards need 1 weights"),
        (["reward_timeout=0"], "reward_timeout=0.0: give a positive number of seconds"),
        (["lora.rank=0"], "rank=0: give at least 1"),
        (["--suffix", "!", "--data", "system.jsonl"], "task '0': no user message with text that the suffix could"),
        (["reward=rewards.py:shares"], "rewards.py has no 'shares'; did you mean 'share'?"),
        (["reward=reward.py:share"], "file reward.py does not exist"),
        (["reward=share"], "reward function 'share': write 'file.py:NAME' or 'package.module:NAME'"),
        (
            ["reward=math:boxed"],
            "reward 'math:boxed': write math or math:EXTRACT with one of box, last_number, bare, any",
        ),
        (["reward=rewards.py:odd"], "its parameters fit no known style"),
        (["reward=rewards.py:needs_hint"], "needs the column(s) 'hint', which 10 of 10 tasks lack"),
        (
            ["reward=math", "--data", "plain.jsonl"],
            "needs the right answer as column 'answer', which 1 of 1 records lack",
        ),
        (["reward=rewards.py:nan"], "trial call before the run: the result of reward function 'nan' is nan"),
        (["reward=rewards.py:wrong_length"], "returned 1 rewards for 2 completions; return one per completion"),
        (["reward=rewards.py:words"], "is 'good' (str), not a number"),
        (["reward=rewards.py:hangs", "reward_timeout=0.5"], "did not answer within its time limit of 0.5 s"),
        (["--out", "data.jsonl"], "data.jsonl: is a file; --out names a folder"),
        (["--out", "."], "holds files that are not a run's"),
        (["--resume"], "nothing to resume, there is no config.yaml; start the run without resume"),
    ],
)
def test_grpo_refuses(job, capsys, monkeypatch, args, message):
    (job / "empty.jsonl").write_text("\n")
    (job / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": b}\n')
    write(job / "typo.jsonl", [{"prompt": "a"}, {"promt": "b"}])
    write(job / "system.jsonl", [{"prompt": [{"role": "system", "content": "s"}]}])
    write(job / "plain.jsonl", [{"prompt": "a"}])
    monkeypatch.setattr("forethought.recipes.own_job.open_model", lambda *a, **k: pytest.fail("the model was loaded"))
    before = sorted(job.rglob("*"))
    assert grpo("--out", "run", *args) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said and said.splitlines()[0].startswith("forethought: ")
    assert [p for p in sorted(job.rglob("*")) if "__pycache__" not in p.parts] == before


def test_a_job_without_its_parts(job, capsys):
    assert main(["train", "grpo"]) == 2
    assert "model: give --model, or `model:` in the config file; data: give --data" in capsys.readouterr().err
    assert main(["train", "grpo", "--model", "model", "--data", "data.jsonl"]) == 2
    assert "no reward: give --reward FILE.py:NAME" in capsys.readouterr().err
    assert main(["train", "sft", "--model", "model", "--data", "data.jsonl", "--reward", "rewards.py:share"]) == 2
    assert "sft has no reward; leave it out" in capsys.readouterr().err


def test_all_problems_of_a_config_file_at_once(job, capsys):
    (job / "job.yaml").write_text(
        "model: model\ndata: data.jsonl\noptim: {lr: 5e-5}\nmax_new_tokens: 1.0e1\nmax_stpes: 10\nsteps: yes\n"
        "kl_estimater: k3\n"
    )
    assert main(["train", "grpo", "--config", "job.yaml", "--reward", "rewards.py:share"]) == 2
    said = capsys.readouterr().err
    assert "job.yaml: 3 problems" in said and "max_stpes: unknown setting" in said
    assert "steps='yes': give a whole number" in said
    assert "kl_estimater: unknown setting; did you mean 'kl_estimator'?" in said
    text = (job / "job.yaml").read_text().replace("max_stpes: 10\nsteps: yes\nkl_estimater: k3\n", "")
    (job / "job.yaml").write_text(text + "reward: rewards.py:share\n")
    assert main(["train", "grpo", "--config", "job.yaml", "steps=2", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "lr: 5.0e-05" in printed and "max_new_tokens: 10\n" in printed and "steps: 2\n" in printed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--device", "cuda"], "use device=cpu"),
        (["--device", "gpu"], "device='gpu': give one of auto, cpu, cuda, mps"),
        (
            ["--suffix", "z" * 70],
            "data.jsonl: 10 of 10 prompts fill the model's context of 64 tokens; the first is task",
        ),
        (["--suffix", "!"], "data.jsonl, task '0': the tokenizer cannot encode '0+1=!'"),
    ],
)
def test_what_only_the_model_can_tell_is_refused_before_the_run_folder_is_made(job, capsys, args, message):
    import torch

    if args == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert grpo("--out", "run", *args) == 2
    assert message in capsys.readouterr().err and not Path("run").exists()


def test_an_old_run_outlives_a_bad_new_one(job, capsys):
    grpo("--out", "run", "steps=1")
    old = metrics("run")
    assert grpo("--out", "run") == 2
    assert "holds a run already; resume it, overwrite it, or choose another folder" in capsys.readouterr().err
    assert grpo("--out", "run", "--overwrite", "--suffix", "z" * 70) == 2
    assert metrics("run") == old


def test_short_room_for_responses_is_told(job, capsys):
    grpo("--out", "run", "steps=1", "max_new_tokens=62")
    assert (
        "data.jsonl: 10 of 10 prompts leave less than max_new_tokens=62 in the context of 64" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a", "reply": "b"}], "a record for sft has `messages`, `prompt` and `completion`, or `text`"),
        ([{"prompt": "a"}], "line 1: no column 'completion'"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a"}], "line 2: no column 'completion'"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "no target in any of 1 records"),
        ([{"messages": [{"role": "user"}]}], "record 0: column 'messages': messages[0].content is None"),
        ([{"text": "a" * 70}], "record 0 has 71 tokens, the model's context is 64: leave it out, or cut such records"),
    ],
)
def test_sft_refuses(job, capsys, rows, message):
    write(job / "train.jsonl", rows)
    assert main(["train", "sft", "--model", "model", "--data", "train.jsonl", "--out", "run"]) == 2
    assert message in capsys.readouterr().err and not Path("run").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--samples", "4"], "samples=4 at temperature 0 would all be the same; give a --temperature, or 1 sample"),
        (["--samples", "0"], "samples=0: give at least 1"),
        (["--max-new-tokens", "0"], "max_tokens=0: give at least 1"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--data", "plain.jsonl"], "needs the right answer as column 'answer', which 1 of 1 records lack (columns of"),
        (["--data", "goldless.jsonl"], "record 1: its answer cannot be used"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_eval_refuses(job, capsys, args, message):
    write(job / "plain.jsonl", [{"prompt": "a", "target": 3}])
    write(job / "goldless.jsonl", [{"prompt": "a", "answer": 3}, {"prompt": "a", "answer": {"x": 1}}])
    assert main(["eval", "--model", "model", "--data", "data.jsonl", "--out", "run", *args]) == 2
    assert message in capsys.readouterr().err and not Path("run").exists()


def test_absent_extras_say_what_to_install(job, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert grpo("--out", "run", "--lora") == 2
    assert "LoRA needs peft: pip install 'forethought[peft]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (job / "data.parquet").write_bytes(b"PAR1")
    assert grpo("--out", "run", "--data", "data.parquet") == 2
    assert "reading parquet needs pyarrow: pip install 'forethought[parquet]'" in capsys.readouterr().err


def test_debug_shows_the_traceback(job):
    with pytest.raises(forethought.errors.DataError):
        main(["--debug", "eval", "--model", "model", "--data", "nothing.jsonl"])


# -- rewards that fail while the run goes on ---------------------------------------------------------------------------


def test_a_reward_that_always_raises_stops_the_first_step(job, capsys):
    assert grpo("--out", "run", reward="raises") == 2
    said = capsys.readouterr().err
    assert (
        "every sample's reward failed; the first: reward function 'raises' raised RuntimeError: no such judge" in said
    )


# -- stopped, killed, full ---------------------------------------------------------------------------------------------

RUN = ["train", "grpo", "--model", "model", "--data", "data.jsonl", "--reward", "rewards.py:share", "--dtype", "fp32"]
RUN += ["prompts_per_step=4", "group_size=4", "max_new_tokens=5", "optim.lr=0.01", "save_every=2", "--out", "run"]


def lines_of(path):
    return path.read_text().count("\n") if path.exists() else 0


def wait_for(process, lines):
    until = time.monotonic() + 90
    while lines_of(Path("run/metrics.jsonl")) < lines:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_second_process_is_refused_and_ctrl_c_saves(job, capsys):
    process = start(*RUN, "steps=100000")
    try:
        wait_for(process, 3)
        for how in ("--resume", "--overwrite"):
            assert main([*RUN, "steps=100000", how]) == 2
            said = capsys.readouterr().err
            assert "in use by" in said and str(process.pid) in said
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    stopped = int(re.search(r"stopped after step (\d+) of 100000; saved in .*; add --resume to go on", said)[1])
    assert main([*RUN, f"steps={stopped + 2}", "--resume"]) == 0
    shutil.move("run", "stopped")
    assert main([*RUN, f"steps={stopped + 2}"]) == 0
    assert metrics("stopped") == metrics("run")


def test_resume_with_another_config_shows_the_difference(job, capsys):
    assert main([*RUN, "steps=2"]) == 0
    capsys.readouterr()
    assert main([*RUN, "steps=2", "--resume", "optim.lr=0.1", "clip_high=0.3"]) == 2
    said = capsys.readouterr().err
    assert "cannot resume, the config has changed" in said
    assert "optim.lr: 0.01 -> 0.1" in said and "clip_high: 0.2 -> 0.3" in said


def test_a_full_disk_leaves_the_last_checkpoint(job, capsys):
    assert main([*RUN, "steps=6", "store_groups=0"]) == 0
    shutil.move("run", "whole")
    (job / "rewards.py").write_text(
        (job / "rewards.py").read_text()
        + "\nimport resource\n_share = share\n"
        + "def share(completions, trainer_state=None, **kw):\n"
        + "    if trainer_state.global_step == 3 and not Path('room').exists():\n"
        + "        resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n"
        + "    return _share(completions)\n"
    )
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        code = main([*RUN, "steps=6", "store_groups=0"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said = capsys.readouterr().err
    assert code == 2 and "the disk is full" in said
    assert "the last good checkpoint, step_00000002, is untouched" in said
    assert [p.name for p in Path("run/checkpoints").iterdir()] == ["step_00000002"]
    (job / "room").touch()
    assert main([*RUN, "steps=6", "store_groups=0", "--resume"]) == 0
    assert metrics("run") == metrics("whole")


# -- the other commands ------------------------------------------------------------------------------------------------


def test_list_names_systems_and_the_own_job(capsys):
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert all(f"forethought run {entry.slug}" in said and entry.paper in said for entry in CATALOGUE)
    assert f"forethought train {'|'.join(METHODS)}" in said and "sft|grpo" in said


def test_every_method_of_train_is_a_job_with_its_line_in_the_help(capsys):
    from forethought.recipes.own_job import Job

    said = help_of("train", capsys)
    for name, method in METHODS.items():
        job, function = method.load()
        assert issubclass(job, Job) and callable(function) and f"{name}: {method.line}" in said
        assert main(["train", name, "--dry-run"]) == 0 and f"method: {name}" in capsys.readouterr().out


def test_run_names_the_nearest_recipe(capsys):
    assert main(["run", "one-shot-rvlr"]) == 2
    assert "did you mean 'one-shot-rlvr'?" in capsys.readouterr().err


def test_show_and_report(job, capsys):
    grpo("--out", "a", "steps=1")
    grpo("--out", "b", "steps=1", "seed=1")
    capsys.readouterr()
    assert main(["show", "a", "--trees", "1"]) == 0
    said = capsys.readouterr().out
    assert "train grpo · own job · model" in said and "Rollouts: grpo, step 1" in said
    assert main(["show", "a", "b"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^a .*\n.*\nb ", said, re.M)
    assert main(["show", "data.jsonl", "held_out.jsonl", "--trees", "1"]) == 0
    said = capsys.readouterr().out
    assert "data.jsonl: 10 records" in said and "held_out.jsonl: 10 records" in said
    Path("a/report.html").unlink()
    assert main(["report", "a"]) == 0
    assert Path(capsys.readouterr().out.strip()) == Path("a/report.html").resolve() or Path("a/report.html").is_file()
    for command in ("show", "report"):
        assert main([command, "nothing"]) == 2
    assert "no such run folder" in capsys.readouterr().err


def test_check_env_says_what_breaks(job, capsys):
    (job / "env.py").write_text(
        "from forethought.envs.env import Step\nfrom forethought.errors import EnvError\n"
        "class Good:\n"
        "    def reset(self, task=None, seed=0):\n        self.left = 3\n        return Step('go')\n"
        "    def step(self, action):\n"
        "        if not self.left:\n            raise EnvError('the episode is over')\n"
        "        self.left -= 1\n"
        "        return Step('on', terminated=self.left == 0, info={'success': True} if not self.left else {})\n"
        "    def snapshot(self):\n        return self.left\n"
        "    def restore(self, snapshot):\n        self.left = snapshot\n"
        "    def state_key(self):\n        return str(self.left)\n"
        "class Bad(Good):\n"
        "    def restore(self, snapshot):\n        pass\n"
    )
    assert main(["check-env", "env.py:Good", "--seeds", "1"]) == 0
    assert "no rule is broken" in capsys.readouterr().out
    assert main(["check-env", "env.py:Bad", "--seeds", "1"]) == 1
    assert re.search(r"broken: .*restore|broken: .*snapshot", capsys.readouterr().out)
    assert main(["check-env", "env.py:Godo"]) == 1
    assert "did you mean 'Good'?" in capsys.readouterr().out


def test_doctor_prints_versions(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert forethought.__version__ in said and "torch" in said


def test_metrics_are_strict_json(job):
    grpo("--out", "run", "steps=1")

    def refuse(name):
        raise ValueError(name)

    for line in Path("run/metrics.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=refuse)["arm"] == "grpo"
