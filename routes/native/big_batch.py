"""POST /big_batch/completions: many raw prompts, drawn by temperature alone, streamed unless `stream` is
false.
"""

from typing import Annotated

from pydantic import Field

from routes.native.batch import NativeReply, raw_prompts
from routes.native.schemas import Real, RowFields, Texts, validate
from rwkv_batch.wire.protocol import GenerateRequest, Sampling


class BigBatchFields(RowFields):
    """The body."""

    contents: Texts = Field(default_factory=list)
    stream: bool = True
    noise: Annotated[Real, Field(ge=0, le=1000)] | None = (
        None  # if sent: up to this is added to each logit, the highest wins
    )

    def sampling(self) -> Sampling:
        if self.noise is None:
            return Sampling(self.temperature, method="gumbel")
        return Sampling(self.temperature, noise=self.noise, method="noise")


def prepare(body: dict, model_id: str) -> tuple[GenerateRequest, bool, NativeReply]:
    """What to run and how to answer. Raises ApiError."""
    fields = validate(BigBatchFields, body)
    return fields.request(raw_prompts(fields.contents)), fields.stream, NativeReply(fields.model)
