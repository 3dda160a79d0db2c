"""The official Anthropic SDK against the real server and the bundled model, strictly validated.

What the model answers is that of the same chat on the OpenAI route.
"""

import json

import pytest
from anthropic import Anthropic
from openai import OpenAI
from serving import Server

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "The weather in a city", "input_schema": CITY}
WEATHER = "What is the weather in Paris?"
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
