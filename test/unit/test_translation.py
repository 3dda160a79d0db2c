"""From texts to prompts and back, with models that keep marks and terms, and with some that do not."""

import random
import re
from collections import Counter
from dataclasses import replace
from html import unescape

import pytest
from translated import TERMS, broken, generated, lacking, translate

from rwkv_batch.translation.forms import FORMS, TranslationForm, form_of
from rwkv_batch.translation.glossary import from_pairs, places
from rwkv_batch.translation.marks import HTML, PLAIN, Handling
from rwkv_batch.translation.segments import LONGEST_WHOLE, Segment, cut
from rwkv_batch.translation.translator import TextsAsked, Translated, Translator, Words

GERMAN = {"dog": "Hund", "cat": "Katze", "car": "Auto", "book": "Buch", "door": "Tür", "dogs": "Hunde"}


def text_of(prompt: str) -> str:
    return prompt.removeprefix("English: ").removesuffix("\n\nGerman:")


def shouts(prompt: str) -> str:
    """Keeps all that is no letter."""
    return re.sub(r"(?<![<{/%$\w])[a-z]{2,}(?![}>\w])", lambda m: m[0].upper(), text_of(prompt))


def knows_words(prompt: str) -> str:
    """Has its own words for terms."""
    return re.sub(r"\w+", lambda m: GERMAN.get(m[0], m[0]), text_of(prompt))


def drops_marks(prompt: str) -> str:
    return re.sub(r"[<{\[(`%][^\s]*", "", text_of(prompt)).strip() or "Wort"


def doubles(prompt: str) -> str:
    return f"{text_of(prompt)} {text_of(prompt)}"


def turns_around(prompt: str) -> str:
    return " ".join(reversed(text_of(prompt).split()))


def says_nothing(prompt: str) -> str:
    return ""


def makes_marks_up(prompt: str) -> str:
    return f"<b>Wort</b> {{7}} https://example.net {text_of(prompt)}"


def draws(prompt: str) -> str:
    dice = random.Random(prompt)
    return "".join(c for c in text_of(prompt) if dice.random() < 0.9)


MODELS = [shouts, knows_words, drops_marks, doubles, turns_around, says_nothing, makes_marks_up, draws]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("terms_in_source", [True, False])
def test_marks_and_terms_are_whole_with_any_model(model, terms_in_source):
    texts = [generated(number) for number in range(200)]
    asked = TextsAsked(texts, "de", "en", from_pairs(TERMS))
    answers, _ = translate(asked, model, TranslationForm(terms_in_source=terms_in_source))
    assert not [wrong for pair in zip(texts, answers, strict=True) if (wrong := broken(*pair))]
    assert not [wrong for pair in zip(texts, answers, strict=True) if (wrong := lacking(*pair, TERMS))]


def test_a_model_that_keeps_them_is_asked_once():
    asked = TextsAsked(["The {0} sees <b>the house</b> [here](https://example.org/long)."], "de", "en")
    (answer,), rounds = translate(asked, shouts)
    assert answer == "The {0} SEES <b>THE HOUSE</b> [HERE](https://example.org/long)."
    assert [[text_of(row.prompt) for row in rows] for rows in rounds] == [
        ["The {0} sees <b>the house</b> <x3>here</x3>."]
    ], "long marks are shown as short ones"


def test_a_broken_segment_is_asked_for_piece_by_piece():
    asked = TextsAsked(["The {0} sees <b>the house</b>.", "Fine."], "de", "en")
    answers, rounds = translate(asked, drops_marks)
    assert answers == ["The {0} sees <b>the house</b>.", "Fine."]
    assert [[text_of(row.prompt) for row in rows] for rows in rounds] == [
        ["The {0} sees <b>the house</b>.", "Fine."],
        ["The", "sees", "the house"],
    ]


def test_the_models_own_word_for_a_term_is_replaced():
    asked = TextsAsked(
        ["My dogs and the dog.", "No term."], "de", "en", from_pairs({"dog|dogs": "Köter|Kötern"})
    )
    form = TranslationForm(terms_in_source=False)
    answers, rounds = translate(asked, knows_words, form)
    assert answers == ["My Kötern and the Köter.", "No term."]
    assert [text_of(row.prompt) for rows in rounds for row in rows] == [
        "My dogs and the dog.",
        "No term.",
        "dogs",
        "dog",
    ], "terms are asked for beside the segments, and known from then on"


def test_a_term_stands_in_the_source_where_the_checkpoint_reads_that():
    asked = TextsAsked(["The dog."], "de", "en", from_pairs({"dog": "Köter"}))
    answers, rounds = translate(asked, knows_words)
    assert answers == ["The Köter."] and [text_of(row.prompt) for row in rounds[0]] == ["The Köter."]
    assert len(rounds) == 1


def test_what_stands_around_a_text_is_fed_where_the_form_has_a_place():
    form = TranslationForm(context="{source}: {context}\n\n")
    texts = ["One {0}.\n\nTwo.", "Three."]

    def fed(context: str, form: TranslationForm = form) -> list[str]:
        asked = TextsAsked(texts, "de", "en", context=context)
        return [row.prompt for row in Translator(asked, form, Words()).start()]

    plain = [f"English: {text}\n\nGerman:" for text in ("One {0}.", "Two.", "Three.")]
    fronts = ["", "English: One {0}.\n\n", "English: Two.\n\n"]
    assert fed("") == [front + each for front, each in zip(fronts, plain, strict=True)], "its neighbours"
    assert fed("A menu\n\n{text}") == [f"English: A menu {{text}}\n\n{each}" for each in plain]
    (first, *_) = fed("long " * 100 + "end")
    assert first.endswith(f"long end\n\n{plain[0]}") and 280 < len(first) - len(plain[0]) < 320
    assert fed("A menu", TranslationForm()) == plain
    assert not any(form.context for _, form in FORMS), "none was found that takes it"


def test_an_answer_without_an_end_is_asked_for_again():
    translator = Translator(TextsAsked(["One two."], "de", "en"), TranslationForm(), Words())
    translator.start()
    again = translator.take(0, Translated("one one one one", complete=False))
    assert [text_of(row.prompt) for row in again] == ["One two."]
    assert translator.take(1, Translated("one one one one", complete=False)) == []
    assert translator.texts() == ["One two."], "rather the source than a text that repeats itself"


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("  One line. \n\n Another\r\n", ["One line.", "Another"]),
        ("# Title\n- first\n  2. second\n> quoted", ["Title", "first", "second", "quoted"]),
        ("123\n--\n{0}\n", []),
        ("<b>All of it</b>", ["All of it"]),
        ("<b>Some</b> of <i>it</i>", ["<b>Some</b> of <i>it</i>"]),
        ("Text\n```\ncode\n```\nmore", ["Text", "more"]),
    ],
)
def test_segments(text, segments):
    parts = cut(text, 0, 100, "lines")
    assert [part.source for part in parts if isinstance(part, Segment)] == segments
    assert "".join(p if isinstance(p, str) else p.source for p in parts) == text


def test_long_texts_are_cut_at_sentences():
    text = "One is here, e.g. Ann. Two is! Is three? " + "word " * 30 + "end. 四在这里。五也在。" + "x" * 150
    parts = cut(text, 0, 60, "lines")
    found = [part.source for part in parts if isinstance(part, Segment)]
    assert found[0].startswith("One is here, e.g. Ann. Two is! Is three? word") and found[1].endswith("word")
    assert 40 < max(map(len, found)) <= 60 and "四在这里。五也在。" in " ".join(found)
    assert "".join(p if isinstance(p, str) else p.source for p in parts) == text


def test_html_is_read_and_written():
    asked = TextsAsked(
        ["<p>dog &amp; cat <a href='x>y'>3 &lt; 4</a></p><ul><li>One</li></ul>"], "de", "en", handling=HTML
    )
    (answer,), rounds = translate(asked, lambda prompt: text_of(prompt).replace("dog", "Hund & Co"))
    assert [text_of(row.prompt) for row in rounds[0]][-1] == "One"
    assert "Hund &amp; Co &amp; cat <a href='x>y'>3 &lt; 4</a></p>" in answer and answer.endswith(
        "<ul><li>One</li></ul>"
    )


def test_xml_has_the_tags_that_the_request_names():
    handling = Handling(escaped=True, silent=frozenset({"x"}), parting=frozenset({"par"}))
    asked = TextsAsked(["<par>One <x>two</x></par><par>Three</par>"], "de", "en", handling=handling)
    (answer,), rounds = translate(asked, shouts)
    assert [text_of(row.prompt) for row in rounds[0]] == ["One {0}", "Three"]
    assert answer == "<par>One <x>two</x></par><par>Three</par>"


def test_where_texts_are_cut_can_be_chosen():
    text = "One\ntwo.\n\nThree."
    for sentences, found in (
        ("lines", ["One", "two.", "Three."]),
        ("texts", ["One\ntwo.", "Three."]),
        ("whole", ["One\ntwo.", "Three."]),
    ):
        parts = cut(text, 0, 8 if sentences == "whole" else 100, sentences)
        assert [part.source for part in parts if isinstance(part, Segment)] == found


def test_a_paragraph_that_no_answer_could_hold_is_cut_all_the_same():
    """One has many nested tags, for which the time to find the innermost text would be quadratic."""
    for text in ("Word and word. " * 400, "<b>" * 900 + "word" + "</b>" * 900):
        parts = cut(text, 0, 100, "whole", Handling(escaped=True))
        sources = [part.source for part in parts if isinstance(part, Segment)]
        assert sources and max(map(len, sources)) <= LONGEST_WHOLE
        assert "".join(part.source if isinstance(part, Segment) else part for part in parts) == text


def test_entities_are_not_cut():
    for before in range(20):
        text = "一" * before + "&amp;&#x4e00;" + "一" * 20 + "&"
        asked = TextsAsked([text], "de", "en", handling=HTML)
        (answer,), _ = translate(asked, text_of, TranslationForm(most=10))
        assert unescape(answer) == unescape(text)


@pytest.mark.parametrize("text", ["<td>&nbsp;</td>", "<p>&#160; 1 &amp; 2</p>"])
def test_space_of_html_without_words_is_not_translated(text):
    assert translate(TextsAsked([text], "de", "en", handling=HTML), shouts) == ([text], [])


def test_space_of_html_around_a_text_stays():
    text = "<p> &nbsp;&#xa0; One &nbsp;<b>two</b>&nbsp; &nbsp;</p>"
    (answer,), rounds = translate(TextsAsked([text], "de", "en", handling=HTML), text_of)
    assert answer == text.replace("One &nbsp;", "One \u00a0")
    assert [text_of(row.prompt) for row in rounds[0]] == ["One \u00a0<b>two</b>"]


def test_what_an_answer_lacks_is_asked_for_before_the_others_have_ended():
    terms = from_pairs({"dog": "Köter"})
    asked = TextsAsked(["The {0} sees.", "The dog.", "Fine."], "de", "en", terms)
    translator = Translator(asked, TranslationForm(terms_in_source=False), Words())
    rows = [text_of(row.prompt) for row in translator.start()]
    assert rows == ["The dog.", "The {0} sees.", "Fine.", "dog"], "what may lack something is the first"
    assert [translator.whole(row) for row in range(4)] == [1, 0, 2, None]
    assert [text_of(row.prompt) for row in translator.take(1, Translated("Sieht."))] == ["The", "sees."]
    assert translator.take(0, Translated("Der Hund.")) == [], "it waits for the term"
    assert translator.take(3, Translated("Hund")) == []
    assert translator.take(5, Translated("sieht.")) == translator.take(4, Translated("Der")) == []
    assert translator.take(2, Translated("Gut.")) == []
    assert translator.texts() == ["Der {0} sieht.", "Der Köter.", "Gut."]


def compounds(prompt: str) -> str:
    """Makes one word of a dog house, and goes on with an answer that is begun."""
    text, _, begun = prompt.removeprefix("English: ").partition("\n\nGerman:")
    words = {"dog": "Hund", "house": "Haus", "A": "Ein", "here": "hier", "x": "Ax"}
    return " <b>hier</b>." if begun else words.get(text, "Ein {0} Hundehaus <b>hier</b>.")


@pytest.mark.parametrize(
    ("terms", "wanted", "asked"),
    [
        ({"dog": "Köter"}, "Ein {0} Köter <b>hier</b>.", ["Ein {0} Köter"]),
        ({"house": "Bau"}, "Ein {0} Bau <b>hier</b>.", ["Ein {0} Bau"]),
        ({"dog": "Köter", "house": "Bau"}, "Ein {0} Köter Bau <b>hier</b>.", ["Ein {0} Köter", "", ""]),
        ({"A": "Ax"}, "Ax {0} Hundehaus <b>hier</b>.", []),
    ],
)
def test_the_model_goes_on_behind_a_term_that_takes_the_place_of_a_compound(terms, wanted, asked):
    texts = TextsAsked(["A {0} dog house <b>here</b>."], "de", "en", from_pairs(terms))
    (answer,), rounds = translate(texts, compounds, TranslationForm(terms_in_source=False))
    assert answer == wanted
    begun = [row.prompt.partition("\n\nGerman:")[2].strip() for rows in rounds[1:] for row in rows]
    assert begun == asked


def test_a_term_that_was_not_found_between_the_same_words_is_not_looked_for_again():
    words, form = Words(), TranslationForm(terms_in_source=False)
    asked = TextsAsked(["We buy sweet juice now."], "de", "en", from_pairs({"sweet": "süße"}))

    def run(text: str) -> list[str]:
        translator = Translator(replace(asked, texts=[text]), form, words)
        rows, number, seen = translator.start(), 0, []
        while rows:
            numbers, number = range(number, number + len(rows)), number + len(rows)
            seen += [text_of(row.prompt) for row in rows]
            rows = [
                row
                for n in numbers
                for row in translator.take(n, Translated("Bonbon" if seen[n] == "sweet" else "Saft"))
            ]
        assert "süße" in translator.texts()[0]
        return seen

    pieces = ["We buy", "juice now."]
    assert run("We buy sweet juice now.") == ["We buy sweet juice now.", "sweet", *pieces]
    assert run("We buy sweet juice now.") == pieces
    assert run("A sweet one.") == ["A sweet one.", "A", "one."], "between other words it is"


def test_a_term_of_several_words_is_found_in_a_sentence_that_is_cut():
    text = "the neural network sees " * 10
    asked = TextsAsked([text], "de", "en", glossary=from_pairs({"neural network": "Netz"}))
    rows = Translator(asked, TranslationForm(most=120), Words()).start()
    prompts = [text_of(row.prompt) for row in rows]
    assert prompts == [("the Netz sees " * 5).strip()] * 2


@pytest.mark.parametrize("most", range(20, 60))
@pytest.mark.parametrize(
    ("text", "term", "handling"),
    [
        ("we see the neural network here and " * 4, "neural network", PLAIN),
        ("we see Dr. Who here. And " * 4, "Dr. Who", PLAIN),
        ("一二三四神经网络五六七八" * 6, "神经网络", PLAIN),
        ("we see <b>it</b> at R&amp;D&nbsp;North and " * 4, "R&D\xa0North", HTML),
        ("1. FC Köln", "1. FC Köln", PLAIN),
    ],
    ids=["words", "sentence", "no spaces", "entities", "Markdown"],
)
def test_no_cut_goes_through_a_term(text, term, handling, most):
    asked = TextsAsked([text], "de", "en", from_pairs({term: "Wort"}), handling=handling)
    (answer,), rounds = translate(asked, text_of, TranslationForm(most=most))
    assert answer.count("Wort") == unescape(text).count(term)
    sources = [text_of(row.prompt) for row in rounds[0]]
    assert len(sources) == len(rounds[0]) and max(map(len, sources)) <= most


def test_a_term_that_is_longer_than_a_prompt_is_not_cut():
    term = "ein " * 40 + "Wort"
    asked = TextsAsked([f"so {term} so"], "de", "en", from_pairs({term: "Wort"}))
    (answer,), _ = translate(asked, text_of, TranslationForm(most=20))
    assert answer == "so Wort so"


def test_each_form_of_a_term_is_looked_for_once_in_an_answer(monkeypatch):
    """However often the term stands in the text."""
    sought = Counter[tuple[str, str]]()

    def seeks(text: str, form: str) -> list[int]:
        sought[text, form] += 1
        return places(text, form)

    monkeypatch.setattr("rwkv_batch.translation.translator.places", seeks)
    glossary = from_pairs({"dog": "Rüde|Rüden|Hündin"})
    looks = []
    for times in (3, 60):
        sought.clear()
        asked = TextsAsked(["The dog sees. " * times], "de", "en", glossary=glossary)
        (made,), _ = translate(asked, lambda prompt: "Das sieht. Die Hündin sieht.", TranslationForm())
        assert made.count("Rüde") == times
        looks.append(max(sought.values()))
    assert looks[0] == looks[1]


def test_so_many_words_are_kept(monkeypatch):
    """Those that came last; one that is asked for again takes no other's place."""
    monkeypatch.setattr("rwkv_batch.translation.translator.MOST_WORDS", 2)
    words = Words()
    for term, word in (("a", "x"), ("b", "y"), ("b", "z"), ("a", "x")):
        words.put(("English", "German", term), word)
    assert [*words.known.values()] == ["x", "z"]
    words.put(("English", "German", "c"), "w")
    assert [*words.known.values()] == ["z", "w"]


def test_inflection_may_change_accents():
    model = {"Apples.": "Äpfel.", "Apples": "Apfel"}.get
    asked = TextsAsked(["Apples."], "de", "en", from_pairs({"apples": "Birnen"}))
    answers, rounds = translate(asked, lambda p: model(text_of(p)), TranslationForm(terms_in_source=False))
    assert (answers, len(rounds)) == (["Birnen."], 1)


def test_a_term_that_is_asked_for_too_late_to_help_is_not_waited_for():
    asked = TextsAsked(["The dog."], "de", "en", from_pairs({"dog": "Köter"}))
    translator = Translator(asked, TranslationForm(terms_in_source=False), Words())
    translator.start()
    assert translator.take(0, Translated("Der Köter.")) == [] and translator.texts() == ["Der Köter."]
    assert translator.take(1, Translated("Hund")) == []


def test_spaces_and_wide_characters_in_marks_are_read():
    asked = TextsAsked(["Hello {0}, <b0>you</b0>!"], "de", "en")
    (answer,), rounds = translate(asked, lambda prompt: "Hallo ｛ 0 ｝，< b0 >du＜/b0＞!")
    assert (answer, len(rounds)) == ("Hallo {0}，<b0>du</b0>!", 1)


def test_forms_of_checkpoints():
    assert form_of("RWKV_v7_G1c_1.5B_Translate_ctx4096_20260118").most == 1500
    assert form_of("rwkv7-g1d-7.2b") == TranslationForm()
    assert not form_of("rwkv7-demo").terms_in_source
    assert form_of("RWKV-x060-World-7B").most == 600
