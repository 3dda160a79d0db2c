"""pydantic-ai's agents over chat completions, Responses and messages."""

import asyncio
from typing import Literal

import pytest
from asked import ALICE, CAPITAL, MODEL, NAME, PARIS, SUNNY, UNKNOWN, WEATHER, WHO
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"temperature": 0, "max_tokens": 200}


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "London"]


class Weather(BaseModel):
    """The weather."""

    sunny: bool


def model_of(kind: str, url: str, name: str = MODEL):
    if kind == "anthropic":
        provider = AnthropicProvider(base_url=url, api_key="unused")
        return AnthropicModel(name, provider=provider, profile={"supports_json_schema_output": True})
    made = OpenAIResponsesModel if kind == "responses" else OpenAIChatModel
    return made(name, provider=OpenAIProvider(base_url=url + "/v1", api_key="unused"))


@pytest.fixture(params=["openai", "responses", "anthropic"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def agent(kind: str, url: str):
    return lambda **fields: Agent(model_of(kind, url), model_settings=SETTINGS, retries=0, **fields)


def test_a_chat(agent):
    assert PARIS in agent().run_sync(CAPITAL).output


def test_a_stream(agent):
    async def streamed() -> list[str]:
        async with agent().run_stream(CAPITAL) as reply:
            return [part async for part in reply.stream_text(delta=True, debounce_by=None)]

    parts = asyncio.run(streamed())
    assert PARIS in "".join(parts) and len(parts) > 2


def test_a_tool(agent):
    asked = []

    def get_weather(city: str) -> str:
        """The weather in a city"""
        asked.append(city)
        return SUNNY

    assert agent(tools=[get_weather]).run_sync(WEATHER).output and asked == ["Paris"]


@pytest.mark.parametrize("form", [NativeOutput, ToolOutput])
def test_a_structured_answer(agent, form: type):
    city = agent(output_type=form(City)).run_sync(CAPITAL).output
    assert isinstance(city, City) and city.name


def test_an_object_that_the_prompt_alone_asks_for(agent):
    """The client asks for any object at most, so `guided_json` says which one."""
    bound = {"extra_body": {"guided_json": City.model_json_schema()}}
    city = agent(output_type=PromptedOutput(City)).run_sync(CAPITAL, model_settings=bound).output
    assert isinstance(city, City)


def test_a_tool_and_then_a_structured_answer(agent):
    """The model chooses when to answer, and the answer is bound all the time."""
    asked = []

    def get_weather(city: Literal["Paris", "London"]) -> str:
        """The weather in a city"""
        asked.append(city)
        return SUNNY

    weather = agent(output_type=NativeOutput(Weather), tools=[get_weather]).run_sync(WEATHER).output
    assert isinstance(weather, Weather) and asked == [PARIS]


def test_a_second_turn(agent):
    first = agent().run_sync(NAME)
    assert ALICE in agent().run_sync(WHO, message_history=first.all_messages()).output


def test_an_error(kind: str, url: str):
    with pytest.raises(ModelHTTPError, match=UNKNOWN) as missing:
        Agent(model_of(kind, url, UNKNOWN), retries=0).run_sync(CAPITAL)
    assert missing.value.status_code == 404
