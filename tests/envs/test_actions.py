"""The strict reading of actions."""

import pytest

from forethought.envs.actions import read_action


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
