"""The strict reading of actions."""

import pytest

from forethought.envs.actions import read_action, read_tool_call


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("up", "up"),
        ("  Go  to\n Drawer 1 ", "go to drawer 1"),
        ("<action>up</action>", "up"),
        ("<think>up or <action>down</action>?</think>\n<action>left</action>", "left"),
        ("<think>a</think><think>b</think><action>x</action> bye", "x"),
        ("<plan>up, up</plan><action>up</action>", "up"),
        ("up <think>late</think> down", "down"),
        ("take mug 1 from shelf 2", "take mug 1 from shelf 2"),
        ("a < b", "a < b"),
        ("", None),
        (" \n\t", None),
        ("<action></action>", None),
        ("<action> </action>", None),
        ("<action>up", None),
        ("up</action>", None),
        ("<action>up</action><action>down</action>", None),
        ("<action>up</action></action>", None),
        ("<action><action>up</action></action>", None),
        ("<think>up", None),
        ("<think>I think <action>up</action>", None),
        ("</action>up<action>", None),
    ],
)
def test_one_action_or_none(text, action):
    assert read_action(text) == action


def test_long_texts_are_read():
    assert read_action("<think>" + "go " * 50_000 + "</think><action>up</action>") == "up"
    assert read_action("<action>" * 20_000) is None


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "f", "arguments": {"x": 1}}', ("f", {"x": 1})),
        ('<think>{"name": "g"}</think> I look it up. <tool_call>{"name": "f"}</tool_call>', ("f", {})),
        ('<tool_call>\n{"name": "f", "arguments": {"x": [1, "a"]}}\n</tool_call>', ("f", {"x": [1, "a"]})),
        ("Hello, what is your name?", None),
        ("", None),
        ('The record {"name": "Ann"} is yours.', None),
        ('{"x": 1}', None),
        ('<tool_call>{"name": "f"}', "the tool call is not closed; write <tool_call>{...}</tool_call>"),
        ('{"name": "f"}</tool_call>', "the tool call is not closed; write <tool_call>{...}</tool_call>"),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>', "one tool call at a time"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "the arguments of f are no object"),
        ('<tool_call>{"name": "f", </tool_call>', "the tool call is not valid JSON"),
        ('<tool_call>"f"</tool_call>', 'the tool call has no name; write {"name": ..., "arguments": {...}}'),
        ('{"name": 3}', 'the tool call has no name; write {"name": ..., "arguments": {...}}'),
        ('{"name": "f", "arguments": ' + "[" * 100_000, "the tool call is not valid JSON"),
    ],
)
def test_tool_calls(text, call):
    assert read_tool_call(text) == call
