"""Files of examples: what is wrong with a line is said in one sentence that names it."""

import json

import pytest

from rwkv_batch.evaluate.asks import EvaluationError
from rwkv_batch.evaluate.files import read_lines, read_texts
from rwkv_batch.evaluate.lambada import passage
from rwkv_batch.evaluate.mmlu import multiple_choice

GOOD = {
    passage: {"text": "a b c"},
    multiple_choice: {"question": "q", "choices": ["1", "2"], "answer": 0, "subject": "s"},
}
WRONG = [
    (passage, "{", "not JSON"),
    (passage, "[1]", "JSON object"),
    (passage, {}, '"text"'),
    (passage, {"text": 5}, '"text"'),
    (passage, {"text": ""}, '"text"'),
    (passage, {"text": "word"}, "behind a space"),
    (passage, {"text": " word"}, "behind a space"),
    (passage, {"text": "a word "}, "behind a space"),
    (multiple_choice, {"question": None}, '"question"'),
    (multiple_choice, {"question": ""}, '"question"'),
    (multiple_choice, {"choices": ["1"]}, '"choices"'),
    (multiple_choice, {"choices": "12"}, '"choices"'),
    (multiple_choice, {"choices": [1, 2]}, '"choices"'),
    (multiple_choice, {"choices": ["x"] * 27}, '"choices"'),
    (multiple_choice, {"choices": None}, '"choices"'),
    (multiple_choice, {"answer": 2}, "0 to 1 or A to B"),
    (multiple_choice, {"answer": -1}, '"answer"'),
    (multiple_choice, {"answer": "C"}, '"answer"'),
    (multiple_choice, {"answer": ""}, '"answer"'),
    (multiple_choice, {"answer": True}, '"answer"'),
    (multiple_choice, {"answer": None}, '"answer"'),
    (multiple_choice, {"subject": 3}, '"subject"'),
]


@pytest.mark.parametrize(("read", "wrong", "why"), WRONG)
def test_a_wrong_line_is_named(tmp_path, read, wrong, why):
    file = tmp_path / "examples.jsonl"
    if isinstance(wrong, dict):
        wrong = json.dumps(GOOD[read] | wrong if read is multiple_choice else wrong)
    file.write_text(f"{json.dumps(GOOD[read])}\n\n{wrong}\n{json.dumps(GOOD[read])}\n")
    with pytest.raises(EvaluationError) as raised:
        read_lines(file, read)
    sentence = str(raised.value)
    assert sentence.startswith(f"{file}, line 3: ") and why in sentence
    assert sentence.endswith(".") and "\n" not in sentence
    assert len(read_lines(file, read, limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (json.dumps({"text": "a \ud800"}), "half a surrogate pair"),
        ('{"text": "a b", "more": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested too deeply"),
    ],
)
def test_a_hostile_line_is_named(tmp_path, line, why):
    file = tmp_path / "examples.jsonl"
    file.write_text(line)
    with pytest.raises(EvaluationError, match=rf"line 1: .*{why}\.$"):
        read_lines(file, passage)


@pytest.mark.parametrize("name", ["examples.jsonl", "text.txt"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, name):
    line = json.dumps({"text": "über"}) if name.endswith("l") else "über"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + f"{line}\n".encode())
    assert [text.strip() for text in read_texts(tmp_path / name)] == ["über"]


def test_files_that_cannot_be_read(tmp_path):
    latin, empty = tmp_path / "latin.jsonl", tmp_path / "empty.txt"
    latin.write_bytes(b'{"text": "a b"}\n{"text": "\xe9"}\n')
    empty.touch()
    for file, why in (
        (tmp_path / "none", "cannot be read"),
        (tmp_path, "cannot be read"),
        (empty, "no examples"),
    ):
        with pytest.raises(EvaluationError, match=why):
            read_lines(file, passage)
    with pytest.raises(EvaluationError, match=r"line 2: this is not UTF-8\."):
        read_lines(latin, passage)
    with pytest.raises(EvaluationError, match="is empty"):
        read_texts(empty)


def test_texts_are_lines_or_a_whole_file(tmp_path):
    lines, text = tmp_path / "texts.jsonl", tmp_path / "text.md"
    lines.write_text('{"text": "a\\n"}\n{"text": "世"}\n', encoding="utf-8")
    text.write_bytes("one\r\n\n世\n".encode())
    assert read_texts(lines) == ["a\n", "世"] and read_texts(lines, limit=1) == ["a\n"]
    assert read_texts(text) == ["one\r\n\n世\n"]


def test_choices_in_fields_of_their_own():
    fields = {"question": "q", "A": "x", "B": "y", "C": "z", "D": "w", "answer": "C", "subject": "s"}
    found = multiple_choice(fields)
    assert (found.choices, found.answer) == (["x", "y", "z", "w"], 2)
