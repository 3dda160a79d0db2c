"""JSON numbers that are too large for their fields, over HTTP: the error names the field in every family."""

import json

import pytest
from frontend_process import FrontendProcess

HUGE = "1" + "0" * 5000
WORD = "open sesame"
NATIVE = [
    ("/v1/chat/completions", {"contents": ["a"]}),
    ("/v2/chat/completions", {"contents": ["a"]}),
    ("/v3/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/big_batch/completions", {"contents": ["a"]}),
    ("/FIM/v1/batch-FIM", {"prefix": ["a"], "suffix": ["b"]}),
    ("/state/chat/completions", {"contents": ["a"]}),
    ("/multi_state/chat/completions", {"contents": ["a"], "session_id": "s", "dialogue_idx": None}),
]
CHAT = {"messages": [{"role": "user", "content": "a"}]}
OPENAI = [
    ("/v1/chat/completions", CHAT),
    ("/openai/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}),
]
# field, its JSON, the place that the error names
EITHER = [
    ("temperature", "1e309", "temperature"),
    ("temperature", "-1e400", "temperature"),
    ("temperature", "1" + "0" * 29, "temperature"),
    ("top_k", HUGE, "top_k"),
    ("chunk_size", "1e400", "chunk_size"),
    ("stop_tokens", f"[0, {10**20}]", "stop_tokens"),
    ("stop_tokens", f'["a", {10**40}]', "stop_tokens[1]"),
    ("unheard_of", '{"deep": [[0, 1e400]]}', "unheard_of.deep[0][1]"),
]
MAX_TOKENS = [
    ("max_tokens", "1e400", "max_tokens"),
    ("max_tokens", str(10**20), "max_tokens"),
    ("max_tokens", str(10**40), "max_tokens"),
]
OPENAI_FIELDS = [
    ("guided_json", '{"enum": [{"a": [0.1000000000000000001]}]}', "guided_json.enum[0].a[0]"),
    ("seed", str(10**40), "seed"),
    ("seed", str(10**20), "seed"),
    ("n", "1e400", "n"),
    ("logit_bias", '{"11": 1e400}', "logit_bias.11"),
    ("logit_bias", f'{{"11": {10**29}}}', "logit_bias"),
]
TOOL = '[{"type": "function", "name": "f", "parameters": {"maximum": %s}}]'
RESPONSE_FIELDS = [
    ("max_output_tokens", "1e400", "max_output_tokens"),
    ("max_tool_calls", str(10**40), "max_tool_calls"),
    ("tools", TOOL % 10**40, "tools[0].parameters.maximum"),
    ("tools", TOOL.replace("maximum", "const") % "1.00000000000000001", "tools[0].parameters.const"),
]
OTHERS = [  # native routes with fields of their own
    ("/multi_state/chat/completions", {"contents": ["a"], "session_id": "s"}, "dialogue_idx", "1e400"),
    ("/multi_state/chat/completions", {"contents": ["a"], "session_id": "s"}, "dialogue_idx", str(10**25)),
    ("/big_batch/completions", {"contents": ["a"]}, "noise", "1e999"),
    ("/translate/v1/batch-translate", {"text_list": ["a"]}, "target_lang", "1e400"),
    ("/state/delete", {}, "session_id", "1e400"),
    ("/v1/state/export", {}, "session_id", HUGE),
    ("/v1/state/fork", {"session_id": "a"}, "new_session_id", "1e400"),
]


def refusal(server: FrontendProcess, path: str, body: dict, field: str, number: str) -> str | dict:
    text = json.dumps(body | {field: "NUMBER"}).replace('"NUMBER"', number)
    answer = server.http.post(path, content=text.encode())
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "field", "number", "place"),
    [(*route, *case) for route in NATIVE for case in EITHER + MAX_TOKENS] + [(*c, c[2]) for c in OTHERS],
)
def test_a_native_error_names_the_field(server, path, body, field, number, place):
    error = refusal(server, path, body, field, number)
    assert place in error and error.endswith(".") and "\n" not in error and len(error) < 200


@pytest.mark.parametrize(
    ("path", "body", "field", "number", "place"),
    [
        *((*route, *case) for route in OPENAI for case in EITHER + OPENAI_FIELDS),
        *((*route, *case) for route in OPENAI[:3] for case in MAX_TOKENS),
        *((*OPENAI[3], *case) for case in RESPONSE_FIELDS),
    ],
)
def test_an_openai_error_names_the_field(server, path, body, field, number, place):
    error = refusal(server, path, body, field, number)
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", place)
    message = error["message"]
    assert place in message and message.endswith(".") and "\n" not in message and len(message) < 250


@pytest.mark.parametrize(("path", "body"), [NATIVE[0], *OPENAI, ("/state/delete", {})])
def test_a_password_in_the_same_body_counts(path, body):
    with FrontendProcess(password=WORD) as locked:
        text = json.dumps(body)[:-1].rstrip() + (", " if body else "") + '"password": "%s", "top_p": 1e400}'
        assert locked.http.post(path, content=(text % WORD).encode()).status_code == 400
        assert locked.http.post(path, content=(text % "wrong").encode()).status_code == 401
        half = (text % "\\ud800").encode()  # half a surrogate pair is no password and no fault of the server
        assert locked.http.post(path, content=half).status_code == 401
