"""JSON texts as their type schema: what a world model of tools is asked to predict (RWML, arXiv 2602.05842).

A tool's answer is values that nobody can know, in a form that can be learned. `mask_schema` keeps the form.
"""

from __future__ import annotations

import json
import re
from typing import Any

_ID = re.compile(r"\d")


def mask_schema(text: str, *, collapse_ids: bool = False) -> str:
    """A JSON object or list with each value replaced by its type, as compact JSON; any other text as it is.

    `{"a": "x", "l": [1]}` becomes `{"type":"object","properties":{"a":{"type":"string"},"l":{"type":"array","items":...`.
    The items of a list are described by one schema that fits all of them: objects with the properties of any, several
    types as a sorted list.

    Args:
        collapse_ids: describe an object whose keys all hold a digit (a table by id) by `additionalProperties`, so that
            ids are not left in the target.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict | list):
        return text
    return json.dumps(schema_of(value, collapse_ids=collapse_ids), separators=(",", ":"))


def schema_of(value: Any, *, collapse_ids: bool = False) -> dict[str, Any]:
    """The schema of a JSON value."""
    if isinstance(value, dict):
        if collapse_ids and value and all(_ID.search(key) for key in value):
            return {"type": "object", "additionalProperties": _merged(list(value.values()), collapse_ids)}
        return {"type": "object", "properties": {k: schema_of(v, collapse_ids=collapse_ids) for k, v in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "items": _merged(value, collapse_ids)}
    if value is None:
        return {"type": "null"}
    if isinstance(value, bool):
        return {"type": "boolean"}
    return {"type": "integer" if isinstance(value, int) else "number" if isinstance(value, float) else "string"}


def _merged(values: list[Any], collapse_ids: bool) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for value in values:
        merged = _join(merged, schema_of(value, collapse_ids=collapse_ids))
    return merged


def _join(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """A schema for what fits either."""
    if not a or a == b:
        return b
    if not b:
        return a
    out: dict[str, Any] = {}
    types = sorted({*_types(a), *_types(b)})
    out["type"] = types[0] if len(types) == 1 else types
    if "properties" in a or "properties" in b:
        first, second = a.get("properties", {}), b.get("properties", {})
        out["properties"] = {k: _join(first.get(k, {}), second.get(k, {})) for k in {**first, **second}}
    for part in ("additionalProperties", "items"):
        if part in a or part in b:
            out[part] = _join(a.get(part, {}), b.get(part, {}))
    return out


def _types(schema: dict[str, Any]) -> list[str]:
    kind = schema["type"]
    return kind if isinstance(kind, list) else [kind]
