"""openai-agents over Responses, which is its default, and over chat completions."""

import asyncio
from typing import Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from asked import ALICE, CAPITAL, MODEL, NAME, PARIS, SUNNY, UNKNOWN, WEATHER, WHO
from openai import AsyncOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "London"]


class Weather(BaseModel):
    """The weather."""

    sunny: bool


KINDS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


@pytest.fixture(params=KINDS)
def agent(url: str, request: pytest.FixtureRequest):
    def agent(model: str = MODEL, **fields) -> Agent:
        client = AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
        settings = ModelSettings(temperature=0, max_tokens=200)
        return Agent(
            name="Assistant", model=KINDS[request.param](model, client), model_settings=settings, **fields
        )

    return agent


def test_a_chat(agent):
    assert PARIS in Runner.run_sync(agent(), CAPITAL).final_output


def test_a_stream(agent):
    async def streamed() -> str:
        run = Runner.run_streamed(agent(), CAPITAL)
        texts = [
            event.data.delta
            async for event in run.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert len(texts) > 2
        return "".join(texts)

    assert PARIS in asyncio.run(streamed())


def test_a_tool(agent):
    asked = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather in a city"""
        asked.append(city)
        return SUNNY

    assert Runner.run_sync(agent(tools=[get_weather]), WEATHER).final_output and asked == ["Paris"]


def test_a_structured_answer(agent):
    city = Runner.run_sync(agent(output_type=City), CAPITAL).final_output
    assert isinstance(city, City) and city.name


def test_a_tool_and_then_a_structured_answer(agent):
    asked = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather in a city"""
        asked.append(city)
        return SUNNY

    weather = Runner.run_sync(agent(tools=[get_weather], output_type=Weather), WEATHER).final_output
    assert isinstance(weather, Weather) and asked == ["Paris"]


def test_a_second_turn(agent):
    first = Runner.run_sync(agent(), NAME)
    turns = [*first.to_input_list(), {"role": "user", "content": WHO}]
    assert ALICE in Runner.run_sync(agent(), turns).final_output


def test_a_turn_that_continues_a_stored_response(url: str):
    client = AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    agent = Agent(
        name="Assistant",
        model=OpenAIResponsesModel(MODEL, client),
        model_settings=ModelSettings(temperature=0),
    )
    first = Runner.run_sync(agent, NAME)
    second = Runner.run_sync(agent, WHO, previous_response_id=first.last_response_id)
    assert ALICE in second.final_output


def test_an_error(agent):
    with pytest.raises(openai.NotFoundError, match=UNKNOWN):
        Runner.run_sync(agent(model=UNKNOWN), CAPITAL)
