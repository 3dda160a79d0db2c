"""The exact text that models read."""

import pytest

from routes.chat import templates
from routes.chat.templates import Message

TOOL = {"type": "function", "function": {"name": "now"}}


def test_one_question():
    assert templates.chat([Message("user", "Hi")]) == "User: Hi\n\nAssistant: <think>\n</think>\n"
    assert templates.chat([Message("user", "Hi")], think=True) == "User: Hi\n\nAssistant: <think"


def test_system_and_developer_turns_move_to_the_front():
    turns = [
        Message("user", "a"),
        Message("developer", " Two. "),
        Message("assistant", "b"),
        Message("system", "Three."),
        Message("user", "c"),
    ]
    assert templates.chat(turns, system="One.") == (
        "System: One.\n\nTwo.\n\nThree.\n\nUser: a\n\nAssistant: b\n\nUser: c\n\nAssistant: "
        "<think>\n</think>\n"
    )


def test_blank_lines_inside_a_turn_are_folded_and_indentation_is_kept():
    assert templates.chat([Message("user", " if x:\r\n\r\n    y\r\n\n\n    z\n")]).startswith(
        "User: if x:\n    y\n    z\n\nAssistant:"
    )


def test_tool_call_and_its_result():
    turns = [
        Message("user", "Time?"),
        Message("assistant", "Wait.", [("now", '{"zone": "UTC"}')]),
        Message("tool", "12:00"),
    ]
    assert templates.chat(turns) == (
        "User: Time?\n\nAssistant: Wait.\n"
        '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>\n\nTool: 12:00'
        "\n\nAssistant: <think>\n</think>\n"
    )


def test_tools_stand_in_the_system_turn_unless_none_may_be_called():
    text = templates.chat([Message("user", "Hi")], "Be kind.", [TOOL])
    assert text.startswith("System: Be kind.\n\nYou can call one tool.") and "Tool: now\n" in text
    assert templates.chat([Message("user", "Hi")], "Be kind.", [TOOL], "none") == templates.chat(
        [Message("user", "Hi")], "Be kind."
    )


def test_last_assistant_turn_is_left_open():
    turns = [Message("user", "Hi"), Message("assistant", "Good ")]
    assert templates.continues(turns)
    assert templates.chat(turns) == "User: Hi\n\nAssistant: Good"


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [Message("user", "a")],
        [Message("assistant", "", [("f", "{}")])],
        [Message("user", "a"), Message("assistant", " ")],
    ],
)
def test_nothing_to_continue(turns):
    assert not templates.continues(turns)
    assert templates.chat(turns).endswith("Assistant: <think>\n</think>\n")


def test_translation_and_fill_in_the_middle():
    assert templates.translation("你好", "zh-TW", "en") == "Chinese: 你好\n\nEnglish:"
    assert templates.translation("a", "Latin", "fr") == "Latin: a\n\nFrench:"
    assert templates.fill_in_the_middle("PRE", "SUF") == "✿prefix✿✿suffix✿SUF✿middle✿PRE"
