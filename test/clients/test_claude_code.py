"""Claude Code, without a window: a chat with its own tools and prompt, and some with none."""

import json
import sys
from pathlib import Path

import pytest
from asked import ALICE, CAPITAL, CITY, CLAUDE_CODE, MODEL, NAME, PARIS, SUNNY, UNKNOWN, WEATHER, WHO
from between import Between

WEATHER_SERVER = Path(__file__).with_name("weather_mcp.py")

BRIEF = ("--tools", "", "--system-prompt", "Be brief.")


@pytest.fixture
def claude(run, url: str):
    def claude(*words: str, model: str = MODEL, at: str = url):
        return run(
            *("claude", "-p", *words),
            ANTHROPIC_BASE_URL=at,
            ANTHROPIC_API_KEY="unused",
            ANTHROPIC_MODEL=model,
            **CLAUDE_CODE,
        )

    return claude


def test_a_chat_with_all_of_its_tools(claude):
    done = claude(CAPITAL)
    assert done.returncode == 0 and PARIS in done.stdout, done.stdout + done.stderr


def test_a_stream(claude):
    done = claude(
        CAPITAL, *BRIEF, "--output-format", "stream-json", "--include-partial-messages", "--verbose"
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    inside = [each["event"] for each in events if each["type"] == "stream_event"]
    texts = [each["delta"]["text"] for each in inside if each.get("delta", {}).get("type") == "text_delta"]
    assert PARIS in "".join(texts) and len(texts) > 2
    assert events[-1]["type"] == "result" and not events[-1]["is_error"]


def demands(tool: str):
    """Changes requests: the first demands a call of the tool, and no other has one."""

    def change(body: dict) -> dict:
        has_called = "tool_result" in json.dumps(body["messages"])
        return {"tool_choice": {"type": "none"} if has_called else {"type": "tool", "name": tool}}

    return change


def test_a_tool(claude, url: str):
    """One of an MCP server: it runs it, and the model reads the result."""
    config = {"mcpServers": {"weather": {"command": sys.executable, "args": [str(WEATHER_SERVER)]}}}
    name = "mcp__weather__get_weather"
    with Between(url, demands(name)) as between:
        done = claude(
            *(WEATHER, *BRIEF, "--mcp-config", json.dumps(config), "--allowed-tools", name), at=between.url
        )
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr
    *_, called, read = between.bodies[-1]["messages"]
    assert [(each["name"], each["input"]) for each in called["content"] if each["type"] == "tool_use"] == [
        (name, {"city": PARIS})
    ]
    assert SUNNY in json.dumps(read)


def test_a_structured_answer(claude, url: str):
    """It asks for one as the arguments of a tool of its own."""
    schema = CITY | {"properties": {"city": {"enum": ["Paris", "London"]}}}
    with Between(url, demands("StructuredOutput")) as between:
        done = claude(
            *(CAPITAL, *BRIEF, "--json-schema", json.dumps(schema), "--output-format", "json"), at=between.url
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["structured_output"]["city"] in ("Paris", "London")


def test_a_second_turn(claude):
    assert ALICE in claude(NAME, *BRIEF).stdout
    assert ALICE in claude(WHO, *BRIEF, "--continue").stdout


def test_an_error(claude):
    done = claude(CAPITAL, *BRIEF, model=UNKNOWN)
    assert done.returncode != 0 and UNKNOWN in done.stdout + done.stderr
