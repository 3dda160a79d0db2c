"""From the body of a request for a response to the engine's request, and the document that is stored of it.

A stored response is a state of the model, `response:{id}`. With `previous_response_id` a request starts from
that state and the model reads the new messages only. Instructions and tools hold for one call, as in OpenAI's
API; those that the state has read last are not sent to the model a second time, others go in front of the new
messages as a system message.
"""

import re
import time
from uuid import uuid4

import msgspec

from routes.http.errors import Json, openai_field
from routes.http.idempotency import digest
from routes.http.schemas import RESPONSE
from routes.openai.chat import DEFAULT_MAX_TOKENS, DEFAULTS
from routes.responses.items import RESPONSE_PREFIX, parse_items, to_messages
from routes.responses.reply import ResponseReply
from routes.responses.schemas import ResponsesBody, TextFormat
from routes.responses.tools import as_listed, functions_of, tool_use
from rwkv_batch.chat import templates
from rwkv_batch.chat.checkpoints import chat_template
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.placing.placement import TAG
from rwkv_batch.wire.protocol import GenerateRequest, Grammar, SessionTurn

ID = re.compile(RESPONSE_PREFIX + "[0-9a-f]{32}")


class Document(msgspec.Struct, frozen=True):
    """What is stored of a response besides the state."""

    response: Json  # the reply; before there is one, the response without output
    input: list[Json]  # its items
    instructions: str  # the last that the state has read, as are the tools
    tools: str  # as they stand in the prompt


def state_key(response_id: str) -> str:
    """The key of a response's state and document."""
    return f"{RESPONSE}:{response_id}"


def new_id(previous: str | None, key: str = "") -> str:
    """Of a response. It begins as that of the one before it: by this those of a chat go to one engine.

    key: an Idempotency-Key. With it the id is the same when the request is sent again.
    """
    digits = len(RESPONSE_PREFIX) + TAG
    own = digest(previous or RESPONSE_PREFIX, key).hex() if key else uuid4().hex
    return previous[:digits] + own[TAG:] if previous and ID.fullmatch(previous) else RESPONSE_PREFIX + own


def prepare(
    body: ResponsesBody,
    model_id: str,
    previous: Document | None,
    settings: FrontendConfig = DEFAULTS,
    key: str = "",
) -> tuple[GenerateRequest, ResponseReply, Document]:
    """What the engine generates, how the route replies, and what is stored of it.

    The document holds a response without output until then. `previous`: the document of
    body.previous_response_id. key: an Idempotency-Key. Raises ApiError 400.
    """
    response_id = new_id(body.previous_response_id, key)
    items = parse_items(body.input, response_id)
    messages, functions = to_messages(items), functions_of(body.tools)
    use = tool_use(functions, body.tool_choice, body.parallel_tool_calls)
    if not body.instructions.strip() and all(message.empty for message in messages):
        raise openai_field("input", "this holds no text; send a string or a list of items")

    template = chat_template(model_id, settings)
    style = body.style(template, body.reasoning.effort, "reasoning.effort").continuing(messages)
    tools = style.tools.prompt(use.offered, use.choice) if use.offered and use.choice != "none" else ""
    known = (previous.instructions, previous.tools) if previous else ("", "")
    prompt = templates.chat(
        messages,
        "" if body.instructions == known[0] else body.instructions,
        [] if tools == known[1] else use.offered,
        use.choice,
        style,
        use.opening(style),
    )
    response = _response(body, response_id, model_id)
    spaces = {each.name: (each.namespace, each.tool.name) for each in functions if each.namespace}
    reply = ResponseReply(response, use.reader(style), spaces)
    reply.ignored = body.ignored()
    return (
        _request(body, prompt, response_id, style, use.grammar(style, body.grammar())),
        reply,
        Document(response, items, body.instructions or known[0], tools or known[1]),
    )


def without_answer(request: GenerateRequest) -> GenerateRequest:
    """A prompt of which only the tokens are wanted: it is neither fed nor stored."""
    turn, (prompt,) = request.turn, request.prompts
    if turn and turn.source and isinstance(prompt, str):  # it stands behind what the state has seen
        prompt = turn.separator + prompt.removeprefix(turn.separator)
        request = msgspec.structs.replace(request, prompts=[prompt], prefix_ids=[])
    return msgspec.structs.replace(request, max_tokens=0, grammar=None, turn=None)


def _request(
    body: ResponsesBody, prompt: str, response_id: str, style: templates.Style, grammar: Grammar | None
) -> GenerateRequest:
    turn = None
    if body.store or body.previous_response_id:
        turn = SessionTurn(
            source=state_key(body.previous_response_id) if body.previous_response_id else None,
            target=state_key(response_id) if body.store else None,
            required=body.previous_response_id is not None,
            separator=style.form.separator,
        )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_output_tokens is None else body.max_output_tokens
    request = body.request([prompt], max_tokens, style, body.wanted_logprobs, turn, grammar)
    # The tokens of thoughts are counted by delta, so deltas are small also when nothing is streamed: any
    # answer may begin with a thought.
    return msgspec.structs.replace(request, pausable=False, flush_tokens=request.flush_tokens or 1)


def _response(body: ResponsesBody, response_id: str, model_id: str) -> Json:
    """The response object before there is any output."""
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
        "service_tier": "flex" if body.is_batch else "default",
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": _format(body), "verbosity": body.text.verbosity},
        "tool_choice": body.tool_choice,
        "tools": as_listed(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
    }


def _format(body: ResponsesBody) -> Json:
    """The format of the text, in the form of the response."""
    form = body.text.format or TextFormat(type="text", schema=None)
    if form.type != "json_schema":
        return {"type": form.type}
    return form.model_dump(by_alias=True) | {"strict": bool(form.strict)}
