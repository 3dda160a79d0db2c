"""/v1/messages over HTTP with the official SDK, against an engine that echoes prompts."""

from datetime import UTC, datetime

import anthropic
import pytest
from anthropic import Anthropic
from fake_engine import INFO
from frontend_process import PASSWORD, FrontendProcess

from rwkv_batch.wire.protocol import AdapterInfo

HI = [{"role": "user", "content": "Hi"}]
ECHO = "User: Hi\n\nAssistant: <think>\n</think>\n"


def client_of(front: FrontendProcess, **key: str) -> Anthropic:
    url = f"http://127.0.0.1:{front.port}"
    return Anthropic(base_url=url, max_retries=0, _strict_response_validation=True, **key)


@pytest.fixture(scope="module")
def client(front: FrontendProcess) -> Anthropic:
    return client_of(front, api_key=PASSWORD)


def ask(client: Anthropic, text: str = "Hi", **fields):
    messages = [{"role": "user", "content": text}]
    return client.messages.create(model="rwkv7", max_tokens=1000, messages=messages, **fields)


def test_a_message_is_answered_by_the_model(front: FrontendProcess, client: Anthropic):
    message = ask(client)
    (block,) = message.content
    assert (message.model, message.role, block.text) == ("fake-rwkv", "assistant", ECHO)
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", len(ECHO))
    assert front.engine.requests[-1].max_tokens == 1000


def test_a_stream_brings_the_same_message(client: Anthropic):
    whole = ask(client, "The same")
    with client.messages.stream(
        model="rwkv7",
        max_tokens=1000,
        messages=[{"role": "user", "content": "The same"}],
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_count_is_that_of_the_prompt_and_generates_nothing(front: FrontendProcess, client: Anthropic):
    counted = client.messages.count_tokens(model="rwkv7", messages=HI, system="Be brief.")
    assert counted.input_tokens == len("System: Be brief.\n\n" + ECHO)
    assert front.engine.requests[-1].max_tokens == 0
    asked = client.messages.create(model="rwkv7", max_tokens=1, messages=HI, system="Be brief.")
    usage = asked.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


def test_a_stop_sequence_is_named(client: Anthropic):
    message = ask(client, stop_sequences=["Assis", "never"])
    assert message.content[0].text == "User: Hi\n\n"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Assis")
    *_, delta, stop = ask(client, stop_sequences=["Assis"], stream=True)
    assert (delta.type, stop.type) == ("message_delta", "message_stop")
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == ("stop_sequence", "Assis")


@pytest.mark.parametrize(
    "key", [{"api_key": PASSWORD}, {"auth_token": PASSWORD}], ids=["x-api-key", "bearer"]
)
def test_the_password_is_the_key(front: FrontendProcess, key: dict[str, str]):
    assert ask(client_of(front, **key)).stop_reason == "end_turn"


def test_errors_have_anthropics_form(front: FrontendProcess, client: Anthropic):
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        ask(client_of(front, api_key="wrong"))
    assert wrong.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(client, extra_body={"temperature": 9})
    assert bad.value.body["type"] == "error"
    assert bad.value.body["error"]["message"].startswith("temperature: ")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=9, messages=HI)
    plain = front.http.get("/v1/messages", headers={"x-api-key": PASSWORD})
    assert (plain.status_code, plain.json()["error"]["type"]) == (405, "invalid_request_error")
    missing = front.http.post("/v1/messages/batches", headers={"x-api-key": PASSWORD})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("word", "error", "kind"),
    [
        ("overloaded", anthropic.RateLimitError, "rate_limit_error"),
        ("invalid", anthropic.BadRequestError, "invalid_request_error"),
        ("fail", anthropic.InternalServerError, "api_error"),
    ],
)
def test_what_the_engine_refuses_has_its_type(client: Anthropic, word, error, kind):
    with pytest.raises(error, match="The fake engine") as refused:
        ask(client, f"!{word}")
    assert refused.value.body["error"]["type"] == kind


def test_an_engine_that_breaks_down_ends_the_stream_with_an_error(client: Anthropic):
    seen = []
    with pytest.raises(anthropic.APIStatusError, match="The fake engine broke down"):
        for event in ask(client, "!broken", stream=True):
            seen.append(event.type)
    assert seen[0] == "message_start" and "message_stop" not in seen


def test_models_are_listed_in_anthropics_form(front: FrontendProcess, client: Anthropic):
    for name in ("a", "b", "c"):
        front.engine.adapters[name] = AdapterInfo(name, "5eed", 4, 0.5, f"{name}.pth")
    names = [INFO.model, *(f"{INFO.model}:{name}" for name in "abc")]
    try:
        page = client.models.list()
        assert [model.id for model in page.data] == names and page.has_more is False
        assert (page.first_id, page.last_id) == (names[0], names[-1])
        assert page.data[1].created_at == datetime.fromtimestamp(0.5, UTC)
        assert [model.id for model in client.models.list(limit=2)] == names  # in two pages
        backwards = client.models.list(limit=2, before_id=names[3])
        assert [model.id for model in backwards.data] == names[1:3] and backwards.has_more
        assert [model.id for model in client.models.list(after_id=names[2]).data] == names[3:]
        one = client.models.retrieve(names[1])
        assert (one.id, one.display_name) == (names[1], names[1])
    finally:
        front.engine.adapters.clear()
    theirs = front.http.get("/v1/models", headers={"x-api-key": PASSWORD}).json()
    assert theirs["object"] == "list" and theirs["data"][0]["object"] == "model"


def test_errors_of_models_have_anthropics_form(front: FrontendProcess, client: Anthropic):
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        client_of(front, api_key="wrong").models.list()
    assert wrong.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("other")
    assert missing.value.body["error"]["type"] == "not_found_error"
    for field, value in (("limit", 0), ("after_id", "other"), ("before_id", "other")):
        with pytest.raises(anthropic.BadRequestError) as bad:
            client.models.list(extra_query={field: value})
        assert bad.value.body["error"]["message"].startswith(f"{field}: ")


def test_a_reply_and_an_error_name_the_request(client: Anthropic):
    named = {"x-request-id": "mine"}
    assert ask(client, extra_headers=named)._request_id == "mine"
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(client, extra_headers=named, extra_body={"temperature": 9})
    assert bad.value.request_id == "mine"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(front: FrontendProcess, stream: bool):
    messages = [{"role": "user", "content": "!hang"}]
    body = {"model": "rwkv7", "max_tokens": 9, "messages": messages, "stream": stream}
    headers = {"x-api-key": PASSWORD}
    with front.client() as http, http.stream("POST", "/v1/messages", json=body, headers=headers) as reply:
        assert reply.status_code == 200
    request = front.engine.requests[-1]
    assert front.engine.wait_for(lambda: request.id in front.engine.cancelled, 30)
