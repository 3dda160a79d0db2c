"""instructor, in each mode in which it asks OpenAI's or Anthropic's protocol for an object."""

import contextlib
from typing import Literal

import anthropic
import instructor
import openai
import pytest
from asked import CAPITAL, MODEL, UNKNOWN, conversation, said
from instructor.core.exceptions import InstructorError
from pydantic import BaseModel

Mode = instructor.Mode
RESPONSES = (Mode.RESPONSES_TOOLS,)
ANTHROPIC = (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON)
# These bind nothing by themselves: the prompt alone asks for the object.
FREE = (Mode.MD_JSON, Mode.ANTHROPIC_JSON)
MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.MD_JSON, *RESPONSES, *ANTHROPIC)


class City(BaseModel):
    """A city, and what is said of it."""

    name: Literal["Paris", "London"]
    large: bool


class Anything(BaseModel):
    """Any object."""


@pytest.fixture(params=[*MODES, Mode.JSON], ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> instructor.Mode:
    return request.param


@pytest.fixture
def ask(url: str, mode: instructor.Mode):
    if mode in ANTHROPIC:
        client = instructor.from_anthropic(
            anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0), mode=mode
        )
    else:
        client = instructor.from_openai(
            openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0), mode=mode
        )
    wanted = Anything if mode is Mode.JSON else City
    bound = {"guided_json": City.model_json_schema()} if mode in FREE else {}

    def ask(messages: list[dict], model: str = MODEL, method: str = "create", **more):
        limit = "max_output_tokens" if mode in RESPONSES else "max_tokens"
        return getattr(client.chat.completions, method)(
            model=model,
            messages=messages,
            response_model=wanted,
            max_retries=0,
            extra_body={"temperature": 0, **bound, **more},
            **{limit: 300},
        )

    return ask


def test_an_object(ask, mode: instructor.Mode):
    if mode is Mode.JSON:  # any object: what the bundled model writes does not always end
        assert isinstance(first_that_ends(ask), Anything)
    else:
        assert ask([said(CAPITAL)]).name in ("Paris", "London")


def first_that_ends(ask) -> object:
    for seed in range(20):
        with contextlib.suppress(InstructorError):
            return ask([said(CAPITAL)], temperature=1, seed=seed)
    return None


def test_a_stream_of_an_object(ask, mode: instructor.Mode):
    *_, last = ask([said(CAPITAL)], method="create_partial")
    assert mode is Mode.JSON or last.name in ("Paris", "London")


def test_a_second_turn(ask, mode: instructor.Mode):
    if mode is not Mode.JSON:
        assert ask(conversation()).name in ("Paris", "London")


def test_an_error(ask):
    with pytest.raises(Exception, match=UNKNOWN):
        ask([said(CAPITAL)], model=UNKNOWN)
