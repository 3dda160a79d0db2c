"""Prompt templates: how requests become the plain text that RWKV models were trained on.

The forms of conversations are those of the G1 series (BlinkDL/RWKV-LM, RWKV-v7/RWKV7-G1x-templates.txt, and
the tests of rwkv-rs/vllm-rwkv). Each model's own form of thoughts is in rwkv_batch/chat/checkpoints.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rwkv_batch.chat import lines
from rwkv_batch.chat.languages import find
from rwkv_batch.chat.tools import MARKDOWN, TAGS, Schema, ToolForm
from rwkv_batch.wire.protocol import LateStops

SEPARATOR = "\n\n"  # separates messages of the assistant form, also those of a stored state and new ones
NO_THINK = "<think>\n</think>\n"  # an empty thought: the model answers at once
THINK = "<think"  # left open: the model writes ">", its thoughts, "</think>" and the answer
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
NEARLY_CLOSED = END_OF_THOUGHT[:-1]  # left for the model to close

FIM_MARK = "✿"
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


@dataclass(frozen=True)
class Form:
    """How turns are marked and parted."""

    heads: dict[str, str]  # role -> what its turns begin with
    separator: str
    stops: tuple[str, ...]  # after which a model would write somebody else's turn
    # What parts turns, and what stands for it inside a message; None: a blank line does.
    reserved: tuple[re.Pattern[str], str] | None

    def clean(self, text: str, keep_blank_lines: bool = False) -> str:
        """A message without what would end its turn.

        `keep_blank_lines`: also outside of code, where blank lines part turns.
        """
        text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
        if self.reserved is None:
            return lines.fold(text, self.turns, keep_blank_lines)
        pattern, instead = self.reserved
        return pattern.sub(instead, text)

    @property
    def turns(self) -> tuple[str, ...]:
        """What turns begin with, without the space behind it."""
        return tuple(head.rstrip() for head in self.heads.values())


ASSISTANT = Form(
    {"system": "System: ", "user": "User: ", "assistant": "Assistant: ", "tool": "Tool: "},
    SEPARATOR,
    ("\n\nUser:", "\nUser:"),
    None,
)
BOT = Form(
    {"system": "System✿", "user": "User✿", "assistant": "Bot✿", "tool": "Tool✿"},
    "✿\n",
    ("✿",),
    (re.compile("✿"), ""),
)
FUNCTION_CALLING = Form(
    {
        "system": "### System\n",
        "user": "### User\n",
        "assistant": "### Assistant\n",
        "tool": "### Tool Output\n",
    },
    "\n",
    ("\n### User", "\n### Tool Output"),
    (re.compile(r"^### (?=(?:System|User|Assistant|Tool Output)\s*$)", re.MULTILINE), ""),
)
FORMS = {"assistant": ASSISTANT, "bot": BOT, "function_calling": FUNCTION_CALLING}


@dataclass(frozen=True)
class Style:
    """How one conversation is rendered and its answer read."""

    form: Form = ASSISTANT
    # What the assistant's turn begins with; "": nothing, None: its own words, which the answer goes on with.
    thought: str | None = NO_THINK
    hint: str = ""  # what is added to the last message of the user
    tool_form: ToolForm = TAGS  # the function form has its own
    lead: tuple[int, ...] = ()  # token ids in front of the whole prompt
    keep_blank_lines: bool = False  # inside messages; those in code stay anyhow

    @property
    def tools(self) -> ToolForm:
        return MARKDOWN if self.form is FUNCTION_CALLING else self.tool_form

    @property
    def thinks(self) -> bool:
        """Whether the answer begins inside a thought."""
        return bool(self.thought) and NEARLY_CLOSED not in (self.thought or "")

    @property
    def left_open(self) -> bool:
        """Whether the answer begins with the last character of a thought's tag."""
        return (self.thought or "").endswith((THINK, NEARLY_CLOSED))

    def continuing(self, messages: Sequence[Message]) -> "Style":
        """This style for these messages."""
        return replace(self, thought=None, hint="") if continues(messages) else self

    def late_stops(self, strings: list[str]) -> LateStops | None:
        """Stop strings that count behind the thought only. None if the answer can have no thought."""
        if self.thought is None:
            return None
        return LateStops(strings, THOUGHT, END_OF_THOUGHT, self.thinks, ">" if self.left_open else "")


def chat(
    messages: Sequence[Message],
    system: str = "",
    tools: Sequence[Schema] = (),
    tool_choice: str | Schema = "auto",
    style: Style = Style(),
    opening: str = "",
) -> str:
    """The transcript of a conversation, ending where the assistant is to speak.

    System and developer messages move to the front. An assistant message at the end is left open, to be
    continued. `opening`: what the assistant says first, behind its thought.
    """
    form, turns = style.form, _turns(messages)
    heads = [system.strip(), *(m.text.strip() for m in messages if m.role in SYSTEM_ROLES)]
    if tools and tool_choice != "none":
        heads.append(style.tools.prompt(tools, tool_choice))
    heads = [head for head in heads if head]
    head = form.clean("\n".join(heads), style.keep_blank_lines)
    blocks = [form.heads["system"] + head] if head else []
    asked = max((i for i, m in enumerate(turns) if m.role == "user"), default=None)
    blocks += [_block(m, style, style.hint if i == asked else "") for i, m in enumerate(turns)]
    if not continues(messages):
        blocks.append(_answer_head(style, opening))
    return form.separator.join(blocks)


def question(text: str, style: Style) -> str:
    """The transcript of one question, which stands in it as it is."""
    return style.form.heads["user"] + text + style.hint + style.form.separator + _answer_head(style)


def continues(messages: Sequence[Message]) -> bool:
    """Whether the conversation ends in the assistant's own words, which the answer then goes on with."""
    turns = _turns(messages)
    return bool(turns) and turns[-1].role == "assistant" and not turns[-1].tool_calls


def _turns(messages: Sequence[Message]) -> list[Message]:
    """The messages that have a place of their own in the transcript: a result of a tool may be empty."""
    return [m for m in messages if m.role not in SYSTEM_ROLES and (m.role == "tool" or not m.empty)]


def _answer_head(style: Style, opening: str = "") -> str:
    closed = ">\n" if opening and style.left_open else ""
    return (style.form.heads["assistant"] + (style.thought or "") + closed + opening).rstrip(" ")


def _block(message: Message, style: Style, hint: str) -> str:
    tools, role, text = style.tools, message.role, message.text.strip()
    if role == "tool":
        role, text = tools.result_role, tools.result(text)
    text = style.form.clean(text, style.keep_blank_lines) + hint
    calls = [tools.call(name, arguments) for name, arguments in message.tool_calls]
    return (style.form.heads[role] + "\n".join([text, *calls] if text else calls)).rstrip(" ")


def translation(text: str, source: str, target: str) -> str:
    """`{source}: {text}`, a blank line, `{target}:`. What names no language stands for itself."""
    return f"{language(source)}: {text}\n\n{language(target)}:"


def language(code: str) -> str:
    """The name a model knows a language by."""
    found = find(code)
    return found.name if found else code


def fill_in_the_middle(prefix: str, suffix: str) -> str:
    """The suffix comes first and the prefix last, so that the model continues the prefix."""
    return f"{FIM_MARK}prefix{FIM_MARK}{FIM_MARK}suffix{FIM_MARK}{suffix}{FIM_MARK}middle{FIM_MARK}{prefix}"
