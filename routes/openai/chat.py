"""POST /v1/chat/completions with `messages`, and /openai/v1/chat/completions.

Thinking (the fields of routes/chat/fields.py, or `reasoning_effort` above minimal) puts what stands before
`</think>` into `reasoning_content` of the message or delta, without the tags, and the rest into `content`; so
does a thought that the model begins its answer with unasked. With `session_id`
the messages are only what is new: they continue the state of that session, which then holds them and the
answer. When an assistant message stands last it is continued: the reply holds only the continuation, and
thinking has no place there.
"""

from uuid import uuid4

from msgspec.structs import replace

from routes.chat.answer import AnswerPart, AnswerReader
from routes.chat.calls import ToolCall
from routes.chat.messages import ignored_calls, parse_messages
from routes.http.errors import ApiError, Json, openai_field
from routes.http.generate import Prepared
from routes.openai.reply import OpenAIReply, logprob_entries
from routes.openai.schemas import ChatBody
from routes.openai.tools import chat_tools, ignored_tools
from rwkv_batch.chat import templates
from rwkv_batch.chat.checkpoints import chat_template
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta, SessionTurn, TokenLogprob

DEFAULT_MAX_TOKENS = 4096
DEFAULTS = FrontendConfig()


def prepare(body: Json, model_id: str, settings: FrontendConfig = DEFAULTS) -> Prepared:
    """Raises ApiError 400 for what cannot be served."""
    if body.get("modalities") not in (None, ["text"]):
        raise openai_field("modalities", 'this server writes text only; input should be ["text"]')
    chat = ChatBody.from_json(body, settings.sampling_profile)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise openai_field("top_logprobs", "this is only allowed when logprobs is true")

    use, messages = chat_tools(chat), _messages(chat)
    style = chat.style(chat_template(model_id, settings), chat.reasoning_effort)
    style = style.continuing(messages)
    if chat.session_id and chat.n != 1:
        raise openai_field("n", "a session has one future; input should be 1 with session_id")
    prompt = templates.chat(messages, chat.system, use.offered, use.choice, style, use.opening(style))
    key = chat.session_id
    request = chat.request(
        [prompt],
        _max_tokens(chat),
        style,
        (chat.top_logprobs or 0) if chat.logprobs else None,
        SessionTurn(source=key, target=key, separator=style.form.separator) if key else None,
        use.grammar(style, chat.grammar()),
    )
    if chat.prediction:
        request = replace(request, prediction=chat.prediction.text)
    readers = [use.reader(style) for _ in range(chat.n)]
    reply = ChatReply(
        model_id, readers, style.thinks, chat.logprobs, chat.include_usage, chat.return_token_ids
    )
    reply.shows_thoughts = chat.include_reasoning and not chat.reasoning.exclude
    reply.ignored = [*ignored_calls(chat.messages), *ignored_tools(chat)]
    return Prepared(request, chat.stream, reply)


def _messages(chat: ChatBody) -> list[templates.Message]:
    if len(chat.contents) > 1 and chat.session_id:
        raise ApiError(400, "State mode only supports a single contents item.", param="contents")
    if len(chat.contents) > 1:
        raise openai_field("contents", "this route takes a single item; send a conversation as messages")
    messages = parse_messages(chat.messages) + [templates.Message("user", text) for text in chat.contents]
    if not chat.system.strip() and all(m.empty for m in messages):
        if chat.session_id:
            raise ApiError(400, "State mode requires incremental contents or messages.", param="messages")
        raise ApiError(
            400, "Empty prompt: messages should hold at least one message with text.", param="messages"
        )
    _check_end(chat, templates.continues(messages))
    return messages


def _check_end(chat: ChatBody, continues: bool) -> None:
    """Raises ApiError 400 unless the chat is to end as it does here."""
    if chat.continue_final_message and not continues:
        raise openai_field("continue_final_message", "the last message should be the assistant's")
    if not chat.add_generation_prompt and not continues:
        why = "the head of the answer always follows here, unless the last message is the assistant's"
        raise openai_field("add_generation_prompt", why)


def _max_tokens(chat: ChatBody) -> int:
    given = {n for n in (chat.max_tokens, chat.max_completion_tokens) if n is not None}
    if len(given) > 1:
        raise openai_field("max_completion_tokens", "this differs from max_tokens; send one of them")
    return given.pop() if given else DEFAULT_MAX_TOKENS


class ChatReply(OpenAIReply):
    """`readers` hold the state of each row."""

    shows_thoughts = True

    def __init__(
        self,
        model_id: str,
        readers: list[AnswerReader],
        think: bool,
        logprobs: bool,
        include_usage: bool,
        ids: bool,
    ) -> None:
        """ids: whether the reply says those of the prompt and of what was drawn."""
        super().__init__("chatcmpl-", "chat.completion", "chat.completion.chunk", model_id, include_usage)
        self._readers = readers
        self._think = think
        self._logprobs, self._ids = logprobs, ids

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        body = super().whole(job, deltas)
        return body | {"prompt_token_ids": job.acceptance.prompt_ids[0]} if self._ids else body

    def whole_choice(self, row: RowDelta) -> Json:
        reader = self._readers[row.row]
        piece = reader.feed(row.text) + reader.finish()
        message: Json = {"role": "assistant", "content": piece.content}
        if self.shows_thoughts and (self._think or piece.reasoning):
            message["reasoning_content"] = piece.reasoning
        if reader.calls:
            calls = [_call(call) for call in reader.calls]
            message |= {"content": piece.content or None, "tool_calls": calls}
        choice: Json = {
            "index": row.row,
            "message": message,
            "logprobs": _logprobs(row.logprobs) if self._logprobs else None,
            "finish_reason": _finish_reason(reader, row),
            **self.row_error(row),
        }
        return choice | {"token_ids": row.ids} if self._ids else choice

    def first(self, job: Job) -> list[Json]:
        events = [self.event(_choice(i, {"role": "assistant"})) for i in range(job.rows)]
        if self._ids:
            events[0]["prompt_token_ids"] = job.acceptance.prompt_ids[0]
        return events

    def new_choices(self, delta: RowDelta) -> list[Json]:
        reader = self._readers[delta.row]
        known = len(reader.calls)
        piece = reader.feed(delta.text)
        if delta.finish_reason:
            piece += reader.finish()
        if not self.shows_thoughts:
            piece = AnswerPart(content=piece.content)
        choices = [_choice(delta.row, part) for part in _parts(piece, reader.calls, known)]
        more: Json = {"logprobs": _logprobs(delta.logprobs)} if self._logprobs and delta.logprobs else {}
        if self._ids and delta.ids:
            more["token_ids"] = delta.ids
        if more:
            # without a choice, the text waits for the rest of a character, tag or stop
            choices = choices or [_choice(delta.row, {"content": ""})]
            choices[0] |= more
        if delta.finish_reason:
            choices.append(_choice(delta.row, {}, _finish_reason(reader, delta)) | self.row_error(delta))
        return choices


def _finish_reason(reader: AnswerReader, row: RowDelta) -> str | None:
    return "tool_calls" if reader.calls and not row.error else row.finish_reason


def _choice(index: int, delta: Json, finish_reason: str | None = None) -> Json:
    """The choice of an event."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _parts(piece: AnswerPart, calls: list[ToolCall], known: int) -> list[Json]:
    """The deltas of the choices that report `piece`, and all but the first `known` of the calls."""
    parts: list[Json] = []
    if piece.reasoning:
        parts.append({"reasoning_content": piece.reasoning})
    if piece.content:
        parts.append({"content": piece.content})
    if new := [{"index": i, **_call(call)} for i, call in enumerate(calls) if i >= known]:
        parts.append({"tool_calls": new})
    return parts


def _call(call: ToolCall) -> Json:
    return {
        "id": "call_" + uuid4().hex,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _logprobs(tokens: list[TokenLogprob]) -> Json:
    """The `logprobs` of a chat choice."""
    return {"content": logprob_entries(tokens), "refusal": None}
