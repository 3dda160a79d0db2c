"""What the checkpoints of each generation were trained on, and which generation a name stands for.

`think_type` and what it makes of a prompt; TURN is what an assistant's turn begins with, such as
"Assistant: ", and Q the last message of the user:

    none                     TURN, without anything of a thought
    fast                     TURN and the checkpoint's empty thought: it answers at once
    free                     TURN<think
    preferChinese            TURN<think>嗯, which thoughts in Chinese begin with
    en                       Q (think), TURN<think
    enShort, en_short        Q (think a bit), TURN<think
    enLong, en_long          Q (think a lot), TURN<think

The words behind Q are those of BlinkDL/RWKV-LM, RWKV-v7/RWKV7-G1x-templates.txt.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from rwkv_batch.chat.templates import NEARLY_CLOSED, NO_THINK, THINK, Form, Style
from rwkv_batch.chat.tools import JSON_FENCE, TAGS, ToolForm
from rwkv_batch.config import ChatTemplateName, FrontendConfig
from rwkv_batch.wire.supervision import EngineInfo

END_OF_TEXT = 0  # a token id
ThinkType = Literal["none", "fast", "free", "preferChinese", "en", "enShort", "en_short", "enLong", "en_long"]
THOUGHTLESS = ("none", "fast")
HINTS = {
    "en": " (think)",
    "enShort": " (think a bit)",
    "en_short": " (think a bit)",
    "enLong": " (think a lot)",
    "en_long": " (think a lot)",
}
CHINESE_THOUGHT = "嗯"


@dataclass(frozen=True)
class ChatTemplate:
    """What a generation of checkpoints was trained on."""

    lead: tuple[int, ...]  # token ids in front of the whole prompt
    empty_thought: str
    think_type: ThinkType  # unless the request says otherwise
    tools: ToolForm
    keep_blank_lines: bool = False  # inside messages

    def style(self, form: Form, think_type: ThinkType) -> Style:
        thought = {"none": "", "fast": self.empty_thought, "preferChinese": f"{THINK}>{CHINESE_THOUGHT}"}
        return Style(
            form,
            thought.get(think_type, THINK),
            HINTS.get(think_type, ""),
            self.tools,
            self.lead,
            self.keep_blank_lines,
        )


CHAT_TEMPLATES: dict[ChatTemplateName, ChatTemplate] = {
    # World models, which were not taught to think
    "world": ChatTemplate((END_OF_TEXT,), NO_THINK, "none", TAGS),
    "g1": ChatTemplate((END_OF_TEXT,), NO_THINK, "fast", TAGS),
    # the model closes the empty thought itself, and calls tools by fenced JSON
    "g1c": ChatTemplate((END_OF_TEXT,), f"{THINK}>{NEARLY_CLOSED}", "fast", JSON_FENCE),
}
GENERATION = re.compile(r"(?<![a-z0-9])g(\d+)([a-z]?)(?![a-z])")  # "g1", "g0a2", "g1c"
OLD = re.compile(r"world|x0[4-7]0|rwkv-?6")


def settings_for(model: EngineInfo, settings: FrontendConfig) -> FrontendConfig:
    """The settings with the template of a model: the one it was loaded with, or that of its checkpoint."""
    own = (name for name in CHAT_TEMPLATES if name == model.defaults.template)
    wanted = next(own, settings.chat_template)
    return replace(settings, chat_template=chat_template_name(model.checkpoint, wanted))


def chat_template_name(model: str, wanted: ChatTemplateName) -> ChatTemplateName:
    """`wanted`, or for "auto" the one that the model's name stands for.

    A name that says nothing stands for g1, which the G1 models before g1c and the bundled model have.
    """
    if wanted != "auto":
        return wanted
    name = model.lower()
    if found := GENERATION.search(name):
        return "g1c" if (int(found[1]), found[2]) >= (1, "c") else "g1"
    return "world" if OLD.search(name) else "g1"


def chat_template(model: str, settings: FrontendConfig) -> ChatTemplate:
    """That of a model's name, as chat_template_name, and as the settings say."""
    template = CHAT_TEMPLATES[chat_template_name(model, settings.chat_template)]
    return replace(template, keep_blank_lines=True) if settings.keep_blank_lines else template
