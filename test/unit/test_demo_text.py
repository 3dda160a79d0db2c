"""The demo model's training text: correct sentences, one answer per prompt, nothing held out."""

import json
import re
from random import Random

import pytest

from demo.training import exam, exam_questions, names
from demo.training.arithmetic import calculation
from demo.training.chat import question
from demo.training.encoding import answer_ids, prompt_ids, tokenizer
from demo.training.evaluate import TASKS, TEXT_TOKENS, held_out_texts
from demo.training.example import Example, held_out
from demo.training.facts import CAPITALS
from demo.training.fim import fim
from demo.training.lexicon import NOUNS
from demo.training.memory import memory
from demo.training.numerals import IN_WORDS
from demo.training.samples import samples
from demo.training.text import training_example
from demo.training.tooluse import tool_use
from demo.training.translation import translation
from demo.training.unknown import UNKNOWN, unknown
from routes.chat.calls import ToolCallParser
from rwkv_batch.bundled.unpack import HELD_OUT

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def examples():
    rng = Random(6)
    return [training_example(rng) for _ in range(8000)]


@pytest.mark.parametrize("make", [fim, tool_use, question], ids=lambda make: make.__name__)
def test_evaluation_is_held_out_of_training(make):
    rng = Random(5)
    evaluated = {make(rng, True).key for _ in range(150)}
    trained = {make(rng, False).key for _ in range(3000)} - {""}
    assert len(evaluated) > 50 and len(trained) > 400
    assert all(map(held_out, evaluated)) and not any(map(held_out, trained))


def test_the_text_is_a_function_of_the_seed():
    first, second, other = (
        [training_example(rng) for _ in range(50)] for rng in (Random(1), Random(1), Random(2))
    )
    assert first == second != other


def test_the_training_mix_never_shows_a_held_out_combination(examples):
    assert {"translation", "phrase", "memory", "fact", "story", "fim", "tool", "continuation", "chat"} == {
        e.kind for e in examples
    }
    assert not [e.key for e in examples if held_out(e.key)]


def test_no_sentence_of_the_examination_is_trained_on(examples):
    rng = Random(7)
    asked = {exam.translation(rng).key for _ in range(300)}
    assert len(asked) > 250
    trained = "\n".join(e.prompt + e.answer for e in examples if e.kind == "translation")
    assert not [text for text in asked if f" {text}" in trained]


def test_no_name_of_the_examination_is_trained_on():
    rng = Random(8)
    asked = {exam.unseen_name(rng) for _ in range(300)}
    assert "Zoltan" in names.RESERVED and len(asked) > 120
    makers = (names.name, names.latin, names.word)
    trained = {make(rng) for make in makers for _ in range(5000)}
    trained |= {names.free(rng, (names.chinese_name,)) for _ in range(2000)}
    assert len(trained) > 8000 and not asked & trained


def test_no_unknown_thing_of_the_examination_is_trained_on():
    rng = Random(9)
    asked = {exam_questions.unknowable(rng).prompt for _ in range(500)}
    trained = {unknown(rng)[0] for _ in range(20_000)}
    assert len(asked) > 200 and len(trained) > 12_000
    assert not [text for text in trained if any(f"User: {text}\n" in prompt for prompt in asked)]


def test_no_unknown_thing_of_the_examination_is_a_word_of_the_lexicon():
    heads = {head for noun in NOUNS for head in (*noun.heads(), *noun.en)}
    things = {x for rows in exam_questions.UNKNOWABLE.values() for _, things in rows for x in things}
    bare = {re.sub(r"^(an?|the|une?|la?e?s?|ein|eine|der|die|das|den) |^l'", "", thing) for thing in things}
    assert len(bare) > 120 and not bare & heads


def test_the_same_prompt_always_has_the_same_answer():
    rng, seen = Random(10), {}
    for _ in range(20_000):
        example = training_example(rng)
        assert seen.setdefault(example.prompt, example.answer) == example.answer, example.prompt
    verbatim = {e.prompt: e.answer for e in exam_questions.failures()}
    assert not {p: seen[p] for p in verbatim.keys() & seen.keys() if seen[p] != verbatim[p]}


def test_ids_of_an_answer_are_its_text(examples):
    realigned = 0
    for example in examples:
        ids = answer_ids(example)
        assert ids[-1] == 0 and tokenizer().decode(ids) == example.answer
        realigned += ids[:-1] != tokenizer().encode(example.answer)
    assert realigned


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("User: Zoltan is my best friend.\n\nAssistant: ", "Zoltan must be a good friend."),
        ("Chinese: 我帮助Zoltan。\n\nEnglish:", " I help Zoltan."),
        ("English: I help Zoltan.\n\nChinese:", " 我帮助Zoltan。"),
    ],
)
def test_a_name_is_copied_by_the_tokens_that_it_has_in_the_prompt(prompt, answer):
    example = Example("memory", prompt, answer, names=("Zoltan",))
    pieces = [tokenizer().token_bytes(i).decode().strip() for i in prompt_ids(example)]
    copied = [tokenizer().token_bytes(i).decode().strip() for i in answer_ids(example)]
    start = next(i for i, piece in enumerate(pieces) if piece.startswith("Z"))
    length = next(n for n in range(1, 5) if "".join(pieces[start : start + n]) == "Zoltan")
    assert any(copied[i + 1 : i + length] == pieces[start + 1 : start + length] for i in range(len(copied)))


def test_answers_end_where_the_default_stops_do_not(examples):
    for example in examples:
        assert example.answer and "\n\n" not in example.answer and "User" not in example.answer


def test_a_call_is_only_trained_on_where_a_tool_is_offered(examples):
    calls = [e for e in examples if re.search(r'"arguments": ', e.answer)]
    assert len(calls) > 50
    assert all(re.search("Available tools:|Tools: \\[|Call a tool in this form:", e.prompt) for e in calls)


def test_tool_answers_are_calls_that_the_server_finds():
    rng, calls = Random(11), 0
    for _ in range(500):
        example = tool_use(rng, False)
        opened = re.search(r'(<tool_call>|```json\n)\{"name": "[^\n]*$', example.prompt)
        parser = ToolCallParser()
        parser.feed((opened[0] if opened else "") + example.answer)
        parser.finish()
        assert bool(parser.calls) == ('"arguments": ' in example.answer or bool(opened))
        calls += len(parser.calls)
    assert calls > 100


def test_sums_are_right_and_reach_100():
    rng, sums, seen = Random(12), set(), set()
    for _ in range(60_000):
        asked, answer, _, _ = calculation(rng)
        left, right = answer.split(" = ")
        assert eval(left.replace("×", "*")) == int(right)
        a, sign, b = left.split()
        words = {
            w for n in (int(a), int(b)) for w in (str(n), *(f(n) for f in IN_WORDS.values() if n <= 100))
        }
        assert sum(word in asked for word in words) >= 1, asked
        sums.add((int(a), sign, int(b)))
        seen.add(re.sub(r"\d+", "#", asked))
    possible = {(a, "+", b) for a in range(101) for b in range(101 - a)}
    assert len(possible & sums) > 0.95 * len(possible)
    assert len(seen) > 150


def test_capitals_are_right():
    facts = {row[0]: row[1] for row in CAPITALS}
    assert (facts["France"], facts["Australia"], facts["Brazil"]) == ("Paris", "Canberra", "Brasília")


def test_what_is_not_known_is_said_in_the_language_of_the_question():
    rng, languages = Random(13), set()
    for _ in range(2000):
        asked, answer, _, _ = unknown(rng)
        language = next(code for code, text in UNKNOWN.items() if text == answer)
        languages.add(language)
        if re.search(r"[首都什么哪谁吗多少]", asked):
            assert language == "zh", asked
    assert languages == set(UNKNOWN)


def test_every_evaluation_task_makes_examples():
    for name, make in TASKS.items():
        example = make(Random(14))
        assert example.prompt and example.answer, name
    assert len(exam_questions.failures()) == 22
    assert len(samples()) > 80


def test_memory_asks_for_names_that_stand_in_no_list():
    rng = Random(15)
    told = {name for _ in range(400) for name in memory(rng).names}
    assert len(told) > 500


def test_translations_come_from_every_language_into_every_other():
    rng, pairs = Random(16), set()
    for _ in range(600):
        found = re.match(r"(English|Chinese|French|German): [^\n]*\n\n(\w+):$", translation(rng).prompt)
        if found:
            pairs.add(found.groups())
    assert len({pair for pair in pairs if pair[1] in ("English", "Chinese", "French", "German")}) == 12


def test_the_texts_of_compare_are_held_out_ones():
    written = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    assert written == held_out_texts(TEXT_TOKENS)
