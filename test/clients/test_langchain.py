"""LangChain's chat models for OpenAI (chat and Responses), Anthropic and Ollama."""

from typing import Literal

import pytest
from asked import ALICE, CAPITAL, FUNCTION, MODEL, NAME, PARIS, SUNNY, UNKNOWN, WEATHER, WHO
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "London"]


@tool
def get_weather(city: str) -> str:
    """The weather in a city"""
    return SUNNY


def chat_of(kind: str, url: str, model: str = MODEL):
    match kind:
        case "openai" | "responses":
            return ChatOpenAI(
                model=model,
                base_url=url + "/v1",
                api_key="unused",
                temperature=0,
                max_tokens=200,
                max_retries=0,
                use_responses_api=kind == "responses",
            )
        case "anthropic":
            return ChatAnthropic(
                model=model, base_url=url, api_key="unused", temperature=0, max_tokens=200, max_retries=0
            )
    return ChatOllama(model=model, base_url=url, temperature=0, num_predict=200)


@pytest.fixture(params=["openai", "responses", "anthropic", "ollama"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def chat(kind: str, url: str):
    return chat_of(kind, url)


def test_a_chat(chat):
    assert PARIS in chat.invoke(CAPITAL).text


def test_a_stream(chat):
    parts = list(chat.stream(CAPITAL))
    assert PARIS in "".join(part.text for part in parts) and len(parts) > 2


def test_a_tool(chat):
    asked = chat.bind_tools([get_weather]).invoke(WEATHER)
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == (FUNCTION["name"], {"city": "Paris"})
    result = ToolMessage(SUNNY, tool_call_id=call["id"])
    assert chat.bind_tools([get_weather]).invoke([HumanMessage(WEATHER), asked, result]).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer(chat, kind: str, method: str):
    if kind == "ollama":
        method = "json_schema"  # its protocol cannot demand a call
    answer = chat.with_structured_output(City, method=method).invoke(CAPITAL)
    assert isinstance(answer, City) and answer.city


def test_a_second_turn(chat):
    first = chat.invoke(NAME)
    assert isinstance(first, AIMessage)
    assert ALICE in chat.invoke([HumanMessage(NAME), first, HumanMessage(WHO)]).text


def test_an_error(kind: str, url: str):
    with pytest.raises(Exception, match=UNKNOWN):
        chat_of(kind, url, UNKNOWN).invoke(CAPITAL)
