"""The libraries of translation services, pointed at this server."""

import deepl
import pytest
from deepl.api_data import MultilingualGlossaryDictionaryEntries
from libretranslatepy import LibreTranslateAPI

HOUSE, HAUS = "The dog sees the house.", "Der Hund sieht das Haus."


def test_deepl(url: str):
    client = deepl.Translator("unused", server_url=url)
    one = client.translate_text(HOUSE, target_lang="DE")
    assert (one.text, one.detected_source_lang) == (HAUS, "EN")
    first, second = client.translate_text([HOUSE, "Good morning"], source_lang="EN", target_lang="FR")
    assert first.text == "Le chien voit la maison." and second.text == "Bonjour"
    html = "<p>The dog sees the house.</p><br/>"
    assert client.translate_text(html, target_lang="DE", tag_handling="html").text == f"<p>{HAUS}</p><br/>"
    xml = client.translate_text(
        "<a>The dog sees the house.</a><x>as it is</x>",
        source_lang="EN",
        target_lang="DE",
        tag_handling="xml",
        ignore_tags=["x"],
        splitting_tags=["a"],
        split_sentences="nonewlines",
        formality="prefer_more",
    )
    assert xml.text == f"<a>{HAUS}</a><x>as it is</x>"
    assert "DE" in [language.code for language in client.get_target_languages()]
    assert "EN" in [language.code for language in client.get_source_languages()]
    assert not client.get_usage().any_limit_reached
    with pytest.raises(deepl.DeepLException, match="is no language"):
        client.translate_text(HOUSE, target_lang="XX")


def test_the_glossaries_of_deepl(url: str):
    client = deepl.Translator("unused", server_url=url)
    glossary = client.create_glossary("ours", "EN", "DE", {"dog": "Rüde", "house": "Haus"})
    assert (glossary.entry_count, glossary.ready, glossary.source_lang) == (2, True, "EN")
    assert client.get_glossary_entries(glossary) == {"dog": "Rüde", "house": "Haus"}
    assert glossary.glossary_id in [each.glossary_id for each in client.list_glossaries()]
    found = client.translate_text(HOUSE, source_lang="EN", target_lang="DE", glossary=glossary)
    assert found.text == "Der Rüde sieht das Haus."
    assert client.get_glossary_languages()
    client.create_glossary_from_csv("theirs", "EN", "DE", 'cat,"Samtpfote"\n')
    client.delete_glossary(glossary)
    with pytest.raises(deepl.DeepLException):
        client.get_glossary(glossary.glossary_id)


def test_the_multilingual_glossaries_of_deepl(url: str):
    client = deepl.DeepLClient("unused", server_url=url)
    entries = MultilingualGlossaryDictionaryEntries
    glossary = client.create_multilingual_glossary(
        "ours", [entries("EN", "DE", {"dog": "Rüde"}), entries("EN", "FR", {"dog": "chienne"})]
    )
    assert [(each.source_lang, each.target_lang) for each in glossary.dictionaries] == [
        ("EN", "DE"),
        ("EN", "FR"),
    ]
    found = client.translate_text(HOUSE, source_lang="EN", target_lang="DE", glossary=glossary)
    assert found.text == "Der Rüde sieht das Haus."
    changed = client.update_multilingual_glossary_dictionary(glossary, entries("EN", "DE", {"house": "Haus"}))
    assert [each.entry_count for each in changed.dictionaries] == [2, 1]
    client.update_multilingual_glossary_name(glossary, "theirs")
    (read,) = client.get_multilingual_glossary_entries(glossary, "EN", "DE").dictionaries
    assert sorted(read.entries.splitlines()) == ["dog\tRüde", "house\tHaus"]
    replaced = client.replace_multilingual_glossary_dictionary(
        glossary, entries("EN", "DE", {"cat": "Samtpfote"})
    )
    assert (replaced.source_lang, replaced.target_lang, replaced.entry_count) == ("EN", "DE", 1)
    csv = 'dog,"Hofhund"\n'
    client.replace_multilingual_glossary_dictionary_from_csv(glossary, "EN", "DE", csv)
    second = client.create_multilingual_glossary(
        "more", [entries("EN", "DE", {"dog": "Rüde", "house": "Haus"})]
    )
    both = client.translate_text(HOUSE, source_lang="EN", target_lang="DE", glossary_ids=[glossary, second])
    assert both.text == "Der Hofhund sieht das Haus."
    client.delete_multilingual_glossary_dictionary(glossary, source_lang="EN", target_lang="FR")
    assert client.get_multilingual_glossary(glossary.glossary_id).name == "theirs"
    listed = [each.glossary_id for each in client.list_multilingual_glossaries()]
    assert {glossary.glossary_id, second.glossary_id} <= set(listed)
    for each in (glossary, second):
        client.delete_multilingual_glossary(each)
    with pytest.raises(deepl.DeepLException):
        client.get_multilingual_glossary(glossary.glossary_id)


def test_libretranslate(url: str):
    client = LibreTranslateAPI(url)
    assert client.translate(HOUSE, "en", "de") == HAUS
    assert client.translate(HOUSE, "auto", "de") == HAUS
    assert client.detect(HAUS)[0]["language"] == "de"
    assert "German" in [language["name"] for language in client.languages()]
