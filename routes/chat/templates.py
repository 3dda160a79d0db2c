"""Prompt templates: how requests become the plain text that RWKV models were trained on.

A blank line separates turns, so runs of line feeds inside a turn of a conversation are folded to one.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from routes.chat.tools import tool_prompt

SEAM = "\n\n"  # what stands between turns, also between those of a stored state and new ones
NO_THINK = "<think>\n</think>\n"  # an empty thought: the model answers at once
THINK = "<think"  # left open: the model writes ">", its thoughts, "</think>" and the answer

FIM_MARK = "✿"
LANGUAGES = {
    "zh-CN": "Chinese",
    "zh-TW": "Chinese",
    "en": "English",
    "ja": "Japanese",
    "fr": "French",
    "de": "German",
    "es": "Spanish",
    "ru": "Russian",
}
ROLE_NAMES = {"user": "User", "assistant": "Assistant", "tool": "Tool"}
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class Turn:
    """One message of a conversation, reduced to what the model reads."""

    role: str
    text: str
    tool_calls: Sequence[tuple[str, str]] = ()  # (name, arguments as JSON text)


def chat(
    turns: Sequence[Turn],
    system: str = "",
    tools: Sequence[dict] = (),
    tool_choice: str | dict = "auto",
    think: bool = False,
) -> str:
    """The transcript of a conversation, ending where the assistant is to speak.

    System and developer turns move to the front. If the last turn is the assistant's, it is left open to be
    continued.
    """
    heads = [system.strip(), *(t.text.strip() for t in turns if t.role in SYSTEM_ROLES)]
    if tools and tool_choice != "none":
        heads.append(tool_prompt(tools, tool_choice))
    head = "\n\n".join(h for h in heads if h)
    blocks = [f"System: {head}"] if head else []
    blocks += [_block(t) for t in _spoken(turns)]
    if continues(turns):
        return "\n\n".join(blocks)
    blocks.append("Assistant: " + (THINK if think else NO_THINK))
    return "\n\n".join(blocks)


def continues(turns: Sequence[Turn]) -> bool:
    """Whether the conversation ends in the assistant's own words, which the answer then goes on with."""
    spoken = _spoken(turns)
    return bool(spoken) and spoken[-1].role == "assistant" and not spoken[-1].tool_calls


def _spoken(turns: Sequence[Turn]) -> list[Turn]:
    return [t for t in turns if t.role not in SYSTEM_ROLES and (t.text.strip() or t.tool_calls)]


def _block(turn: Turn) -> str:
    text = re.sub(r"\n{2,}", "\n", turn.text.replace("\r\n", "\n").replace("\r", "\n").strip())
    calls = [
        f'<tool_call>{json.dumps({"name": n}, ensure_ascii=False)[:-1]}, "arguments": {a}}}</tool_call>'
        for n, a in turn.tool_calls
    ]
    name = ROLE_NAMES.get(turn.role, turn.role.capitalize())
    return f"{name}: " + "\n".join([text, *calls] if text else calls)


def translation(text: str, source: str, target: str) -> str:
    """`{source}: {text}`, a blank line, `{target}:`. Codes that the table does not hold are used as they
    stand.
    """
    return f"{language(source)}: {text}\n\n{language(target)}:"


def language(code: str) -> str:
    """The name a model knows a language by."""
    return LANGUAGES.get(code, code)


def fill_in_the_middle(prefix: str, suffix: str) -> str:
    """The suffix comes first; the prefix stands last so that the model goes on from it."""
    return f"{FIM_MARK}prefix{FIM_MARK}{FIM_MARK}suffix{FIM_MARK}{suffix}{FIM_MARK}middle{FIM_MARK}{prefix}"
