"""The routes of translation services, asked as the clients of each ask. The engine echoes prompts."""

import gzip
import json

import pytest
from frontend_process import PASSWORD, FrontendProcess
from native_calls import V1, events

from routes.translate.names import LIBRETRANSLATE
from routes.translate.offline_reader import PageReply
from rwkv_batch.chat.chinese_names import CHINESE_NAMES
from rwkv_batch.chat.languages import find
from rwkv_batch.translation.forms import TranslationForm
from rwkv_batch.translation.translator import TextsAsked, Translated, Translator, Words
from rwkv_batch.wire.protocol import RowDelta

HELLO = "English: Hello\n\nGerman:"


@pytest.fixture(scope="module")
def closed():
    """Translation needs the password too; there is a glossary."""
    with FrontendProcess(password=PASSWORD, protect_translate=True, glossary="Hello\tServus\n") as process:
        yield process


def post(server, path: str, **sent):
    answer = server.http.post(path, **sent)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_large_text_is_translated_too(server):
    lines = [f"Hello number {number}." for number in range(2000)]
    body = {"from": "en", "to": "de", "text": "\n".join(lines)}
    found = post(server, "/translate", json=body)["result"]
    assert found == "\n".join(f"English: {line}\n\nGerman:" for line in lines)


def test_a_large_text_is_answered_in_pieces_however_it_comes(server):
    """It is cut by a thread, as other requests would wait; a small one is answered whole."""
    asked = {"source": "en", "target": "de", "format": "text"}
    path = "/language/translate/v2"
    for count, in_pieces in ((1, False), (2000, True)):
        text = "Hello there. " * count
        body = json.dumps(asked | {"q": text}).encode()
        for answer in (
            server.http.post(path, content=body),
            server.http.post(path, content=gzip.compress(body), headers={"Content-Encoding": "gzip"}),
            server.http.get(path, params=asked | {"q": text}),
        ):
            assert answer.status_code == 200, answer.text
            assert ("content-length" not in answer.headers) == in_pieces, answer.request


def test_immersive_translate_on_the_route_of_all(server):
    body = {"source_lang": "en", "target_lang": "de", "text_list": ["Hello", " "]}
    assert post(server, "/translate", json=body) == {
        "translations": [
            {"detected_source_lang": "en", "text": HELLO},
            {"detected_source_lang": "en", "text": " "},
        ]
    }


def test_deepl(server):
    body = {"text": ["Hello", "Hello world, this is it."], "target_lang": "DE"}
    assert post(server, "/v2/translate", json=body) == {
        "translations": [
            {"detected_source_language": "EN", "text": HELLO},
            {"detected_source_language": "EN", "text": "English: Hello world, this is it.\n\nGerman:"},
        ]
    }
    form = {"text": ["Hello", "{0} & Ä"], "target_lang": "DE", "source_lang": "EN", "auth_key": "x:fx"}
    first, second = post(server, "/v2/translate", data=form)["translations"]
    assert (first["text"], second["text"]) == (HELLO, "English: {0} & Ä\n\nGerman:")
    one = post(server, "/v2/translate", data={"text": "Hello", "target_lang": "EN-GB", "source_lang": "de"})
    assert one["translations"][0]["text"] == "German: Hello\n\nBritish English:"


def test_the_fields_of_deepl(server):
    hints = {"formality": "prefer_more", "model_type": "quality_optimized", "preserve_formatting": True}
    text = "<p>One <x>two</x>.<br/>Three &amp; four</p>"
    body = {"text": text, "target_lang": "de", "source_lang": "en", "tag_handling": "html"} | hints
    body |= {"ignore_tags": ["x"], "show_billed_characters": True}
    (found,) = post(server, "/v2/translate", json=body)["translations"]
    assert found["billed_characters"] == len(text)
    assert server.engine.requests[-1].prompts == [
        "English: One {0}.\n\nGerman:",
        "English: Three & four\n\nGerman:",
    ]
    assert found["text"].startswith("<p>English: One <x>two</x>.") and "Three &amp; four" in found["text"]
    for split, prompts in (("1", 2), (False, 1), ("nonewlines", 1), (None, 2)):
        body = {"text": "One\ntwo", "target_lang": "de", "source_lang": "en", "split_sentences": split}
        post(server, "/v2/translate", json=body)
        assert len(server.engine.requests[-1].prompts) == prompts
    body = {
        "text": "Menu",
        "target_lang": "de",
        "context": "Il treno parte ogni venti minuti per l'aeroporto.",
    }
    assert post(server, "/v2/translate", json=body)["translations"][0]["detected_source_language"] == "IT"


def test_the_lists_of_deepl(server):
    sources = server.http.get("/v2/languages").json()
    targets = server.http.get("/v2/languages", params={"type": "target"}).json()
    assert {"language": "EN", "name": "English"} in sources
    assert {"language": "PT-BR", "name": "Brazilian Portuguese", "supports_formality": False} in targets
    assert all(find(each["language"]).name == each["name"] for each in (*sources, *targets))
    for method in (server.http.get, server.http.post):
        usage = method("/v2/usage").json()
        assert usage["character_count"] < usage["character_limit"]


def test_deeplx(server):
    for body in (
        {"text": "Hello", "source_lang": "EN", "target_lang": "DE"},
        {"text": "Hello", "target_lang": "DE"},
    ):
        answer = post(server, "/translate", json=body)
        assert answer["data"] == HELLO and answer["code"] == 200 and isinstance(answer["id"], int)
        assert (answer["source_lang"], answer["target_lang"], answer["alternatives"]) == ("EN", "DE", [])
    body = {"text": ["Hello"], "source_lang": "EN", "target_lang": "DE"}
    assert post(server, "/translate", json=body)["translations"][0]["text"] == HELLO, (
        "DeepL's, without its path"
    )


def test_libretranslate(server):
    body = {"q": "Hello", "source": "en", "target": "de", "format": "text", "api_key": ""}
    assert post(server, "/translate", json=body) == {"translatedText": HELLO}
    assert post(server, "/translate", data=body) == {"translatedText": HELLO}
    assert post(server, "/translate", files={name: (None, text) for name, text in body.items()}) == {
        "translatedText": HELLO
    }
    body = {"q": "你好，世界", "source": "auto", "target": "en", "alternatives": 2}
    assert post(server, "/translate", json=body) == {
        "translatedText": "Chinese: 你好，世界\n\nEnglish:",
        "detectedLanguage": {"confidence": 100.0, "language": "zh-Hans"},
        "alternatives": [],
    }
    several = post(server, "/translate", json=body | {"q": ["你好", "繁體"], "alternatives": 0})
    assert [each["language"] for each in several["detectedLanguage"]] == ["zh-Hans", "zh-Hant"]
    assert len(several["translatedText"]) == 2
    html = {"q": "<b>Hello</b> &amp; you", "source": "en", "target": "de", "format": "html"}
    assert "<b>Hello</b> &amp; you" in post(server, "/translate", json=html)["translatedText"]


def test_what_libretranslate_lists_and_detects(server):
    languages = server.http.get("/languages").json()
    assert [each["code"] for each in languages] == LIBRETRANSLATE
    assert all(
        find(each["code"]).name == each["name"] and each["targets"] == LIBRETRANSLATE for each in languages
    )
    assert post(server, "/detect", data={"q": "这是一个测试"}) == [
        {"confidence": 100.0, "language": "zh-Hans"}
    ]
    assert post(server, "/detect", json={"q": "123"}) == []
    assert post(server, "/detect", json={"text": []}) == {"language": ""}
    assert post(server, "/detect", json={"text": ["1", "Das ist ein sehr schöner Tag."]}) == {
        "language": "de"
    }
    assert post(server, "/detect", json={"text": "Das ist ein sehr schöner Tag."}) == {"language": "de"}


def test_mtranserver_and_kiss_translator(server):
    answer = post(server, "/translate", json={"from": "en", "to": "de", "text": "Hello"})
    assert answer == {"result": HELLO, "text": HELLO, "src": "en"}
    batch = {"from": "auto", "to": "zh-Hans", "texts": ["Guten Morgen, mein Freund", "Hallo"]}
    results = ["German: Guten Morgen, mein Freund\n\nChinese:", "German: Hallo\n\nChinese:"]
    for path in ("/translate/batch", "/translate"):
        answer = post(server, path, json=batch)
        assert answer["results"] == results
        assert answer["translations"] == [{"text": text, "src": "de"} for text in results]
    html = {"from": "en", "to": "de", "text": "a &amp; b", "html": True}
    assert "a &amp; b" in post(server, "/translate", json=html)["result"]


def test_hcfy(server):
    body = {"name": "x", "text": "Good morning, my friend", "destination": ["中文(简体)", "英语"]}
    assert post(server, "/translate", json=body) == {
        "text": "Good morning, my friend",
        "from": "英语",
        "to": "中文(简体)",
        "result": ["English: Good morning, my friend", "", "Chinese:"],
    }
    answer = post(server, "/translate", json=body | {"text": "早上好，我的朋友"})
    assert (answer["from"], answer["to"]) == ("中文(简体)", "英语"), "it is in the first language already"
    answer = post(server, "/translate", json=body | {"source": "日语", "text": "東京"})
    assert (answer["from"], answer["to"]) == ("日语", "中文(简体)")
    assert all(find(name) for names in CHINESE_NAMES.values() for name in names.split("/"))


def test_google(server):
    path = "/language/translate/v2"
    body = {"q": ["Hello", "a &amp; b"], "source": "en", "target": "de"}
    first, second = post(server, path, json=body)["data"]["translations"]
    assert first == {"translatedText": HELLO} and "a &amp; b" in second["translatedText"]
    body = {"q": "Das ist ein sehr schöner Tag.", "target": "en", "format": "text"}
    for sent in ({"json": body | {"model": "nmt"}}, {"data": body}):
        (found,) = post(server, path, **sent)["data"]["translations"]
        assert found["detectedSourceLanguage"] == "de"


def test_google_by_its_url(server):
    path, asked = "/language/translate/v2", {"source": "en", "target": "de", "format": "text"}
    for text in ("Hello", ["Hello", "a + b & ä"]):
        wanted = [
            {"translatedText": f"English: {each}\n\nGerman:"} for each in ([text], text)[type(text) is list]
        ]
        answer = server.http.get(path, params=asked | {"q": text, "model": "base"})
        assert answer.json()["data"]["translations"] == wanted
        assert post(server, path, params=asked | {"q": text})["data"]["translations"] == wanted
        assert post(server, path, params=asked, json={"q": text})["data"]["translations"] == wanted
    assert post(server, path, params=asked, data={"q": "Hello", "target": "fr"})["data"]["translations"] == [
        {"translatedText": "English: Hello\n\nFrench:"}
    ], "the body goes before the URL"
    answer = server.http.get(path, params={"q": "Hello"})
    assert answer.status_code == 400 and "`target`" in answer.json()["error"]["message"]
    answer = server.http.get(f"{path}?q=%ff&target=de")
    assert answer.status_code == 400 and "UTF-8" in answer.json()["error"]["message"]


def test_the_lists_of_google(server):
    path = "/language/translate/v2/languages"
    codes = server.http.get(path).json()["data"]["languages"]
    assert {"language": "zh-CN"} in codes and {"language": "no"} in codes
    assert all(find(each["language"]) for each in codes)
    named = post(server, path, json={"target": "en"})["data"]["languages"]
    assert {"language": "zh-TW", "name": "Traditional Chinese"} in named
    named = server.http.get(path, params={"target": "zh-CN"}).json()["data"]["languages"]
    assert {"language": "de", "name": "德语"} in named
    assert server.http.get(path, params={"target": "xx"}).status_code == 400
    texts = ["Das ist ein sehr schöner Tag.", "123"]
    for answer in (
        server.http.get("/language/translate/v2/detect", params={"q": texts}),
        server.http.post("/language/translate/v2/detect", json={"q": texts}),
    ):
        (first,), (second,) = answer.json()["data"]["detections"]
        assert first["language"] == "de" and first["isReliable"] and 0.5 < first["confidence"] <= 1
        assert second == {"language": "und", "confidence": 0.0, "isReliable": False}
    assert server.http.get("/language/translate/v2/detect").status_code == 400
    many = server.http.post("/language/translate/v2/detect", json={"q": [texts[0]] * 1000})
    assert [each[0]["language"] for each in many.json()["data"]["detections"]] == ["de"] * 1000
    large = server.http.post("/language/translate/v2/detect", json={"q": ["a" * 250_001] * 4})
    assert large.status_code == 413 and "1000000 characters" in large.json()["error"]["message"]


WIRES = {  # how each client asks, by its name: path, body, and the names of its source and target
    "immersive": (
        "/translate",
        {"source_lang": "en", "target_lang": "de", "text_list": ["Hello"]},
        "target_lang",
    ),
    "deepl": ("/v2/translate", {"text": ["Hello"], "target_lang": "DE", "source_lang": "EN"}, "target_lang"),
    "deeplx": ("/translate", {"text": "Hello", "target_lang": "DE", "source_lang": "EN"}, "target_lang"),
    "libretranslate": ("/translate", {"q": "Hello", "source": "en", "target": "de"}, "target"),
    "mtranserver": ("/translate", {"from": "en", "to": "de", "text": "Hello"}, "to"),
    "mtranserver batch": ("/translate/batch", {"from": "en", "to": "de", "texts": ["Hello"]}, "to"),
    "kiss": ("/translate", {"from": "en", "to": "de", "texts": ["Hello"]}, "to"),
    "hcfy": ("/translate", {"text": "Hello", "destination": ["德语"], "source": "英语"}, "source"),
    "google": ("/language/translate/v2", {"q": "Hello", "source": "en", "target": "de"}, "target"),
}
MESSAGES = {  # where the sentence of an error is
    "deepl": lambda body: body["message"],
    "deeplx": lambda body: body["message"],
    "google": lambda body: body["error"]["message"],
}


@pytest.mark.parametrize("name", WIRES)
def test_a_wrong_language_is_refused_in_the_form_of_the_service(server, name):
    path, body, field = WIRES[name]
    answer = server.http.post(path, json=body | {field: "xx"})
    sentence = MESSAGES.get(name, lambda body: body["error"])(answer.json())
    assert answer.status_code == 400 and f'`{field}`: "xx" is no language' in sentence
    if name == "deeplx":
        assert answer.json()["code"] == 400
    if name == "google":
        assert answer.json()["error"]["code"] == 400


KEYS = {  # where each client puts its key
    "immersive": {"params": {"password": PASSWORD}},
    "deepl": {"headers": {"Authorization": f"DeepL-Auth-Key {PASSWORD}"}},
    "deeplx": {"params": {"token": PASSWORD}},
    "libretranslate": {"body": {"api_key": PASSWORD}},
    "mtranserver": {"headers": {"Authorization": PASSWORD}},
    "mtranserver batch": {"headers": {"Authorization": f"Bearer {PASSWORD}"}},
    "kiss": {"headers": {"Authorization": f"Bearer {PASSWORD}"}},
    "hcfy": {"params": {"token": PASSWORD}},
    "google": {"params": {"key": PASSWORD}},
}


@pytest.mark.parametrize("name", WIRES)
def test_the_key_is_where_the_client_puts_it(closed, name):
    path, body, _ = WIRES[name]
    key = dict(KEYS[name])
    right = closed.http.post(path, json=body | key.pop("body", {}), **key)
    assert right.status_code == 200 and "Servus" in right.text, "with the terms of the glossary"
    wrong = json.loads(json.dumps(KEYS[name]).replace(json.dumps(PASSWORD)[1:-1], "wrong"))
    refused = closed.http.post(path, json=body | wrong.pop("body", {}), **wrong)
    missing = closed.http.post(path, json=body)
    assert refused.status_code == missing.status_code == (401 if name in ("immersive", "deeplx") else 403)
    sentence = MESSAGES.get(name, lambda body: body["error"])(refused.json())
    assert sentence.startswith("Unauthorized") and PASSWORD not in refused.text


def test_more_places_of_keys(closed):
    form = {"text": "Hello", "target_lang": "DE", "source_lang": "EN", "auth_key": PASSWORD}
    assert closed.http.post("/v2/translate", data=form).status_code == 200
    for path in ("/languages", "/v2/languages", "/v2/usage"):
        assert closed.http.get(path).status_code == 403
        assert (
            closed.http.get(path, headers={"Authorization": f"DeepL-Auth-Key {PASSWORD}"}).status_code == 200
        )
    assert closed.http.post("/detect", json={"q": "a"}).status_code == 403
    google = {"json": WIRES["google"][1], "headers": {"X-goog-api-key": PASSWORD}}
    assert closed.http.post("/language/translate/v2", **google).status_code == 200


def test_translation_is_open_without_the_flag(locked):
    for path, body, _ in WIRES.values():
        assert locked.http.post(path, json=body, headers={"Authorization": "wrong"}).status_code == 200


def test_terms_of_a_request(server):
    body = {"text": "Hello world", "target_lang": "DE", "source_lang": "EN", "glossary": {"world": "Erdball"}}
    assert "Hello Erdball" in post(server, "/translate", json=body)["data"]
    answer = server.http.post("/translate", json=body | {"glossary": {"world": "x" * 300}})
    assert answer.status_code == 400 and "`glossary`: a form of a term has" in answer.json()["message"]


@pytest.mark.parametrize(
    "glossary", ['{"world": "Erdball"}', "world\tErdball\n\nmoon|moons\tMond", ' {"world":"Erdball"}']
)
def test_terms_in_a_form(server, glossary):
    form = {"text": "Hello world", "target_lang": "DE", "source_lang": "EN", "glossary": glossary}
    assert "Hello Erdball" in post(server, "/translate", data=form)["data"]
    found = post(server, "/v2/translate", files={name: (None, text) for name, text in form.items()})
    assert "Hello Erdball" in found["translations"][0]["text"]
    params = {"q": "Hello world", "source": "en", "target": "de", "glossary": glossary}
    answer = server.http.get("/language/translate/v2", params=params).json()
    assert "Hello Erdball" in answer["data"]["translations"][0]["translatedText"]


@pytest.mark.parametrize(
    ("glossary", "why"),
    [
        ("{", "is no JSON object"),
        ('{"a":' * 9999, "is no JSON object"),
        ("world", "on each line"),
        ('{"a": 1}', "string"),
        ("a\t" + "x" * 300, "200"),
    ],
)
def test_terms_in_a_form_that_cannot_be_read(server, glossary, why):
    form = {"text": "Hello", "target_lang": "DE", "source_lang": "EN", "glossary": glossary}
    answer = server.http.post("/translate", data=form)
    assert answer.status_code == 400 and "`glossary" in answer.json()["message"]
    assert why in answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("/translate", {"messages": [{"role": "user", "content": "Hi"}]}, 400, "/v1/chat/completions"),
        ("/translate", {}, 400, "No service has such a body"),
        ("/translate", {"q": "a", "target": "de", "format": "pdf"}, 400, "`format`"),
        ("/translate", {"q": 5, "target": "de"}, 400, "`q`: must be a string, or a list of strings"),
        ("/v2/translate", {"text": None, "target_lang": "DE"}, 400, "`text`: must be a string, or a list"),
        ("/translate", {"q": ["a", 5], "target": "de"}, 400, "`q[1]`: must be a string"),
        ("/translate", {"text": "a", "target_lang": "auto"}, 400, "only the source"),
        ("/translate", {"text": "a", "destination": []}, 400, "`destination`"),
        ("/translate", {"text": "a " * 500_001, "to": "de"}, 413, "1000000 characters"),
        ("/translate", {"text": "a\n" * 5000, "from": "en", "to": "de"}, 413, "4096 paragraphs"),
        ("/translate", {"text": "a {0} " * 26_000, "from": "en", "to": "de"}, 413, "50000 pieces"),
        (
            "/translate",
            {"text_list": ["a"], "target_lang": "de", "placeholders": ["x" * 8001]},
            400,
            "`placeholders`",
        ),
        ("/v2/translate", {"text": ["a"]}, 400, "`target_lang`"),
        (
            "/v2/translate",
            {"text": ["a"], "target_lang": "DE", "custom_instructions": ["b"]},
            400,
            "instructions",
        ),
        ("/detect", {}, 400, "`q`"),
    ],
)
def test_what_is_refused(server, path, body, status, why):
    answer = server.http.post(path, json=body)
    assert answer.status_code == status and why in answer.text


def test_a_field_that_a_form_has_several_times_is_a_list(server):
    parts = {"text": "Hello", "target_lang": "DE", "source_lang": "EN"}
    form = [(name, (None, text)) for name, text in [("text", "Good morning"), *parts.items()]]
    found = post(server, "/v2/translate", files=form)["translations"]
    assert [each["text"] for each in found] == ["English: Good morning\n\nGerman:", HELLO]


def test_a_form_that_cannot_be_read(server):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = server.http.post("/v2/translate", content=b"text=%ff&target_lang=DE", headers=headers)
    assert answer.status_code == 400 and "UTF-8" in answer.json()["message"]
    answer = server.http.post("/translate", content=b"{", headers=headers)
    assert answer.status_code == 400 and "Invalid JSON" in answer.json()["error"]
    answer = server.http.post("/translate", content=json.dumps(WIRES["deeplx"][1]), headers=headers)
    assert answer.json()["data"] == HELLO, "JSON that is said to be a form, as curl sends it"


READER = {  # as its local-inference-client.ts sends it
    "model": "rwkv",
    "stream": True,
    "max_tokens": 256,
    "temperature": 0.2,
    "metadata": {"rwkvOfflineReader": {"kind": "web_translation", "cachePolicyVersion": 3}},
    "messages": [
        {"role": "user", "content": "The dog sees the house.\n\nSee [it](https://example.org/long) now!"}
    ],
}


def test_offline_reader(server, locked):
    assert server.http.get("/v1/server/status").json()["status"] == "running"
    answer = server.http.post(V1, json=READER)
    assert answer.headers["content-type"] == "text/event-stream"
    choices = [event["choices"][0] for event in events(answer)]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    first, second = server.engine.requests[-1].prompts
    assert first == "English: The dog sees the house.\n\nChinese:"
    assert text == f"{first}\n\n{second.replace('<x0>', '[').replace('</x0>', '](https://example.org/long)')}"
    assert choices[0]["delta"]["role"] == "assistant" and choices[-1]["finish_reason"] == "stop"
    whole = server.http.post(V1, json=READER | {"stream": False}).json()
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["usage"]["completion_tokens"] > 0 and whole["usage"]["prompt_tokens"] > 0
    assert whole["system_fingerprint"] == answer.headers["x-model-fingerprint"] != ""
    chinese = READER | {"stream": False, "messages": [{"role": "user", "content": "狗看见那座房子。"}]}
    answer = server.http.post(V1, json=chinese).json()
    assert answer["choices"][0]["message"]["content"] == "Chinese: 狗看见那座房子。\n\nEnglish:"
    assert locked.http.post(V1, json=READER).status_code == 401, "chats need the password"
    for messages in ([], "x", READER["messages"] * 2):
        answer = server.http.post(V1, json=READER | {"messages": messages})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


def test_offline_reader_gets_a_stream_of_a_text_without_words(server):
    body = READER | {"messages": [{"role": "user", "content": "123\n--"}]}
    answer = server.http.post(V1, json=body | {"stream": "true", "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"] == "text/event-stream" and answer.text.endswith("data: [DONE]\n\n")
    *found, usage = events(answer)
    choices = [event["choices"][0] for event in found]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "123\n--"
    assert choices[0]["delta"]["role"] == "assistant" and choices[-1]["finish_reason"] == "stop"
    assert usage["usage"]["total_tokens"] == 0
    whole = server.http.post(V1, json=body | {"stream": None}).json()
    assert whole["choices"][0]["message"]["content"] == "123\n--"


@pytest.mark.parametrize(
    "wrong",
    [
        {"stream": "perhaps"},
        {"stream": False, "stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": "perhaps"}},
        {"stream_options": []},
    ],
)
def test_how_offline_reader_wants_its_stream_is_checked(server, wrong):
    answer = server.http.post(V1, json=READER | wrong)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(list(wrong)[-1])


def test_what_is_sure_is_streamed_at_once():
    """A plain text as it is made; one with a mark when it is known to be whole."""
    asked = TextsAsked(["One.\n\nTwo {0}.\n\nThree."], "zh", "en")
    reply = PageReply(Translator(asked, TranslationForm(), Words()), "m", False)

    translator, answers = reply.rounds.translator, dict[int, str]()

    def shown(*deltas: RowDelta) -> str:
        for each in deltas:
            answers[each.row] = answers.get(each.row, "") + each.text
            if each.finish_reason:
                translator.take(each.row, Translated(answers[each.row]))
        return "".join(event["choices"][0]["delta"]["content"] for event in reply.events(list(deltas)))

    assert shown(RowDelta(0, " 一", 1), RowDelta(2, " 三。", 1)) == "一"
    assert shown(RowDelta(0, "。", 1, "stop"), RowDelta(1, " 二", 1)) == "。\n\n"
    assert shown(RowDelta(2, "", 1, "stop")) == ""
    assert shown(RowDelta(1, "。", 1, "stop")) == "", "its mark is lost, and it is asked for again"
    assert shown(RowDelta(3, " 二", 1, "stop")) == "二 {0}.\n\n三。"


def test_each_paragraph_is_streamed_as_it_is_made():
    asked = TextsAsked(["One.\n\nTwo.\n\nThree."], "zh", "en")
    reply = PageReply(Translator(asked, TranslationForm(), Words()), "m", False)
    translator = reply.rounds.translator

    def shown(delta: RowDelta, whole: str = "") -> str:
        if whole:
            translator.take(delta.row, Translated(whole))
        return "".join(event["choices"][0]["delta"]["content"] for event in reply.events([delta]))

    assert shown(RowDelta(1, " 二", 1)) == ""
    assert shown(RowDelta(0, " 一。", 1, "stop"), " 一。") == "一。\n\n二"
    assert shown(RowDelta(1, "二", 1)) == "二"
    assert shown(RowDelta(1, "。", 1, "stop"), " 二二。") == "。\n\n"
    assert shown(RowDelta(2, " 三", 1)) == "三"


def test_the_probe_of_offline_reader_is_a_chat(server):
    body = {"model": "rwkv", "stream": False, "max_tokens": 128, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "Translate this"}]
    answer = server.http.post(V1, json=body | {"metadata": {"x": {"kind": "web_translation"}}})
    assert answer.status_code == 200
    assert server.engine.requests[-1].prompts[0].startswith("User: Translate this")
