"""Glossaries: files of terms, what is found in texts, and what counts for which languages."""

import sys
import weakref
from collections import Counter

import pytest

from rwkv_batch.translation import glossary as glossary_module
from rwkv_batch.translation.glossary import NO_GLOSSARY, GlossaryError, from_pairs, parse, places


def found(glossary: str, text: str, source: str = "en", target: str = "de") -> list[tuple[str, str]]:
    terms = parse(glossary).pair(source, target)
    return [(text[each.start : each.end], each.wanted) for each in terms.find(text)]


def test_columns_and_languages():
    lines = "# ours\n\ncat\tKatze\nen\tde\tdog\tHund\nen\tfr\thouse\tmaison\n*\tzh\tmodel\t模型\tcase\n"
    assert found(lines, "Cat, dog, house, model") == [("Cat", "Katze"), ("dog", "Hund")]
    assert found(lines, "a house", target="French") == [("house", "maison")]
    assert found(lines, "a model, a Model", target="zh-TW") == [("model", "模型")], "varieties, and the case"
    assert found("\tzh-TW\tcat\t貓\n", "a cat", target="zh-CN") == []


def test_forms():
    assert found("cat|cats\tKatze|Katzen", "cats and a cat") == [("cats", "Katzen"), ("cat", "Katze")]
    assert found("cat|cats\tKater", "cats") == [("cats", "Kater")]


def test_terms_are_whole_words_and_the_longest_counts():
    lines = "neural network\tneuronales Netz\nnet\tNetz\n机器\tMaschine\nAPI\tSchnittstelle"
    assert found(lines, "The neural network nets a net.") == [
        ("neural network", "neuronales Netz"),
        ("net", "Netz"),
    ]
    assert found(lines, "这台机器的API很快", source="zh") == [("机器", "Maschine"), ("API", "Schnittstelle")]
    assert places("Serverraum, Server", "Server") == [12]


def test_the_work_for_a_text_does_not_grow_with_terms_that_begin_alike():
    def calls(terms: int) -> int:
        glossary = from_pairs({"一" * 8 + chr(0x5000 + number): "x" for number in range(terms)})
        made, count = glossary.pair("zh", "de"), Counter[str]()
        sys.setprofile(lambda frame, event, argument: count.update([event]))
        try:
            found = made.find("一" * 50 + chr(0x5000))
        finally:
            sys.setprofile(None)
        assert [(each.start, each.end) for each in found] == [(42, 51)]
        return count.total()

    assert calls(500) == calls(1)


def test_the_work_for_a_text_does_not_grow_with_the_lengths_of_terms():
    glossary = from_pairs({"一" * length + "二": "x" for length in range(1, 199)}).pair("zh", "de")
    glossary.find("")

    def calls(text: str) -> int:
        count = Counter[str]()
        sys.setprofile(lambda frame, event, argument: count.update([event]))
        try:
            assert glossary.find(text) == []
        finally:
            sys.setprofile(None)
        return count.total()

    assert calls("一" * 20_000) == calls("三")


def test_each_of_three_glossaries_counts_behind_those_before_it():
    own, stored, ours = (
        from_pairs(pairs) for pairs in ({"a": "own"}, {"a": "x", "b": "stored"}, {"b": "y", "c": "ours"})
    )
    for glossary in (own.before(stored).before(ours), own.before(stored.before(ours))):
        assert [each.wanted for each in glossary.pair("en", "de").find("a b c")] == ["own", "stored", "ours"]
    assert own.before(NO_GLOSSARY) is own and NO_GLOSSARY.before(own) is own


def test_what_finds_terms_is_kept_beside_other_glossaries(monkeypatch):
    made = []
    real = glossary_module.AhoCorasick
    monkeypatch.setattr(
        glossary_module, "AhoCorasick", lambda forms, **how: made.append(list(forms)) or real(forms, **how)
    )
    stored, ours = from_pairs({"dog": "Hund"}), from_pairs({"cat": "Katze"})
    for wanted in ("Bude", "Haus"):
        glossary = from_pairs({"house": wanted}).before(stored).before(ours)
        found = glossary.pair("en", "de").find("a dog, a cat, a house")
        assert [each.wanted for each in found] == ["Hund", "Katze", wanted]
    assert len(made) == 4, "of the two that stay once"


def test_terms_whose_case_counts_go_before_others():
    lines = "*\t*\tAI\tKI\tcase\n*\t*\tai model\tModell\n*\t*\tmodel\tModell"
    assert found(lines, "An AI model, an ai model") == [
        ("AI", "KI"),
        ("model", "Modell"),
        ("ai model", "Modell"),
    ]


def test_no_term_is_found_in_a_word_or_across_its_end():
    lines = "ab\tx\nbc d\ty\n机器\tz\n3d\tw"
    assert found(lines, "abc d, xab, 大机器, ab机器ab, 3d1, 3D") == [
        ("机器", "z"),
        ("ab", "x"),
        ("机器", "z"),
        ("ab", "x"),
        ("3D", "w"),
    ]


def test_case_that_takes_more_letters():
    assert found("straße\troad", "İ STRASSE, Straße", source="de", target="en") == [("Straße", "road")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cat", "line 1 has 1 columns"),
        ("a\tb\nen\txx\tcat\tKatze", 'line 2: "xx" is no language'),
        ("cat\t", "line 1: a term needs"),
        ("a\tb\tc\td\te\tf", "6 columns"),
        ("en\tde\tcat\tKatze\tsoft", '"soft" is no option'),
        ("cat\t" + "x" * 300, "at most 200"),
    ],
)
def test_what_is_refused(text, why):
    with pytest.raises(GlossaryError, match=why):
        parse(text)


def test_terms_of_a_request_go_before_those_of_the_file():
    own = from_pairs({"cat": "Kater", "dog|dogs": "Hund|Hunde", "": "x", "y": "| "})
    file = parse("cat\tKatze\nbird\tVogel")
    terms = own.before(file).pair("en", "de")
    assert [each.wanted for each in terms.find("cat dogs bird")] == ["Kater", "Hunde", "Vogel"]


def test_the_terms_of_a_request_are_not_kept():
    own = from_pairs({"cat": "Kater"}).before(parse("dog\tHund"))
    assert own.pair("en", "de") is own.pair("en", "de"), "while it runs"
    gone = weakref.ref(own)
    del own
    assert gone() is None


def test_forms_of_a_request_are_limited():
    with pytest.raises(GlossaryError, match="at most 50000"):
        from_pairs({"|".join(map(str, range(50_000))): "x"})
    with pytest.raises(GlossaryError, match="at most 500000"):
        from_pairs({f"{number} " + "x" * 190: "y" for number in range(3000)})


def test_forms_that_a_term_becomes_are_limited():
    from_pairs({"dog": "|".join(map(str, range(64)))})
    with pytest.raises(GlossaryError, match="65 forms, and at most 64"):
        from_pairs({"dog": "|".join(map(str, range(65)))})
    with pytest.raises(GlossaryError, match=r"^line 2: .* at most 64"):
        parse("cat\tKatze\ndog\t" + "|".join(map(str, range(65))))


@pytest.mark.parametrize("number", ["&#" + "9" * 5000, "&#x" + "f" * 5000])
def test_a_character_of_any_number_of_digits_can_stand_in_html(number):
    text = f"{number}; a dog"
    terms = from_pairs({"dog": "Hund"}).pair("en", "de")
    assert terms.places(text, escaped=True) == [(len(text) - 3, len(text))]
