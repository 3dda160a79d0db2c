"""Codex's command line, which streams /v1/responses with tools of its own.

It has no way to draw greedily, so what is said is not looked at.
"""

import json
from pathlib import Path

import pytest
from asked import CAPITAL, MODEL, NAME, UNKNOWN, WHO

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


@pytest.fixture
def codex(run, url: str, tmp_path: Path):
    def codex(*words: str, model: str = MODEL):
        (tmp_path / ".codex").mkdir(exist_ok=True)
        (tmp_path / ".codex" / "config.toml").write_text(CONFIG.format(url=url, model=model))
        return run("codex", "exec", "--skip-git-repo-check", "--json", *words)

    return codex


def said(stdout: str) -> list[str]:
    """The answers among the events of a run."""
    events = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item["text"] for item in items if item["type"] == "agent_message"]


def test_a_chat(codex):
    done = codex(CAPITAL)
    assert done.returncode == 0 and said(done.stdout), done.stdout + done.stderr


def test_a_structured_answer_beside_its_tools(codex, tmp_path: Path):
    (tmp_path / "schema.json").write_text(json.dumps(ONE_OF_TWO))
    done = codex("--output-schema", "schema.json", CAPITAL)
    assert done.returncode == 0, done.stdout
    assert json.loads(said(done.stdout)[-1])["city"] in ("Paris", "London")


def test_a_second_turn(codex):
    assert said(codex(NAME).stdout)
    done = codex("resume", "--last", WHO)
    assert done.returncode == 0 and said(done.stdout), done.stdout + done.stderr


def test_an_error(codex):
    done = codex(CAPITAL, model=UNKNOWN)
    assert done.returncode != 0 and UNKNOWN in done.stdout + done.stderr
