"""The AI SDK with its providers for OpenAI (Responses), servers like it (chat completions) and Anthropic."""

import json
from pathlib import Path

import pytest
from asked import ALICE, MODEL, PARIS, UNKNOWN

SCRIPT = Path(__file__).with_name("ai_sdk.mjs")


@pytest.fixture(params=["openai", "compatible", "anthropic"])
def ask(run, node_modules: Path, url: str, request: pytest.FixtureRequest):
    def ask(case: str, model: str = MODEL):
        done = run("node", SCRIPT, node_modules, url, request.param, case, model)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask


def test_a_chat(ask):
    assert PARIS in ask("chat")


def test_a_stream(ask):
    parts = ask("stream")
    assert PARIS in "".join(parts) and len(parts) > 2


def test_a_tool(ask):
    found = ask("tool")
    assert found["cities"] == [PARIS] and found["text"]


def test_a_structured_answer(ask):
    assert ask("object")["city"] in ("Paris", "London")


def test_a_tool_and_then_a_structured_answer(ask):
    found = ask("toolThenObject")
    assert found["cities"] == [PARIS] and found["object"]["sky"] in ("sunny", "cloudy")


def test_a_second_turn(ask):
    assert ALICE in ask("turn")


def test_an_error(ask):
    error = ask("error", UNKNOWN)
    assert error["status"] == 404 and UNKNOWN in error["message"]
