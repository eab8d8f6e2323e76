"""Type schemas in place of values."""

import json

import pytest

from forethought.envs.schema import mask_schema, schema_of


def test_the_example_of_the_specification():
    masked = json.loads(mask_schema('{"a":"x","n":3,"l":[{"k":true}]}'))
    assert masked == {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "n": {"type": "integer"},
            "l": {"type": "array", "items": {"type": "object", "properties": {"k": {"type": "boolean"}}}},
        },
    }
    assert mask_schema("Error: Order not found") == "Error: Order not found"


@pytest.mark.parametrize("text", ["", "3", '"a"', "null", "true", "[1, ", "done", "[" * 100_000])
def test_what_is_no_object_or_list_stays(text):
    assert mask_schema(text) == text


def test_values_never_remain():
    text = json.dumps({"name": "Ann", "age": 7, "ok": None, "x": 1.5, "list": ["secret"], "none": []})
    masked = mask_schema(text)
    assert "Ann" not in masked and "secret" not in masked and "7" not in masked
    assert json.loads(masked)["properties"]["none"] == {"type": "array", "items": {}}
    assert json.loads(masked)["properties"]["ok"] == {"type": "null"}
    assert json.loads(masked)["properties"]["x"] == {"type": "number"}
    assert " " not in masked  # compact


def test_items_are_described_by_one_schema():
    assert schema_of([1, "a", 2]) == {"type": "array", "items": {"type": ["integer", "string"]}}
    merged = schema_of([{"a": 1}, {"b": "x", "a": None}])["items"]
    assert merged == {"type": "object", "properties": {"a": {"type": ["integer", "null"]}, "b": {"type": "string"}}}
    assert schema_of([[1], ["a"], []])["items"] == {"type": "array", "items": {"type": ["integer", "string"]}}
    assert schema_of([{"a": 1}, 3])["items"] == {
        "type": ["integer", "object"],
        "properties": {"a": {"type": "integer"}},
    }


def test_tables_by_id():
    text = '{"credit_card_1": {"last": "12"}, "paypal_2": {"mail": "a"}}'
    assert "credit_card_1" in mask_schema(text)
    collapsed = json.loads(mask_schema(text, collapse_ids=True))
    inner = {"type": "object", "properties": {"last": {"type": "string"}, "mail": {"type": "string"}}}
    assert collapsed == {"type": "object", "additionalProperties": inner}
    assert json.loads(mask_schema('{"a1": 1, "b": 2}', collapse_ids=True))["properties"].keys() == {"a1", "b"}
    assert mask_schema("{}", collapse_ids=True) == '{"type":"object","properties":{}}'
