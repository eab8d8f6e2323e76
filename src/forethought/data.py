"""Data files: strict JSON in and out, tasks by named columns, and a batch order that a resumed run can continue.

JSON is strict in both directions (RFC 8259: no NaN, no Infinity), one object per line, UTF-8. A line that cannot be
used is an error that names file, line and column; nothing is dropped without being counted. Columns follow TRL's names
(`messages`; `prompt` and `completion`; `prompt` and anything else); dotted names reach into nested columns, such as
`reward_model.ground_truth`. Parquet files are read where pyarrow is installed.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forethought.config import derive_seed
from forethought.errors import ConfigError, DataError, MissingExtraError, RunError, nearest
from forethought.files import from_json, nonfinite, to_json, write_atomic

Task = Mapping[str, Any]
"""A task: at least `id` (stable text) and `prompt` (text, or chat messages); further columns ride along."""

_COLUMN_IN_TEMPLATE = re.compile(r"\{([\w.]+)\}")
_SHOWN = 5  # problems listed in one message


# -- files -----------------------------------------------------------------------------------------------------------


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"{path}: no such data file{nearest(path.name, names)}") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder; give a .jsonl or .parquet file") from None
    except OSError as err:
        raise DataError(f"{path}: cannot be read: {err.strerror}") from None


@dataclass(frozen=True)
class _Row:
    """A row as found: its place (line of a JSONL file, row of a parquet file, from 1), its index from 0, and why it
    cannot be used, if so."""

    place: int
    index: int
    value: dict[str, Any]
    problem: str = ""


def _jsonl_rows(path: Path) -> Iterator[_Row]:
    data = _bytes_of(path)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path}: is UTF-16 text; save it as UTF-8")
    index = -1
    # Only \n ends a line: str.splitlines would also cut at U+2028 and others, which JSON text may hold.
    for place, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not raw.strip():
            continue
        index += 1
        try:
            value = from_json(raw.decode().strip("\r\n\t "))
            problem = "" if isinstance(value, dict) else f"{type(value).__name__}, not an object {{...}} with columns"
        except UnicodeDecodeError as err:
            value, problem = {}, f"column {err.start + 1}: not UTF-8 text"
        except ValueError as err:
            value, problem = {}, str(err)
        if problem and place == 1 and raw.lstrip().startswith(b"["):
            problem += "; the file looks like one JSON list: write one object per line"
        yield _Row(place, index, {} if problem else value, problem)


def _parquet_rows(path: Path) -> Iterator[_Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtraError(
            f"{path}: reading parquet needs pyarrow: pip install 'forethought[parquet]' (or convert the file to .jsonl)"
        ) from None
    try:
        with parquet.ParquetFile(pyarrow.BufferReader(_bytes_of(path))) as file:
            index = -1
            for batch in file.iter_batches():
                for value in batch.to_pylist():
                    index += 1
                    yield _Row(index + 1, index, value)
    except pyarrow.ArrowException as err:
        raise DataError(f"{path}: not a readable parquet file: {str(err).splitlines()[0]}") from None


def _is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def _unit(path: Path) -> str:
    return "row" if _is_parquet(path) else "line"


def column(row: Mapping[str, Any], name: str) -> Any:
    """A column by name; `a.b` is the column of that very name or else reaches into column `a`.

    Raises:
        KeyError: there is no such column.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


def _lacks(row: Mapping[str, Any], name: str) -> str:
    """Why a required column cannot be used, or an empty string."""
    try:
        value = column(row, name)
    except KeyError:
        inner = [f"{k}.{i}" for k, v in row.items() if isinstance(v, Mapping) for i in v]
        return f"no column {name!r}{nearest(name, [*row, *inner])} (columns: {', '.join(row) or 'none'})"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return f"column {name!r} is null"
    return ""


def _usable(path: Path, rows: Iterable[_Row], skip: bool) -> list[_Row]:
    """The rows without a problem; the others are reported: an error, or a warning where the user told to skip them."""
    good: list[_Row] = []
    bad: list[_Row] = []
    for row in rows:
        (bad if row.problem else good).append(row)
    if bad:
        lines = [f"\n  {_unit(path)} {row.place}: {row.problem}" for row in bad[:_SHOWN]]
        more = f"\n  ... and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        text = f"{path}: {len(good)} rows loaded, {len(bad)} refused{''.join(lines)}{more}"
        if not skip:
            raise DataError(f"{text}\nfix the file, name other columns, or pass skip_bad to leave such rows out")
        warnings.warn(text, stacklevel=3)
    return good


def _read(path: Path, rows: Iterator[_Row], required: Sequence[str], skip_bad: bool, limit: int | None) -> list[_Row]:
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit}: give at least 1, or none to read all rows")

    def checked() -> Iterator[_Row]:
        for row in rows:
            found = row.problem or next(filter(None, (_lacks(row.value, name) for name in required)), "")
            yield replace(row, problem=found) if found else row

    return _usable(path, itertools.islice(checked(), limit), skip_bad)


def read_jsonl(
    path: str | Path, *, required: Sequence[str] = (), skip_bad: bool = False, limit: int | None = None
) -> list[dict[str, Any]]:
    """Read one JSON object per line. A byte order mark, CRLF line ends and blank lines are fine; so is an empty file.

    Args:
        required: columns (dotted names allowed) that every row must have and that must not be null.
        skip_bad: leave unusable rows out with a warning that counts and names them, instead of an error.
        limit: look at this many rows at most.

    Raises:
        DataError: file missing or not UTF-8; or lines that are not strict JSON objects or lack a column: the message
            gives the number of good and bad lines and names each (the first five) by line and column.
    """
    path = Path(path)
    return [row.value for row in _read(path, _jsonl_rows(path), required, skip_bad, limit)]


def _read_rows(path: Path, required: Sequence[str], skip_bad: bool, limit: int | None) -> list[_Row]:
    source = _parquet_rows(path) if _is_parquet(path) else _jsonl_rows(path)
    rows = _read(path, source, required, skip_bad, limit)
    if not rows:
        raise DataError(f"{path}: has no rows that can be used; give at least one")
    return rows


def read_rows(
    path: str | Path, *, required: Sequence[str] = (), skip_bad: bool = False, limit: int | None = None
) -> list[dict[str, Any]]:
    """Rows of a JSONL or (by its suffix) parquet file; at least one. Arguments and errors as `read_jsonl`."""
    return [row.value for row in _read_rows(Path(path), required, skip_bad, limit)]


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write one strict JSON object per line, atomically; returns the number of rows.

    NumPy scalars and one-number tensors become plain numbers.

    Raises:
        DataError: a row holds NaN, infinity or something that is not JSON; row (from 0) and field are named, and the
            file is left as it was. RunError: the disk is full, or the place is not writable.
    """
    lines = []
    for index, row in enumerate(rows):
        try:
            lines.append(to_json(row) + "\n")
        except (TypeError, ValueError, RecursionError) as err:
            raise DataError(f"{path}: row {index}: {_culprit(row)}{err}; nothing was written") from None
    write_atomic(path, "".join(lines))
    return len(lines)


def _culprit(row: Any) -> str:
    for name, value in row.items() if isinstance(row, Mapping) else ():
        try:
            to_json(value)
        except TypeError:
            return f"field {name!r}: "
        except (ValueError, RecursionError):
            return "" if nonfinite(value) else f"field {name!r}: "
    return ""


# -- tasks -----------------------------------------------------------------------------------------------------------


def check_messages(value: Any) -> str:
    """What is wrong with a list of chat messages `{"role", "content"}`, or an empty string."""
    if not isinstance(value, list) or not value:
        return "is neither text nor a list of chat messages"
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"message {index} has no 'role'"
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            return f"message {index} has no 'content'"
    return ""


def _prompt_of(row: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """(columns that the row's prompt fills in, problem). TRL's `messages` split before the last assistant turn."""
    if name == "messages" or (name == "prompt" and "prompt" not in row and "messages" in row):
        if problem := _lacks(row, "messages"):
            return {}, problem
        messages = row["messages"]
        if problem := check_messages(messages):
            return {}, f"column 'messages' {problem}"
        if messages[-1]["role"] != "assistant":
            return {"prompt": messages}, ""
        if len(messages) == 1:
            return {}, "column 'messages' has nothing before the assistant's turn"
        return {"prompt": messages[:-1], "completion": messages[-1:]}, ""
    names = [name] if name in row else _COLUMN_IN_TEMPLATE.findall(name)
    if problem := next(filter(None, (_lacks(row, n) for n in names or [name])), ""):
        return {}, problem
    if names and names != [name]:
        value = _COLUMN_IN_TEMPLATE.sub(lambda match: str(column(row, match[1])), name)
    else:
        value = column(row, name)
    if isinstance(value, str):
        return ({"prompt": value}, "") if value.strip() else ({}, f"column {name!r} is empty")
    problem = check_messages(value)
    return ({}, f"column {name!r} {problem}") if problem else ({"prompt": value}, "")


def load_tasks(
    path: str | Path,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    limit: int | None = None,
    *,
    id_column: str | None = "id",
    skip_bad: bool = False,
) -> list[Task]:
    """Read tasks from a JSONL or parquet file.

    Each task keeps all columns of its row and has `id`, `prompt` (text or chat messages) and, where the file has one,
    `answer`. Without a `prompt` column, TRL's `messages` are taken: the last assistant turn becomes `completion`, what
    stands before it the prompt. Ids are the text of `id_column` if the file has that column, else the row's index.

    Args:
        prompt_column: column of the prompt; dotted names reach into nested columns (`extra_info.question`), and text
            with columns in braces joins several (`{Body} {Question}`).
        answer_column: column of the answer, e.g. `reward_model.ground_truth`. A file without the default `answer` is
            fine (a reward may use any column); a name that was given must be there.
        limit: only the first rows.
        id_column: column of ids; None numbers the rows.
        skip_bad: leave unusable rows out with a warning that counts and names them.

    Raises:
        DataError: no rows, a row without a usable prompt or answer, ids that repeat. MissingExtraError: no pyarrow.
    """
    path = Path(path)
    rows = _read_rows(path, (), skip_bad, limit)
    has_answer = answer_column != "answer" or any("answer" in row.value for row in rows)
    has_id = id_column is not None and (id_column != "id" or any("id" in row.value for row in rows))
    seen: dict[str, int] = {}

    def task(row: _Row) -> _Row:
        new, problem = _prompt_of(row.value, prompt_column)
        if has_answer:
            problem = problem or _lacks(row.value, answer_column)
        if has_id:
            problem = problem or _lacks(row.value, str(id_column))
        if problem:
            return replace(row, problem=problem)
        name = str(column(row.value, str(id_column))) if has_id else str(row.index)
        if name in seen:
            same = f"the id {name!r} is already that of {_unit(path)} {seen[name]}"
            return replace(row, problem=f"{same}; ids must differ (id_column=None numbers the rows)")
        seen[name] = row.place
        answer = {"answer": column(row.value, answer_column)} if has_answer else {}
        return replace(row, value={**row.value, **new, **answer, "id": name})

    tasks: list[Task] = [row.value for row in _usable(path, map(task, rows), skip_bad)]
    if not tasks:
        raise DataError(f"{path}: none of its {len(rows)} rows can be used")
    return tasks


# -- batches ---------------------------------------------------------------------------------------------------------


class BatchSampler:
    """Endless or epoch-wise batches of indices 0..n-1; an iterator that can be saved and resumed exactly.

    Each epoch gives every index once, the last batch of an epoch may be short (10 items in batches of 4: 4, 4, 2), and
    after the last epoch the iterator stays at its end. The order of an epoch is derived from (seed, epoch) alone, not
    from a generator that moves on, so a resumed run sees what an unbroken one would have seen.

    Args:
        n: number of items.
        batch_size: items per batch; more than n gives one batch of n per epoch.
        seed: seed of the order.
        shuffle: False keeps the items in order.
        epochs: None for no end.
    """

    def __init__(self, n: int, batch_size: int, seed: int, shuffle: bool = True, epochs: int | None = None):
        problems = []
        if n < 1:
            problems.append(f"n={n}: there is no data; give at least one item")
        if batch_size < 1:
            problems.append(f"batch_size={batch_size}: give at least 1")
        if epochs is not None and epochs < 0:
            problems.append(f"epochs={epochs}: give a number from 0, or none for no end")
        if problems:
            raise ConfigError("batches: " + "; ".join(problems))
        self.n, self.batch_size, self.seed, self.shuffle, self.epochs = n, batch_size, int(seed), shuffle, epochs
        self.batches_per_epoch = -(-n // batch_size)
        self.step = 0
        """Batches given out so far. Save it after the step that used the last batch is complete."""
        self._order: tuple[int, list[int]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self.step // self.batches_per_epoch

    def __len__(self) -> int:
        """Batches in all.

        Raises:
            TypeError: there is no end.
        """
        if self.epochs is None:
            raise TypeError("a BatchSampler without epochs has no length")
        return self.epochs * self.batches_per_epoch

    def order(self, epoch: int) -> list[int]:
        """The indices of one epoch in order."""
        if self._order is None or self._order[0] != epoch:
            indices = np.arange(self.n)
            if self.shuffle:
                # Raw generator output is stable across NumPy versions; Generator.permutation is not promised to be.
                keys = np.random.PCG64(derive_seed(self.seed, "batch order", epoch)).random_raw(self.n)
                indices = np.argsort(keys, kind="stable")
            self._order = (epoch, indices.tolist())
        return self._order[1]

    def __iter__(self) -> BatchSampler:
        return self

    def __next__(self) -> list[int]:
        epoch, batch = divmod(self.step, self.batches_per_epoch)
        if self.epochs is not None and epoch >= self.epochs:
            raise StopIteration
        self.step += 1
        return self.order(epoch)[batch * self.batch_size : (batch + 1) * self.batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Position and what the order depends on; plain JSON values."""
        keys = ("step", "n", "batch_size", "seed", "shuffle")
        return {key: getattr(self, key) for key in keys}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position. The number of epochs may differ.

        Raises:
            RunError: the data's size, batch size, seed or shuffling differ, so the order could not be continued.
        """
        own = self.state_dict()
        changed = [f"{k}: {state.get(k)} -> {own[k]}" for k in own if k != "step" and state.get(k) != own[k]]
        if changed:
            raise RunError(f"batches: the data order cannot be continued, these have changed: {', '.join(changed)}")
        self.step = int(state["step"])
