"""Chat completions in OpenAI's form.

Thinking (`enable_think`, or `reasoning_effort` above minimal) puts what stands before `</think>` into
`reasoning_content` of the message or delta, without the tags, and the rest into `content`. With `session_id`
the messages are only what is new: they continue the state of that session, which then holds them and the
answer. When an assistant message stands last it is continued: the reply holds only the continuation, and
thinking has no place there.
"""

from uuid import uuid4

from routes.chat import templates
from routes.chat.answer import AnswerReader, Piece
from routes.chat.tools import ToolCall
from routes.http.errors import ApiError
from routes.http.replies import RowResult
from routes.openai.messages import turns
from routes.openai.schemas import ChatBody, bad, parse, refuse
from routes.openai.shared import NOT_HERE, OpenAIReply, chat_logprobs, engine_request, wants_usage
from routes.openai.tools import tool_use
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, SessionTurn

DEFAULT_MAX_TOKENS = 4096
# The texts after which a model would speak for the user. A blank line alone does not end an answer: answers
# have paragraphs.
DEFAULT_STOPS = ("\n\nUser:", "\nUser:")
DEFAULT_ALPHAS = (1.0, 0.1)
REFUSED = NOT_HERE | {
    "audio": "this server writes text only",
    "functions": "this is deprecated; use tools",
    "function_call": "this is deprecated; use tool_choice",
    "web_search_options": "this server does not search the web",
}


def prepare(body: dict, model_id: str) -> tuple[GenerateRequest, bool, "ChatReply"]:
    """The engine's request, whether to stream, and how to reply. Raises ApiError 400 for what cannot be
    served.
    """
    refuse(body, REFUSED)
    if body.get("modalities") not in (None, ["text"]):
        raise bad("modalities", 'this server writes text only; input should be ["text"]')
    form = body.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise bad("response_format", 'only {"type": "text"} is available')
    chat = parse(ChatBody, body)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise bad("top_logprobs", "this is only allowed when logprobs is true")

    use, spoken, think = tool_use(chat), _spoken(chat), _thinks(chat)
    if chat.session_id and chat.n != 1:
        raise bad("n", "a session has one future; input should be 1 with session_id")
    prompt = templates.chat(spoken, chat.system, use.offered, use.choice, think)
    opening = ""
    if templates.continues(spoken):
        think = False
    elif not think:
        opening = use.opening()
    request = engine_request(
        chat,
        [prompt + opening],
        _max_tokens(chat),
        DEFAULT_STOPS,
        DEFAULT_ALPHAS,
        (chat.top_logprobs or 0) if chat.logprobs else None,
        SessionTurn(source=chat.session_id, target=chat.session_id, seam=templates.SEAM)
        if chat.session_id
        else None,
    )
    readers = [AnswerReader(think, use.look_for_calls, opening) for _ in range(chat.n)]
    return request, chat.stream, ChatReply(model_id, readers, think, chat.logprobs, wants_usage(chat))


def _spoken(chat: ChatBody) -> list[templates.Turn]:
    if len(chat.contents) > 1 and chat.session_id:
        raise ApiError(400, "State mode only supports a single contents item.", param="contents")
    if len(chat.contents) > 1:
        raise bad("contents", "this route takes a single item; send a conversation as messages")
    spoken = turns(chat.messages) + [templates.Turn("user", text) for text in chat.contents]
    if not chat.system.strip() and not any(t.text.strip() or t.tool_calls for t in spoken):
        if chat.session_id:
            raise ApiError(400, "State mode requires incremental contents or messages.", param="messages")
        raise ApiError(
            400, "Empty prompt: messages should hold at least one message with text.", param="messages"
        )
    return spoken


def _thinks(chat: ChatBody) -> bool:
    by_effort = None if chat.reasoning_effort is None else chat.reasoning_effort not in ("none", "minimal")
    if None not in (by_effort, chat.enable_think) and by_effort != chat.enable_think:
        raise bad("reasoning_effort", "this contradicts enable_think; send one of them")
    return bool(by_effort or chat.enable_think)


def _max_tokens(chat: ChatBody) -> int:
    given = {n for n in (chat.max_tokens, chat.max_completion_tokens) if n is not None}
    if len(given) > 1:
        raise bad("max_completion_tokens", "this differs from max_tokens; send one of them")
    return given.pop() if given else DEFAULT_MAX_TOKENS


class ChatReply(OpenAIReply):
    """One reply: `readers` hold the state of each row."""

    def __init__(
        self, model_id: str, readers: list[AnswerReader], think: bool, logprobs: bool, include_usage: bool
    ) -> None:
        super().__init__("chatcmpl-", "chat.completion", "chat.completion.chunk", model_id, include_usage)
        self._readers = readers
        self._called = [False] * len(readers)
        self._think = think
        self._logprobs = logprobs

    def whole(self, job: Job, rows: list[RowResult]) -> dict:
        return self.body(job, rows, [self._choice(i, row) for i, row in enumerate(rows)])

    def _choice(self, index: int, row: RowResult) -> dict:
        reader = self._readers[index]
        piece = reader.feed(row.text) + reader.finish()
        message: dict = {"role": "assistant", "content": piece.content}
        if self._think:
            message["reasoning_content"] = piece.reasoning
        if piece.call:
            message |= {"content": piece.content or None, "tool_calls": [_call(piece.call)]}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(row.logprobs) if self._logprobs else None,
            "finish_reason": "tool_calls" if piece.call else row.finish_reason,
        }

    def first(self, job: Job) -> list[dict]:
        return [self._chunk(i, {"role": "assistant"}) for i in range(job.rows)]

    def events(self, deltas: list[RowDelta]) -> list[dict]:
        self.count(deltas)
        return [event for delta in deltas for event in self._row_events(delta)]

    def _row_events(self, row: RowDelta) -> list[dict]:
        reader = self._readers[row.row]
        piece = reader.feed(row.text)
        if row.finish_reason:
            piece += reader.finish()
        chunks = [self._chunk(row.row, delta) for delta in _deltas(piece)]
        if self._logprobs and row.logprobs:
            chunks = chunks or [
                self._chunk(row.row, {"content": ""})
            ]  # text waits for the rest of a character, tag or stop
            chunks[0]["choices"][0]["logprobs"] = chat_logprobs(row.logprobs)
        self._called[row.row] |= piece.call is not None
        if row.finish_reason:
            chunks.append(
                self._chunk(row.row, {}, "tool_calls" if self._called[row.row] else row.finish_reason)
            )
        return chunks

    def _chunk(self, index: int, delta: dict, finish_reason: str | None = None) -> dict:
        return self.event({"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason})


def _deltas(piece: Piece) -> list[dict]:
    deltas: list[dict] = []
    if piece.reasoning:
        deltas.append({"reasoning_content": piece.reasoning})
    if piece.content:
        deltas.append({"content": piece.content})
    if piece.call:
        deltas.append({"tool_calls": [{"index": 0, **_call(piece.call)}]})
    return deltas


def _call(call: ToolCall) -> dict:
    return {
        "id": "call_" + uuid4().hex,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
