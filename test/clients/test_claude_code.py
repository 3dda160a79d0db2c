"""Claude Code, without a window: a chat with its own tools and prompt, and some with none."""

import json

import pytest
from asked import ALICE, CAPITAL, CLAUDE_CODE, MODEL, NAME, PARIS, UNKNOWN, WHO

BRIEF = ("--tools", "", "--system-prompt", "Be brief.")


@pytest.fixture
def claude(run, url: str):
    def claude(*words: str, model: str = MODEL):
        return run(
            *("claude", "-p", *words),
            ANTHROPIC_BASE_URL=url,
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


def test_a_second_turn(claude):
    assert ALICE in claude(NAME, *BRIEF).stdout
    assert ALICE in claude(WHO, *BRIEF, "--continue").stdout


def test_an_error(claude):
    done = claude(CAPITAL, *BRIEF, model=UNKNOWN)
    assert done.returncode != 0 and UNKNOWN in done.stdout + done.stderr
