"""The language of texts, measured on sentences of our own; the documents say how well."""

from pathlib import Path

import pytest

from rwkv_batch.chat.languages import find
from rwkv_batch.translation.language.detection import detect, detect_together

LISTED = Path(__file__).resolve().parents[1] / "helpers" / "language_sentences.tsv"
SENTENCES = [line.split("\t") for line in LISTED.read_text(encoding="utf-8").splitlines()]
ROOT = Path(__file__).resolve().parents[2]


def test_it_is_right_as_often_as_the_documents_say():
    right = sum(detect(text).code == code for code, text in SENTENCES)
    languages = len({code for code, _ in SENTENCES})
    said = f"{right} of {len(SENTENCES)} sentences of ours in {languages} languages"
    assert right >= 0.97 * len(SENTENCES) and languages > 60
    assert said in (ROOT / "docs" / "translators.md").read_text(encoding="utf-8"), said


def test_every_language_of_the_list_has_a_name():
    assert all(find(code) for code, _ in SENTENCES)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("使用 JavaScript 编写代码", "zh-CN"),
        ("東京タワー", "ja"),
        ("日本の首都は東京です", "ja"),
        ("「の」是日文假名，常见于中文商标之中", "zh-CN"),
        ("GitHub で公開", "ja"),
        ("Élan vital", "fr"),
        ("한국어 텍스트", "ko"),
        ("Москва is big", "ru"),
        ("مرحبا بالعالم", "ar"),
        ("你好", "zh-CN"),
        ("繁體中文", "zh-TW"),
        ("Bonjour", "fr"),
        ("Rechnung", "de"),
    ],
)
def test_short_texts_and_mixed_ones(text, code):
    assert detect(text).code == code


@pytest.mark.parametrize("text", ["", "123 + 4", "🦄", "ⵜⵉⴼⵉⵏⴰⵖ", "\x00\x07", "￾"])
def test_what_tells_nothing(text):
    assert detect(text).code is None


def test_neighbours_say_what_a_short_text_leaves_open():
    page = ["Il treno per l'aeroporto parte ogni venti minuti.", "Menu", "Home"]
    assert [each.code for each in detect_together(page)] == ["it", "it", "it"]
    assert detect("Menu").code != "it", "alone it is something else"
    assert detect_together(["Menu"], around=page[0])[0].code == "it"
    assert detect_together(["Привет", page[0]])[0].code == "ru", "a neighbour in another script says nothing"
