"""POST /big_batch/completions: many raw prompts, drawn by temperature alone, streamed by default."""

from typing import Annotated

from pydantic import Field

from routes.http.errors import Json
from routes.http.generate import Prepared
from routes.native.batch import NativeReply, raw_prompts
from routes.native.schemas import Real, RowFields, Texts
from rwkv_batch.wire.protocol import Sampling


class BigBatchFields(RowFields):
    """The body."""

    contents: Texts = Field(default_factory=list)
    stream: bool = True
    # if sent: a random number up to this is added to each logit and the highest wins
    noise: Annotated[Real, Field(ge=0, le=1000)] | None = None

    def sampling(self) -> Sampling:
        if self.noise is None:
            return Sampling(self.temperature, method="gumbel")
        return Sampling(self.temperature, noise=self.noise, method="noise")


def prepare(body: Json, model_id: str) -> Prepared:
    """Raises ApiError."""
    fields = BigBatchFields.from_json(body)
    return Prepared(fields.request(raw_prompts(fields.contents)), fields.stream, NativeReply(fields.model))
