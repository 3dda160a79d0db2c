"""Translations by the bundled model, which breaks most marks; bench/session_load.py measures more texts."""

import httpx
from serving import Server, events
from translated import TERMS, broken, generated, lacking


def test_marks_and_terms_of_generated_texts_are_whole(server: Server):
    texts = [generated(number) for number in range(1000, 1040)]
    body = {"source_lang": "en", "target_lang": "de", "text_list": texts, "glossary": TERMS}
    answer = httpx.post(f"{server.url}/translate", json=body, timeout=120).json()
    found = [each["text"] for each in answer["translations"]]
    assert not [
        why for pair in zip(texts, found, strict=True) if (why := broken(*pair) or lacking(*pair, TERMS))
    ]
    assert [each["detected_source_lang"] for each in answer["translations"]] == ["en"] * len(texts)


def test_a_term_stands_where_the_models_own_word_stood(server: Server):
    body = {
        "text": "The dog sees the house. We love my dogs.",
        "target_lang": "DE",
        "glossary": {"dog": "Rüde"},
    }
    answer = httpx.post(f"{server.url}/translate", json=body, timeout=60).json()
    assert answer["data"] == "Der Rüde sieht das Haus. Wir lieben meine Hunde."


def test_a_stored_glossary(server: Server):
    entries = {"name": "ours", "source_lang": "en", "target_lang": "de", "entries_format": "tsv"}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        stored = http.post("/v2/glossaries", json=entries | {"entries": "dog\tRüde"}).json()
        assert stored in http.get("/v2/glossaries").json()["glossaries"]
        body = {"text": ["The dog sees the house."], "source_lang": "EN", "target_lang": "DE"}
        body |= {"glossary_id": stored["glossary_id"]}
        answer = http.post("/v2/translate", json=body).json()
        assert answer["translations"][0]["text"] == "Der Rüde sieht das Haus."
        assert http.delete(f"/v2/glossaries/{stored['glossary_id']}").status_code == 204
        assert http.post("/v2/translate", json=body).status_code == 404


def test_offline_reader_gets_a_translation_as_it_is_made(server: Server):
    text = "The dog sees the house.\n\n<b>The cat</b> drinks water."
    body = {
        "model": "rwkv",
        "stream": True,
        "max_tokens": 256,
        "temperature": 0.2,
        "metadata": {"rwkvOfflineReader": {"kind": "web_translation"}},
        "messages": [{"role": "user", "content": text}],
    }
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        seen = [each for each in events(response) if isinstance(each, dict)]
    pieces = [each["choices"][0]["delta"].get("content", "") for each in seen]
    translated = "".join(pieces)
    assert translated.startswith("狗看见那座房子。\n\n<b>") and translated.count("</b>") == 1
    assert seen[-1]["choices"][0]["finish_reason"] == "stop"
