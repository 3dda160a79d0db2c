"""The official Anthropic SDK against the real server and the bundled model, strictly validated.

What the model answers is that of the same chat on the OpenAI route.
"""

import json
from typing import Annotated, Literal

import anthropic
import jsonschema
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, Field
from serving import Server

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "The weather in a city", "input_schema": CITY}
WEATHER = "What is the weather in Paris?"
STRICT_CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
HOT = {"temperature": 1.0, "top_k": -1, "top_p": 1.0}
EXACT = {"temperature": 0, "presence_penalty": 0}  # greedy, no penalties


@pytest.fixture(scope="module")
def client(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="unused", max_retries=0, _strict_response_validation=True)


@pytest.fixture(scope="module")
def openai(server: Server) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def ask(client: Anthropic, text: str, **fields):
    messages = [{"role": "user", "content": text}]
    fields = {"model": "rwkv7", "max_tokens": 100, "messages": messages, "extra_body": EXACT} | fields
    return client.messages.create(**fields)


def chat(openai: OpenAI, text: str, **fields):
    messages = [*fields.pop("before", []), {"role": "user", "content": text}]
    reply = openai.chat.completions.create(
        model="rwkv7", max_tokens=100, messages=messages, extra_body=EXACT, **fields
    )
    return reply.choices[0], reply.usage


def text_of(message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("question", ["What is the capital of France?", "What is 7 + 5?"])
def test_an_answer_is_that_of_the_openai_route(client: Anthropic, openai: OpenAI, question: str):
    message, (choice, usage) = ask(client, question), chat(openai, question)
    assert text_of(message) == choice.message.content != ""
    assert (message.stop_reason, choice.finish_reason) == ("end_turn", "stop")
    assert message.usage.output_tokens == usage.completion_tokens
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == usage.prompt_tokens
    counted = client.messages.count_tokens(model="rwkv7", messages=[{"role": "user", "content": question}])
    assert counted.input_tokens == usage.prompt_tokens


def test_a_stream_ends_in_the_same_message(client: Anthropic):
    whole = ask(client, "What colour is the sky?", system="You are a helpful assistant.")
    with client.messages.stream(
        model="rwkv7",
        max_tokens=100,
        messages=[{"role": "user", "content": "What colour is the sky?"}],
        system="You are a helpful assistant.",
        extra_body=EXACT,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert kinds >= {"message_start", "content_block_delta", "content_block_stop", "message_stop"}
    assert text_of(final) == text_of(whole) and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_call_is_made_and_its_result_read(client: Anthropic, openai: OpenAI):
    called = ask(client, WEATHER, tools=[TOOL])
    (use,) = [block for block in called.content if block.type == "tool_use"]
    assert (called.stop_reason, use.name) == ("tool_use", "get_weather")
    function = {"name": "get_weather", "description": TOOL["description"], "parameters": CITY}
    theirs, _ = chat(openai, WEATHER, tools=[{"type": "function", "function": function}])
    (call,) = theirs.message.tool_calls
    assert use.input == json.loads(call.function.arguments)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny, 22 degrees"}
    answered = client.messages.create(
        model="rwkv7",
        max_tokens=100,
        tools=[TOOL],
        messages=[
            {"role": "user", "content": WEATHER},
            called.to_param(),
            {"role": "user", "content": [result]},
        ],
        extra_body=EXACT,
    )
    assert answered.stop_reason == "end_turn" and text_of(answered)
    with client.messages.stream(
        model="rwkv7",
        max_tokens=100,
        tools=[TOOL],
        messages=[{"role": "user", "content": WEATHER}],
        extra_body=EXACT,
    ) as stream:
        streamed = stream.get_final_message()
    assert [b.model_dump(exclude={"id"}) for b in streamed.content] == [
        b.model_dump(exclude={"id"}) for b in called.content
    ]


def test_a_thought_is_a_block_of_its_own(client: Anthropic):
    message = ask(client, "What is 7 + 5?", thinking={"type": "enabled", "budget_tokens": 1024})
    thought = message.content[0]
    assert thought.type == "thinking" and thought.thinking and thought.signature
    again = client.messages.create(
        model="rwkv7",
        max_tokens=20,
        messages=[
            {"role": "user", "content": "What is 7 + 5?"},
            message.to_param(),
            {"role": "user", "content": "Thanks."},
        ],
        extra_body=EXACT,
    )
    assert again.stop_reason in ("end_turn", "max_tokens")


def test_stop_sequences_and_limits_say_why_a_message_stops(client: Anthropic):
    whole = text_of(ask(client, "What is the capital of France?"))
    word = whole.split()[1]
    cut = ask(client, "What is the capital of France?", stop_sequences=[word, "never"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert text_of(cut) == whole[: whole.index(word)]
    short = ask(client, "What is the capital of France?", max_tokens=2)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)


class Person(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    drink: Literal["tea", "coffee"]
    awake: bool


@pytest.mark.parametrize("thinking", ["disabled", "enabled"])
def test_an_answer_is_bound_by_its_format(client: Anthropic, thinking: str):
    for seed in range(4):
        message = client.messages.parse(
            model="rwkv7",
            max_tokens=500,
            messages=[{"role": "user", "content": "Tell me about Anna."}],
            output_format=Person,
            thinking={"type": thinking, **({"budget_tokens": 1024} if thinking == "enabled" else {})},
            extra_body=HOT | {"seed": seed},
        )
        assert message.stop_reason == "end_turn" and isinstance(message.parsed_output, Person)
        assert (message.content[0].type == "thinking") == (thinking == "enabled")


def test_a_bound_stream_is_the_whole_answer(client: Anthropic):
    fields = {
        "model": "rwkv7",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "Tell me about Anna."}],
        "output_format": Person,
        "extra_body": HOT | {"seed": 1},
    }
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.parsed_output == Person.model_validate_json(text)
    assert text == text_of(client.messages.parse(**fields))


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_demanded_call_is_whole_and_by_the_schema(client: Anthropic, choice: dict, thinks: bool):
    tool = TOOL | {"input_schema": STRICT_CITY, "strict": True}
    hot = HOT | {"seed": 3, "enable_think": thinks}
    message = ask(client, "Hi", tools=[tool], tool_choice=choice, extra_body=hot, max_tokens=500)
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use" and calls
    for call in calls:
        jsonschema.validate(call.input, STRICT_CITY)


def test_a_strict_tool_that_is_called_freely_is_called_by_its_schema(client: Anthropic):
    tool = TOOL | {"input_schema": STRICT_CITY, "strict": True}
    message = ask(client, "What is the weather in Berlin?", tools=[tool])
    (call,) = [block for block in message.content if block.type == "tool_use"]
    jsonschema.validate(call.input, STRICT_CITY)


def test_a_schema_that_cannot_be_used_is_a_bad_request(client: Anthropic):
    form = {"type": "json_schema", "schema": {"type": "thing"}}
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match="JSON schema") as bad:
            ask(client, "Hi", output_config={"format": form}, stream=stream)
        assert bad.value.body["error"]["type"] == "invalid_request_error"


def test_models_are_those_of_the_openai_route(client: Anthropic, openai: OpenAI):
    listed = client.models.list()
    assert [model.id for model in listed] == [model.id for model in openai.models.list()]
    one = client.models.retrieve(listed.data[0].id)
    assert one == listed.data[0] and one.created_at.year >= 2024
