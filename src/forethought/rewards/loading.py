"""Objects of the user's own files, by name: `file.py:NAME` or `package.module:NAME`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from forethought.errors import ConfigError, nearest

USER_MODULE = "user_file_"
"""Modules that were loaded from a user's file are called this in `sys.modules`, then the file's name and a digest."""


def load_object(spec: str, what: str) -> Any:
    """The object that `spec` names.

    The folder of a file goes to the end of the import path, so a file may import its neighbours without hiding an
    installed package.

    Args:
        spec: `file.py:NAME` or `package.module:NAME`; NAME may be dotted.
        what: what the user asked for ("reward function"), for the messages.

    Raises:
        ConfigError: not of this form, no such file, module or name, or the file fails while it is loaded (with the
            line and the error).
    """
    target, colon, name = spec.rpartition(":") if isinstance(spec, str) else ("", "", "")
    if not (colon and target and name):
        raise ConfigError(f"{what} {spec!r}: write 'file.py:NAME' or 'package.module:NAME'")
    if not target.endswith(".py") and os.sep in target:
        raise ConfigError(f"{what} {spec!r}: {target} is not a Python file; write 'file.py:NAME'")
    module = _from_file(Path(target), spec, what) if target.endswith(".py") else _from_module(target, spec, what)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            own = [n for n, v in vars(module).items() if not n.startswith("_") and _defined_in(v, module)]
            names = f" It defines: {', '.join(own)}." if own else ""
            raise ConfigError(f"{what} {spec!r}: {target} has no {name!r}{nearest(name, own)}.{names}")
        found = getattr(found, part)
    return found


def absolute_spec(spec: str) -> str:
    """The same name with the file's whole path: a child process may start in another folder."""
    target, _, name = spec.rpartition(":")
    return f"{Path(target).expanduser().resolve()}:{name}" if target.endswith(".py") else spec


def _defined_in(value: Any, module: ModuleType) -> bool:
    return (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__


def _from_file(path: Path, spec: str, what: str) -> ModuleType:
    path = path.expanduser()
    if not path.is_file():
        why = "is a folder" if path.is_dir() else f"does not exist (looked in {Path.cwd()})"
        raise ConfigError(f"{what} {spec!r}: file {path} {why}")
    path = path.resolve()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    # Two files of one name must not overwrite each other in sys.modules.
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    name = f"{USER_MODULE}{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}_{digest}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as err:
        del sys.modules[name]
        raise ConfigError(f"{what} {spec!r}: loading {path} failed{_line(err, str(path))}: {describe(err)}") from err
    return module


def _from_module(target: str, spec: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as err:
        if err.name and (target == err.name or target.startswith(err.name + ".")):
            hint = f"; for a file write {target}.py:NAME" if Path(f"{target}.py").is_file() else ""
            raise ConfigError(f"{what} {spec!r}: there is no module {err.name!r}{hint}") from err
        raise ConfigError(f"{what} {spec!r}: importing {target} failed: {describe(err)}") from err
    except (Exception, SystemExit) as err:
        raise ConfigError(f"{what} {spec!r}: importing {target} failed: {describe(err)}") from err


def describe(err: BaseException, limit: int = 300) -> str:
    """`KeyError: 'answer'`, cut to `limit` characters; never raises, whatever the error's own text does."""
    try:
        text = str(err)
    except Exception:
        text = "(its message cannot be shown)"
    text = f"{type(err).__name__}: {text}" if text else type(err).__name__
    return text if len(text) <= limit else text[:limit] + " ..."


def _line(err: BaseException, path: str) -> str:
    if isinstance(err, SyntaxError) and err.filename == path:
        return f" at line {err.lineno}"
    return where(err, path)


def where(err: BaseException, path: str) -> str:
    """` at line N` for the deepest frame of the traceback that lies in the file `path`, or an empty text."""
    lines = [frame.lineno for frame in traceback.extract_tb(err.__traceback__) if frame.filename == path]
    return f" at line {lines[-1]}" if lines else ""
