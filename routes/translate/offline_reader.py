"""RWKV's offline_reader, a browser extension that translates pages: what it asks looks like a chat.

One message of the user is the text, and `metadata` says that it is to be translated. It names no language:
texts become Chinese, and Chinese ones English. Its temperature and max_tokens are hints.
"""

from functools import partial

from msgspec.structs import replace

from routes.chat.messages import parse_messages
from routes.http.access import authorized_json
from routes.http.errors import ApiError, Json, openai_field, openai_shape
from routes.http.exchange import HttpRequest, HttpResponse
from routes.http.frontend import Frontend
from routes.http.generate import Prepared, generate_from
from routes.http.schemas import RequestBody
from routes.openai.reply import OpenAIReply
from routes.openai.schemas import StreamOptions
from routes.translate.handlers import is_large, translator_of
from routes.translate.rounds import TranslationReply, request_of
from rwkv_batch.config import FrontendConfig
from rwkv_batch.translation.language.detection import detect
from rwkv_batch.translation.segments import Segment
from rwkv_batch.translation.translator import TextsAsked, Translator
from rwkv_batch.wire.client import Job, Wire
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta
from rwkv_batch.wire.supervision import EngineInfo

KIND = "web_translation"
CHINESE, ENGLISH = "zh-CN", "en"


def is_translation(body: Json) -> bool:
    """Whether the extension has sent it to have a text translated."""
    metadata = body.get("metadata")
    own = metadata.get("rwkvOfflineReader") if isinstance(metadata, dict) else None
    return isinstance(own, dict) and own.get("kind") == KIND


async def translate_page(front: Frontend, http: HttpRequest) -> HttpResponse:
    """POST /v1/chat/completions with that metadata. Raises ApiError."""
    fields = authorized_json(front, http, required=True)
    slow = is_large(http)
    prepare = partial(_prepare, settings=front.settings, slow=slow)
    return await generate_from(front, http, fields, prepare, in_thread=slow)


class PageFields(RequestBody):
    """What counts of the body beside its text."""

    field_error = staticmethod(openai_field)

    stream: bool = False
    stream_options: StreamOptions | None = None


def _prepare(body: Json, model: EngineInfo, settings: FrontendConfig, slow: bool) -> Prepared:
    text = _text_of(body)
    fields = PageFields.from_json({name: value for name, value in body.items() if value is not None})
    options = fields.stream_options
    if options and not fields.stream:
        raise openai_field("stream_options", "this is only allowed when stream is true")
    target = ENGLISH if (detect(text).code or "").startswith("zh") else CHINESE
    translator = translator_of(TextsAsked([text], target), model, settings)
    reply = PageReply(translator, model.model, bool(options and options.include_usage))
    reply.slow = slow
    request = replace(request_of(reply.rows), flush_tokens=int(fields.stream))
    return Prepared(request, fields.stream, reply)


def _text_of(body: Json) -> str:
    given = body.get("messages")
    texts = (
        [each.text for each in parse_messages(given) if each.role == "user"]
        if isinstance(given, list)
        else []
    )
    if len(texts) != 1:
        raise ApiError(400, "messages: a page's text is one message of the user.", param="messages")
    return texts[0]


class PageReply(OpenAIReply):
    """A chat's reply that holds the translation, and streams what of it is sure."""

    def __init__(self, translator: Translator, model_id: str, include_usage: bool) -> None:
        super().__init__("chatcmpl-", "chat.completion", "chat.completion.chunk", model_id, include_usage)
        self._translator = translator
        self.rounds = TranslationReply(translator, openai_shape, lambda done: {})
        self._plain = [self._is_plain(segment) for segment in translator.segments]
        self._live = [""] * len(translator.segments)  # the answer to each whole one
        self._at = self._number = 0  # of the part that is being shown, and of the segment that it is
        self._shown = 0  # characters of that segment
        self.rows = self.rounds.rows

    def begin(self, client: Wire, request: GenerateRequest) -> Job:
        return self.rounds.begin(client, request)

    def whole_choice(self, row: RowDelta) -> Json:
        message = {"role": "assistant", "content": self._translator.texts()[0]}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}

    def new_choices(self, delta: RowDelta) -> list[Json]:
        return []

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        one = RowDelta(0, "", sum(delta.tokens for delta in deltas))
        return super().whole(job, [one])

    def first(self, job: Job) -> list[Json]:
        return [self.event(_choice({"role": "assistant", "content": ""}))]

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        super().events(deltas)  # counts the tokens
        for delta in deltas:
            if (number := self._translator.whole(delta.row)) is not None:
                self._live[number] += delta.text
        return [self.event(_choice({"content": new}))] if (new := self._new()) else []

    def last(self, job: Job) -> list[Json]:
        rest = self._new()
        events = [self.event(_choice({"content": rest}))] if rest else []
        return [*events, self.event(_choice({}, "stop")), *super().last(job)]

    def _new(self) -> str:
        """What is sure now and was not shown. The text of a plain segment is sure as it comes."""
        text = ""
        while self._at < len(self._translator.parts):
            part = self._translator.parts[self._at]
            if not isinstance(part, Segment):
                text += part
            else:
                live = self._live[self._number].strip() if self._plain[self._number] else ""
                if part.answer is None:
                    return text + self._next(live)
                if not part.answer.startswith(live):
                    part.answer = live  # it was shown
                text += self._next(part.answer)
                self._number, self._shown = self._number + 1, 0
            self._at += 1
        return text

    def _next(self, text: str) -> str:
        """What is new of the segment that is being shown."""
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def _is_plain(self, segment: Segment) -> bool:
        return all(isinstance(token, str) for token in segment.tokens) and not self._translator.has_terms(
            segment
        )


def _choice(delta: Json, finish_reason: str | None = None) -> Json:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
