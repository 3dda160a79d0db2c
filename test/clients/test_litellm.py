"""litellm over the OpenAI, Anthropic and Ollama routes."""

import json

import litellm
import pytest
from asked import ALICE, CAPITAL, CITY, MODEL, PARIS, TOOL, UNKNOWN, WEATHER, conversation, said

PROVIDERS = {"openai": "/v1", "anthropic": "", "ollama_chat": ""}


@pytest.fixture(params=PROVIDERS)
def ask(url: str, request: pytest.FixtureRequest):
    def ask(messages: list[dict], model: str = MODEL, **fields):
        return litellm.completion(
            model=f"{request.param}/{model}",
            api_base=url + PROVIDERS[request.param],
            api_key="unused",
            messages=messages,
            temperature=0,
            max_tokens=200,
            num_retries=0,
            **fields,
        )

    return ask


def test_a_chat(ask):
    assert PARIS in ask([said(CAPITAL)]).choices[0].message.content


def test_a_stream(ask):
    parts = list(ask([said(CAPITAL)], stream=True))
    assert PARIS in "".join(part.choices[0].delta.content or "" for part in parts) and len(parts) > 2


def test_a_tool(ask):
    (call,) = ask([said(WEATHER)], tools=[TOOL]).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_a_structured_answer(ask):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = json.loads(ask([said(CAPITAL)], response_format=form).choices[0].message.content)
    assert list(answer) == ["city"] and isinstance(answer["city"], str)


def test_a_second_turn(ask):
    assert ALICE in ask(conversation()).choices[0].message.content


def test_an_error(ask):
    with pytest.raises(Exception, match=UNKNOWN):
        ask([said(CAPITAL)], model=UNKNOWN)
