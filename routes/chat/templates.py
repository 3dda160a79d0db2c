"""Prompt templates: how requests become the plain text that RWKV models were trained on.

A blank line separates messages, so runs of line feeds inside a message are folded to one.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from routes.chat.tools import Schema, tool_prompt

SEPARATOR = "\n\n"  # separates messages, also those of a stored state and new ones
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
class Message:
    """One message of a conversation, reduced to what the model reads."""

    role: str
    text: str
    tool_calls: Sequence[tuple[str, str]] = ()  # (name, arguments as JSON text)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to read."""
        return not self.text.strip() and not self.tool_calls


def chat(
    messages: Sequence[Message],
    system: str = "",
    tools: Sequence[Schema] = (),
    tool_choice: str | Schema = "auto",
    think: bool = False,
) -> str:
    """The transcript of a conversation, ending where the assistant is to speak.

    System and developer messages move to the front. An assistant message at the end is left open, to be
    continued.
    """
    heads = [system.strip(), *(m.text.strip() for m in messages if m.role in SYSTEM_ROLES)]
    if tools and tool_choice != "none":
        heads.append(tool_prompt(tools, tool_choice))
    head = "\n\n".join(h for h in heads if h)
    blocks = [f"System: {head}"] if head else []
    blocks += [_block(m) for m in _turns(messages)]
    if not continues(messages):
        blocks.append("Assistant: " + (THINK if think else NO_THINK))
    return SEPARATOR.join(blocks)


def continues(messages: Sequence[Message]) -> bool:
    """Whether the conversation ends in the assistant's own words, which the answer then goes on with."""
    turns = _turns(messages)
    return bool(turns) and turns[-1].role == "assistant" and not turns[-1].tool_calls


def _turns(messages: Sequence[Message]) -> list[Message]:
    """The messages that have a place of their own in the transcript."""
    return [m for m in messages if not m.empty and m.role not in SYSTEM_ROLES]


def _block(message: Message) -> str:
    text = re.sub(r"\n{2,}", "\n", message.text.replace("\r\n", "\n").replace("\r", "\n").strip())
    calls = [
        f'<tool_call>{json.dumps({"name": n}, ensure_ascii=False)[:-1]}, "arguments": {a}}}</tool_call>'
        for n, a in message.tool_calls
    ]
    name = ROLE_NAMES.get(message.role, message.role.capitalize())
    return f"{name}: " + "\n".join([text, *calls] if text else calls)


def translation(text: str, source: str, target: str) -> str:
    """`{source}: {text}`, a blank line, `{target}:`. Codes that are not in LANGUAGES stand for themselves."""
    return f"{language(source)}: {text}\n\n{language(target)}:"


def language(code: str) -> str:
    """The name a model knows a language by."""
    return LANGUAGES.get(code, code)


def fill_in_the_middle(prefix: str, suffix: str) -> str:
    """The suffix comes first and the prefix last, so that the model continues the prefix."""
    return f"{FIM_MARK}prefix{FIM_MARK}{FIM_MARK}suffix{FIM_MARK}{suffix}{FIM_MARK}middle{FIM_MARK}{prefix}"
