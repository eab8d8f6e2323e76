"""A run folder: config, metrics, results and checkpoints of one run, safe against kills, full disks and second writers.

    config.yaml      resolved settings, versions in its first lines
    metrics.jsonl    one strict JSON object per line: {"step": ..., "reward/mean": ...}
    results.json     and other whole files: written beside, synced, renamed
    checkpoints/     step_00000010/ with MANIFEST.json (size and SHA-256 of every file): the same way, as a whole folder
    log.txt          what happened when
    .lock            the process that writes here; the kernel drops the lock when that process ends, however it ends

Whatever the moment of a crash, a file or checkpoint under its final name is whole, and the previous good checkpoint
goes only after a newer one is whole. POSIX only (record locks).
"""

from __future__ import annotations

import contextlib
import operator
import os
import platform
import random
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from forethought import __version__
from forethought.config import diff, dump_yaml, load_yaml, parse_yaml, render_diff
from forethought.errors import ConfigError, DataError, RunError
from forethought.files import (
    FolderLock,
    append_whole,
    finite,
    from_json,
    io_problem,
    is_leftover,
    make_folder,
    nonfinite,
    plain,
    recover,
    remove_whole,
    to_json,
    verify_folder,
    whole_folder,
    write_atomic,
)

_HEADER = "# forethought run; "
_STEP = re.compile(r"step_(\d+)")
# What `overwrite` removes besides JSON files. config.yaml is replaced last: it marks the folder as a run's until then.
_OWN = (
    "metrics.jsonl",
    "trees.sqlite",
    "trees.sqlite-wal",
    "trees.sqlite-shm",
    "checkpoints",
    "model",
    "arms",
    "stages",
)
_OWN += ("report.html", "log.txt")


# -- versions and random state ---------------------------------------------------------------------------------------


def _git_revision() -> str | None:
    """Commit of the source tree that this package runs from (with "-dirty"), None if it is installed from elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not ((root / ".git").exists() and (root / "pyproject.toml").exists()):
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        env = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=env)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str | None]:
    """Versions that a result depends on, None where absent. Nothing heavy is imported."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    out: dict[str, str | None] = {"forethought": __version__, "git": _git_revision()}
    out["python"] = platform.python_version()
    return out | {name: version(name) for name in ("torch", "transformers", "numpy")}


def rng_state() -> dict[str, Any]:
    """State of the global generators of python, numpy and (if imported) torch with its devices, as plain JSON values.

    What a resumed run needs to draw the numbers that an unbroken one would have drawn.
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    torch = sys.modules.get("torch")  # never imported: never drawn from
    if torch is not None:
        state["torch"] = torch.get_rng_state().numpy().tobytes().hex()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [s.numpy().tobytes().hex() for s in torch.cuda.get_rng_state_all()]
        if torch.backends.mps.is_available():
            state["mps"] = torch.mps.get_rng_state().numpy().tobytes().hex()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Inverse of `rng_state`. Imports torch where the state holds torch's.

    A state saved with another number of CUDA devices leaves them as they are, with a warning.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
    if "torch" not in state:
        return
    import torch

    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    torch.set_rng_state(tensor(state["torch"]))
    if "cuda" in state:
        if torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all([tensor(s) for s in state["cuda"]])
        else:
            warnings.warn(
                f"the random state of {len(state['cuda'])} CUDA devices cannot be restored on "
                f"{torch.cuda.device_count()}: the run goes on, but not exactly as it would have",
                stacklevel=2,
            )
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(tensor(state["mps"]))


# -- metrics ---------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(raw line with its end, object) of each line; a last line without an end was cut by a kill and is left out."""
    data = path.read_bytes() if path.exists() else b""
    for number, raw in enumerate(data.split(b"\n")[:-1], 1):
        try:
            value = from_json(raw.decode())
            if not isinstance(value, dict) or not isinstance(value.get("step"), int):
                raise ValueError("no object with a whole 'step'")
        except ValueError as err:
            raise DataError(f"{path}: line {number}: {err}") from None
        yield raw + b"\n", value


def _cut_torn_line(path: Path) -> None:
    """Drop a last line that a kill has cut, so that the next one does not run into it."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n") and data:
            write_atomic(path, data[: data.rfind(b"\n") + 1])


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, also while it is being written (a line cut by a kill is left out).

    Raises:
        DataError: a line inside the file is damaged.
    """
    return [value for _, value in _lines(Path(folder) / "metrics.jsonl")]


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


# -- the run folder --------------------------------------------------------------------------------------------------


class RunDir:
    """One run's folder. Made by `create` (for writing, exclusive) or `open` (for reading); a context manager.

    Attributes:
        path: the folder.
        config: the settings in config.yaml, as a mapping.
        resumed: the folder held this run before.
        skipped: broken checkpoints that `latest_checkpoint` passed over, each with what is wrong with it.
    """

    def __init__(self, path: Path, config: dict[str, Any], resumed: bool, lock: FolderLock | None):
        self.path, self.config, self.resumed = path, config, resumed
        self.skipped: list[str] = []
        self._lock = lock

    @classmethod
    def create(
        cls,
        out: str | Path,
        config: Any,
        *,
        resume: bool = False,
        overwrite: bool = False,
        may_change: Sequence[str] = (),
    ) -> RunDir:
        """Make the folder and take its lock, before any compute.

        Args:
            config: resolved settings, a dataclass or a mapping.
            resume: continue the run that the folder holds.
            overwrite: remove the run that the folder holds: the files above, model/, arms/ and stages/ (inner runs)
                and all JSON files; nothing else is touched.
            may_change: settings that may differ on resume, e.g. ("steps", "report"); a group's name covers its members.

        Raises:
            RunError: the folder holds a run already, holds other files, is in use by another process (its pid is
                named) or not writable; or resume finds nothing, or another config (the difference is shown).
            ConfigError: the config cannot be written as YAML.
        """
        if resume and overwrite:
            raise RunError("resume and overwrite exclude each other: give one")
        path = Path(out).expanduser().resolve()
        try:
            text = dump_yaml(config)
        except yaml.YAMLError as err:
            raise ConfigError(f"the config cannot be written as YAML: {err}") from None
        new = parse_yaml(text, "config") or {}
        cls._check_place(path, resume, overwrite)
        make_folder(path)
        lock = FolderLock(path)
        try:
            cls._check_place(path, resume, overwrite)  # again: another process may have been here first
            return cls(path, new, resume, lock)._start(text, overwrite, tuple(may_change), lock.stale)
        except BaseException as err:
            lock.release()
            if isinstance(err, OSError):
                raise io_problem(err, path) from err
            raise

    def _start(self, text: str, overwrite: bool, may_change: tuple[str, ...], stale: int | None) -> RunDir:
        """Bring the folder into the state to write in; the lock is held."""
        path, resume = self.path, self.resumed
        if overwrite:
            for old in (*(path / name for name in _OWN), *path.glob("*.json")):
                remove_whole(old)
        recover(path)
        recover(path / "checkpoints", below=True)
        _cut_torn_line(path / "metrics.jsonl")
        change = diff(load_yaml(path / "config.yaml"), self.config) if resume else {}
        refused = {k: v for k, v in change.items() if not any(k == f or k.startswith(f + ".") for f in may_change)}
        if refused:
            raise RunError(
                f"{path}: cannot resume, the config has changed (old -> new):\n{render_diff(refused)}\n"
                "give the old values, or start anew in another folder"
            )
        made_by = ", ".join(f"{k} {v}" for k, v in versions().items() if v)
        if change or not resume:
            write_atomic(path / "config.yaml", f"{_HEADER}{made_by}\n{text}")
        if stale:
            self.log(f"process {stale} ended without closing this folder")
        changed = f"; changed settings:\n{render_diff(change)}" if change else ""
        self.log(f"{'resumed' if resume else 'created'} with {made_by}{changed}")
        return self

    @staticmethod
    def _check_place(path: Path, resume: bool, overwrite: bool) -> None:
        try:
            if resume and not (path / "config.yaml").is_file():
                raise RunError(f"{path}: nothing to resume, there is no config.yaml; start the run without resume")
            if resume or not path.is_dir():
                return
            found = sorted(p.name for p in path.iterdir() if p.name != ".lock" and not is_leftover(p.name))
            head = (path / "config.yaml").read_bytes()[: len(_HEADER)] if "config.yaml" in found else b""
        except OSError as err:
            raise io_problem(err, path) from err
        if found and head != _HEADER.encode():
            shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise RunError(f"{path}: holds files that are not a run's ({shown}); choose another folder")
        if found and not overwrite:
            raise RunError(f"{path}: holds a run already; resume it, overwrite it, or choose another folder")

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """A run folder for reading, also while its run goes on.

        Raises:
            RunError: no run folder.
        """
        path = Path(path).expanduser().resolve()
        if not (path / "config.yaml").is_file():
            raise RunError(f"{path}: not a run folder (it has no config.yaml)")
        return cls(path, load_yaml(path / "config.yaml"), True, None)

    def close(self) -> None:
        """Release the lock; the folder can then be read only."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _for_writing(self) -> None:
        if self._lock is None or not self._lock.held:
            raise RunError(f"{self.path}: open for reading only; use RunDir.create to write")

    def _inside(self, name: str) -> Path:
        path = Path(os.path.normpath(self.path / name))
        if path == self.path or self.path not in path.parents or any(p.startswith(".") for p in Path(name).parts):
            raise RunError(f"{name!r}: give a name inside the run folder {self.path}")
        return path

    def log(self, message: str) -> None:
        """Append a line with the time to log.txt."""
        self._for_writing()
        append_whole(self.path / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n".encode())

    # -- metrics and whole files --
    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append one line to metrics.jsonl: `step` and then the metrics in their order.

        Values are numbers (NumPy's and one-number tensors too), null, or text such as `arm`. NaN and infinity become
        null, and the key `nonfinite` lists their names.

        Raises:
            RunError: a value is none of these, a name is reserved, or the disk is full (the file stays whole).
        """
        self._for_writing()
        line: dict[str, Any] = {"step": operator.index(step)}
        for name, value in metrics.items():
            value = plain(value)
            if name in ("step", "nonfinite"):
                raise RunError(f"metric {name!r}: the name is reserved; choose another")
            if not isinstance(value, int | float | str | None):
                raise RunError(f"metric {name!r}: {type(value).__name__} is not a number; log one number per name")
            line[name] = value
        if names := nonfinite(line):
            line = finite(line) | {"nonfinite": names}
        try:
            data = to_json(line).encode() + b"\n"
        except ValueError as err:
            raise RunError(f"metrics of step {step}: {err}") from None
        append_whole(self.path / "metrics.jsonl", data)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far."""
        return read_metrics(self.path)

    def truncate_metrics(self, step: int, **match: Any) -> int:
        """Before going on from a checkpoint of `step`: drop the lines of later steps.

        Args:
            match: only lines with these values, e.g. `arm="grpo", seed=1` where a run holds several learners.

        Returns:
            Lines dropped.
        """
        self._for_writing()
        path = self.path / "metrics.jsonl"
        kept, dropped = [], 0
        for raw, line in _lines(path):
            if line["step"] > step and all(line.get(k) == v for k, v in match.items()):
                dropped += 1
            else:
                kept.append(raw)
        if dropped:
            write_atomic(path, b"".join(kept))
        return dropped

    def write_json(self, name: str, obj: Any) -> Path:
        """Write a whole JSON file, atomically; returns its path.

        NaN and infinity inside become null; their names are listed under the top-level key `nonfinite`.

        Raises:
            RunError: not JSON, NaN in something that is not an object, name outside the folder, or the disk is full.
        """
        self._for_writing()
        path = self._inside(name)
        try:
            if (names := nonfinite(obj)) and isinstance(obj, Mapping):
                obj = {**finite(obj), "nonfinite": names}
            text = to_json(obj, indent=1) + "\n"
        except (TypeError, ValueError, RecursionError) as err:
            raise RunError(f"{path}: {err}") from None
        make_folder(path.parent)
        write_atomic(path, text)
        return path

    # -- whole folders and checkpoints --
    @contextlib.contextmanager
    def save_folder(self, name: str) -> Iterator[Path]:
        """Write a folder as a whole, e.g. the final model: fill the temporary folder that this yields.

        It gets its name when all is on disk. A folder of that name is replaced, and stays if anything fails.

        Raises:
            RunError: the disk is full; the temporary folder is removed. What else the body raises is passed on.
        """
        self._for_writing()
        with whole_folder(self._inside(name)) as temp:
            yield temp

    def _checkpoints(self, name: str) -> Path:
        return self._inside(f"checkpoints/{name}" if name else "checkpoints")

    @staticmethod
    def _steps(folder: Path) -> list[Path]:
        """Step folders, newest first."""
        found = [p for p in folder.glob("step_*") if _STEP.fullmatch(p.name) and p.is_dir()]
        return sorted(found, key=_step_of, reverse=True)

    def _good_checkpoints(self, folder: Path) -> list[Path]:
        return [path for path in self._steps(folder) if not verify_folder(path, content=False)]

    @contextlib.contextmanager
    def checkpoint(self, step: int, *, name: str = "", keep_last: int = 2) -> Iterator[Path]:
        """Save a checkpoint: fill the temporary folder that this yields; it becomes checkpoints/step_00000010.

        Others go only after this one is whole and on disk: those of later steps, which a resumed run has left behind,
        and all but the `keep_last` newest good ones.

        Args:
            name: one of several learners in this run, e.g. "grpo/seed1": its checkpoints lie in a folder of their own.

        Raises:
            RunError: the disk is full; the last good checkpoint stays as it is. Also bad arguments.
        """
        if step < 0 or keep_last < 1:
            raise RunError(f"checkpoint step={step}, keep_last={keep_last}: give a step from 0, and keep at least 1")
        self._for_writing()
        folder = self._checkpoints(name)
        try:
            with whole_folder(folder / f"step_{step:08d}") as temp:
                yield temp
        except RunError as err:
            good = self._good_checkpoints(folder)
            kept = f"; the last good checkpoint, {good[0].name}, is untouched" if good else ""
            raise RunError(f"checkpoint of step {step}: {err}{kept}") from err
        # Later steps belong to a line that this run has left: it went on from an earlier checkpoint.
        good = [path for path in self._good_checkpoints(folder) if _step_of(path) <= step][:keep_last]
        with contextlib.suppress(OSError):  # one that cannot be removed costs space, not the run
            for path in self._steps(folder):
                if not _step_of(good[-1]) <= _step_of(path) <= step:
                    remove_whole(path)

    def latest_checkpoint(self, name: str = "") -> Path | None:
        """The newest checkpoint that is whole, every file compared with its manifest; None if none was ever saved.

        Broken ones are passed over with a warning that says what is wrong with each (also in `skipped`).

        Raises:
            RunError: there are checkpoints, but all are broken: a run never starts from scratch silently.
        """
        self.skipped = []
        folder = self._checkpoints(name)
        for path in self._steps(folder):
            problem = verify_folder(path)
            if not problem:
                if self.skipped:
                    text = f"{folder}: going on from {path.name}, because {'; '.join(self.skipped)}"
                    warnings.warn(text, stacklevel=2)
                return path
            self.skipped.append(f"{path.name} is broken: {problem}")
        if self.skipped:
            raise RunError(f"{folder}: no checkpoint can be used: {'; '.join(self.skipped)}")
        return None
