"""Ollama's official client against the real server and the bundled model.

What the model answers is that of the same chat on the OpenAI route.
"""

import json

import httpx
import ollama
import pytest
from openai import OpenAI
from serving import Server

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city", "parameters": CITY},
}
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
    (model,) = client.list().models
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
