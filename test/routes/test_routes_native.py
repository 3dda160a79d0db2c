"""The native routes over HTTP, against an engine that echoes."""

import json

import pytest
from frontend_process import FrontendProcess
from native_calls import BAD, CHAT, COMPLETIONS, FIM, TRANSLATE, V1, events, streamed


@pytest.fixture(scope="module")
def server():
    with FrontendProcess(max_body=1 << 20) as process:
        yield process


def test_a_batch_comes_back_in_the_order_of_its_prompts(server):
    answer = server.http.post(V1, json={"contents": ["first", "第二 🦄"], "model": "mine", "max_tokens": 4})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert "第二" in answer.text, "characters are not escaped"
    assert answer.json() == {
        "id": "rwkv7-batch",
        "object": "chat.completion",
        "model": "mine",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "firs"}, "finish_reason": "length"},
            {"index": 1, "message": {"role": "assistant", "content": "第二 🦄"}, "finish_reason": "stop"},
        ],
    }


@pytest.mark.parametrize("chunk_size", [-3, 0, 1, 2, 8, 128])
def test_joined_stream_is_the_whole_text(server, chunk_size):
    prompts = ["🦄🧬🫠 hello 𠮷", "", "line\r\n\u2028 two", "0123456789" * 5]
    body = {"contents": prompts, "max_tokens": 40, "chunk_size": chunk_size}
    whole = server.http.post(V1, json=body).json()["choices"]
    texts, reasons = streamed(server.http.post(V1, json=body | {"stream": True}))
    assert {c["index"]: c["message"]["content"] for c in whole} == texts
    assert {c["index"]: c["finish_reason"] for c in whole} == reasons
    assert server.engine.requests[-1].flush_tokens == max(1, chunk_size)


def test_fields_reach_the_engine(server):
    server.http.post(
        V1,
        json={
            "contents": ["fields"],
            "max_tokens": "7",
            "temperature": 0,
            "top_k": 3,
            "top_p": 0.25,
            "alpha_presence": 0.5,
            "alpha_frequency": 0.75,
            "alpha_decay": 0.9,
            "stop_tokens": [0, "\n\n", 261, "5"],
            "noise": 3,
            "pad_zero": False,
            "enable_think": True,
            "unknown": {"x": [1]},
        },
    )
    request = server.engine.request("fields")
    assert (request.max_tokens, request.n, request.flush_tokens) == (7, 1, 0)
    assert (request.stop_ids, request.stop_strings) == ([0, 261], ["\n\n", "5"])
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 3, 0.25)
    assert (sampling.alpha_presence, sampling.alpha_frequency, sampling.alpha_decay) == (0.5, 0.75, 0.9)


@pytest.mark.parametrize(
    ("path", "body"), [(V1, {"contents": ["defaults"]}), (FIM, {"prefix": ["defaults"], "suffix": [""]})]
)
def test_defaults(server, path, body):
    server.http.post(path, json=body)
    request = server.engine.requests[-1]
    assert (request.max_tokens, request.stop_ids, request.stop_strings, request.flush_tokens) == (
        8192,
        [0, 261, 24281],
        [],
        0,
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1, 50, 0.6)
    assert (sampling.alpha_presence, sampling.alpha_frequency, sampling.alpha_decay) == (2, 0.2, 0.996)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias, sampling.seed) == (
        0,
        0,
        {},
        None,
    )


def test_an_empty_stop_list_never_stops(server):
    server.http.post(V1, json={"contents": ["onwards"], "stop_tokens": []})
    assert server.engine.request("onwards").stop_ids == []


def test_an_empty_prompt_starts_from_token_zero(server):
    assert server.http.post(V1, json={"contents": [""]}).status_code == 200
    assert server.engine.requests[-1].prompts == [[0]]


def test_no_tokens_asked_no_tokens_given(server):
    choice = server.http.post(V1, json={"contents": ["nothing"], "max_tokens": 0}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


def test_contents_is_the_batch_and_messages_the_conversation(server):
    said = [{"role": "user", "content": "hi"}]
    assert "usage" in server.http.post(V1, json={"messages": said}).json()
    assert "usage" in server.http.post(V1, json={"messages": said, "contents": []}).json()
    assert "usage" not in server.http.post(V1, json={"contents": ["hi"], "messages": []}).json()


def test_fill_in_the_middle(server):
    answer = server.http.post(FIM, json={"prefix": ["def f(", "a"], "suffix": ["): pass", "c"]}).json()
    assert (answer["object"], answer["model"]) == ("FIM.completion", "rwkv7")
    assert [c["message"]["content"] for c in answer["choices"]] == [
        "✿prefix✿✿suffix✿): pass✿middle✿def f(",
        "✿prefix✿✿suffix✿c✿middle✿a",
    ]
    texts, reasons = streamed(server.http.post(FIM, json={"prefix": ["a"], "suffix": ["c"], "stream": True}))
    assert (texts, reasons) == ({0: "✿prefix✿✿suffix✿c✿middle✿a"}, {0: "stop"})


def test_translation_by_position(server):
    answer = server.http.post(
        TRANSLATE,
        json={
            "source_lang": "en",
            "target_lang": "zh-CN",
            "text_list": ["Hello", "", " \n", "Bye "],
            "placeholders": ["{{1}}"],
        },
    )
    assert answer.json() == {
        "translations": [
            {"detected_source_lang": "en", "text": "English: Hello\n\nChinese:"},
            {"detected_source_lang": "en", "text": ""},
            {"detected_source_lang": "en", "text": " \n"},
            {"detected_source_lang": "en", "text": "English: Bye\n\nChinese:"},
        ]
    }
    request = server.engine.requests[-1]
    assert len(request.prompts) == 2, "blank texts are not run"
    assert (request.max_tokens, request.sampling.temperature, request.stop_ids, request.stop_strings) == (
        112,
        0,
        [0],
        ["\n\nEnglish:"],
    )


def test_translation_of_nothing(server):
    before = len(server.engine.requests)
    assert server.http.post(TRANSLATE, json={"target_lang": "en", "text_list": []}).json() == {
        "translations": []
    }
    assert server.http.post(TRANSLATE, json={"target_lang": "en", "text_list": [" "]}).json() == {
        "translations": [{"detected_source_lang": "en", "text": " "}]
    }
    assert len(server.engine.requests) == before


def test_the_script_decides_where_the_source_is_not_told(server):
    body = {"target_lang": "en", "text_list": ["你好", "こんにちは世界", "Привет", "안녕", "Bonjour", "123"]}
    translations = server.http.post(TRANSLATE, json=body).json()["translations"]
    assert [t["detected_source_lang"] for t in translations] == ["zh-CN", "ja", "ru", "ko", "fr", "en"]
    assert [t["text"].split(":")[0] for t in translations] == [
        "Chinese",
        "Japanese",
        "Russian",
        "Korean",
        "French",
        "123",
    ]
    into_chinese = server.http.post(
        TRANSLATE, json={"source_lang": "auto", "target_lang": "zh-CN", "text_list": ["Qzx"]}
    ).json()
    assert into_chinese == {
        "translations": [{"detected_source_lang": "en", "text": "English: Qzx\n\nChinese:"}]
    }


@pytest.mark.parametrize(
    ("path", "body", "status", "words"), BAD, ids=[f"{i}-{path}" for i, (path, *_) in enumerate(BAD)]
)
def test_bad_input_is_told_what_is_wrong(server, path, body, status, words):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.http.post(path, content=content)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    if isinstance(error, dict):
        assert path in (V1, CHAT, COMPLETIONS)
        assert set(error) == {"message", "type", "param", "code"}
        error = error["message"]
    assert words in error
    assert "\n" not in error and len(error) < 400, "one sentence"
    assert server.http.get("/health").status_code == 200, "and the server lives"


def test_form_content_type_does_not_matter(server):
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert server.http.post(V1, content=b'{"contents":["a"]}', headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (V1, {"contents": ["overloaded"]}),
        (V1, {"contents": ["overloaded"], "stream": True}),
        (COMPLETIONS, {"prompt": "overloaded"}),
    ],
)
def test_a_full_queue_is_429(server, path, body):
    answer = server.http.post(path, json=body)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    assert "overloaded" in str(answer.json()["error"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (V1, {"contents": ["unavailable"]}),
        (V1, {"contents": ["unavailable"], "stream": True}),
        (COMPLETIONS, {"prompt": "unavailable"}),
        ("/v1/state/rewind", {"session_id": "unavailable", "turn": 1}),
        ("/state/delete", {"session_id": "unavailable"}),
    ],
)
def test_a_database_that_is_away_is_503(server, path, body):
    answer = server.http.post(path, json=body)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "unavailable" in str(answer.json()["error"])


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_error_before_the_text(server, stream):
    answer = server.http.post(V1, json={"contents": ["fail"], "stream": stream})
    if answer.status_code == 200:  # the failure came after the stream had begun
        assert events(answer) == [{"error": "The fake engine failed."}]
    else:
        assert (answer.status_code, answer.json()) == (500, {"error": "The fake engine failed."})


def test_an_engine_error_within_a_stream(server):
    answer = server.http.post(V1, json={"contents": ["broken promise"], "stream": True, "chunk_size": 1})
    *text, error = events(answer)
    assert error == {"error": "The fake engine broke down."}
    assert text, "what had been said before is there"
    chat = server.http.post(COMPLETIONS, json={"prompt": "broken promise", "stream": True})
    assert events(chat)[-1]["error"]["message"] == "The fake engine broke down."
