"""The official OpenAI Python SDK against the real server, with strict response validation."""

import json

import openai
import pytest
from openai import OpenAI
from serving import Server

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PROMPT = "User: What is the capital of France?\n\nAssistant:"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
EXACT = {"temperature": 0, "presence_penalty": 0}  # greedy, no penalties


@pytest.fixture(scope="module", params=["/v1", "/openai/v1"])
def client(server: Server, request: pytest.FixtureRequest) -> OpenAI:
    return OpenAI(
        base_url=server.url + request.param, api_key="unused", max_retries=0, _strict_response_validation=True
    )


def test_models_are_listed(client: OpenAI):
    models = client.models.list()
    assert [m.object for m in models.data] == ["model"]
    assert client.models.retrieve(models.data[0].id) == client.models.retrieve("rwkv7") == models.data[0]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_chat_answers(client: OpenAI):
    reply = client.chat.completions.create(model="rwkv7", messages=QUESTION, **EXACT)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert (
        reply.usage and reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    )
    assert reply.model == client.models.list().data[0].id


def test_a_stream_brings_the_same_text_and_usage(client: OpenAI):
    whole = client.chat.completions.create(model="rwkv7", messages=QUESTION, **EXACT)
    chunks = list(
        client.chat.completions.create(
            model="rwkv7", messages=QUESTION, stream=True, stream_options={"include_usage": True}, **EXACT
        )
    )
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "stop"
    ]
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert len({(c.id, c.created) for c in chunks}) == 1


def test_max_tokens_ends_with_length(client: OpenAI):
    reply = client.chat.completions.create(model="rwkv7", messages=QUESTION, max_completion_tokens=2, **EXACT)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage and reply.usage.completion_tokens == 2


def test_stop_strings_end_the_text(client: OpenAI):
    whole = (
        client.chat.completions.create(model="rwkv7", messages=QUESTION, **EXACT).choices[0].message.content
        or ""
    )
    cut = client.chat.completions.create(
        model="rwkv7", messages=QUESTION, stop=["is", "never"], **EXACT
    ).choices[0]
    assert "is" in whole and cut.message.content == whole[: whole.index("is")]
    assert cut.finish_reason == "stop"


def test_n_choices_with_a_seed_repeat(client: OpenAI):
    def texts() -> list[str | None]:
        reply = client.chat.completions.create(
            model="rwkv7",
            messages=[{"role": "user", "content": "Tell me something"}],
            n=3,
            seed=7,
            temperature=1.5,
            top_p=1,
            max_tokens=12,
            extra_body={"top_k": 0},
        )
        assert [c.index for c in reply.choices] == [0, 1, 2]
        return [c.message.content for c in reply.choices]

    assert texts() == texts()


def test_logprobs_are_those_of_the_drawn_tokens(client: OpenAI):
    reply = client.chat.completions.create(
        model="rwkv7", messages=QUESTION, logprobs=True, top_logprobs=3, **EXACT
    )
    entries = reply.choices[0].logprobs.content if reply.choices[0].logprobs else None
    assert entries and "".join(e.token for e in entries) == reply.choices[0].message.content
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == pytest.approx(
            entry.logprob
        )


def test_a_tool_is_called_and_its_answer_read(client: OpenAI):
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(model="rwkv7", messages=question, tools=[TOOL], **EXACT).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls
    call = first.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    history = [
        *question,
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 18, "sky": "sunny"}'},
    ]
    second = client.chat.completions.create(model="rwkv7", messages=history, tools=[TOOL], **EXACT).choices[0]
    assert second.finish_reason == "stop" and "18" in (second.message.content or "")


def test_a_tool_call_streams_without_its_tags(client: OpenAI):
    chunks = list(
        client.chat.completions.create(
            model="rwkv7",
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            tools=[TOOL],
            stream=True,
            **EXACT,
        )
    )
    deltas = [c.choices[0].delta for c in chunks]
    calls = [call for d in deltas for call in d.tool_calls or []]
    assert [call.function.name for call in calls if call.function] == ["get_weather"]
    assert not any("<tool" in (d.content or "") for d in deltas)
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["tool_calls"]


def test_thoughts_are_kept_apart(client: OpenAI):
    reply = client.chat.completions.create(
        model="rwkv7", messages=QUESTION, extra_body={"enable_think": True}, **EXACT
    )
    message = reply.choices[0].message
    assert "Paris" in (message.content or "") and "think" not in (message.content or "")
    assert message.model_extra and message.model_extra["reasoning_content"].strip()


def test_stops_of_the_client_wait_for_the_answer(client: OpenAI):
    def ask(**fields):
        extra = {"chat_template_kwargs": {"rwkv_generation_prompt": "open_think"}}
        return client.chat.completions.create(
            model="rwkv7", messages=QUESTION, extra_body=extra, **fields, **EXACT
        ).choices[0]

    whole = ask().message
    thought, answer = whole.model_extra["reasoning_content"], whole.content
    word = next(w for w in thought.split() if answer.find(w) > 0)
    cut = ask(stop=word)
    assert cut.message.model_extra["reasoning_content"] == thought and cut.finish_reason == "stop"
    assert cut.message.content == answer[: answer.index(word)]


def test_an_unknown_way_to_think_is_refused_with_the_known_ones(client: OpenAI):
    for extra, known in (
        ({"think_type": "deep"}, "preferChinese"),
        ({"chat_template_kwargs": {"rwkv_prompt_template": "chatml"}}, "function_calling"),
        ({"chat_template_kwargs": {"rwkv_generation_prompt": "slow"}}, "fake_think"),
    ):
        with pytest.raises(openai.BadRequestError, match=known):
            client.chat.completions.create(model="rwkv7", messages=QUESTION, extra_body=extra)
        with pytest.raises(openai.BadRequestError, match=known):
            client.responses.create(model="rwkv7", input="Hi", extra_body=extra)


def test_completions_continue_the_prompt(client: OpenAI):
    reply = client.completions.create(model="rwkv7", prompt=PROMPT, temperature=0, max_tokens=20)
    assert "Paris" in reply.choices[0].text
    # A chunk before the last has no finish reason, as OpenAI sends it; the SDK's strict types for this old
    # route have no room for that.
    lenient = OpenAI(base_url=client.base_url, api_key="unused")
    streamed = lenient.completions.create(
        model="rwkv7", prompt=PROMPT, temperature=0, max_tokens=20, stream=True
    )
    assert "".join(c.choices[0].text for c in streamed) == reply.choices[0].text


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"temperature": 9}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"n": 0}, "n"),
    ],
)
def test_bad_input_is_a_bad_request_that_names_the_field(client: OpenAI, fields: dict, param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="rwkv7", messages=QUESTION, **fields)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


def test_an_unknown_route_is_not_found(client: OpenAI):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="rwkv7", input="text")


def test_a_wrong_key_is_an_authentication_error(locked_server: Server):
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=locked_server.url + "/v1", api_key="wrong", max_retries=0).models.list()
    right = OpenAI(
        base_url=locked_server.url + "/v1",
        api_key="open sesame",
        max_retries=0,
        _strict_response_validation=True,
    )
    assert right.models.list().data
