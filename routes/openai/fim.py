"""POST /v1/fim/completions: the text between a prompt and a suffix, as Mistral's clients ask for it."""

from typing import Annotated

from pydantic import Field

from routes.chat.answer import AnswerReader
from routes.http.errors import Json, openai_field
from routes.http.generate import Prepared
from routes.http.schemas import Int
from routes.openai.chat import DEFAULT_MAX_TOKENS, ChatReply
from routes.openai.schemas import CHAT_ONLY, NO_CHAT, OpenAIBody, TopK, TopP
from rwkv_batch.chat.templates import fill_in_the_middle


class FimBody(OpenAIBody):
    """`prompt` stands in front of the text, `suffix` behind it."""

    refused = CHAT_ONLY | NO_CHAT

    prompt: str
    suffix: str = ""
    top_p: TopP = 1.0
    top_k: TopK = 0
    n: Annotated[Int, Field(ge=1, le=1)] = 1
    random_seed: Annotated[Int, Field(ge=0, le=2**63 - 1)] | None = None  # Mistral's name of seed


def prepare(body: Json, model_id: str) -> Prepared:
    """Raises ApiError 400 for what cannot be served."""
    fields = FimBody.from_json(body)
    if fields.random_seed is not None:
        if fields.seed not in (None, fields.random_seed):
            raise openai_field("random_seed", "this differs from seed; send one of them")
        fields = fields.model_copy(update={"seed": fields.random_seed})
    prompt = fill_in_the_middle(fields.prompt, fields.suffix) if fields.suffix else fields.prompt
    if not prompt:
        raise openai_field("prompt", "input should hold a text, or the suffix should")
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    request = fields.request([prompt], max_tokens, grammar=fields.grammar())
    reply = ChatReply(model_id, [AnswerReader()], False, False, fields.include_usage, False)
    return Prepared(request, fields.stream, reply)
