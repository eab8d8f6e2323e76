"""One base error; every subclass also inherits the stdlib kind that a caller would expect to catch.

A message names the field, the value and the fix. Errors that cross a process border (workers, 2-process
training) are picklable: they carry only their message.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForethoughtError(Exception):
    """Base of every error that Forethought raises on purpose."""


class ConfigError(ForethoughtError, ValueError):
    """A setting is unknown, of the wrong type or outside its range."""


class DataError(ForethoughtError, ValueError):
    """A data file or record cannot be used; the message names file, line and column."""


class ModelError(ForethoughtError, RuntimeError):
    """A model cannot be found, loaded, or used for what was asked."""


class RewardError(ForethoughtError, RuntimeError):
    """A reward function failed or returned something that is not a reward."""


class EnvError(ForethoughtError, RuntimeError):
    """An environment broke its protocol."""


class RunError(ForethoughtError, RuntimeError):
    """A run folder cannot be used: locked, not writable, or not what the config says."""


class MissingExtraError(ForethoughtError, ImportError):
    """An optional dependency is needed; the message says what to install."""


class EngineError(ForethoughtError, RuntimeError):
    """A sampling engine failed or cannot do what was asked."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""
