"""The demo model's training text: correct sentences, one answer per prompt, nothing held out."""

from random import Random

import pytest

from demo.chat import question
from demo.evaluate import TASKS, samples
from demo.example import held_out
from demo.facts import CAPITALS, calculation
from demo.fim import fim
from demo.memory import draw_facts, memory, pair_key
from demo.sentences import sentence
from demo.text import training_example
from demo.tooluse import tool_use
from demo.translation import translation
from routes.chat.calls import ToolCallParser

SPLITS = (translation, memory, fim, tool_use, question)


@pytest.mark.parametrize("make", SPLITS, ids=lambda make: make.__name__)
def test_evaluation_is_held_out_of_training(make):
    rng = Random(5)
    evaluated = {make(rng, True).key for _ in range(150)}
    trained = {make(rng, False).key for _ in range(5000)} - {""}
    assert len(evaluated) > 50 and len(trained) > 500
    assert all(map(held_out, evaluated)) and not any(map(held_out, trained))


def test_no_two_things_told_in_training_are_a_held_out_pair():
    rng = Random(15)
    for _ in range(2000):
        stated = list(draw_facts(rng, 4, evaluation=False)[0].items())
        assert not any(held_out(pair_key(*a, *b)) for i, a in enumerate(stated) for b in stated[:i])


def test_the_training_mix_never_shows_a_held_out_combination():
    rng = Random(6)
    examples = [training_example(rng) for _ in range(5000)]
    assert {"translation", "phrase", "memory", "fact", "story", "fim", "tool", "continuation"} == {
        e.kind for e in examples
    }
    assert not [e.key for e in examples if held_out(e.key)]


def test_a_held_out_sentence_stays_out_of_longer_texts_too():
    rng = Random(7)
    held = set()
    while len(held) < 200:
        drawn = sentence(rng)
        if held_out(drawn.key):
            held.add(drawn.en)
    prompts = [e.prompt + e.answer for e in (translation(rng, False) for _ in range(5000))]
    assert not [text for text in held if any(f" {text}" in prompt for prompt in prompts)]


def test_the_same_prompt_always_has_the_same_answer():
    rng, seen = Random(8), {}
    for _ in range(20_000):
        example = training_example(rng)
        assert seen.setdefault(example.prompt, example.answer) == example.answer
    for example in samples():
        assert seen.get(example.prompt, example.answer) == example.answer


def test_a_text_in_any_language_has_one_meaning():
    rng, meanings = Random(9), {}
    for _ in range(20_000):
        drawn = sentence(rng)
        for text in (drawn.en, drawn.zh, drawn.fr, drawn.de):
            assert meanings.setdefault(text, drawn.en) == drawn.en


def test_answers_end_where_the_default_stops_do_not():
    rng = Random(10)
    for _ in range(5000):
        answer = training_example(rng).answer
        assert answer and "\n\n" not in answer and "User" not in answer


def test_tool_answers_are_calls_that_the_server_finds():
    rng, calls = Random(11), 0
    for _ in range(500):
        answer = tool_use(rng, False).answer
        parser = ToolCallParser()
        parser.feed(answer)
        assert bool(parser.calls) == ("<tool_call>" in answer)
        calls += len(parser.calls)
    assert calls > 100


def test_sums_and_capitals_are_right():
    rng = Random(12)
    for _ in range(2000):
        _, answer, _, _ = calculation(rng)
        left, right = answer.split(" = ")
        assert eval(left.replace("×", "*")) == int(right)
    facts = {row[0]: row[1] for row in CAPITALS}
    assert (facts["France"], facts["Australia"], facts["Brazil"]) == ("Paris", "Canberra", "Brasília")


def test_grammar_of_the_four_languages():
    rng, by_english = Random(13), {}
    for _ in range(200_000):
        drawn = sentence(rng)
        by_english[drawn.en] = drawn
    expected = {
        "Is this book white?": (
            "这本书是白色的吗？",
            "Est-ce que ce livre est blanc ?",
            "Ist dieses Buch weiß?",
        ),
        "My sister is a doctor.": ("我的姐姐是医生。", "Ma sœur est médecin.", "Meine Schwester ist Ärztin."),
        "Maria is at school.": ("玛丽亚在学校。", "Maria est à l'école.", "Maria ist in der Schule."),
        "The tree is white.": ("树是白色的。", "L'arbre est blanc.", "Der Baum ist weiß."),
    }
    found = expected.keys() & by_english.keys()
    assert len(found) >= 3
    for english in found:
        drawn = by_english[english]
        assert (drawn.zh, drawn.fr, drawn.de) == expected[english]


def test_every_evaluation_task_makes_examples():
    for name, make in TASKS.items():
        example = make(Random(14))
        assert example.prompt and example.answer, name
