"""What the clients ask, and what the bundled model answers."""

MODEL = "rwkv7"
CAPITAL, PARIS = "What is the capital of France?", "Paris"
NAME, GREETED, WHO, ALICE = "My name is Alice.", "Nice to meet you, Alice!", "What is my name?", "Alice"
WEATHER = "What is the weather in Paris?"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather in a city", "parameters": CITY}
TOOL = {"type": "function", "function": FUNCTION}
SUNNY = "sunny, 22 degrees"
UNKNOWN = "no-such-model"  # whose 404 is the error that every client shows

# What is always set for Claude Code: it draws greedily, and asks nobody else.
CLAUDE_CODE = {
    "CLAUDE_CODE_EXTRA_BODY": '{"temperature": 0}',
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


def said(text: str) -> dict[str, str]:
    """A message of the user."""
    return {"role": "user", "content": text}


def conversation() -> list[dict[str, str]]:
    """It ends with a question that its first turn answers."""
    return [said(NAME), {"role": "assistant", "content": GREETED}, said(WHO)]
