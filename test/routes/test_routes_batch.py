"""v2, v3 and big_batch over HTTP, against an engine that echoes; and what all native routes make of
`use_prefix_cache`.
"""

import json

import httpx
import pytest
from frontend_process import FrontendProcess
from native_calls import FIM, V1, events, streamed

from routes.native.batch import v3
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta, Sampling

V2, V3, BIG = "/v2/chat/completions", "/v3/chat/completions", "/big_batch/completions"
STATE, TREE = "/state/chat/completions", "/multi_state/chat/completions"
PATHS = [V2, V3, BIG]
WORD = "pass word"
CLOSED, OPEN = "Assistant: <think>\n</think>", "Assistant: <think"


@pytest.fixture(scope="module")
def server():
    with FrontendProcess(max_body=1 << 20) as process:
        yield process


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    assert [c["index"] for c in answer.json()["choices"]] == list(range(len(answer.json()["choices"])))
    return [c["message"]["content"] for c in answer.json()["choices"]]


@pytest.mark.parametrize(("path", "id_"), [(V2, "rwkv7-batch"), (V3, "rwkv7-batch-v3"), (BIG, "rwkv7-batch")])
def test_the_reply(server, path, id_):
    answer = server.http.post(
        path, json={"contents": ["first", "第二 🦄"], "model": "mine", "stream": False}
    ).json()
    assert {k: v for k, v in answer.items() if k != "choices"} == {
        "id": id_,
        "object": "chat.completion",
        "model": "mine",
    }
    assert [(c["index"], c["message"]["role"], c["finish_reason"]) for c in answer["choices"]] == [
        (i, "assistant", "stop") for i in (0, 1)
    ]
    short = server.http.post(
        path, json={"contents": ["long enough"], "max_tokens": 4, "stream": False}
    ).json()["choices"][0]
    assert (len(short["message"]["content"]), short["finish_reason"]) == (4, "length")


@pytest.mark.parametrize("path", [V1, *PATHS])
def test_a_row_that_fails_is_named_and_the_others_are_answered(server, path):
    body = {"contents": ["fine", "ill", "well"], "stream": False, "use_prefix_cache": False}
    whole = server.http.post(path, json=body)
    assert whole.status_code == 200 and "error" not in whole.json()
    fine, ill, well = whole.json()["choices"]
    assert fine["finish_reason"] == well["finish_reason"] == "stop" and "error" not in fine | well
    assert (ill["finish_reason"], ill["error"]) == ("error", "The fake engine lost it.")
    streamed_events = events(server.http.post(path, json=body | {"stream": True}))
    ends = {c["index"]: c for e in streamed_events for c in e["choices"] if "finish_reason" in c}
    assert {index: end["finish_reason"] for index, end in ends.items()} == {0: "stop", 1: "error", 2: "stop"}
    assert ends[1]["error"] == "The fake engine lost it." and "error" not in ends[0] | ends[2]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_request_of_which_no_row_is_left_has_failed(server, rows):
    body = {"contents": ["ill"] * rows, "stream": False}
    whole = server.http.post(V2, json=body)
    assert (whole.status_code, whole.json()) == (500, {"error": "The fake engine lost it."})
    assert events(server.http.post(V2, json=body | {"stream": True}))[-1] == whole.json()


def test_a_batch_has_a_path_of_its_own_too(server):
    body = {"contents": ["first", "second"], "max_tokens": 5}
    batch, chat = (server.http.post(path, json=body).json() for path in ("/v1/batch/completions", V1))
    assert batch == chat and len(batch["choices"]) == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chunk_size", [0, 1, 3, 128])
def test_joined_stream_is_the_whole_text(server, path, chunk_size):
    body = {"contents": ["🦄🧬🫠 hello 𠮷", "0123456789" * 5], "max_tokens": 30, "chunk_size": chunk_size}
    whole = server.http.post(path, json=body | {"stream": False}).json()["choices"]
    joined, reasons = streamed(server.http.post(path, json=body | {"stream": True}))
    assert {c["index"]: c["message"]["content"] for c in whole} == joined
    assert {c["index"]: c["finish_reason"] for c in whole} == reasons
    assert server.engine.requests[-1].flush_tokens == max(1, chunk_size)


def test_v2_draws_in_its_own_way(server):
    server.http.post(
        V2,
        json={
            "contents": ["v2"],
            "temperature": 0,
            "top_k": 3,
            "top_p": 0.25,
            "alpha_presence": 0.5,
            "alpha_frequency": 0.75,
            "alpha_decay": 0.9,
            "stop_tokens": [0, "END"],
            "noise": 9,
        },
    )
    request = server.engine.request("v2")
    assert request.sampling == Sampling(0, 3, 0.25, 0.5, 0.75, 0.9, method="nucleus")
    assert (request.stop_ids, request.stop_strings) == ([0], ["END"])
    server.http.post(V2, json={"contents": ["v2 defaults"]})
    assert server.engine.request("v2 defaults").sampling == Sampling(
        1, 50, 0.6, 2, 0.2, 0.996, method="nucleus"
    )


def test_v2_pads_unless_told_not_to(server):
    for fields, lead in (({}, [0]), ({"pad_zero": True}, [0]), ({"pad_zero": False}, [])):
        server.http.post(V2, json={"contents": ["padded"], **fields})
        assert server.engine.request("padded").prefix_ids == lead
    server.http.post(V1, json={"contents": ["padded"], "pad_zero": True})
    assert server.engine.request("padded").prefix_ids == [], "which is v2's alone"


def test_v3_answers_every_question_in_its_place(server):
    body = {"contents": ["Why?\n\nHow?", "谁？"], "stop_tokens": []}
    assert texts(server.http.post(V3, json=body)) == [
        f"User: Why?\n\nHow?\n\n{CLOSED}",
        f"User: 谁？\n\n{CLOSED}",
    ]
    assert texts(server.http.post(V3, json=body | {"enable_think": True})) == [
        f"User: Why?\n\nHow?\n\n{OPEN}",
        f"User: 谁？\n\n{OPEN}",
    ]


@pytest.mark.parametrize(("fields", "end"), [({}, CLOSED), ({"enable_think": True}, OPEN)])
def test_v3_reads_the_whole_conversation(server, fields, end):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]},
    ]
    answer = server.http.post(V3, json={"messages": messages, "stop_tokens": [], **fields})
    assert texts(answer) == [
        f"System: Be brief.\n\nUser: Hi\n\nAssistant: Hello\n\nUser: Who are you?\n\n{end}"
    ]
    assert texts(server.http.post(V3, json={"messages": messages, "contents": [], **fields})) == texts(answer)
    joined, _ = streamed(server.http.post(V3, json={"messages": messages, "stream": True, **fields}))
    assert [joined[0]] == texts(answer)


def job_of(prepared) -> Job:
    return Job(prepared.request, lambda _: None)


def test_v3_tells_an_unasked_thought_apart():
    deltas = [[RowDelta(0, c, 1)] for c in "<think>Hm.</think>\nYes"] + [[RowDelta(0, "", 0, "stop")]]
    body = {"contents": ["a"]}
    whole = v3(body, "rwkv7-g1k", FrontendConfig())
    message = whole.reply.whole(job_of(whole), [d for batch in deltas for d in batch])["choices"][0][
        "message"
    ]
    assert message == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}
    streamed = v3(body, "rwkv7-g1k", FrontendConfig())
    choices = [c for batch in deltas for e in streamed.reply.events(batch) for c in e["choices"]]
    assert "".join(c["delta"].get("content", "") for c in choices) == "Yes"
    assert "".join(c["delta"].get("reasoning_content", "") for c in choices) == "Hm."
    assert [c["finish_reason"] for c in choices if "finish_reason" in c] == ["stop"]
    asked = v3(body | {"enable_think": True}, "rwkv7-g1k", FrontendConfig())
    text = asked.reply.whole(job_of(asked), [RowDelta(0, ">Hm.</think>\nYes", 9, "stop")])
    assert text["choices"][0]["message"]["content"] == ">Hm.</think>\nYes", "as clients of this route know it"


def test_v3_draws_as_v1_does(server):
    fields = {
        "top_k": 3,
        "top_p": 0.25,
        "temperature": 0.5,
        "alpha_presence": 0.5,
        "alpha_frequency": 0.1,
        "alpha_decay": 0.9,
    }
    for path in (V1, V3):
        server.http.post(path, json={"contents": ["alike"], **fields})
    assert (
        server.engine.requests[-1].sampling
        == server.engine.requests[-2].sampling
        == Sampling(0.5, 3, 0.25, 0.5, 0.1, 0.9)
    )


def test_big_batch_streams_unless_told_not_to(server):
    for fields in ({}, {"stream": True}):
        assert streamed(server.http.post(BIG, json={"contents": ["a", "b"], **fields})) == (
            {0: "a", 1: "b"},
            {0: "stop", 1: "stop"},
        )
    assert texts(server.http.post(BIG, json={"contents": ["a", "b"], "stream": False})) == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, Sampling(1, method="gumbel")),
        ({"temperature": 0.5}, Sampling(0.5, method="gumbel")),
        ({"temperature": 0}, Sampling(0, method="gumbel")),
        ({"top_k": 1, "top_p": 0, "alpha_presence": 5}, Sampling(1, method="gumbel")),
        ({"noise": 1.5}, Sampling(1, noise=1.5, method="noise")),
        ({"noise": 0, "temperature": 0.3}, Sampling(0.3, noise=0, method="noise")),
        ({"noise": None}, Sampling(1, method="gumbel")),
    ],
)
def test_big_batch_draws_by_temperature_or_by_noise(server, fields, sampling):
    server.http.post(BIG, json={"contents": ["drawn"], **fields})
    assert server.engine.request("drawn").sampling == sampling


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (V1, {"contents": ["hint"]}),
        (V2, {"contents": ["hint"]}),
        (V3, {"contents": ["hint"]}),
        (BIG, {"contents": ["hint"]}),
        (STATE, {"contents": ["hint"]}),
        (TREE, {"contents": ["hint"], "session_id": "s", "dialogue_idx": 0}),
        (FIM, {"prefix": ["a"], "suffix": ["b"]}),
    ],
)
def test_the_prefix_cache_can_be_declined(server, path, body):
    for fields, wanted in (
        ({}, True),
        ({"use_prefix_cache": True}, True),
        ({"use_prefix_cache": False}, False),
    ):
        assert server.http.post(path, json=body | fields).status_code == 200
        assert server.engine.requests[-1].prefix_cache == wanted
    assert server.http.post(path, json=body | {"use_prefix_cache": "perhaps"}).status_code == 400


BAD = [
    # path, body, status, words of the sentence
    *[
        case
        for path in PATHS
        for case in [
            (path, b"{", 400, "Invalid JSON"),
            (path, b"[1]", 400, "JSON object"),
            (path, {}, 400, "Empty prompts list"),
            (path, {"contents": []}, 400, "Empty prompts list"),
            (path, {"contents": "text"}, 400, "contents"),
            (path, {"contents": ["a", 1]}, 400, "contents[1]"),
            (path, {"contents": ["a"] * 4097}, 400, "contents"),
            (path, {"contents": ["a"], "max_tokens": -1}, 400, "max_tokens"),
            (path, {"contents": ["a"], "temperature": "hot"}, 400, "temperature"),
            (path, {"contents": ["a"], "stop_tokens": [65536]}, 400, "stop_tokens[0]"),
            (path, {"contents": ["a"], "stream": "perhaps"}, 400, "stream"),
            (path, {"contents": ["a" * (1 << 20)]}, 413, "1048576"),
        ]
    ],
    (V2, {"contents": ["a"], "pad_zero": "perhaps"}, 400, "pad_zero"),
    (V2, {"contents": ["a"], "top_p": [1]}, 400, "top_p"),
    (V2, {"contents": ["invalid"]}, 400, "finds this invalid"),
    (V2, {"contents": ["overloaded"]}, 429, "overloaded"),
    (V3, {"contents": ["a"], "messages": [{"role": "user", "content": "b"}]}, 400, "`messages`"),
    (V3, {"messages": []}, 400, "Empty prompts list"),
    (V3, {"messages": [{"role": "user", "content": " "}]}, 400, "Empty prompts list"),
    (V3, {"messages": "hi"}, 400, "messages"),
    (V3, {"messages": [{"role": "robot", "content": "a"}]}, 400, "messages[0].role"),
    (V3, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (V3, {"contents": ["a"], "enable_think": "perhaps"}, 400, "enable_think"),
    (BIG, {"contents": ["a"], "noise": -1}, 400, "noise"),
    (BIG, {"contents": ["a"], "noise": True}, 400, "noise"),
    (BIG, {"contents": ["invalid"]}, 400, "finds this invalid"),
    (BIG, {"contents": ["overloaded"], "stream": False}, 429, "overloaded"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"), BAD, ids=[f"{i}-{path}" for i, (path, *_) in enumerate(BAD)]
)
def test_bad_input_is_told_what_is_wrong(server, path, body, status, words):
    answer = server.http.post(path, content=body if isinstance(body, bytes) else json.dumps(body).encode())
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error
    assert "\n" not in error and len(error) < 400, "one sentence"


@pytest.mark.parametrize("path", [V2, BIG])
def test_an_engine_error_within_a_stream(server, path):
    text = server.http.post(path, json={"contents": ["broken promise"], "stream": True, "chunk_size": 1}).text
    assert text.startswith("data: ") and text.endswith(
        'data: {"error":"The fake engine broke down."}\n\ndata: [DONE]\n\n'
    )


def test_passwords_preflights_and_methods():
    with FrontendProcess(password=WORD) as locked:
        for path in PATHS:
            body = {"contents": ["a"]}
            assert locked.http.post(path, json=body).status_code == 401
            assert locked.http.post(path, content=b"{").status_code == 401
            assert locked.http.post(path, json=body | {"password": WORD}).status_code == 200
            assert locked.http.post(path, json=body, params={"password": WORD}).status_code == 200
            allowed = locked.http.post(path, json=body, headers={"authorization": f"Bearer {WORD}"})
            assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "*")
            assert locked.http.options(path).status_code == 204
            assert (locked.http.get(path).status_code, locked.http.get(path).headers["allow"]) == (
                405,
                "POST, OPTIONS",
            )
