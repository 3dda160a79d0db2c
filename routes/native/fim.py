"""POST /FIM/v1/batch-FIM: the text between a prefix and a suffix, for any number of pairs."""

from pydantic import Field

from routes.chat.templates import fill_in_the_middle
from routes.http.errors import ApiError, Json
from routes.http.generate import Prepared
from routes.http.schemas import Prompts
from routes.native.batch import NativeReply
from routes.native.schemas import SamplingFields, Texts


class FimFields(SamplingFields):
    """The body."""

    prefix: Texts = Field(default_factory=list)
    suffix: Texts = Field(default_factory=list)


def prepare(body: Json, model_id: str) -> Prepared:
    """Raises ApiError."""
    fields = FimFields.from_json(body)
    if len(fields.prefix) != len(fields.suffix):
        raise ApiError(
            400,
            f"`prefix` has {len(fields.prefix)} texts and `suffix` has {len(fields.suffix)}; they form "
            "pairs.",
        )
    if not fields.prefix:
        raise ApiError(400, "Empty prompts list: `prefix` and `suffix` need at least one text each.")
    prompts: Prompts = [fill_in_the_middle(*pair) for pair in zip(fields.prefix, fields.suffix, strict=True)]
    return Prepared(fields.request(prompts), fields.stream, NativeReply(fields.model, "FIM.completion"))
