"""The body of POST /infill: fields, defaults, ranges, refusals.

`samplers`, `id_slot` and limits of time (`t_max_prompt_ms`, `t_max_predict_ms`) are hints: `n_predict` is
what ends a text.
"""

from typing import Annotated

from pydantic import BaseModel, Field

from routes.chat.grammars import JsonSchema, of_schema
from routes.http.schemas import INT_LIMIT, Int
from routes.llama_cpp.fields import LlamaSamplers, Predict, Seed
from routes.openai.schemas import CHAT_ONLY, NO_CHAT, OpenAIBody
from rwkv_batch.wire.protocol import Grammar

REFUSED = (
    CHAT_ONLY
    | NO_CHAT
    | {
        "response_format": "this route takes json_schema",
        "grammar_lazy": "a grammar binds all of the text; leave it out or send false",
        "lora": "this route takes an adapter by its name, as adapter",
        "n_probs": "logprobs are available on /v1/completions",
        "return_tokens": "this route sends text only; leave it out",
    }
)


class ExtraText(BaseModel):
    """What an editor shows the model beside the file that is edited."""

    text: str
    filename: str = ""


class InfillBody(LlamaSamplers, OpenAIBody):
    """POST /infill."""

    refused = REFUSED

    n: Annotated[Int, Field(ge=1, le=1)] = 1
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraText] = Field(default_factory=list)
    prompt: str = ""  # what the middle begins with
    n_predict: Predict | None = None
    n_indent: Annotated[Int, Field(ge=0, le=INT_LIMIT)] = 0  # the text ends at a line that is indented less
    seed: Seed | None = None
    cache_prompt: bool = True
    grammar_: Annotated[str, Field(alias="grammar")] = ""  # the base has a method of that name
    json_schema: JsonSchema | None = None
    response_fields: list[str] | None = None  # those that the reply has, "timings/prompt_n"; null: all

    def given(self) -> dict[str, Grammar]:
        found = super().given()
        if self.grammar_:
            found["grammar"] = Grammar("grammar", self.grammar_)
        if self.json_schema is not None:
            found["json_schema"] = of_schema(self.json_schema)
        return found

    @property
    def prefix(self) -> str:
        """All text in front of what is filled in."""
        return "".join(f"{extra.text}\n" for extra in self.input_extra) + self.input_prefix + self.prompt
