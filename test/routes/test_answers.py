"""What of a model's text is thought, answer and call, however the text comes in pieces."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routes.chat.answer import AnswerPart, AnswerReader
from rwkv_batch.chat.templates import Style
from rwkv_batch.text.stops import AnswerStops

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (">\nI think.\n</think>\nYes.\n\nReally.\n", "I think.", "Yes.\n\nReally.\n"),
        (">I\n\nthink</think>Yes", "I\n\nthink", "Yes"),
        ("></think>\n\nYes", "", "Yes"),
        (">\n</think>\n", "", ""),
        ("no bracket</think>a</think>b", "no bracket", "a</think>b"),
        (">>a < b </thin", ">a < b </thin", ""),
        (">never ended\n", "never ended\n", ""),
    ],
)
def test_thoughts_are_parted_for_every_split(text, reasoning, content):
    for cut in range(len(text) + 1):
        for pieces in ([text[:cut], text[cut:]], list(text)):
            reader, total = AnswerReader("<think"), AnswerPart()
            for piece in pieces:
                total += reader.feed(piece)
            assert total + reader.finish() == AnswerPart(reasoning, content)


@pytest.mark.parametrize(
    ("thought", "text", "reasoning", "content"),
    [
        ("<think></think", ">\nYes.\n", "", "Yes.\n"),
        ("<think></think", "Yes>", "", "Yes>"),
        ("<think></think", ">\n<think>\nHm.\n</think>\nYes", "Hm.", "Yes"),
        ("<think></think", "><think>Hm", "Hm", ""),
        ("<think>\n</think>\n", "\n<think>Hm</think>\n\nYes", "Hm", "Yes"),
        ("<think>\n</think>\n", " \nYes <think>No</think>", "", " \nYes <think>No</think>"),
        ("<think>\n</think>\n", "<thinking> is it", "", "<thinking> is it"),
        ("<think>\n</think>\n", "\n<thi", "", "\n<thi"),
        ("<think>\n</think>\n", "<think>a</think><think>b</think>", "a", "<think>b</think>"),
        ("<think>\n</think>", "\nYes", "", "\nYes"),
        ("<think>嗯", "，好。</think>\n是", "嗯，好。", "是"),
        ("", "  Yes", "", " Yes"),
        ("", " ", "", ""),
        ("", " <think>Hm</think>Yes", "Hm", "Yes"),
        (None, "<think>a</think>", "", "<think>a</think>"),
    ],
)
def test_thoughts_are_parted_for_any_end_of_the_prompt(thought, text, reasoning, content):
    for cut in range(len(text) + 1):
        for pieces in ([text[:cut], text[cut:]], list(text)):
            reader, total = AnswerReader(thought), AnswerPart()
            for piece in pieces:
                total += reader.feed(piece)
            assert total + reader.finish() == AnswerPart(reasoning, content), pieces


@pytest.mark.parametrize(
    "text",
    [f" \n a {CALL} \n", f"{CALL}\n b ", f"a\n{CALL}\nb", " a b \n", "<tool_call>x</tool_call> ", " \n"],
)
def test_text_around_a_call_does_not_depend_on_the_split(text):
    def read(pieces):
        reader, total = AnswerReader(calls=True), AnswerPart()
        for piece in pieces:
            total += reader.feed(piece)
        return total + reader.finish(), reader.calls

    whole = read([text])
    around = text.replace(CALL, "")
    assert whole[0].content == (around.strip() if CALL in text else around.lstrip())
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]]) == whole
    assert read(list(text)) == whole


FRAGMENTS = [
    *(
        "<think>",
        "</think>",
        "<think",
        "</think",
        ">",
        "\n",
        " ",
        "a",
        "```",
        "```json",
        "**Tool Call:**",
        "<tool_call",
    ),
    *("<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "[", "]", ",", '"', "{", "}"),
    *(
        '{"name": "f", "arguments": {}}',
        '{"name": "g", "arguments": "{}"}',
        '{"name": "f", "arguments": {"x": "``',
    ),
]


@settings(max_examples=1500, deadline=None)
@given(
    st.sampled_from([None, "", "<think", "<think></think", "<think>\n</think>\n", "<think>嗯"]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    st.integers(1, 7),
    st.sampled_from([None, 1]),
)
def test_an_answer_does_not_depend_on_how_it_is_cut(thought, fragments, size, most):
    text = "".join(fragments)

    def read(pieces):
        reader, total = AnswerReader(thought, True, {"f"}, most), AnswerPart()
        for piece in pieces:
            total += reader.feed(piece)
        return total + reader.finish(), reader.calls

    whole = read([text])
    assert read([text[at : at + size] for at in range(0, len(text), size)]) == whole
    assert all(call.name == "f" for call in whole[1])


@settings(max_examples=1500, deadline=None)
@given(
    st.sampled_from(["", "<think", "<think></think", "<think>\n</think>\n", "<think>嗯"]),
    st.lists(st.sampled_from(["<think>", "</think>", ">", "\n", " ", "a", "END"]), max_size=12),
)
def test_stops_of_the_client_cut_the_content_and_leave_the_thought(thought, fragments):
    """The engine, which stops, and the front end, which reads, agree on where the answer begins."""

    def read(text):
        reader = AnswerReader(thought)
        return reader.feed(text) + reader.finish()

    late = Style(thought=thought).late_stops(["END", "\n"])
    stops = AnswerStops([], late.strings, late.opens, late.closes, late.rest, late.inside)
    text = "".join(fragments)
    sent, stopped = stops.feed(text)
    cut, whole = read(sent if stopped else sent + stops.finish()), read(text)
    assert cut == AnswerPart(whole.reasoning, re.split("END|\n", whole.content)[0])
