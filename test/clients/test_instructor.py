"""instructor, in each mode in which it asks OpenAI's or Anthropic's protocol for an object."""

from collections.abc import Iterable
from typing import Literal

import anthropic
import instructor
import openai
import pytest
from asked import CAPITAL, MODEL, UNKNOWN, conversation, said
from pydantic import BaseModel

Mode = instructor.Mode
RESPONSES = (Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS)
ANTHROPIC = (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_REASONING_TOOLS, Mode.ANTHROPIC_JSON)
# By themselves these ask for any object, or for nothing: the prompt alone says which.
FREE = (Mode.JSON, Mode.MD_JSON, Mode.ANTHROPIC_JSON)
MODES = (
    *(Mode.FUNCTIONS, Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.JSON, Mode.JSON_O1, Mode.MD_JSON),
    *RESPONSES,
    *ANTHROPIC,
)
# Several objects at once, and what has one of them come at least.
PARALLEL = {Mode.PARALLEL_TOOLS: "required", Mode.ANTHROPIC_PARALLEL_TOOLS: {"type": "any"}}


class City(BaseModel):
    """A city, and what is said of it."""

    name: Literal["Paris", "London"]
    large: bool


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> instructor.Mode:
    return request.param


def client_of(url: str, mode: instructor.Mode):
    if mode.name.startswith("ANTHROPIC"):
        return instructor.from_anthropic(
            anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0), mode=mode
        )
    return instructor.from_openai(
        openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0), mode=mode
    )


@pytest.fixture
def ask(url: str, mode: instructor.Mode):
    client = client_of(url, mode)
    bound = {"guided_json": City.model_json_schema()} if mode in FREE else {}

    def ask(messages: list[dict], model: str = MODEL, method: str = "create", **more):
        limit = "max_output_tokens" if mode in RESPONSES else "max_tokens"
        return getattr(client.chat.completions, method)(
            model=model,
            messages=messages,
            response_model=City,
            max_retries=0,
            extra_body={"temperature": 0, **bound, **more},
            **{limit: 300},
        )

    return ask


def test_an_object(ask):
    assert ask([said(CAPITAL)]).name in ("Paris", "London")


def test_a_stream_of_an_object(ask):
    *_, last = ask([said(CAPITAL)], method="create_partial")
    assert last.name in ("Paris", "London")


class Color(BaseModel):
    """A color."""

    color: Literal["red", "blue"]


@pytest.mark.parametrize("mode", PARALLEL, ids=lambda mode: mode.name)
@pytest.mark.parametrize("several", [False, True])
def test_objects_at_once(url: str, mode: instructor.Mode, several: bool):
    extra = {"temperature": 0, "tool_choice": PARALLEL[mode]}
    if several:  # the model does not draw what ends a text, so it goes on until the tokens end
        extra["logit_bias"] = {"0": -100}
    found = client_of(url, mode).chat.completions.create(
        model=MODEL,
        messages=[said(CAPITAL)],
        response_model=Iterable[City | Color],
        max_retries=0,
        max_tokens=150,
        extra_body=extra,
    )
    objects = list(found)
    assert len(objects) > several and all(isinstance(each, City | Color) for each in objects)


def test_a_second_turn(ask):
    assert ask(conversation()).name in ("Paris", "London")


def test_an_error(ask):
    with pytest.raises(Exception, match=UNKNOWN):
        ask([said(CAPITAL)], model=UNKNOWN)
