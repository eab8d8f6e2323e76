"""Settings: dataclasses as the schema, YAML and `a.b=c` overrides as the input, one error that lists every problem.

A recipe's or trainer's config is a frozen, keyword-only dataclass; its `__post_init__` checks ranges and raises
`ConfigError`. This module reads values into it by the type of each field, so that a number is a number however it
was written. YAML is read with the number and truth rules of YAML 1.2: YAML 1.1, PyYAML's default, takes 5e-5 and
1.0e6 for text, `no` for false, 010 for 8, 1:30 for 90 and a date for a date object.

Also `derive_seed`: every random stream of a run has its own seed, derived from the run's seed and a name.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import numbers
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from forethought.errors import ConfigError, nearest

T = TypeVar("T")


def derive_seed(*parts: str | int | float | None) -> int:
    """A 63-bit seed from named parts, e.g. `derive_seed(run_seed, "order", epoch)`.

    BLAKE2b over the parts as text, each with its length in front, so that ("ab", "c") and ("a", "bc") differ. The same
    on every machine, and it fits `torch.manual_seed`, NumPy and a signed SQL integer.

    Raises:
        TypeError: a part is neither text nor a number (the text of other objects may hold a memory address).
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if part is not None and not isinstance(part, str | numbers.Number):
            raise TypeError(f"derive_seed takes text and numbers, not {type(part).__name__}")
        data = str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1


# -- YAML ------------------------------------------------------------------------------------------------------------

_RESOLVERS = [
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
]


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalar rules of YAML 1.2; a key given twice is an error."""

    yaml_implicit_resolvers: dict = {}

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Writes text so that both this module's rules and YAML 1.1 readers take it for text."""

    yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()}


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    text = str(loader.construct_scalar(node)).replace("_", "")
    if node.tag.endswith(":int"):
        return int(text)
    return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))


_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{at}: not YAML: {err.problem}") from None
    except (yaml.YAMLError, ValueError) as err:
        raise ConfigError(f"{source}: not YAML: {err}") from None


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping with text keys. An empty file is an empty mapping.

    Raises:
        ConfigError: no such file, not UTF-8, not YAML (line and column named), a key given twice, or not a mapping.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        names = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")] if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such config file{nearest(path.name, names)}") from None
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path}: not UTF-8 text (byte {err.start}); save it as UTF-8") from None
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read: {err.strerror}") from None
    data = parse_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds {_kind(data)}, not a mapping; write one 'name: value' per line")
    if bad := _non_text_key(data):
        raise ConfigError(f"{path}: the key {bad} is not text; put it in quotes")
    return data


def _non_text_key(data: Any) -> str | None:
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                return repr(key)
            if inner := _non_text_key(value):
                return inner
    elif isinstance(data, list):
        return next(filter(None, map(_non_text_key, data)), None)
    return None


def dump_yaml(config: Any) -> str:
    """YAML text of a config (dataclass or mapping) in its own order; `load_yaml` reads the same values back."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


# -- reading values by type ------------------------------------------------------------------------------------------


class _Text(str):
    """A value from the command line: text whose type the field decides."""


_BAD = object()
_TRUE, _FALSE = {"true", "yes", "on"}, {"false", "no", "off"}
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "true/false", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return names.get(type(value), type(value).__name__)


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return "null"
    if hint in _NAMES:
        return _NAMES[hint]
    if origin is typing.Literal:
        return " or ".join(map(repr, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in args)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list of {len(args)} values ({', '.join(_describe(a) for a in args)})"
    if (origin or hint) in (list, tuple):
        return f"a list, each item {_describe(args[0])}" if args else "a list"
    if origin is dict:
        return "a mapping"
    if dataclasses.is_dataclass(hint):
        return f"a mapping with keys {', '.join(_fields(hint))}"
    return "any value" if hint is Any else str(hint)


@functools.cache
def _fields(cls: type) -> dict[str, tuple[Any, dataclasses.Field]]:
    """Settable fields of a dataclass: name -> (type, field)."""
    hints = typing.get_type_hints(cls)
    return {f.name: (hints[f.name], f) for f in dataclasses.fields(cls) if f.init}


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass that a type is, or is optionally."""
    for member in (hint, *typing.get_args(hint)):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member
    return None


def _dotted_names(cls: type, prefix: str = "") -> list[str]:
    out = []
    for name, (hint, _) in _fields(cls).items():
        inner = _dataclass_in(hint)
        out += [prefix + name] + (_dotted_names(inner, f"{prefix}{name}.") if inner else [])
    return out


class _Reader:
    """Reads values by type and collects problems instead of stopping at the first."""

    def __init__(self, root: type):
        self.root = root
        self.problems: list[str] = []

    def bad(self, where: str, value: Any, hint: Any, extra: str = "") -> Any:
        value = str(value) if isinstance(value, _Text) else value
        shown = "null" if value is None else reprlib.repr(value)
        self.problems.append(f"{where}={shown}: give {_describe(hint)}{extra}")
        return _BAD

    def unknown(self, cls: type, name: str, prefix: str) -> None:
        elsewhere = [n for n in _dotted_names(self.root) if n.split(".")[-1] == name and n != prefix + name]
        guess = f"; did you mean {elsewhere[0]!r}?" if elsewhere else nearest(name, _fields(cls))
        known = "" if guess else f"; known: {', '.join(_fields(cls))}"
        self.problems.append(f"{prefix}{name}: unknown setting{guess}{known}")

    def build(self, cls: type, mapping: Mapping[str, Any], prefix: str = "") -> Any:
        fields, values, failed = _fields(cls), {}, []
        for name in mapping:
            if name not in fields:
                self.unknown(cls, str(name), prefix)
        for name, (hint, field) in fields.items():
            if name in mapping:
                value = self.read(hint, mapping[name], prefix + name)
                if value is _BAD:
                    failed.append(name)
                else:
                    values[name] = value
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self.problems.append(f"{prefix}{name}: missing; give {_describe(hint)}")
                failed.append(name)
        # With defaults in place of unreadable values the range checks of the others can still be reported.
        try:
            made = cls(**values)
        except ValueError as err:
            message, own = str(err), prefix.rstrip(".")
            if not any(re.search(rf"\b{re.escape(name)}\b", message) for name in failed):
                message = message.removeprefix(own.split(".")[-1] + ": ") if own else message
                self.problems.append(f"{own}: {message}" if own else message)
            return _BAD
        except TypeError:
            if not failed:
                raise
            return _BAD
        return _BAD if failed else made

    def read(self, hint: Any, value: Any, where: str) -> Any:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return self.unpack(value)
        if hint in (int, float, bool, str, Path, None, type(None)):
            return self.scalar(hint, value, where)
        if origin is typing.Literal:
            return self.literal(hint, args, value, where)
        if origin in (typing.Union, types.UnionType):
            return self.union(hint, args, value, where)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if isinstance(value, hint):
                return value
            inner = self.unpack(value)
            return self.build(hint, inner, where + ".") if isinstance(inner, Mapping) else self.bad(where, value, hint)
        if (origin or hint) in (list, tuple):
            return self.sequence(hint, origin or hint, args, value, where)
        if (origin or hint) is dict:
            inner = self.unpack(value)
            if not isinstance(inner, Mapping) or not all(isinstance(k, str) for k in inner):
                return self.bad(where, value, hint, " with text keys")
            out = {k: self.read(args[1] if args else Any, v, f"{where}.{k}") for k, v in inner.items()}
            return _BAD if any(v is _BAD for v in out.values()) else out
        raise TypeError(f"{where}: fields of type {hint} cannot be read from a config")

    @staticmethod
    def unpack(value: Any) -> Any:
        """Command-line text as the YAML value that it spells (plain text if it spells none); anything else as it is."""
        if isinstance(value, _Text):
            try:
                return parse_yaml(value, "")
            except ConfigError:
                return str(value)
        return value

    def scalar(self, hint: Any, value: Any, where: str) -> Any:
        text = value.strip().lower() if isinstance(value, str) else None
        if hint is str:
            if isinstance(value, str):
                return str(value)
            return self.bad(where, value, hint, " (put it in quotes)" if value is not None else "")
        if hint is Path:
            return Path(value) if isinstance(value, str | Path) and str(value) else self.bad(where, value, hint)
        if hint in (None, type(None)):
            return None if value is None or (text in ("none", "null")) else self.bad(where, value, hint)
        if hint is bool:
            ones, zeros = (_TRUE | {"1"}, _FALSE | {"0"}) if isinstance(value, _Text) else (_TRUE, _FALSE)
            if isinstance(value, bool):
                return value
            return True if text in ones else False if text in zeros else self.bad(where, value, hint)
        return self.number(hint, value, where)

    def number(self, hint: Any, value: Any, where: str) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return self.bad(where, value, hint)
        try:
            try:
                number = int(value) if isinstance(value, str) else value
            except ValueError:
                number = float(value)
            if hint is float:
                number = float(number)
            elif isinstance(number, float):
                number = int(number) if number.is_integer() else math.nan
        except (ValueError, OverflowError):
            return self.bad(where, value, hint)
        return self.bad(where, value, hint) if number != number else number

    def literal(self, hint: Any, options: tuple, value: Any, where: str) -> Any:
        for option in options:
            if isinstance(option, str) and isinstance(value, str) and option == value:
                return option
            if type(option) is type(value) and option == value:
                return option
        for option in options:  # 2, true or null written as text
            if isinstance(value, str) and not isinstance(option, str) and str(option).lower() == value.lower():
                return option
        return self.bad(where, value, hint, nearest(value, map(str, options)) if isinstance(value, str) else "")

    def union(self, hint: Any, members: tuple, value: Any, where: str) -> Any:
        written_null = isinstance(value, _Text) and value.lower() in ("none", "null")
        if type(None) in members and (value is None or written_null):
            return None
        members = tuple(m for m in members if m is not type(None))
        if len(members) == 1:
            return self.read(members[0], value, where)
        for member in sorted(members, key=lambda m: type(value) is not m):  # 5 is an int before it is a float
            out = _Reader(self.root).read(member, value, where)
            if out is not _BAD:
                return out
        return self.bad(where, value, hint)

    def sequence(self, hint: Any, kind: type, args: tuple, value: Any, where: str) -> Any:
        if isinstance(value, _Text) and value.lstrip().startswith("["):
            value = self.unpack(value)
        elif isinstance(value, _Text):
            value = [_Text(part.strip()) for part in value.split(",")] if value.strip() else []
        if not isinstance(value, list | tuple):
            return self.bad(where, value, hint)
        fixed = kind is tuple and bool(args) and args[-1] is not Ellipsis
        if fixed and len(value) != len(args):
            return self.bad(where, value, hint)
        hints = args if fixed else [args[0] if args else Any] * len(value)
        out = [self.read(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True))]
        return _BAD if any(v is _BAD for v in out) else kind(out)

    def done(self, made: Any, source: str) -> Any:
        if len(self.problems) == 1:
            raise ConfigError(f"{source}: {self.problems[0]}")
        if self.problems:
            raise ConfigError(f"{source}: {len(self.problems)} problems\n  - " + "\n  - ".join(self.problems))
        return made


def from_dict(cls: type[T], mapping: Mapping[str, Any], *, source: str = "config") -> T:
    """Build the dataclass `cls` from a nested mapping, reading each value by its field's type.

    Field types: int, float, bool, str, Path, Literal, Optional and unions, tuple, list, dict with text keys, Any, and
    dataclasses of these. Whole numbers may be written 1e6 or 1.0e6, numbers as quoted text; true/false is never a
    number and NaN is never accepted. Text is not split into a list.

    Args:
        source: what the error calls the input, e.g. the file's path.

    Raises:
        ConfigError: ONE error that lists all problems: unknown names (with the nearest known one), missing required
            fields, values of the wrong type, and what the dataclasses' own checks refuse.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{source}: holds {_kind(mapping)}; give {_describe(cls)}")
    reader = _Reader(cls)
    return reader.done(reader.build(cls, mapping), source)


def to_dict(config: Any) -> Any:
    """Plain dicts, lists, numbers and text, ready for YAML or JSON; `from_dict` reads an equal config back."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {name: to_dict(getattr(config, name)) for name in _fields(type(config))}
    if isinstance(config, Mapping):
        return {k: to_dict(v) for k, v in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(v) for v in config]
    return str(config) if isinstance(config, Path) else config


def apply_overrides(config: T, overrides: Iterable[str], *, source: str = "command line") -> T:
    """A copy of `config` with `a.b=value` settings applied in order (the last one wins); `--a.b=value` works too.

    The field decides what the text means: `name=5` is text for a str field. Lists are `seeds=1,2,3` or YAML
    (`stop=["a,b"]`), groups are YAML (`optim={lr: 1e-5}`) or dotted, null is `none` or `null`.

    Raises:
        ConfigError: one error that lists all problems, as `from_dict`.
    """
    tree, cls = to_dict(config), type(config)
    reader = _Reader(cls)
    for item in overrides:
        key, equals, value = item.partition("=")
        key = key.strip()
        parts = (key[2:].replace("-", "_") if key.startswith("--") else key).split(".")
        if not equals or not all(parts):
            reader.problems.append(f"{item!r}: write name=value")
            continue
        node = tree
        for depth, part in enumerate(parts[:-1], 1):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
            if not isinstance(node, dict):
                reader.problems.append(f"{'.'.join(parts)}: {'.'.join(parts[:depth])!r} is a value, not a group")
                break
        else:
            old, new = node.get(parts[-1]), _Text(value)
            inner = reader.unpack(new) if isinstance(old, dict) else None
            node[parts[-1]] = old | inner if isinstance(old, dict) and isinstance(inner, dict) else new
    return reader.done(reader.build(cls, tree), source)


# -- differences -----------------------------------------------------------------------------------------------------


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()
"""Stands for a setting that one side of a difference does not have."""


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict) or (prefix and not data):
        return {prefix: data}
    out: dict[str, Any] = {}
    for name, value in data.items():
        out |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return out


def diff(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Settings that differ between two configs (dataclasses or mappings): dotted name -> (old, new).

    A setting that one side lacks is `ABSENT` there. Lists are compared whole; 1 and 1.0 are equal, 1 and true are not.
    """
    a, b = _flat(to_dict(old)), _flat(to_dict(new))
    out = {}
    for name in [*a, *(n for n in b if n not in a)]:
        x, y = a.get(name, ABSENT), b.get(name, ABSENT)
        if x != y or isinstance(x, bool) != isinstance(y, bool):
            out[name] = (x, y)
    return out


def render_diff(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """One line per change: `name: old -> new`."""
    return "\n".join(f"  {name}: {old!r} -> {new!r}" for name, (old, new) in changes.items())
