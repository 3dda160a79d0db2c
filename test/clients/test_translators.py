"""What translators on desktops and in browsers send to a language model, in their shapes.

What they translate is left aside: the bundled model is asked a question that it can answer.
"""

import json

import httpx
import pytest
from asked import ALICE, CAPITAL, MODEL, PARIS, UNKNOWN, conversation, said

SYSTEM = {"role": "system", "content": "You are a professional translation engine."}
ASKED = [SYSTEM, said(CAPITAL)]
# Those that any of them sends. Some send the key twice, as one of Azure's too.
HEADERS = {"Authorization": "Bearer unused", "api-key": "unused", "Content-Type": "application/json"}
CHAT = "/v1/chat/completions"
# Temperatures are settings of all of them.
ZOTERO = {"model": MODEL, "messages": ASKED, "temperature": 0, "stream": True}
POT = {
    "temperature": 0,
    "top_p": 0.99,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "stream": True,
    "messages": ASKED,
    "model": MODEL,
}
LUNA = {
    "model": MODEL,
    "messages": ASKED,
    "n": 1,
    "temperature": 0,
    "max_tokens": 1024,
    "stream": True,
    "frequency_penalty": 0,
    "top_p": 0.3,
}
KISS = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_completion_tokens": 20480, "stream": True}


@pytest.fixture(scope="module")
def http(url: str):
    with httpx.Client(base_url=url, headers=HEADERS, timeout=60) as client:
        yield client


def streamed(reply: httpx.Response) -> str:
    """The text as these clients put it together: of lines of data whose JSON has a choice."""
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data:").strip() for line in reply.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


@pytest.mark.parametrize("body", [ZOTERO, POT, LUNA, KISS], ids=["zotero", "pot", "luna", "kiss"])
def test_a_text_with_and_without_a_stream(http: httpx.Client, body: dict):
    assert PARIS in streamed(http.post(CHAT, json=body))
    reply = http.post(CHAT, json=body | {"stream": False}).json()
    assert PARIS in reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "wanted", [{"reasoning_effort": "none"}, {"enable_thinking": False}, {"think": False}]
)
def test_they_may_ask_for_no_thought(http: httpx.Client, wanted: dict):
    reply = http.post(CHAT, json=KISS | {"stream": False} | wanted).json()
    message = reply["choices"][0]["message"]
    assert PARIS in message["content"] and "reasoning_content" not in message


def test_earlier_texts_and_the_beginning_of_an_answer(http: httpx.Client):
    """LunaTranslator sends some of the translations before, and may say how the next one begins."""
    assert ALICE in streamed(http.post(CHAT, json=LUNA | {"messages": [SYSTEM, *conversation()]}))
    begun = [*ASKED, {"role": "assistant", "content": "The capital of France is"}]
    assert PARIS in streamed(http.post(CHAT, json=LUNA | {"messages": begun}))


def test_models_are_listed_beside_the_route_of_chats(http: httpx.Client):
    assert http.get("/v1/models").json()["data"][0]["id"]


def test_stranslate_and_zotero_ask_responses_too(http: httpx.Client):
    body = {"model": MODEL, "input": ASKED, "temperature": 0, "stream": True, "store": False}
    reply = http.post("/v1/responses", json=body)
    events = [json.loads(line[5:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    text = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
    assert PARIS in text and events[-1]["type"] == "response.completed"


def test_zotero_and_luna_ask_messages_too(http: httpx.Client):
    system = [
        {"type": "text", "text": SYSTEM["content"], "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ]
    body = {"model": MODEL, "max_tokens": 4000, "messages": [said(CAPITAL)], "temperature": 0}
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "unused"}
    reply = http.post("/v1/messages", json=body | {"system": system, "stream": True}, headers=headers)
    events = [json.loads(line[5:]) for line in reply.text.splitlines() if line.startswith("data:")]
    text = "".join(each["delta"]["text"] for each in events if each["type"] == "content_block_delta")
    assert PARIS in text and events[-1]["type"] == "message_stop"


@pytest.mark.parametrize(
    "origin", ["chrome-extension://abcdefgh", "tauri://localhost", "https://example.org"]
)
def test_browsers_let_extensions_read_the_answer(http: httpx.Client, origin: str):
    wanted = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,api-key",
    }
    before = http.options(CHAT, headers=wanted)
    assert before.is_success and before.headers["access-control-allow-origin"] in ("*", origin)
    allowed = before.headers["access-control-allow-headers"].lower()
    assert allowed == "*" or all(name in allowed for name in ("authorization", "content-type", "api-key"))
    reply = http.post(CHAT, json=KISS | {"stream": False}, headers={"Origin": origin})
    assert reply.headers["access-control-allow-origin"] in ("*", origin)


def test_immersive_translate(http: httpx.Client):
    body = {"source_lang": "en", "target_lang": "de", "text_list": ["Good morning.", "Good night."]}
    found = http.post("/translate/v1/batch-translate", json=body).json()["translations"]
    assert len(found) == 2 and all(each["text"] and each["detected_source_lang"] for each in found)


def test_an_error(http: httpx.Client):
    """They show `error.message`."""
    assert UNKNOWN in http.post(CHAT, json=POT | {"model": UNKNOWN}).json()["error"]["message"]
