"""Ollama's official client against the real server and the bundled model.

What the model answers is that of the same chat on the OpenAI route.
"""

import json
import re

import httpx
import jsonschema
import ollama
import pytest
from openai import OpenAI
from serving import Server

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city", "parameters": CITY},
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
HOT = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "num_predict": 500}
EXACT = {"temperature": 0, "presence_penalty": 0}  # greedy, no penalties


def said(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


@pytest.fixture(scope="module")
def openai(server: Server) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


@pytest.mark.parametrize("question", ["What is the capital of France?", "What is 7 + 5?"])
def test_an_answer_is_that_of_the_openai_route(client: ollama.Client, openai: OpenAI, question: str):
    model = client.list().models[0]  # the default one
    assert model.model == openai.models.list().data[0].id and model.size > 0
    reply = client.chat(model=model.model, messages=said(question), options=EXACT)
    theirs = openai.chat.completions.create(model="rwkv7", messages=said(question), extra_body=EXACT)
    assert reply.message.content == theirs.choices[0].message.content != ""
    assert (reply.done_reason, reply.eval_count, reply.prompt_eval_count) == (
        theirs.choices[0].finish_reason,
        theirs.usage.completion_tokens,
        theirs.usage.prompt_tokens,
    )
    parts = list(client.chat(model=model.model, messages=said(question), options=EXACT, stream=True))
    assert "".join(part.message.content for part in parts) == reply.message.content
    assert parts[-1].eval_count == reply.eval_count
    prompt = client.generate(model=model.model, prompt=question, options=EXACT)
    assert prompt.response == reply.message.content


def test_a_call_is_made_and_its_result_read(client: ollama.Client, openai: OpenAI):
    question = said("What is the weather in Paris?")
    called = client.chat(model="rwkv7", messages=question, tools=[TOOL], options=EXACT)
    (call,) = called.message.tool_calls
    theirs = openai.chat.completions.create(model="rwkv7", messages=question, tools=[TOOL], extra_body=EXACT)
    function = theirs.choices[0].message.tool_calls[0].function
    assert (call.function.name, call.function.arguments) == (function.name, json.loads(function.arguments))
    result = {"role": "tool", "tool_name": "get_weather", "content": "sunny, 22 degrees"}
    messages = [*question, called.message, result]
    answered = client.chat(model="rwkv7", messages=messages, tools=[TOOL], options=EXACT)
    assert answered.done_reason == "stop" and answered.message.content


def test_a_thought_has_a_field_of_its_own(client: ollama.Client):
    question = said("What is 7 + 5?")
    parts = list(client.chat(model="rwkv7", messages=question, think=True, options=EXACT, stream=True))
    assert any(part.message.thinking for part in parts)
    whole = client.chat(model="rwkv7", messages=question, think=True, options=EXACT)
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking
    assert "".join(part.message.content for part in parts) == whole.message.content


def test_a_middle_is_that_of_the_native_route(client: ollama.Client, openai: OpenAI, server: Server):
    """By Ollama's, OpenAI's and llama.cpp's routes for editors."""
    prefix, suffix = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"
    greedy = {"temperature": 0, "alpha_presence": 0, "alpha_frequency": 0, "stop_tokens": [0]}
    pair = {"prefix": [prefix], "suffix": [suffix], "max_tokens": 20}
    native = httpx.post(server.url + "/FIM/v1/batch-FIM", json=pair | greedy, timeout=60).json()
    middle = native["choices"][0]["message"]["content"]
    assert middle
    reply = client.generate(model="rwkv7", prompt=prefix, suffix=suffix, options=EXACT | {"num_predict": 20})
    assert reply.response == middle
    completion = openai.completions.create(
        model="rwkv7", prompt=prefix, suffix=suffix, max_tokens=20, temperature=0
    )
    assert completion.choices[0].text == middle
    body = {"input_prefix": prefix, "input_suffix": suffix, "n_predict": 20, "temperature": 0}
    infilled = httpx.post(server.url + "/infill", json=body, timeout=60).json()
    assert infilled["content"] == middle


@pytest.mark.parametrize("think", [False, True])
def test_a_chat_is_bound_by_its_format(client: ollama.Client, think: bool):
    question = said("Tell me about Anna.")
    for seed in range(4):
        fields = {"model": "rwkv7", "messages": question, "think": think, "options": HOT | {"seed": seed}}
        reply = client.chat(format=PERSON, **fields)
        assert reply.done_reason == "stop" and bool(reply.message.thinking) == think
        jsonschema.validate(json.loads(reply.message.content), PERSON)
        parts = client.chat(format=PERSON, stream=True, **fields)
        assert "".join(part.message.content for part in parts) == reply.message.content


@pytest.mark.parametrize("place", [{}, {"raw": True}, {"suffix": "\n"}])
def test_a_prompt_is_bound_by_its_format(client: ollama.Client, place: dict):
    for seed in range(4):
        options = HOT | {"seed": seed}
        reply = client.generate(model="rwkv7", prompt="Anna: ", format=PERSON, options=options, **place)
        assert reply.done_reason == "stop"
        jsonschema.validate(json.loads(reply.response), PERSON)


def test_json_mode_answers_with_an_object(client: ollama.Client):
    replies = [
        client.chat(model="rwkv7", messages=said("Hi"), format="json", options=HOT | {"seed": seed})
        for seed in range(4)
    ]
    ended = [json.loads(reply.message.content) for reply in replies if reply.done_reason == "stop"]
    assert ended and all(isinstance(each, dict) for each in ended)


def test_a_format_that_cannot_be_used_is_a_bad_request(client: ollama.Client):
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="JSON schema") as bad:
            list(client.chat(model="rwkv7", messages=said("Hi"), format={"type": "thing"}, stream=stream))
        assert bad.value.status_code == 400


@pytest.mark.parametrize(
    ("fields", "valid"),
    [
        ({"grammar": 'root ::= [0-9]+ "px"'}, r"\d+px"),
        ({"json_schema": {"enum": ["red", "green"]}}, '"red"|"green"'),
    ],
)
def test_a_middle_is_bound_by_a_grammar_of_llama_cpp(server: Server, fields: dict, valid: str):
    body = {"input_prefix": "width: ", "input_suffix": ";\n", "n_predict": 200, "seed": 1} | fields
    for stream in (False, True):
        sent = httpx.post(server.url + "/infill", json=body | {"stream": stream}, timeout=60)
        frames = sent.text.split("\n\n") if stream else [f"data: {sent.text}"]
        events = [json.loads(f.removeprefix("data: ")) for f in frames if f.startswith("data: ")]
        assert re.fullmatch(valid, "".join(event["content"] for event in events))
        assert events[-1]["stop_type"] == "eos"
