"""The fields by which requests choose how a chat is rendered: the form of its turns, and the thought."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from routes.http.errors import Json
from routes.http.schemas import RequestBody
from rwkv_batch.chat.checkpoints import THOUGHTLESS, ChatTemplate, ThinkType
from rwkv_batch.chat.templates import FORMS, Style

GENERATION_PROMPTS: dict[str, ThinkType] = {"open_think": "free", "fake_think": "fast"}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # of a thought, as OpenAI's
TEMPLATE_KWARGS: dict[str, tuple[object, ...]] = {
    "rwkv_prompt_template": tuple(FORMS),
    "rwkv_generation_prompt": tuple(GENERATION_PROMPTS),
    "enable_thinking": (True, False),  # as the templates of other models have it
}


def _template_kwargs(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("input should be an object")
    for name, chosen in value.items():
        if name not in TEMPLATE_KWARGS:
            *most, last = TEMPLATE_KWARGS
            known = f"{', '.join(most)} and {last}"
            raise ValueError(f"{str(name)[:40]!r} is not known here; input may hold {known}")
        values = TEMPLATE_KWARGS[name]
        if chosen not in values or type(chosen) is not type(values[0]):  # 1 is True
            raise ValueError(f"{name} should be one of {', '.join(str(v).lower() for v in values)}")
    return value


TemplateKwargs = Annotated[
    Json,
    BeforeValidator(_template_kwargs),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {name: {"enum": list(values)} for name, values in TEMPLATE_KWARGS.items()},
            "additionalProperties": False,
        }
    ),
]


class ChatStyleFields(RequestBody):
    """`think_type` decides over `switches`; nothing else may contradict another field."""

    enable_think: bool | None = None
    think: bool | None = None
    think_type: ThinkType | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    def style(
        self, template: ChatTemplate, effort: str | None = None, effort_field: str = "reasoning_effort"
    ) -> Style:
        """What the request asks for, of a model with `template`.

        `effort`: OpenAI's reasoning effort, which stands in `effort_field`. Raises ApiError 400.
        """
        asked: dict[str, ThinkType] = {}  # field -> what it asks for
        if self.think_type is not None:
            asked["think_type"] = self.think_type
        if prompt := self.chat_template_kwargs.get("rwkv_generation_prompt"):
            asked["chat_template_kwargs"] = GENERATION_PROMPTS[prompt]
        for field, flag in self.switches().items():
            if flag is not None and self.think_type is None:
                asked[field] = "free" if flag else template.think_type
        if effort is not None:
            asked[effort_field] = template.think_type if effort in ("none", "minimal") else "free"
        first = next(iter(asked), "")
        for field, wanted in asked.items():
            if (wanted in THOUGHTLESS) != (asked[first] in THOUGHTLESS):
                raise self.field_error(field, f"this contradicts {first}; send one of them")
        form = FORMS[self.chat_template_kwargs.get("rwkv_prompt_template", "assistant")]
        return template.style(form, asked[first] if first else template.think_type)

    def switches(self) -> dict[str, bool | None]:
        """The fields that turn thoughts on or off; None: not given."""
        return {
            "enable_think": self.enable_think,
            "think": self.think,
            "chat_template_kwargs.enable_thinking": self.chat_template_kwargs.get("enable_thinking"),
        }
