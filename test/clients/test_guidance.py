"""guidance: its programs of turns, text and JSON as a server of OpenAI's protocol runs them."""

import json

import guidance
import openai
import pytest
from asked import ALICE, CAPITAL, CITY, MODEL, NAME, PARIS, SUNNY, UNKNOWN, WEATHER, WHO
from guidance import assistant, gen, select, system, user
from guidance.models.experimental import VLLMModel


def model_of(url: str, name: str = MODEL) -> guidance.models.Model:
    return guidance.models.OpenAI(name, api_key="unused", base_url=f"{url}/v1", echo=False)


@pytest.fixture
def model(url: str) -> guidance.models.Model:
    return model_of(url)


def test_a_chat(model):
    with system():
        model += "You are a helpful assistant."
    with user():
        model += CAPITAL
    with assistant():
        model += gen("answer", max_tokens=100, temperature=0)
    assert PARIS in model["answer"]


@guidance.guidance
def asked(lm):
    """The question and its answer, as a part of a program."""
    with user():
        lm += CAPITAL
    with assistant():
        lm += gen("answer", max_tokens=100, temperature=0)
    return lm


def test_a_stream(model):
    states = list(model.stream() + asked())
    assert PARIS in states[-1]["answer"] and len(states) > 2


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool(model, choice: str):
    """It runs the function itself, and the next turn reads the result."""
    asked = []

    def get_weather(city: str) -> str:
        """The weather in a city"""
        asked.append(city)
        return SUNNY

    with user():
        model += WEATHER
    with assistant():
        model += gen(tools=[get_weather], tool_choice=choice)
    assert asked == [PARIS]
    with assistant():
        model += gen("answer", max_tokens=100, temperature=0)
    assert model["answer"], model


def test_a_structured_answer(model):
    with user():
        model += CAPITAL
    with assistant():
        model += guidance.json(
            "city", temperature=0, schema=CITY | {"properties": {"city": {"enum": ["Paris", "London"]}}}
        )
    assert json.loads(model["city"])["city"] in ("Paris", "London")


def test_a_second_turn(model):
    for text, name in ((NAME, "first"), (WHO, "second")):
        with user():
            model += text
        with assistant():
            model += gen(name, max_tokens=100, temperature=0)
    assert ALICE in model["second"]


def test_an_error(url: str):
    model = model_of(url, UNKNOWN)
    with user():
        model += CAPITAL
    with pytest.raises(openai.NotFoundError, match=UNKNOWN), assistant():
        model += gen("answer", max_tokens=100, temperature=0)


def test_programs_are_bound_by_their_grammars(url: str):
    """The library sends its grammar in the fields of older and of newer versions of vLLM."""
    model = VLLMModel(MODEL, api_key="unused", base_url=f"{url}/v1", echo=False)
    with user():
        model += CAPITAL
    with assistant():
        model += "It is " + select(["Paris", "London"], name="city") + gen("year", regex="[12][0-9]{3}")
    assert model["city"] in ("Paris", "London") and len(model["year"]) == 4
