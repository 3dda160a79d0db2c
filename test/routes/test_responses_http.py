"""Responses over HTTP against an engine that echoes: states, documents, branches, deletion, errors. The
client is the official SDK.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from fake_engine import ChatEngine
from frontend_process import FrontendProcess
from openai import OpenAI

from rwkv_batch.wire.commands import PutDocument
from rwkv_batch.wire.protocol import Rejected
from rwkv_batch.wire.supervision import Drain

ANSWER = "Assistant: <think>\n</think>\n"
NO_SUCH = "resp_" + "0" * 32


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory):
    with (
        ChatEngine(f"ipc://{tmp_path_factory.mktemp('engine')}/engine") as engine,
        FrontendProcess(engine) as process,
    ):
        yield process


@pytest.fixture(scope="module", params=["/v1", "/openai/v1"])
def client(front: FrontendProcess, request: pytest.FixtureRequest) -> OpenAI:
    return OpenAI(
        base_url=f"http://127.0.0.1:{front.port}{request.param}",
        api_key="unused",
        max_retries=0,
        _strict_response_validation=True,
    )


def state(front: FrontendProcess, response_id: str) -> str:
    """What the model's state of a response has seen."""
    return front.engine.sessions[f"response:{response_id}"]


def test_two_turns_and_two_branches(front: FrontendProcess, client: OpenAI):
    first = client.responses.create(model="rwkv7", input="I am Ann.")
    assert first.status == "completed" and first.output_text == f"User: I am Ann.\n\n{ANSWER}"
    branches = [
        client.responses.create(model="rwkv7", input=text, previous_response_id=first.id)
        for text in ("Left?", "Right?")
    ]
    for text, branch in zip(("Left?", "Right?"), branches, strict=True):
        assert branch.previous_response_id == first.id
        assert branch.usage and branch.usage.input_tokens == len(
            f"User: {text}\n\n{ANSWER}"
        )  # the new turn, not the conversation
        assert state(front, branch.id) == f"User: I am Ann.\n\n{ANSWER}\n\nUser: {text}\n\n{ANSWER}"
    assert state(front, first.id) == f"User: I am Ann.\n\n{ANSWER}"


def test_an_input_is_counted_as_a_response_counts_it(front: FrontendProcess, client: OpenAI):
    first = client.responses.create(model="rwkv7", input="I am Ann.", instructions="Be brief.")
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    for fields in (
        {"input": "I am Ann.", "instructions": "Be brief."},
        {"input": "Who?", "previous_response_id": first.id},
        {"input": "Who?", "tools": [tool], "tool_choice": "required"},
        {"input": "Who?", "reasoning": {"effort": "high"}},
    ):
        before = set(front.engine.sessions)
        counted = client.responses.input_tokens.count(model="rwkv7", **fields)
        assert counted.object == "response.input_tokens" and set(front.engine.sessions) == before
        request = front.engine.requests[-1]
        assert (request.max_tokens, request.turn, request.grammar) == (0, None, None)
        assert counted.input_tokens == len(request.prompts[0])
        made = client.responses.create(model="rwkv7", **fields)
        (prompt,) = front.engine.requests[-1].prompts
        behind = "\n\n" if "previous_response_id" in fields else ""
        assert request.prompts == [behind + prompt] and made.status == "completed"
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.input_tokens.count(model="rwkv7", input="Who?", previous_response_id=NO_SUCH)
    with pytest.raises(openai.BadRequestError, match="input"):
        client.responses.input_tokens.count(model="rwkv7", input=" ")


def test_a_response_that_is_over_cannot_be_cancelled(client: OpenAI):
    made = client.responses.create(model="rwkv7", input="I am Ann.")
    with pytest.raises(openai.BadRequestError, match="is over"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(NO_SUCH)
    assert client.responses.retrieve(made.id).status == "completed"


def test_a_stream_says_what_can_be_retrieved_afterwards(client: OpenAI):
    with client.responses.stream(model="rwkv7", input="Tell me.", metadata={"k": "v"}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    kept = client.responses.retrieve(final.id)
    assert (kept.output_text, kept.metadata, kept.usage) == (final.output_text, {"k": "v"}, final.usage)
    assert kept.output_text == f"User: Tell me.\n\n{ANSWER}"


def test_input_items_are_listed_in_pages(client: OpenAI):
    texts = [f"number {i}" for i in range(5)]
    made = client.responses.create(model="rwkv7", input=[{"role": "user", "content": text} for text in texts])

    def listed(**fields) -> list[str]:
        return [item.content[0].text for item in client.responses.input_items.list(made.id, **fields)]

    assert listed() == texts[::-1] and listed(order="asc") == texts
    assert listed(order="asc", limit=2) == texts  # the SDK goes on to the next page
    page = client.responses.input_items.list(made.id, limit=2, order="asc")
    assert len(page.data) == 2 and page.has_more
    for field, value in (("limit", 0), ("limit", "x"), ("order", "up"), ("after", "msg_nowhere")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_items.list(made.id, extra_query={field: value})
        assert caught.value.param == field


def test_a_deleted_response_is_gone_with_its_state(front: FrontendProcess, client: OpenAI):
    made = client.responses.create(model="rwkv7", input="Forget me.")
    answer = front.http.delete(f"/v1/responses/{made.id}")
    assert (answer.status_code, answer.json()) == (
        200,
        {"id": made.id, "object": "response", "deleted": True},
    )
    assert f"response:{made.id}" not in front.engine.sessions
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="rwkv7", input="And?", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_no_response_is_stored_where_texts_are_not(tmp_path: Path):
    """Nor does the server say that requests can be paused."""
    with (
        ChatEngine(f"ipc://{tmp_path}/engine") as engine,
        FrontendProcess(engine, token_log=False) as process,
        OpenAI(base_url=f"http://127.0.0.1:{process.port}/v1", api_key="unused", max_retries=0) as client,
    ):
        made = client.responses.create(model="rwkv7", input="A secret.", store=True)
        assert made.status == "completed" and made.store is False
        assert not engine.sessions
        assert process.http.get("/v1/server/status").json()["capabilities"]["pause_resume"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        for stream in (False, True):
            with pytest.raises(openai.NotFoundError, match="--no-token-log") as caught:
                client.responses.create(
                    model="rwkv7", input="And?", previous_response_id=made.id, stream=stream
                )
            assert caught.value.code == "previous_response_not_found"
        reference = {"type": "item_reference", "id": made.output[0].id}
        with pytest.raises(openai.NotFoundError, match=r"--no-token-log.*`store`"):
            client.responses.create(model="rwkv7", input=[reference])


def test_a_state_that_has_gone_while_its_document_stayed_cannot_be_continued(
    front: FrontendProcess, client: OpenAI
):
    made = client.responses.create(model="rwkv7", input="Evict me.")
    del front.engine.sessions[f"response:{made.id}"]
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="rwkv7", input="And?", previous_response_id=made.id, stream=stream)
        assert caught.value.code == "previous_response_not_found"


def test_nothing_is_kept_without_store(front: FrontendProcess, client: OpenAI):
    before = set(front.engine.sessions)
    made = client.responses.create(model="rwkv7", input="Off the record.", store=False)
    assert made.output_text and set(front.engine.sessions) == before
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    first = client.responses.create(model="rwkv7", input="On the record.")
    last = client.responses.create(
        model="rwkv7", input="Not this.", previous_response_id=first.id, store=False
    )
    assert (
        last.output_text.startswith("User: On the record.")
        and state(front, first.id) == f"User: On the record.\n\n{ANSWER}"
    )


@pytest.mark.parametrize("response_id", [NO_SUCH, "resp_1", "x%2Fy", "chat"])
def test_ids_that_are_none(front: FrontendProcess, response_id: str):
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        answer = front.http.request(method, f"/v1/responses/{response_id}{path}")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "response_not_found"
    answer = front.http.post("/v1/responses", json={"input": "x", "previous_response_id": response_id})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "previous_response_not_found"


def test_items_of_stored_responses_may_be_sent_as_references(front: FrontendProcess, client: OpenAI):
    """AI SDK sends them from the second turn on."""
    first = client.responses.create(model="rwkv7", input="I am Ann.")
    (asked,) = client.responses.input_items.list(first.id)
    reference = {"type": "item_reference", "id": first.output[0].id}
    again = client.responses.create(
        model="rwkv7",
        input=[{"id": asked.id}, reference, {"role": "user", "content": "Who?"}],
        store=False,
    )
    said = first.output_text.rstrip("\n").replace("\n\n", "\n")
    (prompt,) = front.engine.requests[-1].prompts
    assert prompt == f"User: I am Ann.\n\nAssistant: {said}\n\nUser: Who?\n\n{ANSWER}"
    assert again.status == "completed"
    kept = client.responses.create(model="rwkv7", input=[reference, {"role": "user", "content": "Who?"}])
    listed = [item.id for item in client.responses.input_items.list(kept.id, order="asc")]
    assert listed[0] == first.output[0].id
    assert len({*listed, first.output[0].id, kept.output[0].id}) == 3, "each item has an id of its own"


def test_thoughts_and_calls_may_be_sent_as_references_too(front: FrontendProcess, client: OpenAI):
    """The example in the prompt for a tool, which is echoed, is a call."""
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
    asked = [
        client.responses.create(model="rwkv7", input="Hi", reasoning={"effort": effort}, tools=[tool])
        for effort in ("high", "none")
    ]
    thought, call = asked[0].output[0], asked[1].output[-1]
    assert (thought.type, call.type, call.name) == ("reasoning", "function_call", "look")
    references = [{"type": "item_reference", "id": item.id} for item in (thought, call)]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    client.responses.create(model="rwkv7", input=[*references, result])
    (prompt,) = front.engine.requests[-1].prompts
    assert prompt == (
        f'Assistant: <tool_call>{{"name": "look", "arguments": {{}}}}</tool_call>\n\nTool: sunny\n\n{ANSWER}'
    )


def test_a_reference_to_what_is_not_stored_is_a_404_that_says_store(front: FrontendProcess, client: OpenAI):
    unstored = client.responses.create(model="rwkv7", input="Hi", store=False)
    deleted = client.responses.create(model="rwkv7", input="Hi")
    client.responses.delete(deleted.id)
    other = client.responses.create(model="rwkv7", input="Hi").output[0].id
    for identity in (unstored.output[0].id, deleted.output[0].id, "msg_1", other + "9", "rs_" + other[4:]):
        reference = {"type": "item_reference", "id": identity}
        with pytest.raises(openai.NotFoundError, match="`store`") as caught:
            client.responses.create(model="rwkv7", input=[{"role": "user", "content": "a"}, reference])
        assert (caught.value.code, caught.value.param) == ("item_not_found", "input[1].id")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="rwkv7", input=[{"type": "item_reference"}])
    assert refused.value.param == "input[0].id"


def test_an_id_cannot_reach_other_sessions(front: FrontendProcess):
    front.engine.sessions["private"] = "secret"
    for response_id in ("private", "../private", ":private"):
        answer = front.http.post("/v1/responses", json={"input": "x", "previous_response_id": response_id})
        assert (
            answer.status_code == 404 and front.http.delete(f"/v1/responses/{response_id}").status_code == 404
        )
    assert front.engine.sessions["private"] == "secret"


@pytest.mark.parametrize(
    "method, path, allow",
    [
        ("PUT", f"/v1/responses/{NO_SUCH}", "GET, DELETE, HEAD, OPTIONS"),
        ("POST", f"/openai/v1/responses/{NO_SUCH}/input_items", "GET, HEAD, OPTIONS"),
        ("GET", "/v1/responses", "POST, OPTIONS"),
    ],
)
def test_wrong_methods_are_told_the_right_ones(front: FrontendProcess, method: str, path: str, allow: str):
    answer = front.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow) and "error" in answer.json()


def test_browsers_may_ask(front: FrontendProcess):
    answer = front.http.options(f"/v1/responses/{NO_SUCH}", headers={"origin": "https://example.org"})
    assert answer.status_code == 204 and "DELETE" in answer.headers["access-control-allow-methods"]


def test_a_password_guards_every_response():
    with FrontendProcess(password="open sesame") as process:
        for method, path in (
            ("POST", ""),
            ("GET", f"/{NO_SUCH}"),
            ("DELETE", f"/{NO_SUCH}"),
            ("GET", f"/{NO_SUCH}/input_items"),
        ):
            answer = process.http.request(
                method, f"/v1/responses{path}", json={"input": "x"} if method == "POST" else None
            )
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        right = {"authorization": "Bearer open sesame"}
        assert process.http.post("/v1/responses", json={"input": "x"}, headers=right).status_code == 200
        assert process.http.get(f"/v1/responses/{NO_SUCH}", headers=right).status_code == 404


def test_bad_bodies_are_told_in_openais_form(front: FrontendProcess):
    for body, status in (
        (b"{", 400),
        (b"[]", 400),
        (b"", 400),
        (json.dumps({"input": "x", "background": True}).encode(), 400),
    ):
        answer = front.http.post("/v1/responses", content=body)
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(front: FrontendProcess, stream: bool):
    body = {"input": "!hang", "stream": stream}
    with front.client() as http, http.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.status_code == 200
    request = front.engine.requests[-1]
    assert front.engine.wait_for(lambda: request.id in front.engine.cancelled, 30)


def test_what_the_engine_refuses_has_its_status(front: FrontendProcess):
    for mischief, status in (("overloaded", 429), ("unavailable", 503), ("invalid", 400), ("fail", 500)):
        answer = front.http.post("/v1/responses", json={"input": f"!{mischief}"})
        assert answer.status_code == status and "The fake engine" in answer.json()["error"]["message"]


def test_a_response_that_cannot_be_stored_is_an_error(
    front: FrontendProcess, monkeypatch: pytest.MonkeyPatch
):
    reply, before = front.engine.reply_to, dict(front.engine.sessions)
    monkeypatch.setattr(
        front.engine,
        "reply_to",
        lambda c: Rejected(c.id, "invalid", "The disk is full.") if isinstance(c, PutDocument) else reply(c),
    )
    answer = front.http.post("/v1/responses", json={"input": "Hi"})
    assert (
        answer.status_code == 500
        and "could not be stored: The disk is full." in answer.json()["error"]["message"]
    )
    streamed = front.http.post("/v1/responses", json={"input": "Hi", "stream": True}).text
    assert (
        "could not be stored: The disk is full." in streamed
        and "response.failed" in streamed
        and "response.completed" not in streamed
    )
    assert front.engine.sessions == before, "nobody could go on from their sessions, or delete them"


def test_an_engine_that_breaks_down_fails_the_response(front: FrontendProcess, client: OpenAI):
    events = list(client.responses.create(model="rwkv7", input="!broken", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error and events[-1].response.error.message == "The fake engine broke down."
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(events[-1].response.id)


def test_a_reply_that_takes_long_is_whole_and_kept(front: FrontendProcess, client: OpenAI):
    made = client.responses.create(model="rwkv7", input="!late")
    assert (
        made.output_text.startswith("late")
        and client.responses.retrieve(made.id).output_text == made.output_text
    )


def test_a_response_that_ends_while_the_server_drains_is_kept(tmp_path: Path):
    with (
        ChatEngine(f"ipc://{tmp_path}/engine") as engine,
        FrontendProcess(engine) as process,
        ThreadPoolExecutor() as pool,
    ):
        answer = pool.submit(process.http.post, "/v1/responses", json={"input": "!late"})
        assert engine.wait_for(lambda: len(engine.requests) == 1, 30)
        process.control.send(Drain(120))
        made = answer.result()
        assert made.status_code == 200 and made.json()["status"] == "completed"
        stored = [(type(command), command.key) for command in engine.commands]
        assert stored == [(PutDocument, f"response:{made.json()['id']}")]
        process.process.join(60)
        assert process.process.exitcode == 0
