"""Codex's command line, which streams /v1/responses with tools of its own.

It has no way to draw greedily, so what is said is not looked at.
"""

import json
import sys
from pathlib import Path

import pytest
from asked import CAPITAL, MODEL, NAME, PARIS, SUNNY, UNKNOWN, WEATHER, WHO
from between import Between

CONFIG = """model = "{model}"
model_provider = "rwkv"

[model_providers.rwkv]
name = "RWKV"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false
"""

ONE_OF_TWO = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}},
    "required": ["city"],
    "additionalProperties": False,
}


CALLED = ["function_call", "function_call_output"]
WEATHER_SERVER = f"""
[mcp_servers.weather]
command = "{sys.executable}"
args = ["{Path(__file__).with_name("weather_mcp.py")}"]
required = true
"""


@pytest.fixture
def codex(run, url: str, tmp_path: Path):
    def codex(*words: str, model: str = MODEL, at: str = url, more: str = ""):
        (tmp_path / ".codex").mkdir(exist_ok=True)
        (tmp_path / ".codex" / "config.toml").write_text(CONFIG.format(url=at, model=model) + more)
        return run("codex", "exec", "--skip-git-repo-check", "--json", *words)

    return codex


def said(stdout: str) -> list[str]:
    """The answers among the events of a run."""
    return [item["text"] for item in items_of(stdout, "agent_message")]


def items_of(stdout: str, kind: str) -> list[dict]:
    events = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in items if item["type"] == kind]


def demands(tool: dict, arguments: dict):
    """Changes a first request: it demands a call of the tool with these arguments."""
    bound = {"type": "object", "properties": {k: {"const": v} for k, v in arguments.items()}}
    bound |= {"required": list(arguments), "additionalProperties": False}

    def change(body: dict) -> dict:
        if any(item["type"] == "function_call_output" for item in body["input"]):
            return {"tool_choice": "none"}
        tools = [bound_to(each, tool["name"], bound) for each in body["tools"]]
        return {"tools": tools, "tool_choice": {"type": "function", **tool}}

    return change


def bound_to(tool: dict, name: str, parameters: dict) -> dict:
    if tool["type"] == "namespace":
        return tool | {"tools": [bound_to(each, name, parameters) for each in tool["tools"]]}
    return tool | {"parameters": parameters} if tool.get("name") == name else tool


def test_a_chat(codex):
    done = codex(CAPITAL)
    assert done.returncode == 0 and said(done.stdout), done.stdout + done.stderr


def test_a_structured_answer_beside_its_tools(codex, tmp_path: Path):
    (tmp_path / "schema.json").write_text(json.dumps(ONE_OF_TWO))
    done = codex("--output-schema", "schema.json", CAPITAL)
    assert done.returncode == 0, done.stdout
    assert json.loads(said(done.stdout)[-1])["city"] in ("Paris", "London")


def test_a_tool_of_its_own(codex, url: str):
    with Between(url, demands({"name": "exec_command"}, {"cmd": "echo hello"})) as between:
        done = codex(CAPITAL, at=between.url)
    assert done.returncode == 0 and said(done.stdout), done.stdout + done.stderr
    (ran,) = items_of(done.stdout, "command_execution")
    assert "echo hello" in ran["command"]
    assert [item["type"] for item in between.bodies[-1]["input"][-2:]] == CALLED


def test_a_tool_of_a_namespace(codex, url: str):
    """Tools of MCP servers are offered so, and are found by their namespace."""
    named = {"name": "get_weather", "namespace": "mcp__weather"}
    with Between(url, demands(named, {"city": PARIS})) as between:
        done = codex(WEATHER, at=between.url, more=WEATHER_SERVER)
    assert done.returncode == 0 and said(done.stdout), done.stdout + done.stderr
    (called,) = items_of(done.stdout, "mcp_tool_call")
    assert called["result"]["content"] == [{"type": "text", "text": SUNNY}]
    assert called["arguments"] == {"city": PARIS}
    assert [item["type"] for item in between.bodies[-1]["input"][-2:]] == CALLED


def test_a_second_turn(codex):
    assert said(codex(NAME).stdout)
    done = codex("resume", "--last", WHO)
    assert done.returncode == 0 and said(done.stdout), done.stdout + done.stderr


def test_an_error(codex):
    done = codex(CAPITAL, model=UNKNOWN)
    assert done.returncode != 0 and UNKNOWN in done.stdout + done.stderr
