"""A conversation becomes an example in any of the forms in which the server sends one.

All conversations, of the training text and of the evaluation, are rendered here and nowhere else.
"""

from collections.abc import Sequence
from random import Random

from demo.example import Example
from routes.chat import templates
from routes.chat.templates import NO_THINK, THINK, Message, Style

END = 0  # end of text
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are a friendly robot.",
    "Answer briefly.",
    "Be concise.",
    "You are a polite assistant. Answer in one sentence.",
    "You are RWKV, a small language model.",
    "Help the user.",
    "You are a teacher who answers the questions of a child.",
)
FORMS = ("chat",) * 4 + ("raw",) * 2 + ("bare", "think", "kept")
TOOL_FORMS = ("chat",) * 4 + ("bare", "think")


def conversation(
    rng: Random,
    kind: str,
    turns: Sequence[Message],
    answer: str,
    *,
    thought: str = "",
    system: str = "",
    key: str = "",
    tools: Sequence[dict] = (),
    choice: str | dict = "auto",
    names: tuple[str, ...] = (),
    form: str = "",
) -> Example:
    """`turns` end with the one to be answered. The form is drawn if none is named:

    chat   as the chat routes send it with thinking off: the earlier answers stand plain
    kept   the same after a kept state: every earlier answer still follows its own empty thought
    raw    `User: ...`, blank line, `Assistant:`; the answer begins with a space
    bare   the empty thought without the line feed after it; the answer begins with that line feed
    think  thinking on: `thought` comes first

    Half of them begin with END, as chat templates of the G1 series do.
    """
    form = form or rng.choice([f for f in (TOOL_FORMS if tools else FORMS) if thought or f != "think"])
    style = Style(thought=THINK) if form == "think" else Style()
    lead = (END,) if rng.random() < 0.5 else ()
    prompt = templates.chat(turns, system, tools, choice, style)
    if form == "kept":
        prompt = prompt.removesuffix(NO_THINK).replace("\n\nAssistant: ", f"\n\nAssistant: {NO_THINK}")
    elif form == "raw":
        prompt, answer = prompt.removesuffix(f" {NO_THINK}"), f" {answer}"
    elif form == "bare":
        prompt, answer = prompt.removesuffix("\n"), f"\n{answer}"
    elif form == "think":
        answer = f">{thought}</think>\n{answer}"
    return Example(kind, prompt, answer, key, names, lead)


def some_system(rng: Random) -> str:
    """Mostly none; else a system text that does not change the answer."""
    return rng.choice(SYSTEMS) if rng.random() < 0.35 else ""
