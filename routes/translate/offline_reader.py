"""RWKV's offline_reader, a browser extension that translates pages: what it asks looks like a chat.

One message of the user is the text, and `metadata` says that it is to be translated. It names no language:
texts become Chinese, and Chinese ones English. Its temperature and max_tokens are hints.
"""

from functools import partial

from msgspec.structs import replace

from routes.chat.messages import parse_messages
from routes.http.errors import ApiError, Json, openai_shape
from routes.http.exchange import HttpRequest, HttpResponse, authorized_json
from routes.http.frontend import Frontend
from routes.http.generate import Prepared, generate_from
from routes.openai.reply import OpenAIReply
from routes.translate.handlers import translator_of
from routes.translate.rounds import TranslationReply, request_of
from rwkv_batch.config import FrontendConfig
from rwkv_batch.translation.detection import detect
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
    fields = authorized_json(front.settings.password, http, required=True)
    return await generate_from(front, http, fields, partial(_prepare, settings=front.settings))


def _prepare(body: Json, model: EngineInfo, settings: FrontendConfig) -> Prepared:
    text = _text_of(body)
    target = ENGLISH if (detect(text).code or "").startswith("zh") else CHINESE
    translator = translator_of(TextsAsked([text], target), model, settings)
    stream = body.get("stream") is True
    options = body.get("stream_options")
    usage = isinstance(options, dict) and options.get("include_usage") is True
    reply = PageReply(translator, model.model, usage)
    return Prepared(replace(request_of(reply.rows), flush_tokens=int(stream)), stream, reply)


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
        self._live = [""] * len(translator.segments)  # the text of each in the first round
        self._shown = 0  # characters
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
        if self.rounds.number == 1:
            for delta in deltas:
                self._live[delta.row] += delta.text
        return [self.event(_choice({"content": new}))] if (new := self._new()) else []

    def last(self, job: Job) -> list[Json]:
        rest = self._new()
        events = [self.event(_choice({"content": rest}))] if rest else []
        return [*events, self.event(_choice({}, "stop")), *super().last(job)]

    def _new(self) -> str:
        """What is sure now and was not shown. The text of a plain segment is sure as it comes."""
        text, number = "", 0
        for part in self._translator.parts:
            if not isinstance(part, Segment):
                text += part
                continue
            live = self._live[number].strip() if self._is_plain(part) else ""
            number += 1
            if part.answer is not None:
                if not part.answer.startswith(live):
                    part.answer = live  # it was shown
                text += part.answer
                continue
            text += live
            break
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def _is_plain(self, segment: Segment) -> bool:
        return all(isinstance(token, str) for token in segment.tokens) and not self._translator.has_terms(
            segment
        )


def _choice(delta: Json, finish_reason: str | None = None) -> Json:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
