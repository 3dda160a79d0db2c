"""Calls of the native routes and what is wrong with some, for the tests of several folders."""

import json

import httpx

V1, FIM, TRANSLATE = "/v1/chat/completions", "/FIM/v1/batch-FIM", "/translate/v1/batch-translate"
CHAT, COMPLETIONS = "/openai/v1/chat/completions", "/v1/completions"


def events(response: httpx.Response) -> list[dict]:
    """The JSON of each event; the stream must end with [DONE]."""
    frames = [f for f in response.text.split("\n\n") if f and not f.startswith(":")]
    assert all(f.startswith("data: ") for f in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(f.removeprefix("data: ")) for f in frames[:-1]]


def streamed(response: httpx.Response) -> tuple[dict[int, str], dict[int, str]]:
    """Text and finish reason of each row of a native stream."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in events(response):
        assert set(event) == {"object", "choices"}
        assert event["object"] == "chat.completion.chunk"
        for choice in event["choices"]:
            if "finish_reason" in choice:
                assert choice["delta"] == {}
                assert choice["index"] not in reasons, "one finish chunk per row"
                reasons[choice["index"]] = choice["finish_reason"]
            else:
                assert choice["delta"]["content"], "never empty"
                assert choice["index"] not in reasons, "no text after the finish chunk"
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"]["content"]
    return texts, reasons


LONE = b'{"contents":["fine","\\ud800"]}'
DEEP = b'{"contents":' + b"[" * 5000 + b"]" * 5000 + b"}"
BAD = [
    # path, body, status, words of the sentence
    (V1, b"", 400, "Invalid JSON"),
    (V1, b"{", 400, "Invalid JSON"),
    (V1, b'{"contents":["a"]} x', 400, "Invalid JSON"),
    (V1, b"[1]", 400, "JSON object"),
    (V1, b'"text"', 400, "JSON object"),
    (V1, b"null", 400, "JSON object"),
    (V1, b'{"contents":["\xff"]}', 400, "UTF-8"),
    (V1, LONE, 400, "contents[1]"),
    (V1, b'{"contents":["a"],"\\udc00":1}', 400, "field name"),
    (V1, b'{"contents":["a"],"temperature":NaN}', 400, "NaN"),
    (V1, b'{"contents":["a"],"temperature":-Infinity}', 400, "Infinity"),
    (V1, b'{"contents":["a"],"temperature":1e999}', 400, "1e999"),
    (V1, b'{"contents":["a"],"max_tokens":1' + b"0" * 5000 + b"}", 400, "too large"),
    (V1, DEEP, 400, "nested"),
    (V1, b'{"contents":["a"],"x":' + b'{"y":' * 100 + b"1" + b"}" * 101, 400, "nested"),
    (V1, {}, 400, "messages should hold at least one message with text"),
    (V1, {"contents": []}, 400, "Empty prompts list: send a conversation as `messages`"),
    (V1, {"contents": None}, 400, "contents"),
    (V1, {"contents": "text"}, 400, "contents"),
    (V1, {"contents": ["a", 1]}, 400, "contents[1]"),
    (V1, {"contents": ["a"] * 4097}, 400, "contents"),
    (V1, {"contents": ["a"], "messages": [{"role": "user", "content": "b"}]}, 400, "`messages`"),
    (V1, {"contents": ["a"], "max_tokens": -1}, 400, "max_tokens"),
    (V1, {"contents": ["a"], "max_tokens": None}, 400, "max_tokens"),
    (V1, {"contents": ["a"], "max_tokens": 1.5}, 400, "max_tokens"),
    (V1, {"contents": ["a"], "max_tokens": True}, 400, "max_tokens"),
    (V1, {"contents": ["a"], "max_tokens": 10**20}, 400, "max_tokens"),
    (V1, {"contents": ["a"], "temperature": "nan"}, 400, "temperature"),
    (V1, {"contents": ["a"], "temperature": 1e10}, 400, "temperature"),
    (V1, {"contents": ["a"], "top_p": [0.5]}, 400, "top_p"),
    (V1, {"contents": ["a"], "top_k": "many"}, 400, "top_k"),
    (V1, {"contents": ["a"], "alpha_decay": 1.5}, 400, "alpha_decay"),
    (V1, {"contents": ["a"], "alpha_presence": 1e6}, 400, "alpha_presence"),
    (V1, {"contents": ["a"], "stop_tokens": 0}, 400, "stop_tokens"),
    (V1, {"contents": ["a"], "stop_tokens": [65536]}, 400, "stop_tokens[0]"),
    (V1, {"contents": ["a"], "stop_tokens": [0, -1]}, 400, "stop_tokens[1]"),
    (V1, {"contents": ["a"], "stop_tokens": [""]}, 400, "stop_tokens[0]"),
    (V1, {"contents": ["a"], "stop_tokens": [[1]]}, 400, "stop_tokens[0]"),
    (V1, {"contents": ["a"], "stop_tokens": [True]}, 400, "stop_tokens[0]"),
    (V1, {"contents": ["a"], "stop_tokens": ["x"] * 65}, 400, "stop_tokens"),
    (V1, {"contents": ["a"], "stream": "perhaps"}, 400, "stream"),
    (V1, {"contents": ["a"], "chunk_size": {}}, 400, "chunk_size"),
    (V1, {"contents": ["a"], "model": 7}, 400, "model"),
    (V1, {"contents": ["a" * (1 << 20)]}, 413, "1048576"),
    (V1, {"contents": ["invalid"]}, 400, "finds this invalid"),
    (FIM, {"prefix": ["a"], "suffix": []}, 400, "`suffix`"),
    (FIM, {}, 400, "`prefix`"),
    (FIM, {"prefix": ["a"], "suffix": [None]}, 400, "suffix[0]"),
    (TRANSLATE, {"text_list": ["a"]}, 400, "target_lang"),
    (TRANSLATE, {"target_lang": "en"}, 400, "text_list"),
    (TRANSLATE, {"target_lang": "auto", "text_list": ["a"]}, 400, "target_lang"),
    (TRANSLATE, {"target_lang": "en", "source_lang": "", "text_list": ["a"]}, 400, "source_lang"),
    (TRANSLATE, {"target_lang": "en", "text_list": "a"}, 400, "text_list"),
    (TRANSLATE, {"target_lang": "en", "text_list": [1]}, 400, "text_list[0]"),
    (CHAT, b"{", 400, "Invalid JSON"),
    (CHAT, b"[]", 400, "JSON object"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (V1, {"messages": []}, 400, "messages"),
    (COMPLETIONS, {"prompt": "a" * (1 << 20)}, 413, "1048576"),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt"),
]
