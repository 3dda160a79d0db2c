"""POST /v2/chat/completions: raw prompts, drawn by top-k, then nucleus sampling on what is left."""

import msgspec

from routes.http.errors import Json
from routes.http.generate import Prepared
from routes.http.schemas import END_OF_TEXT
from routes.native.batch import BatchFields, NativeReply, raw_prompts
from rwkv_batch.wire.protocol import Sampling


class V2Fields(BatchFields):
    """The body."""

    pad_zero: bool = True  # whether every prompt is the beginning of a document

    def sampling(self) -> Sampling:
        return msgspec.structs.replace(super().sampling(), method="nucleus")


def prepare(body: Json, model_id: str) -> Prepared:
    """Raises ApiError."""
    fields = V2Fields.from_json(body)
    request = fields.request(
        raw_prompts(fields.contents), prefix_ids=[END_OF_TEXT] if fields.pad_zero else []
    )
    return Prepared(request, fields.stream, NativeReply(fields.model))
