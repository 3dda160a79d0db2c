"""POST /v2/chat/completions: a batch of raw prompts, drawn by top-k and then nucleus sampling on what is
left.
"""

import msgspec

from routes.native.batch import BatchFields, NativeReply, raw_prompts
from routes.native.schemas import validate
from rwkv_batch.wire.protocol import GenerateRequest, Sampling

PAD = [0]  # end of text: a document begins after it


class V2Fields(BatchFields):
    """The body."""

    pad_zero: bool = True  # whether PAD stands in front of every prompt

    def sampling(self) -> Sampling:
        return msgspec.structs.replace(super().sampling(), method="nucleus")


def prepare(body: dict, model_id: str) -> tuple[GenerateRequest, bool, NativeReply]:
    """What to run and how to answer. Raises ApiError."""
    fields = validate(V2Fields, body)
    request = fields.request(raw_prompts(fields.contents), lead=PAD if fields.pad_zero else ())
    return request, fields.stream, NativeReply(fields.model)
