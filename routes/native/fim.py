"""POST /FIM/v1/batch-FIM: the text between a prefix and a suffix, for any number of pairs."""

from pydantic import Field

from routes.chat.templates import fill_in_the_middle
from routes.http.errors import ApiError
from routes.native.batch import NativeReply
from routes.native.schemas import SamplingFields, Texts, validate
from rwkv_batch.wire.protocol import GenerateRequest


class FimFields(SamplingFields):
    """The body."""

    prefix: Texts = Field(default_factory=list)
    suffix: Texts = Field(default_factory=list)


def prepare(body: dict, model_id: str) -> tuple[GenerateRequest, bool, NativeReply]:
    """What to run and how to answer. Raises ApiError."""
    fields = validate(FimFields, body)
    if len(fields.prefix) != len(fields.suffix):
        raise ApiError(
            400,
            f"`prefix` has {len(fields.prefix)} texts and `suffix` has {len(fields.suffix)}; they form "
            "pairs.",
        )
    if not fields.prefix:
        raise ApiError(400, "Empty prompts list: `prefix` and `suffix` need at least one text each.")
    prompts: list[str | list[int]] = [
        fill_in_the_middle(*pair) for pair in zip(fields.prefix, fields.suffix, strict=True)
    ]
    return fields.request(prompts), fields.stream, NativeReply(fields.model, "FIM.completion")
