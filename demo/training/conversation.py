"""A conversation becomes an example in any of the ways in which the server renders one.

All conversations, of the training text and of the evaluation, are rendered here and nowhere else, by the
server's own templates. test/unit/test_demo_prompts.py compares them with what the routes send.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from demo.training.example import Example
from rwkv_batch.chat import templates
from rwkv_batch.chat.checkpoints import CHAT_TEMPLATES, CHINESE_THOUGHT, ThinkType
from rwkv_batch.chat.templates import FORMS, Message, Style
from rwkv_batch.config import ChatTemplateName

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
Call = tuple[str, str]  # a tool's name, and its arguments as JSON text


@dataclass(frozen=True)
class Way:
    """One way to ask: what of a request and of the server's flags changes the prompt.

    lead: token 0 comes first, as chats have it; without it the prompt is that of a raw route. bare: /v3, whose
    answers begin with the line feed behind an empty thought. kept: a session, where earlier answers stand as
    they were written, each behind its own thought. begun: the answer's first words stand in the prompt.
    """

    template: ChatTemplateName = "g1"
    form: str = "assistant"
    think_type: ThinkType = "fast"
    lead: bool = True
    bare: bool = False
    kept: bool = False
    begun: bool = False

    @property
    def style(self) -> Style:
        style = CHAT_TEMPLATES[self.template].style(FORMS[self.form], self.think_type)
        return replace(style, thought=(style.thought or "").rstrip("\n")) if self.bare else style


CHAT = Way()
WAYS: dict[Way, float] = {
    CHAT: 30,
    Way(lead=False): 9,
    Way(kept=True): 4,
    Way(kept=True, lead=False): 1,
    Way(bare=True): 4,
    Way(bare=True, lead=False): 1,
    Way(begun=True): 1.5,
    Way(template="world", think_type="none"): 6,
    Way(template="world", think_type="none", lead=False): 6,
    Way(template="world", think_type="none", kept=True, lead=False): 1.5,
    Way(think_type="free"): 6,
    Way(think_type="free", lead=False): 1,
    Way(think_type="preferChinese"): 2,
    Way(think_type="en"): 1.5,
    Way(think_type="enShort"): 1.5,
    Way(think_type="enLong"): 1.5,
    Way(template="g1c"): 4,
    Way(template="g1c", kept=True): 1,
    Way(template="g1c", think_type="free"): 1,
    Way(form="bot"): 2,
    Way(form="bot", kept=True): 0.5,
    Way(form="bot", template="g1c"): 1,
    Way(form="bot", think_type="none"): 1,
    Way(form="bot", think_type="free"): 1,
    Way(form="function_calling"): 2.5,
    Way(form="function_calling", kept=True): 0.5,
    Way(form="function_calling", template="g1c"): 1,
    Way(form="function_calling", think_type="none"): 1,
    Way(form="function_calling", think_type="free"): 1,
}
PLAIN_WAYS = {way: share for way, share in WAYS.items() if not way.style.thinks}
TOOL_WAYS = {way: share for way, share in WAYS.items() if not (way.kept or way.begun)}
PLAIN_TOOL_WAYS = {way: share for way, share in TOOL_WAYS.items() if not way.style.thinks}


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
    call: Call | None = None,
    names: tuple[str, ...] = (),
    way: Way | None = None,
) -> Example:
    """`turns` end with the one to be answered: by `answer`, or by `call`. A way is drawn if none is named."""
    if way is None:
        with_thought, plain = (TOOL_WAYS, PLAIN_TOOL_WAYS) if tools else (WAYS, PLAIN_WAYS)
        ways = with_thought if thought else plain
        (way,) = rng.choices(list(ways), list(ways.values()))
    style, lead = way.style, (END,) if way.lead else ()
    if way.begun:
        return begun(rng, Example(kind, "", answer, key, names, lead), turns, system, style)
    if way.kept:
        parts = kept(turns, system, style)
        return Example(kind, "".join(parts), told(style, answer), key, names, lead, parts)
    # as ToolUse.opening of routes/openai/tools.py
    opening = "" if style.thinks or not tools else style.tools.opening(choice)
    prompt = templates.chat(turns, system, tools, choice, style, opening)
    if call and opening:
        rest = f'{call[0]}", "arguments": {call[1]}}}' if choice == "required" else f" {call[1]}}}"
        return Example(kind, prompt, rest + style.tools.after, key, names, lead)
    if call:
        answer = style.tools.call(*call)
    return Example(kind, prompt, told(style, answer, thought), key, names, lead)


def told(style: Style, answer: str, thought: str = "") -> str:
    """The answer as a model writes it behind `style.thought`."""
    if style.thinks:
        if (style.thought or "").endswith(CHINESE_THOUGHT):
            return f"，我来回答。</think>\n{answer}"
        if "lot" in style.hint:
            thought += " I think about it step by step. Now I know what to say."
        return f">{thought}</think>\n{answer}"
    if style.left_open:
        return f">\n{answer}"
    if not style.thought:
        return f" {answer}" if style.form is templates.ASSISTANT else answer
    return answer if style.thought.endswith("\n") else f"\n{answer}"


def kept(turns: Sequence[Message], system: str, style: Style) -> tuple[str, ...]:
    """The prompts of a session's requests and the answers between them, as they are read one after the other."""
    parts: list[str] = []
    new: list[Message] = []
    for turn in turns:
        if turn.role != "assistant":
            new.append(turn)
            continue
        parts += [asked(new, system, style, bool(parts)), told(style, turn.text)]
        new = []
    return *parts, asked(new, system, style, bool(parts))


def asked(new: Sequence[Message], system: str, style: Style, later: bool) -> str:
    """One request of a session."""
    prompt = templates.chat(new, "" if later else system, style=style)
    return style.form.separator + prompt if later else prompt


def begun(rng: Random, whole: Example, turns: Sequence[Message], system: str, style: Style) -> Example:
    """The first words of the answer, if it has spaces, are the client's."""
    words = whole.answer.split(" ")
    count = rng.randrange(1, len(words)) if len(words) > 1 else 0
    head, tail = " ".join(words[:count]), " ".join(words[count:])
    if not head.strip() or "\n" in whole.answer:
        return replace(whole, prompt=templates.chat(turns, system, style=style))
    turns = [*turns, Message("assistant", head)]
    prompt = templates.chat(turns, system, style=style.continuing(turns))
    return replace(whole, prompt=prompt, answer=f" {tail}")


def some_system(rng: Random) -> str:
    """Mostly none; else a system text that does not change the answer."""
    return rng.choice(SYSTEMS) if rng.random() < 0.35 else ""
