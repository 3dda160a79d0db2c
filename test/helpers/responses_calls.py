"""Requests for responses and the rows that answer them, without a server.

Everything that is sent is validated with the SDK's types.
"""

import json
from dataclasses import dataclass

import msgspec
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from routes.responses import prepare as preparing
from routes.responses import schemas
from routes.responses.prepare import Document
from routes.responses.reply import ResponseReply
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import Accepted, GenerateRequest, RowDelta

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
MODEL = "rwkv7-test"
ANSWER = "Assistant: <think>\n</think>\n"
PREVIOUS = "resp_" + "0" * 32

EVENT = TypeAdapter(ResponseStreamEvent)


@dataclass
class PreparedResponse:
    """What becomes of a request: for the engine, for the client, for the store."""

    stream: bool
    request: GenerateRequest
    reply: ResponseReply
    unanswered: Document

    def document(self) -> Document:
        """What would be stored now."""
        data = msgspec.json.encode(msgspec.structs.replace(self.unanswered, response=self.reply.response))
        return msgspec.json.decode(data, type=Document)


def prepare(previous=None, **fields) -> PreparedResponse:
    body = schemas.ResponsesBody.from_json({"model": "any", "input": "Hi", **fields})
    return PreparedResponse(body.stream, *preparing.prepare(body, MODEL, previous))


def prompt_of(previous=None, **fields) -> str:
    (prompt,) = prepare(previous, **fields).request.prompts
    return prompt


def job_of(prepared, prompt_tokens=5, cached=0) -> Job:
    job = Job(prepared.request, lambda _: None)
    job.acceptance = Accepted("", [prompt_tokens], [cached])
    return job


def pieces(text: str, size: int, reason: str = "stop") -> list[RowDelta]:
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    return [*(RowDelta(0, part, len(part)) for part in parts), RowDelta(0, "", 0, reason)]


def streamed(prepared, deltas, **tokens) -> list[dict]:
    """All events, each delta in a batch of its own, checked."""
    job, reply = job_of(prepared, **tokens), prepared.reply
    events = reply.first(job) + [e for delta in deltas for e in reply.events([delta])] + reply.last(job)
    for event in events:
        EVENT.validate_json(json.dumps(event), strict=True)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


def whole(prepared, deltas, **tokens) -> Response:
    return Response.model_validate_json(
        json.dumps(prepared.reply.whole(job_of(prepared, **tokens), deltas)), strict=True
    )
