"""Run folders: locks, metrics, checkpoints; kills at random moments, full disks, second processes, changed configs."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from forethought import files, rundir
from forethought.errors import ConfigError, DataError, RunError
from forethought.files import FolderLock, recover, verify_folder
from forethought.rundir import RunDir, read_metrics, rng_state, set_rng_state, versions

CONFIG = {"model": "m", "steps": 10, "optim": {"lr": 1e-5, "betas": [0.9, 0.95]}}


def refused(call, *args, **kwargs) -> str:
    with pytest.raises(RunError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def run_python(program: str, *args: object, **kwargs) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


def start_python(program: str, *args: object) -> subprocess.Popen:
    command = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def save(run: RunDir, step: int, **kwargs) -> None:
    with run.checkpoint(step, **kwargs) as folder:
        (folder / "model.safetensors").write_bytes(bytes([step % 256]) * 1000)
        (folder / "state").mkdir()
        (folder / "state" / "optim.bin").write_bytes(b"o" * 100)


def steps_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# -- creating --------------------------------------------------------------------------------------------------------


def test_a_new_run_has_its_config_versions_and_log(tmp_path):
    @dataclass(frozen=True)
    class Config:
        steps: int = 3
        rate: float = 5e-5
        stop: tuple[str, ...] = ("yes",)

    with RunDir.create(tmp_path / "a" / "run", Config()) as run:
        text = (run.path / "config.yaml").read_text()
        assert text.splitlines()[0].startswith("# forethought run; forethought 0.") and "torch 2." in text
        assert text.splitlines()[1:] == ["steps: 3", "rate: 5.0e-05", "stop:", "- 'yes'"]
        assert run.config == {"steps": 3, "rate": 5e-5, "stop": ["yes"]} and not run.resumed
        assert "created with forethought" in (run.path / "log.txt").read_text()
    assert RunDir.open(run.path).config == run.config


def test_a_folder_with_a_run_or_with_other_files_is_left_alone(tmp_path):
    RunDir.create(tmp_path / "run", CONFIG).close()
    message = refused(RunDir.create, tmp_path / "run", CONFIG)
    assert message == f"{tmp_path / 'run'}: holds a run already; resume it, overwrite it, or choose another folder"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "mine" / "config.yaml").write_text("site: blog")
    for overwrite in (False, True):
        message = refused(RunDir.create, tmp_path / "mine", CONFIG, overwrite=overwrite)
        assert "holds files that are not a run's (config.yaml, thesis.tex); choose another folder" in message
    assert steps_in(tmp_path / "mine") == ["config.yaml", "thesis.tex"]
    (tmp_path / "empty").mkdir()
    RunDir.create(tmp_path / "empty", CONFIG).close()


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
    with RunDir.create(tmp_path, CONFIG) as run:
        run.log_metrics({"a": 1}, 1)
        save(run, 5)
        run.write_json("results.json", {})
        run.write_json("history.json", {})
        with run.save_folder("model") as folder:
            (folder / "w").write_text("x")
        with RunDir.create(tmp_path / "arms" / "grpo" / "seed0", {}) as inner:  # a recipe's piece with its own folder
            inner.write_json("done.json", {})
        (tmp_path / "notes.md").write_text("keep")
    with RunDir.create(tmp_path, {"steps": 1}, overwrite=True) as run:
        assert steps_in(tmp_path) == [".lock", "config.yaml", "log.txt", "notes.md"]
        assert run.config == {"steps": 1} and run.latest_checkpoint() is None and run.metrics() == []
    assert "give one" in refused(RunDir.create, tmp_path, CONFIG, overwrite=True, resume=True)


def test_places_that_cannot_hold_a_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    assert "a file is in the place of this folder" in refused(RunDir.create, tmp_path / "file", CONFIG)
    assert "a file is in the place of this folder" in refused(RunDir.create, tmp_path / "file" / "run", CONFIG)
    with pytest.raises(ConfigError, match="the config cannot be written as YAML"):
        RunDir.create(tmp_path / "run", {"x": object()})
    assert not (tmp_path / "run").exists()

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", read_only)
    message = refused(RunDir.create, tmp_path / "run", CONFIG)
    assert "run: not writable (Read-only file system); choose another folder or change its permissions" in message


def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "theirs").mkdir(mode=0o755)
    program = (
        "import os, sys\n"
        "from forethought.rundir import RunDir\n"
        "from forethought.errors import RunError\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "else: os.chmod(sys.argv[1], 0o555)\n"
        "for name in (sys.argv[1], sys.argv[1] + '/run'):\n"
        "    try: RunDir.create(name, {})\n"
        "    except RunError as err: print(err)\n"
    )
    done = run_python(program, tmp_path / "theirs")
    assert done.stdout.count("not writable (Permission denied); choose another folder") == 2, done.stderr


# -- the lock --------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from forethought.rundir import RunDir
run = RunDir.create(sys.argv[1], {}, resume="resume" in sys.argv)
if "fork" in sys.argv:
    import os
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    print(child)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_second_process_is_refused_and_a_dead_one_is_taken_over(tmp_path):
    holder = start_python(HOLDER, tmp_path / "run")
    try:
        assert holder.stdout and holder.stdout.readline() == "ready\n"
        for kwargs in ({"resume": True}, {"overwrite": True}):
            message = refused(RunDir.create, tmp_path / "run", {}, **kwargs)
            assert f"run: in use by process {holder.pid} on " in message and "wait for it" in message
        assert RunDir.open(tmp_path / "run").metrics() == []  # looking on is fine
    finally:
        holder.kill()
        holder.communicate()
    with RunDir.create(tmp_path / "run", {}, resume=True) as run:
        assert f"process {holder.pid} ended without closing this folder" in (run.path / "log.txt").read_text()
    RunDir.create(tmp_path / "run", {}, resume=True).close()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("ended without closing") == 1 and log.count("resumed") == 2


def test_a_worker_that_outlives_the_run_does_not_keep_the_lock(tmp_path):
    holder = start_python(HOLDER, tmp_path / "run", "fork")
    assert holder.stdout
    child = int(holder.stdout.readline())
    try:
        assert holder.stdout.readline() == "ready\n"
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # still there
        RunDir.create(tmp_path / "run", {}, resume=True).close()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_the_same_process_is_refused_until_it_closes_or_forgets_the_run(tmp_path):
    run = RunDir.create(tmp_path, {})
    assert f"in use by this very process ({os.getpid()})" in refused(RunDir.create, tmp_path, {}, resume=True)
    run.log_metrics({"a": 1}, 1)  # the refused attempt has not dropped the lock of the first
    other = run_python(
        "import sys; from forethought.rundir import RunDir; RunDir.create(sys.argv[1], {}, resume=True)", tmp_path
    )
    assert f"in use by process {os.getpid()}" in other.stderr
    del run
    RunDir.create(tmp_path, {}, resume=True).close()
    RunDir.create(tmp_path, {}, resume=True).close()


def test_a_run_that_could_not_start_holds_no_lock(tmp_path):
    RunDir.create(tmp_path, CONFIG).close()
    refused(RunDir.create, tmp_path, {"steps": 11}, resume=True)
    RunDir.create(tmp_path, CONFIG, resume=True).close()


def test_on_a_file_system_without_locks_the_process_id_decides(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "lockf", unsupported)
    lock = tmp_path / ".lock"
    FolderLock(tmp_path).release()
    holder = subprocess.Popen(["sleep", "60"])
    here = {"host": os.uname().nodename, "since": "today"}
    try:
        lock.write_text(json.dumps({"pid": holder.pid, **here}))
        assert f"in use by process {holder.pid}" in refused(FolderLock, tmp_path)
    finally:
        holder.kill()
        holder.wait()
    taken = FolderLock(tmp_path)
    assert taken.stale == holder.pid and json.loads(lock.read_text())["pid"] == os.getpid()
    taken.release()
    lock.write_text(json.dumps({"pid": holder.pid, "host": "elsewhere", "since": "today"}))
    assert f"if that has ended, delete {lock}" in refused(FolderLock, tmp_path)


def test_closed_and_opened_runs_do_not_write(tmp_path):
    run = RunDir.create(tmp_path, {})
    run.close()
    run.close()
    for reader in (run, RunDir.open(tmp_path)):
        for call in (
            lambda r: r.log_metrics({}, 1),
            lambda r: r.write_json("x.json", {}),
            lambda r: r.truncate_metrics(0),
            lambda r: r.log("x"),
            lambda r: save(r, 1),
        ):
            assert "open for reading only" in refused(call, reader)
    assert "not a run folder" in refused(RunDir.open, tmp_path / "nothing")


# -- resume ----------------------------------------------------------------------------------------------------------


def test_resume_with_a_changed_config_shows_the_difference(tmp_path):
    RunDir.create(tmp_path, CONFIG).close()
    new = {"model": "m", "steps": 20, "optim": {"lr": 2e-5, "betas": (0.9, 0.95), "warmup": 3}}
    message = refused(RunDir.create, tmp_path, new, resume=True)
    assert "cannot resume, the config has changed (old -> new):" in message
    assert "  steps: 10 -> 20\n  optim.lr: 1e-05 -> 2e-05\n  optim.warmup: (absent) -> 3" in message
    assert "model" not in message.split("\n", 1)[1] and "betas" not in message
    message = refused(RunDir.create, tmp_path, new, resume=True, may_change=("steps", "opt"))
    assert "steps" not in message and "optim.lr: 1e-05 -> 2e-05" in message
    assert RunDir.open(tmp_path).config["steps"] == 10
    with RunDir.create(tmp_path, new, resume=True, may_change=("steps", "optim")) as run:
        assert run.resumed and run.config["steps"] == 20
        assert "changed settings:\n  steps: 10 -> 20" in (tmp_path / "log.txt").read_text()
    assert RunDir.open(tmp_path).config["optim"] == {"lr": 2e-5, "betas": [0.9, 0.95], "warmup": 3}


def test_resume_of_nothing_is_an_error(tmp_path):
    message = refused(RunDir.create, tmp_path / "run", CONFIG, resume=True)
    assert "nothing to resume" in message and not (tmp_path / "run").exists()


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_strict_json_lines(tmp_path):
    torch = pytest.importorskip("torch")
    with RunDir.create(tmp_path, {}) as run:
        run.log_metrics({"arm": "grpo", "seed": 0, "reward/mean": np.float32(0.5), "n": np.int64(3)}, 1)
        run.log_metrics(
            {"loss": float("nan"), "kl": torch.tensor(float("inf")), "lr": 1e-5, "x": None, "ok": True}, step=2
        )
        lines = (tmp_path / "metrics.jsonl").read_text().split("\n")
        assert lines == [
            '{"step": 1, "arm": "grpo", "seed": 0, "reward/mean": 0.5, "n": 3}',
            '{"step": 2, "loss": null, "kl": null, "lr": 1e-05, "x": null, "ok": true, "nonfinite": ["loss", "kl"]}',
            "",
        ]
        assert run.metrics() == read_metrics(tmp_path) == [json.loads(line) for line in lines[:2]]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"a": [1]}, "metric 'a': list is not a number; log one number per name"),
        ({"a": np.ones(2)}, "metric 'a': list is not a number"),
        ({"a": object()}, "metric 'a': object is not a number"),
        ({"step": 3}, "metric 'step': the name is reserved"),
        ({"nonfinite": 3}, "metric 'nonfinite': the name is reserved"),
        ({"a": "\ud800"}, "metrics of step 1: holds half of a surrogate pair"),
    ],
)
def test_metrics_that_are_no_numbers_are_named(tmp_path, metrics, message):
    with RunDir.create(tmp_path, {}) as run:
        assert message in refused(run.log_metrics, metrics, 1)
        assert run.metrics() == []


def test_truncating_keeps_the_bytes_of_earlier_lines_and_of_other_learners(tmp_path):
    with RunDir.create(tmp_path, {}) as run:
        assert run.truncate_metrics(5) == 0
        for step in range(1, 5):
            for arm in ("a", "b"):
                run.log_metrics({"arm": arm, "x": step / 3}, step)
        lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        assert run.truncate_metrics(2, arm="b") == 2
        assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines[:4] + [lines[4], lines[6]])
        assert run.truncate_metrics(1) == 4
        assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines[:2])


def test_a_line_cut_by_a_kill_is_dropped_and_a_damaged_one_is_named(tmp_path):
    with RunDir.create(tmp_path, {}) as run:
        run.log_metrics({"x": 1}, 1)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 2, "x"')
    assert read_metrics(tmp_path) == [{"step": 1, "x": 1}]
    with RunDir.create(tmp_path, {}, resume=True) as run:
        run.log_metrics({"x": 2}, 2)
        assert path.read_bytes() == whole + b'{"step": 2, "x": 2}\n'
        path.write_bytes(whole + b'{"step": 2, "x"\n' + whole)
        with pytest.raises(DataError, match="metrics.jsonl: line 2: column 16: not JSON"):
            run.metrics()
        path.write_bytes(b'{"x": 1}\n')
        with pytest.raises(DataError, match="line 1: no object with a whole 'step'"):
            run.truncate_metrics(1)


def test_write_json_is_strict_and_stays_inside(tmp_path):
    with RunDir.create(tmp_path, {}) as run:
        value = {"arms": {"grpo": {"mean": float("nan"), "n": np.int64(3), "ci95": (0.1, float("inf"))}}}
        path = run.write_json("arms/results.json", value)
        assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
            "arms": {"grpo": {"mean": None, "n": 3, "ci95": [0.1, None]}},
            "nonfinite": ["arms.grpo.mean", "arms.grpo.ci95[1]"],
        }
        for name in ("../x.json", "/tmp/x.json", ".", "", ".lock", "a/../../x.json"):
            assert "give a name inside the run folder" in refused(run.write_json, name, {})
        assert "NaN or infinite" in refused(run.write_json, "x.json", [float("nan")])
        assert "set is not JSON" in refused(run.write_json, "x.json", {"a": {1}})
        assert not (tmp_path / "x.json").exists()


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_are_named_sealed_and_the_last_two_stay(tmp_path):
    with RunDir.create(tmp_path, {}) as run:
        assert run.latest_checkpoint() is None
        for step in (0, 10, 20):
            save(run, step)
        folder = tmp_path / "checkpoints"
        assert steps_in(folder) == ["step_00000010", "step_00000020"]
        assert run.latest_checkpoint() == folder / "step_00000020" and run.skipped == []
        manifest = json.loads((folder / "step_00000020" / "MANIFEST.json").read_text())
        assert list(manifest["files"]) == ["model.safetensors", "state/optim.bin"]
        assert manifest["files"]["state/optim.bin"]["bytes"] == 100
        save(run, 30, keep_last=1)
        save(run, 99_999_999)
        save(run, 100_000_000)
        assert steps_in(folder) == ["step_100000000", "step_99999999"]
        assert RunDir.open(tmp_path).latest_checkpoint() == folder / "step_100000000"
        for bad in ({"step": -1}, {"step": 1, "keep_last": 0}):
            assert "give a step from 0, and keep at least 1" in refused(lambda b=bad: save(run, **b))


def test_learners_of_one_run_keep_their_checkpoints_apart(tmp_path):
    with RunDir.create(tmp_path, {}) as run:
        save(run, 5, name="grpo/seed0")
        save(run, 9, name="grpo/seed1")
        assert run.latest_checkpoint("grpo/seed0") == tmp_path / "checkpoints/grpo/seed0/step_00000005"
        assert run.latest_checkpoint("sft") is None and run.latest_checkpoint() is None
        assert "inside the run folder" in refused(run.latest_checkpoint, "../..")


def damage_cut(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:500])
    (folder / "state" / "optim.bin").unlink()
    return "model.safetensors has 500 of 1000 bytes"


def damage_missing(folder: Path) -> str:
    (folder / "state" / "optim.bin").unlink()
    return "state/optim.bin is missing"


def damage_bit(folder: Path) -> str:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[7] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    return "model.safetensors has not the content that was saved"


def damage_no_manifest(folder: Path) -> str:
    (folder / "MANIFEST.json").unlink()
    return "it has no MANIFEST.json, so saving did not end"


def damage_manifest(folder: Path) -> str:
    (folder / "MANIFEST.json").write_text('{"files": {"model.safeten')
    return "its MANIFEST.json is damaged"


def damage_manifest_shape(folder: Path) -> str:
    (folder / "MANIFEST.json").write_text('{"files": [1]}')
    return "its MANIFEST.json is damaged"


def damage_empty(folder: Path) -> str:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return "it has no MANIFEST.json, so saving did not end"


DAMAGES = [
    damage_cut,
    damage_missing,
    damage_bit,
    damage_no_manifest,
    damage_manifest,
    damage_manifest_shape,
    damage_empty,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_h14_a_broken_newest_checkpoint_is_passed_over_and_named(tmp_path, damage):
    with RunDir.create(tmp_path, {}) as run:
        save(run, 10)
        save(run, 20)
    folder = tmp_path / "checkpoints"
    problem = damage(folder / "step_00000020")
    with RunDir.create(tmp_path, {}, resume=True) as run:
        with pytest.warns(UserWarning) as caught:
            assert run.latest_checkpoint() == folder / "step_00000010"
        assert f"going on from step_00000010, because step_00000020 is broken: {problem}" in str(caught[0].message)
        assert run.skipped == [f"step_00000020 is broken: {problem}"]
        # Step 10 goes neither while 30 is being written, nor if that fails; the broken one does not count as kept.
        with pytest.raises(KeyError), run.checkpoint(30):
            assert (folder / "step_00000010").is_dir()
            raise KeyError
        assert verify_folder(folder / "step_00000010") == ""
        save(run, 20)
        assert run.latest_checkpoint() == folder / "step_00000020"
        assert steps_in(folder) == ["step_00000010", "step_00000020"]


def test_h14_when_all_are_broken_the_run_does_not_start_from_scratch(tmp_path):
    with RunDir.create(tmp_path, {}) as run:
        save(run, 10)
        save(run, 20)
        damage_cut(tmp_path / "checkpoints" / "step_00000010")
        damage_bit(tmp_path / "checkpoints" / "step_00000020")
        message = refused(run.latest_checkpoint)
        assert (
            "no checkpoint can be used: step_00000020 is broken: " in message and "step_00000010 is broken" in message
        )


def test_steps_of_a_line_that_the_run_has_left_go_when_the_new_one_is_whole(tmp_path):
    with RunDir.create(tmp_path, {}) as run:
        save(run, 10)
        save(run, 20)
        damage_bit(tmp_path / "checkpoints" / "step_00000020")  # its sizes are right
        save(run, 15, keep_last=1)
        assert steps_in(tmp_path / "checkpoints") == ["step_00000015"]


def test_saving_a_step_again_replaces_it(tmp_path):
    with RunDir.create(tmp_path, {}) as run:
        save(run, 10)
        with run.checkpoint(10) as folder:
            (folder / "other").write_text("new")
        assert steps_in(tmp_path / "checkpoints") == ["step_00000010"]
        assert steps_in(tmp_path / "checkpoints" / "step_00000010") == ["MANIFEST.json", "other"]


def test_an_error_or_ctrl_c_while_saving_leaves_only_what_was_there(tmp_path):
    with RunDir.create(tmp_path, {}) as run:
        save(run, 10)
        for error in (ValueError("mine"), KeyboardInterrupt()):
            for step in (10, 20):
                with pytest.raises(type(error)), run.checkpoint(step) as folder:
                    (folder / "model.safetensors").write_bytes(b"half")
                    raise error
        assert steps_in(tmp_path / "checkpoints") == ["step_00000010"]
        assert verify_folder(tmp_path / "checkpoints" / "step_00000010") == ""


def test_what_a_kill_between_two_renames_left_is_put_right(tmp_path):
    with RunDir.create(tmp_path, {}) as run:
        save(run, 10)
        save(run, 20)
    folder = tmp_path / "checkpoints"
    (folder / "step_00000020").rename(folder / ".step_00000020.old")  # killed while 20 was being replaced
    (folder / ".step_00000020.tmp-123").mkdir()
    (folder / ".step_00000020.tmp-123" / "half").write_text("x")
    (folder / ".step_00000010.old").mkdir()  # killed while the replaced one was being removed
    (tmp_path / ".results.json.tmp-123").write_text("{")
    with RunDir.create(tmp_path, {}, resume=True) as run:
        assert steps_in(folder) == ["step_00000010", "step_00000020"]
        assert run.latest_checkpoint() == folder / "step_00000020"
        assert not (tmp_path / ".results.json.tmp-123").exists()
    recover(tmp_path / "not there", below=True)


# -- full disks ------------------------------------------------------------------------------------------------------


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def body_raises(error):
    def body(folder):
        (folder / "model.safetensors").write_bytes(b"x" * 10)
        raise error

    return body


BODIES = {
    "os": body_raises(OSError(errno.ENOSPC, "No space left on device")),
    "quota": body_raises(OSError(errno.EDQUOT, "Disk quota exceeded")),
    "safetensors": body_raises(
        Exception("Error while serializing: IoError(Os { code: 28, message: No space left on device })")
    ),
    "numpy": body_raises(OSError("10000 requested and 734 written")),
    "torch": body_raises(RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")),
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("step", [10, 20])
def test_a_disk_that_fills_while_the_weights_are_written(tmp_path, kind, step):
    with RunDir.create(tmp_path, {}) as run:
        save(run, 10)
        with pytest.raises(RunError) as caught, run.checkpoint(step) as folder:
            BODIES[kind](folder)
        message = str(caught.value)
        assert message.startswith(f"checkpoint of step {step}: ") and "the disk is full (" in message
        assert "MiB left" in message and "the last good checkpoint, step_00000010, is untouched" in message
        assert steps_in(tmp_path / "checkpoints") == ["step_00000010"]
        assert verify_folder(tmp_path / "checkpoints" / "step_00000010") == ""
        save(run, 20)


@pytest.mark.parametrize("where", ["fsync", "mkdir", "rename"])
def test_a_disk_that_fills_at_any_later_point(tmp_path, monkeypatch, where):
    with RunDir.create(tmp_path, {}) as run:
        save(run, 10)
        monkeypatch.setattr(os, where, full)
        for step in (10, 20):
            assert "the disk is full" in refused(save, run, step)
        monkeypatch.undo()
        assert steps_in(tmp_path / "checkpoints") == ["step_00000010"]
        assert verify_folder(tmp_path / "checkpoints" / "step_00000010") == ""


def test_a_disk_that_fills_under_metrics_and_results(tmp_path, monkeypatch):
    with RunDir.create(tmp_path, {}) as run:
        run.log_metrics({"x": 1}, 1)
        run.write_json("results.json", {"a": 1})
        real, before = os.write, (tmp_path / "metrics.jsonl").read_bytes()
        left = [5]

        def nearly_full(fd, data):
            if not left[0]:
                full()
            data = data[: left[0]]
            left[0] -= len(data)
            return real(fd, data)

        monkeypatch.setattr(os, "write", nearly_full)
        assert "metrics.jsonl: not written, the disk is full" in refused(run.log_metrics, {"x": 2}, 2)
        monkeypatch.undo()
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        run.log_metrics({"x": 2}, 2)
        monkeypatch.setattr(os, "fsync", full)
        assert "results.json: not written, the disk is full" in refused(run.write_json, "results.json", {"a": 2})
        monkeypatch.undo()
        assert json.loads((tmp_path / "results.json").read_text()) == {"a": 1}
        assert run.metrics() == [{"step": 1, "x": 1}, {"step": 2, "x": 2}]


LIMITED = """
import resource, signal, sys
import numpy as np
from forethought.errors import RunError
from forethought.rundir import RunDir
run = RunDir.create(sys.argv[1], {})
for step in range(5):
    run.log_metrics({"x": step}, step)
with run.checkpoint(10) as folder:
    (folder / "w.bin").write_bytes(b"w" * 4000)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
def numpy_save(folder): np.save(folder / "w.npy", np.zeros(10000))
def safetensors_save(folder):
    from safetensors.numpy import save_file
    save_file({"w": np.zeros(10000)}, folder / "w.safetensors")
for body in (numpy_save, safetensors_save):
    try:
        with run.checkpoint(20) as folder:
            body(folder)
    except RunError as err:
        print(err)
for step in range(5, 2000):
    try:
        run.log_metrics({"x": step}, step)
    except RunError as err:
        print(err)
        break
print("last", step - 1)
"""


def test_a_real_limit_on_file_size(tmp_path):
    done = run_python(LIMITED, tmp_path / "run", preexec_fn=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    for line in lines[:2]:
        assert line.startswith("checkpoint of step 20: ") and "the disk is full" in line and "step_00000010" in line
    assert "metrics.jsonl: not written, the disk is full" in lines[2]
    assert steps_in(tmp_path / "run" / "checkpoints") == ["step_00000010"]
    with RunDir.create(tmp_path / "run", {}, resume=True) as run:
        assert run.latest_checkpoint() == tmp_path / "run" / "checkpoints" / "step_00000010"
        assert f"last {run.metrics()[-1]['step']}" == lines[3] and len(run.metrics()) > 100
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


# -- kill -9 at random moments ---------------------------------------------------------------------------------------

# A run whose state is a number: each step adds a random one. Any break in metrics, data order or random state shows.
LEARNER = """
import json, random, sys, time
import numpy as np
from forethought.data import BatchSampler
from forethought.rundir import RunDir, rng_state, set_rng_state

STEPS = 60
out, resume = sys.argv[1], sys.argv[2] == "resume"
random.seed(1); np.random.seed(2)
run = RunDir.create(out, {"steps": STEPS}, resume=resume)
batches, total, step = BatchSampler(10, 3, seed=0), 0.0, 0
found = run.latest_checkpoint()
if found:
    saved = json.loads((found / "state.json").read_text())
    step, total = saved["step"], saved["total"]
    assert all((found / f"part{i}.bin").read_bytes() == bytes([step % 256]) * 50_000 for i in range(4))
    batches.load_state_dict(saved["batches"]); set_rng_state(saved["rng"])
run.truncate_metrics(step)
while step < STEPS:
    batch = next(batches)
    step += 1
    total += random.random() + np.random.rand() + sum(batch)
    run.log_metrics({"total": total, "first": batch[0]}, step)
    if step % 2 == 0:
        began = time.perf_counter()
        with run.checkpoint(step) as folder:
            for i in range(4):
                (folder / f"part{i}.bin").write_bytes(bytes([step % 256]) * 50_000)
            saved = {"step": step, "total": total, "batches": batches.state_dict(), "rng": rng_state()}
            (folder / "state.json").write_text(json.dumps(saved))
        print(step, time.perf_counter() - began, flush=True)
run.write_json("results.json", {"total": total})
"""


def test_kill_9_at_random_moments_loses_no_finished_checkpoint_and_changes_no_number(tmp_path):
    oracle = tmp_path / "oracle"
    assert run_python(LEARNER, oracle, "new").returncode == 0
    broken = tmp_path / "broken"
    chance = random.Random(7)
    saved, kills, done = 0, 0, False
    while not done:
        assert kills < 200
        child = start_python(LEARNER, broken, "resume" if (broken / "config.yaml").exists() else "new")
        killer = threading.Timer(60, child.kill)  # a hang must not hang the tests
        killer.start()
        assert child.stdout and child.stdin
        line = child.stdout.readline()  # at work: from here on kill it anywhere within the next checkpoint or two
        if line and kills < 12:
            time.sleep(chance.uniform(0, 1.5) * float(line.split()[1]))
            child.send_signal(signal.SIGKILL)
        lines = [line, *child.stdout.readlines()]
        child.communicate()
        killer.cancel()
        done, kills = child.returncode == 0, kills + (child.returncode == -signal.SIGKILL)
        assert child.returncode in (0, -signal.SIGKILL)
        saved = max([saved, *(int(text.split()[0]) for text in lines if text)])
        look = RunDir.open(broken)
        found = look.latest_checkpoint()  # whole by its manifest, and at least what was reported
        assert found is not None and int(found.name[5:]) >= saved and look.skipped == []
        for value in read_metrics(broken):
            assert value["step"] <= 60
    assert kills >= 5
    assert (broken / "metrics.jsonl").read_bytes() == (oracle / "metrics.jsonl").read_bytes()
    assert (broken / "results.json").read_bytes() == (oracle / "results.json").read_bytes()
    assert len(steps_in(broken / "checkpoints")) == 2
    assert (broken / "log.txt").read_text().count("ended without closing this folder") >= kills - 1


def killed_at(call: int, action) -> bool:
    """Run the action in a forked child that kills itself in front of its n-th file system call; True if so."""
    pid = os.fork()
    if pid == 0:
        left = [call]

        def count(real):
            def counted(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return counted

        for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir", "write", "ftruncate"):
            setattr(os, name, count(getattr(os, name)))
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_kill_in_front_of_any_file_system_call_of_resume_and_save(tmp_path):
    with RunDir.create(tmp_path / "start", {"steps": 1}) as run:
        save(run, 10)
        save(run, 20)

    def action():
        with RunDir.create(path, {"steps": 2}, resume=True, may_change=("steps",)) as run:
            run.log_metrics({"x": 1}, 1)
            with run.checkpoint(20) as folder:  # the one that exists is replaced
                (folder / "new").write_text("new")
            save(run, 30)
            run.write_json("results.json", {"done": True})

    call = 1
    while True:
        path = tmp_path / f"run{call}"
        shutil.copytree(tmp_path / "start", path)
        (path / ".lock").write_text("")
        if not killed_at(call, action):
            break
        with RunDir.create(path, {"steps": 2}, resume=True, may_change=("steps",)) as run:
            found = run.latest_checkpoint()
            assert found is not None and found.name >= "step_00000020" and run.skipped == []
            assert all(line == {"step": 1, "x": 1} for line in run.metrics())
            assert run.config == {"steps": 2}
            if (path / "results.json").exists():
                assert json.loads((path / "results.json").read_text()) == {"done": True}
            left = [str(p) for p in path.rglob("*") if p.name.startswith(".") and p.name != ".lock"]
            assert left == []
        call += 1
    assert call > 40 and steps_in(path / "checkpoints") == ["step_00000020", "step_00000030"]


# -- versions and random state ---------------------------------------------------------------------------------------


def test_versions_without_importing_torch():
    program = (
        "import sys; from forethought.rundir import versions; print(versions()); assert 'torch' not in sys.modules"
    )
    assert run_python(program).returncode == 0
    found = versions()
    assert found["python"] == sys.version.split()[0] and found["numpy"] == np.__version__
    assert set(found) == {"forethought", "git", "python", "torch", "transformers", "numpy"}
    if (Path(rundir.__file__).parents[2] / ".git").exists():
        assert found["git"] is not None and len(found["git"].removesuffix("-dirty")) == 40


def test_random_state_of_all_generators_survives_json():
    torch = pytest.importorskip("torch")

    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    random.gauss(0, 1), np.random.randn()  # leaves one cached normal in each
    state = json.loads(json.dumps(rng_state()))
    first = draw()
    assert draw() != first
    set_rng_state(state)
    assert draw() == first


def test_random_state_without_torch_leaves_torch_alone():
    program = (
        "import sys\nfrom forethought.rundir import *\nfrom forethought.rundir import rng_state, set_rng_state\n"
        "s = rng_state(); set_rng_state(s); print('torch' in s, 'torch' in sys.modules)"
    )
    assert run_python(program).stdout == "False False\n"


def test_a_state_of_other_devices_is_a_warning():
    pytest.importorskip("torch")
    state = rng_state() | {"cuda": ["00"] * 99}
    with pytest.warns(UserWarning, match="random state of 99 CUDA devices cannot be restored"):
        set_rng_state(state)
