"""From the body of a request for a response to the engine's request, and what is kept of the response.

A stored response is a state of the model, `response:{id}`. With `previous_response_id` a request starts from
that state and the model reads the new turns only. Instructions and tools hold for one call, as in OpenAI's
API; what the state has read last need not be read again, others go in front of the new turns as a system
turn.
"""

import re
import time
from dataclasses import dataclass
from uuid import uuid4

import msgspec

from routes.chat import templates
from routes.chat.answer import AnswerReader
from routes.chat.tools import tool_prompt
from routes.http.errors import ApiError
from routes.native.schemas import RESPONSE
from routes.openai.chat import DEFAULT_ALPHAS, DEFAULT_MAX_TOKENS, DEFAULT_STOPS
from routes.openai.schemas import bad
from routes.openai.shared import engine_request
from routes.openai.tools import ToolUse
from routes.responses import input
from routes.responses.reply import ResponseReply
from routes.responses.schemas import ResponsesBody, tool_use
from rwkv_batch.wire.protocol import GenerateRequest, SessionTurn

ID = re.compile(r"resp_[0-9a-f]{32}")


class Document(msgspec.Struct, frozen=True):
    """What is kept of a response besides the state: the reply, the items of its input, and what the state has
    read last.
    """

    response: dict
    input: list[dict]
    instructions: str
    tools: str  # as they stand in the prompt

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


decode_document = msgspec.json.Decoder(Document).decode


@dataclass
class Prepared:
    """A request on its way."""

    request: GenerateRequest
    reply: ResponseReply
    stream: bool
    key: str | None  # where to keep the document; None: the response is not stored
    input: list[dict]
    instructions: str
    tools: str

    def document(self) -> bytes:
        """Of the response as it stands now."""
        return Document(self.reply.response, self.input, self.instructions, self.tools).encode()


def key_of(response_id: str) -> str:
    """The key of a response's state and document."""
    return f"{RESPONSE}:{response_id}"


def not_found(response_id: str) -> ApiError:
    """The error for a previous response that is not there."""
    return ApiError(
        404,
        f"There is no response {response_id[:60]} that could be continued: it was deleted, or not stored.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def prepare(body: ResponsesBody, model_id: str, previous: Document | None) -> Prepared:
    """`previous`: the document of body.previous_response_id. Raises ApiError 400 for what cannot
    be served.
    """
    items = input.read(body.input)
    spoken, use, think = input.turns(items), tool_use(body), _thinks(body)
    if not body.instructions.strip() and not any(t.text.strip() or t.tool_calls for t in spoken):
        raise bad("input", "this holds no text; send a string or a list of items")

    tools = tool_prompt(use.offered, use.choice) if use.offered and use.choice != "none" else ""
    known = (previous.instructions, previous.tools) if previous else ("", "")
    prompt = templates.chat(
        spoken,
        "" if body.instructions == known[0] else body.instructions,
        [] if tools == known[1] else use.offered,
        use.choice,
        think,
    )
    opening = ""
    if templates.continues(spoken):
        think = False
    elif not think:
        opening = use.opening()
    response_id = "resp_" + uuid4().hex
    return Prepared(
        request=_request(body, prompt + opening, response_id, think),
        reply=ResponseReply(
            _response(body, response_id, model_id, use),
            AnswerReader(think, use.look_for_calls, opening),
            think,
        ),
        stream=body.stream,
        key=key_of(response_id) if body.store else None,
        input=items,
        instructions=body.instructions or known[0],
        tools=tools or known[1],
    )


def _thinks(body: ResponsesBody) -> bool:
    return body.reasoning.effort not in (None, "none", "minimal")


def _request(body: ResponsesBody, prompt: str, response_id: str, think: bool) -> GenerateRequest:
    turn = None
    if body.store or body.previous_response_id:
        turn = SessionTurn(
            source=key_of(body.previous_response_id) if body.previous_response_id else None,
            target=key_of(response_id) if body.store else None,
            required=body.previous_response_id is not None,
            seam=templates.SEAM,
        )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_output_tokens is None else body.max_output_tokens
    request = engine_request(body, [prompt], max_tokens, DEFAULT_STOPS, DEFAULT_ALPHAS, None, turn)
    # thoughts are counted by the pieces in which they come, so these are small also when nothing is streamed
    return msgspec.structs.replace(request, flush_tokens=request.flush_tokens or int(think))


def _response(body: ResponsesBody, response_id: str, model_id: str, use: ToolUse) -> dict:
    """The response object before there is any output."""
    choice = (
        use.choice
        if isinstance(use.choice, str)
        else {"type": "function", "name": use.choice["function"]["name"]}
    )
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions or None,
        "model": model_id,
        "output": [],
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": choice,
        "tools": [tool.model_dump() | {"strict": False} for tool in body.tools],
        "top_p": body.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
    }
