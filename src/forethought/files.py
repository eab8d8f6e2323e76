"""Files that stay whole: strict JSON, atomic writes, folders sealed by a manifest, and an exclusive lock.

JSON is strict in both directions (RFC 8259: no NaN, no Infinity). A file or folder under its final name is whole at
whatever moment the writer was killed. POSIX only (record locks).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forethought.errors import RunError

_SURROGATE = "holds half of a surrogate pair (U+D800 to U+DFFF), which is not text"
MANIFEST = "MANIFEST.json"
_FULL_DISK = (  # what writes that do not raise a plain OSError say: safetensors, torch, numpy
    *("No space left", "os error 28", "File too large", "os error 27", "Disk quota"),
    *("PytorchStreamWriter failed", "requested and"),
)
_TEMP = ".*.tmp-*"
_OLD = ".*.old"
_held: set[tuple[int, str]] = set()  # locked by this process: record locks do not refuse their own process


# -- strict JSON -----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """NumPy values, and tensors of one number, as Python's own; other mappings as dicts; anything else as it is."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return dict(value) if isinstance(value, Mapping) else value


def _encode(value: Any) -> Any:
    simple = plain(value)
    if simple is value:
        raise TypeError(f"{type(value).__name__} is not JSON")
    return simple


def nonfinite(value: Any, where: str = "") -> list[str]:
    """Names (dotted, lists by index) of all NaN and infinite numbers inside a value, NumPy's and tensors' included."""
    value = plain(value)
    if isinstance(value, dict):
        return [n for k, v in value.items() for n in nonfinite(v, f"{where}.{k}" if where else str(k))]
    if isinstance(value, list | tuple):
        return [n for i, v in enumerate(value) for n in nonfinite(v, f"{where}[{i}]")]
    return [where] if isinstance(value, float) and not math.isfinite(value) else []


def finite(value: Any) -> Any:
    """The value with null in the place of NaN and infinite numbers; tell the reader with `nonfinite`'s names."""
    value = plain(value)
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON text.

    Raises:
        ValueError: NaN or infinity inside (the fields are named), or text that UTF-8 cannot hold.
        TypeError: something that is not JSON.
    """
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent, default=_encode)
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(_SURROGATE) from None
    except ValueError as err:
        names = nonfinite(value)
        raise ValueError(
            f"{', '.join(names)}: NaN or infinite, which JSON cannot hold" if names else str(err)
        ) from None
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"the field {next(n for n in names if names.count(n) > 1)!r} is given twice")
    return out


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text} is too large for a float")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_number, parse_constant=_constant)


def from_json(text: str) -> Any:
    """Strict inverse of `to_json`; a field given twice is refused, and so is a character that is half of a pair.

    Raises:
        ValueError: with the column where the text stops being JSON, or the name of the field that is NaN.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as err:
        raise ValueError(f"column {err.colno}: not JSON ({err.msg})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as err:
        try:
            names = nonfinite(json.loads(text))
        except (ValueError, RecursionError):
            names = []
        raise ValueError(f"field {names[0]!r}: {err}" if names and names[0] else str(err)) from None
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(_SURROGATE) from None
    return value


# -- writing ---------------------------------------------------------------------------------------------------------


def _is_full(err: BaseException | None) -> bool:
    """Whether an error comes from a full disk, also in the words of libraries that raise no OSError for it."""
    while err is not None:
        if isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if any(words in str(err) for words in _FULL_DISK):
            return True
        err = err.__cause__ or err.__context__
    return False


def io_problem(err: Exception, path: Path) -> RunError:
    """A failed write as the error to raise, with what a user can do about it."""
    said = getattr(err, "strerror", None) or str(err)
    if _is_full(err):
        try:
            left = f"{shutil.disk_usage(path if path.is_dir() else path.parent).free / 2**20:.0f} MiB left; "
        except OSError:
            left = ""
        return RunError(f"{path}: not written, the disk is full ({left}{said}); free some space or use another disk")
    if getattr(err, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RunError(f"{path}: not writable ({said}); choose another folder or change its permissions")
    return RunError(f"{path}: cannot be written: {said}")


def make_folder(path: Path) -> None:
    """Make a folder and its parents; it may exist.

    Raises:
        RunError: not writable, or a file is in its place.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise RunError(f"{path}: a file is in the place of this folder; choose another") from None
    except OSError as err:
        raise io_problem(err, path) from err


def fsync_dir(path: Path) -> None:
    """Make names created, renamed or removed in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _beside(path: Path, end: str) -> Path:
    return path.with_name(f".{path.name}.{end}")


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write a whole file: after a crash at any moment it holds the old or the new content, never a part.

    Raises:
        RunError: the disk is full, or the place is not writable; the old content stays.
    """
    path = Path(path)
    temp = _beside(path, f"tmp-{os.getpid()}")
    try:
        with open(temp, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
        fsync_dir(path.parent)
    except OSError as err:
        raise io_problem(err, path) from err
    finally:
        with contextlib.suppress(OSError):
            temp.unlink()


def append_whole(path: Path, data: bytes) -> None:
    """Append all of the data, or nothing if the disk fills.

    Raises:
        RunError: the disk is full, or the place is not writable; the file is as it was.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as err:
        raise io_problem(err, path) from err
    try:
        before = os.fstat(fd).st_size
        try:
            done = 0
            while done < len(data):
                done += os.write(fd, data[done:])
        except OSError as err:
            os.ftruncate(fd, before)
            raise io_problem(err, path) from err
    finally:
        os.close(fd)


# -- whole folders ---------------------------------------------------------------------------------------------------


def _seal(folder: Path) -> None:
    """Sync every file of a folder and write its manifest."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    for sub in (p for p in folder.rglob("*") if p.is_dir()):
        fsync_dir(sub)
    write_atomic(folder / MANIFEST, to_json({"schema": 1, "files": files}, indent=1))


@contextlib.contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Write a folder as a whole: fill the temporary folder that this yields; it gets its name when all is on disk.

    A manifest with the size and SHA-256 of every file is added. A folder of that name is replaced, and stays if
    anything fails; then the temporary folder is removed.

    Raises:
        RunError: the disk is full, or the place is not writable. What else the body raises is passed on.
    """
    temp, old = _beside(final, f"tmp-{os.getpid()}"), _beside(final, "old")
    make_folder(final.parent)
    try:
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir()
    except OSError as err:
        raise io_problem(err, final) from err
    try:
        yield temp
        try:
            _seal(temp)
            if final.exists():
                os.rename(final, old)
            os.rename(temp, final)
            fsync_dir(final.parent)
        except OSError as err:
            raise io_problem(err, final) from err
    except BaseException as err:
        shutil.rmtree(temp, ignore_errors=True)
        if old.exists() and not final.exists():
            os.rename(old, final)
        if isinstance(err, Exception) and not isinstance(err, RunError) and _is_full(err):
            raise io_problem(err, final) from err
        raise
    shutil.rmtree(old, ignore_errors=True)


def verify_folder(folder: Path, *, content: bool = True) -> str:
    """What is wrong with a folder according to its manifest, or an empty string. `content=False` checks sizes only."""
    try:
        files = from_json((folder / MANIFEST).read_bytes().decode())["files"]
        wanted = [(folder / name, int(want["bytes"]), str(want["sha256"])) for name, want in files.items()]
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so saving did not end"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} is damaged"
    for path, size, digest in wanted:
        name = path.relative_to(folder)
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
        if content:
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return f"{name} has not the content that was saved"
    return ""


def remove_whole(path: Path) -> None:
    """Remove a file, or a folder in such a way that a half-removed one never bears its final name."""
    if path.is_dir() and not path.is_symlink():
        away = _beside(path, f"tmp-{os.getpid()}")
        os.rename(path, away)
        shutil.rmtree(away, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def recover(folder: Path, *, below: bool = False) -> None:
    """Put right what a killed writer left in a folder: drop what was unfinished, bring back what was being replaced.

    Args:
        below: in all folders below it too.
    """
    find = folder.rglob if below else folder.glob
    for path in list(find(_TEMP)):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    for path in list(find(_OLD)):
        final = path.with_name(path.name.removeprefix(".").removesuffix(".old"))
        shutil.rmtree(path, ignore_errors=True) if final.exists() else os.rename(path, final)


def is_leftover(name: str) -> bool:
    """Whether a file name is that of an unfinished write."""
    return Path(name).match(_TEMP)


# -- the lock --------------------------------------------------------------------------------------------------------


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _release(fd: int, key: tuple[int, str]) -> None:
    if key[0] == os.getpid():  # a forked child leaves its parent's lock alone
        _held.discard(key)
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
    os.close(fd)


class FolderLock:
    """Exclusive use of a folder by one process, by a POSIX record lock on its file `.lock`.

    The kernel drops the lock when the process ends, however it ends, and children that outlive it (worker pools) do
    not inherit it. File systems without locks fall back to the process id in the file.

    Attributes:
        stale: the process id of a holder that ended without releasing, if there was one.

    Raises:
        RunError: another process, or this one, holds it (named with its process id); or the folder is not writable.
    """

    def __init__(self, folder: Path):
        path, key = folder / ".lock", (os.getpid(), str(folder))
        if key in _held:
            raise RunError(f"{folder}: in use by this very process ({os.getpid()}); close it there first")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as err:
            raise io_problem(err, folder) from err
        try:
            self.stale = self._take(fd, folder)
        except BaseException as err:
            os.close(fd)
            if isinstance(err, OSError):
                raise io_problem(err, folder) from err
            raise
        _held.add(key)
        self._release = weakref.finalize(self, _release, fd, key)

    @staticmethod
    def _take(fd: int, folder: Path) -> int | None:
        try:
            holder = json.loads(os.pread(fd, 4096, 0) or b"{}")
            pid, host, since = holder.get("pid"), holder.get("host"), holder.get("since")
        except (ValueError, AttributeError):
            pid = host = since = None
        who = f"process {pid} on {host} since {since}" if pid else "another process"
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            if err.errno in (errno.EACCES, errno.EAGAIN):
                raise RunError(f"{folder}: in use by {who}; wait for it, or choose another folder") from None
            if pid and not (host == socket.gethostname() and not _alive(int(pid))):
                raise RunError(f"{folder}: in use by {who}; if that has ended, delete {folder / '.lock'}") from None
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(me).encode(), 0)
        return pid

    @property
    def held(self) -> bool:
        return self._release.alive

    def release(self) -> None:
        self._release()
