"""Bound answers over HTTP with the official SDK, from the bundled model at temperature 1."""

import json
import re

import jsonschema
import openai
import pytest
from openai import OpenAI
from serving import Server

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}
OTHER = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
HI = [{"role": "user", "content": "Tell me about Anna."}]
HOT = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 300}
ALL = {"top_k": -1}


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(
        base_url=server.url + "/v1", api_key="unused", max_retries=0, _strict_response_validation=True
    )


def assert_people(texts: list[str | None]) -> None:
    for text in texts:
        jsonschema.validate(json.loads(text or ""), PERSON)


@pytest.mark.parametrize("template", ["assistant", "bot", "function_calling"])
def test_a_chat_answers_by_the_schema(client: OpenAI, template: str):
    extra = ALL | {"chat_template_kwargs": {"rwkv_prompt_template": template}}
    reply = client.chat.completions.create(
        model="rwkv7", messages=HI, response_format=FORMAT, n=8, seed=1, extra_body=extra, **HOT
    )
    assert_people([c.message.content for c in reply.choices if c.finish_reason == "stop"])
    assert sum(c.finish_reason == "stop" for c in reply.choices) > 4


@pytest.mark.parametrize("effort", ["none", "high"])
def test_a_thought_is_free_and_the_answer_bound(client: OpenAI, effort: str):
    reply = client.chat.completions.create(
        model="rwkv7",
        messages=HI,
        response_format=FORMAT,
        n=8,
        seed=2,
        extra_body=ALL | {"reasoning_effort": effort},
        **HOT | {"max_tokens": 600},
    )
    ended = [c for c in reply.choices if c.finish_reason == "stop"]
    assert_people([c.message.content for c in ended])
    assert ended and all((effort == "high") == hasattr(c.message, "reasoning_content") for c in ended)


def test_a_stream_is_the_whole_text(client: OpenAI):
    fields = {"model": "rwkv7", "messages": HI, "response_format": FORMAT, "seed": 3, "extra_body": ALL} | HOT
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(stream=True, **fields))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert_people([text])


def test_json_mode_answers_with_an_object(client: OpenAI):
    reply = client.chat.completions.create(
        model="rwkv7", messages=HI, response_format={"type": "json_object"}, n=4, seed=1, **HOT
    )
    ended = [c.message.content for c in reply.choices if c.finish_reason == "stop"]
    assert all(isinstance(json.loads(text or ""), dict) for text in ended)


@pytest.mark.parametrize(
    ("fields", "valid"),
    [
        ({"guided_regex": "[A-Z][a-z]{2,8} is [0-9]{1,2}\\."}, r"[A-Z][a-z]{2,8} is [0-9]{1,2}\."),
        ({"guided_choice": ["red", "green", "deep blue"]}, "red|green|deep blue"),
        ({"guided_grammar": 'root ::= term ("+" term)? \nterm ::= [0-9]+ "x"'}, r"\d+x(\+\d+x)?"),
        ({"guided_json": {"enum": ["a", "b"]}}, '"a"|"b"'),
        ({"structured_outputs": {"choice": ["north", "south"]}}, "north|south"),
    ],
)
def test_the_fields_of_vllm(client: OpenAI, fields: dict, valid: str):
    chat = client.chat.completions.create(model="rwkv7", messages=HI, n=4, seed=5, extra_body=fields, **HOT)
    plain = client.completions.create(model="rwkv7", prompt="It is ", n=4, seed=5, extra_body=fields, **HOT)
    texts = [c.message.content for c in chat.choices if c.finish_reason == "stop"]
    texts += [c.text for c in plain.choices if c.finish_reason == "stop"]
    assert len(texts) >= 6
    assert all(re.fullmatch(valid, text or "") for text in texts), texts


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize(("thinks", "strict"), [(False, True), (True, False), (False, False)])
def test_a_demanded_call_has_arguments_by_the_schema(
    client: OpenAI, choice: object, thinks: bool, strict: bool
):
    offered = {"type": "function", "function": TOOL["function"] | {"strict": strict}}
    reply = client.chat.completions.create(
        model="rwkv7",
        messages=HI,
        tools=[offered] if choice == "required" else [offered, OTHER],
        tool_choice=choice,
        n=6,
        seed=7,
        extra_body=ALL | {"enable_think": thinks},
        **HOT | {"max_tokens": 500},
    )
    ended = [c.message for c in reply.choices if c.finish_reason == "tool_calls"]
    assert ended
    for message in ended:
        for call in message.tool_calls or ():
            assert call.function.name == "get_weather"
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)


@pytest.mark.parametrize("thinks", [False, True])
def test_a_call_comes_first_and_then_an_answer_by_the_schema(client: OpenAI, thinks: bool):
    """With a choice of the model's own, and a tool that is not strict."""
    function = TOOL["function"] | {"strict": False, "description": "The weather in a city"}
    fields = {
        "model": "rwkv7",
        "tools": [{"type": "function", "function": function}],
        "response_format": FORMAT,
        "n": 6,
        "seed": 11,
        "extra_body": ALL | {"enable_think": thinks},
    } | HOT
    turns: list = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = client.chat.completions.create(messages=turns, **fields)
    calls = [call for choice in called.choices for call in choice.message.tool_calls or ()]
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    call = calls[0].model_dump()
    turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
    turns.append({"role": "tool", "tool_call_id": call["id"], "content": "sunny, 22 degrees"})
    answered = client.chat.completions.create(messages=turns, **fields)
    ended = [choice.message.content for choice in answered.choices if choice.finish_reason == "stop"]
    assert ended
    assert_people(ended)


def test_a_strict_tool_that_is_called_freely_is_called_by_its_schema(client: OpenAI):
    question = [{"role": "user", "content": "What is the weather in Berlin?"}]
    reply = client.chat.completions.create(
        model="rwkv7", messages=question, tools=[TOOL], n=8, seed=7, extra_body=ALL, **HOT
    )
    calls = [call for c in reply.choices for call in c.message.tool_calls or ()]
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    assert all(c.message.content or c.message.tool_calls for c in reply.choices)


def test_responses_are_bound_by_their_format(client: OpenAI):
    form = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    reply = client.responses.create(
        model="rwkv7",
        input="Tell me about Anna.",
        text={"format": form},
        max_output_tokens=300,
        extra_body=ALL,
    )
    assert reply.status == "completed"
    assert_people([reply.output_text])
    assert reply.text and reply.text.format and reply.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_regex": "(a"}, "regular expression of guided_regex"),
        ({"guided_json": {"type": "thing"}}, "JSON schema of guided_json cannot be used: #/type"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "schema of response_format"),
        ({"guided_grammar": "start: nowhere"}, "grammar of guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_used_is_a_bad_request(client: OpenAI, fields: dict, words: str):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            client.chat.completions.create(model="rwkv7", messages=HI, stream=stream, extra_body=fields)
        assert refused.value.param in fields


def test_sampling_fields_are_honoured(client: OpenAI):
    """A min_p or top_a of 1 leaves the likeliest token."""
    prompt = "User: What is the capital of France?\n\nAssistant:"
    greedy = client.completions.create(model="rwkv7", prompt=prompt, temperature=0)
    for fields in ({"min_p": 1.0}, {"top_a": 1.0, "min_p": 1.0}):
        drawn = client.completions.create(model="rwkv7", prompt=prompt, temperature=1, extra_body=fields)
        assert drawn.choices[0].text == greedy.choices[0].text
    named = "User: My name is Zoltan.\n\nAssistant: Hello!\n\nUser: What is my name?\n\nAssistant:"
    again, changed = (
        client.completions.create(
            model="rwkv7", prompt=named, temperature=0, extra_body={"repetition_penalty": penalty}
        )
        for penalty in (1.0, 2.0)
    )
    assert again.choices[0].text == " Your name is Zoltan." != changed.choices[0].text


def test_many_answers_of_one_prompt(client: OpenAI):
    fields = {"max_tokens": 12, "temperature": 2, "seed": 1}
    reply = client.completions.create(model="rwkv7", prompt="User: Tell me a story.", n=200, **fields)
    assert [choice.index for choice in reply.choices] == list(range(200))
    assert len({choice.text for choice in reply.choices}) > 1
