"""Ollama's own client, sync and async."""

import asyncio
import json

import ollama
import pytest
from asked import ALICE, CAPITAL, CITY, MODEL, PARIS, SUNNY, TOOL, UNKNOWN, WEATHER, conversation, said

COUNTED = {
    "type": "object",
    "properties": {"degrees": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["degrees"],
}
EXACT = {"temperature": 0, "num_predict": 200}


@pytest.fixture(scope="module")
def client(url: str) -> ollama.Client:
    return ollama.Client(host=url)


def test_a_chat(client: ollama.Client):
    assert PARIS in client.chat(MODEL, [said(CAPITAL)], options=EXACT).message.content
    assert PARIS in client.generate(MODEL, CAPITAL, options=EXACT).response


def test_its_own_variable_names_the_server(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OLLAMA_HOST", url)
    assert PARIS in ollama.Client().chat(MODEL, [said(CAPITAL)], options=EXACT).message.content


def test_a_stream(url: str):
    async def streamed() -> list[str]:
        parts = await ollama.AsyncClient(host=url).chat(MODEL, [said(CAPITAL)], options=EXACT, stream=True)
        return [part.message.content async for part in parts]

    parts = asyncio.run(streamed())
    assert PARIS in "".join(parts) and len(parts) > 2


def test_a_tool(client: ollama.Client):
    def get_weather(city: str) -> str:
        """The weather in a city"""
        return SUNNY

    for tool in (TOOL, get_weather):
        asked = client.chat(MODEL, [said(WEATHER)], tools=[tool], options=EXACT).message
        (call,) = asked.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
        result = {"role": "tool", "tool_name": "get_weather", "content": SUNNY}
        assert client.chat(MODEL, [said(WEATHER), asked, result], tools=[tool], options=EXACT).message.content


def test_a_tool_and_then_a_structured_answer(client: ollama.Client):
    """The model chooses when to answer, and both are bound."""
    fields = {"tools": [TOOL], "format": COUNTED, "options": EXACT}
    asked = client.chat(MODEL, [said(WEATHER)], **fields).message
    (call,) = asked.tool_calls
    assert call.function.arguments == {"city": "Paris"} and not asked.content
    result = {"role": "tool", "tool_name": "get_weather", "content": SUNNY}
    answer = json.loads(client.chat(MODEL, [said(WEATHER), asked, result], **fields).message.content)
    assert isinstance(answer["degrees"], int)


def test_a_structured_answer(client: ollama.Client):
    answer = json.loads(client.chat(MODEL, [said(CAPITAL)], format=CITY, options=EXACT).message.content)
    assert list(answer) == ["city"]


def test_a_second_turn(client: ollama.Client):
    assert ALICE in client.chat(MODEL, conversation(), options=EXACT).message.content


def test_what_clients_look_for_first(client: ollama.Client):
    assert MODEL in [each.model for each in client.list().models]
    assert client.ps().models and "tools" in client.show(MODEL).capabilities


def test_an_error(client: ollama.Client):
    with pytest.raises(ollama.ResponseError, match=UNKNOWN) as missing:
        client.chat(UNKNOWN, [said(CAPITAL)])
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="embeddings"):
        client.embed(MODEL, CAPITAL)
