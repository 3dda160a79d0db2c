"""RWKV's penalties, which chats have by default: not where the likeliest token is asked for, or JSON."""

import pytest

from routes.anthropic import messages
from routes.ollama import prepare as ollama
from routes.openai import chat
from routes.responses import prepare as responses
from routes.responses.schemas import ResponsesBody
from rwkv_batch.config import FrontendConfig

HI = {"messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}
PROFILE = FrontendConfig(sampling_profile="open_think")
MODEL = "rwkv7-test"


def responded(body, model, settings):
    fields = ResponsesBody.from_json({"input": "Hi", **body}, settings.sampling_profile)
    return responses.prepare(fields, model, None, settings)


ROUTES = {
    "chat": lambda fields, settings: chat.prepare(HI | fields, MODEL, settings)[0],
    "responses": lambda fields, settings: responded(fields, MODEL, settings)[0],
    "anthropic": lambda fields, settings: (
        messages.prepare(HI | {"max_tokens": 9} | fields, MODEL, settings).request
    ),
    "ollama": lambda fields, settings: ollama.chat(HI | fields, MODEL, settings).request,
    "ollama's prompts": lambda fields, settings: ollama.text({"prompt": "Hi"} | fields, MODEL, settings)[0],
}
BOUND = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    "anthropic": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "ollama": {"format": SCHEMA},
    "ollama's prompts": {"format": "json"},
}
DEMANDED = {
    "chat": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    "responses": {
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "look"},
    },
    "anthropic": {"tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
}


def alphas(route, settings=FrontendConfig(), **fields):  # noqa: B008 (it is frozen)
    made = ROUTES[route](fields, settings).sampling
    return made.alpha_presence, made.alpha_frequency


@pytest.mark.parametrize("settings", [FrontendConfig(), PROFILE])
@pytest.mark.parametrize("route", ROUTES)
def test_the_likeliest_token_and_json_are_drawn_without_the_penalties_of_chats(route, settings):
    assert alphas(route, settings) == alphas(route, settings, temperature=0.1) == (1, 0.1)
    assert alphas(route, settings, temperature=0) == (0, 0)
    assert alphas(route, settings, **BOUND[route]) == (0, 0)
    assert alphas(route, settings, guided_choice=["yes", "no"]) == (0, 0)


@pytest.mark.parametrize("route", DEMANDED)
def test_a_call_that_is_demanded_is_drawn_without_them_and_one_that_may_come_with_them(route):
    assert alphas(route, **DEMANDED[route]) == (0, 0)
    assert alphas(route, tools=DEMANDED[route]["tools"]) == (1, 0.1)


@pytest.mark.parametrize("route", ROUTES)
def test_penalties_of_the_request_always_count(route):
    own = {"alpha_presence": 0.5, "alpha_frequency": 0.25}
    assert alphas(route, temperature=0, **own, **BOUND[route]) == (0.5, 0.25)
    assert alphas(route, temperature=0, alpha_presence=0.5) == (0.5, 0)


@pytest.mark.parametrize("route", ["ollama", "ollama's prompts"])
def test_a_temperature_among_the_options_is_one(route):
    assert alphas(route, options={"temperature": 0}) == (0, 0)
    assert alphas(route, options={"temperature": 1}) == (1, 0.1)
