"""The routes of translation services: one engine call behind all of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from robyn import Response

from routes.http.errors import ApiError, ErrorShape, Json
from routes.http.exchange import HttpRequest, HttpResponse, json_response
from routes.http.frontend import Frontend
from routes.http.generate import Prepared, generate_from
from routes.http.priority import PriorityFields
from routes.http.route import Handler
from routes.http.schemas import MAX_PROMPTS, RequestBody
from routes.translate.bodies import read_body
from routes.translate.glossaries import stored_glossary
from routes.translate.keys import allowed_fields
from routes.translate.names import (
    DEEPL_SOURCES,
    DEEPL_TARGETS,
    LIBRETRANSLATE,
    libretranslate_code,
)
from routes.translate.rounds import TranslationReply, request_of
from routes.translate.schemas import DetectFields, LanguagesQuery
from routes.translate.wires import DEEPL, IN_URL, AnyTranslationService, Make, wire_of
from rwkv_batch.chat.languages import name_of
from rwkv_batch.config import FrontendConfig
from rwkv_batch.translation.forms import form_of
from rwkv_batch.translation.glossary import NO_GLOSSARY, Glossary, parse
from rwkv_batch.translation.language.detection import detect
from rwkv_batch.translation.translator import TextsAsked, Translator, Words
from rwkv_batch.wire.supervision import EngineInfo

MOST_CHARACTERS = 1_000_000  # of all texts of a request
LARGE = 20_000  # bytes of a body or URL; some 50 ms of work
UNLIMITED = 10**12  # characters: what DeepL's clients are told that they may send
KINDS = (
    "a body has `text` and `target_lang` (DeepLX), `q` and `target` (LibreTranslate), `text` and `to` "
    "(MTranServer), `text_list` and `target_lang` (Immersive Translate) or `text` and `destination` (hcfy)"
)

GOOGLE_MODELS = ("nmt", "base")  # of Google's: any will do
WORDS = Words()


class Urgency(PriorityFields, RequestBody):
    """How urgent a translation is."""


def translates(wire: AnyTranslationService) -> Handler:
    """The handler of a route that answers the clients of one service."""

    async def handler(front: Frontend, http: HttpRequest) -> HttpResponse:
        fields = allowed_fields(front, http, required=True, in_url=wire in IN_URL)
        return await _answer(front, http, fields, wire)

    return handler


async def any_service(front: Frontend, http: HttpRequest) -> HttpResponse:
    """POST /translate: the service is known by the fields of the body. Raises ApiError."""
    body, _ = read_body(http)
    wire = wire_of(body)
    if wire:
        http.shape = wire.shape
    fields = allowed_fields(front, http, required=True)
    if "messages" in fields:
        raise ApiError(
            400, "/translate takes texts; a chat belongs to /v1/chat/completions.", param="messages"
        )
    if wire is None:
        raise ApiError(400, f"No service has such a body: {KINDS}.")
    return await _answer(front, http, fields, wire)


async def deepl_languages(front: Frontend, http: HttpRequest) -> Response:
    """/v2/languages: what DeepL lists. Others are known, too. Raises ApiError."""
    query = LanguagesQuery.from_json({k: v for k, v in allowed_fields(front, http).items() if k == "type"})
    if query.type == "source":
        return json_response(http, [{"language": code, "name": name_of(code)} for code in DEEPL_SOURCES])
    return json_response(
        http,
        [{"language": code, "name": name_of(code), "supports_formality": False} for code in DEEPL_TARGETS],
    )


async def deepl_usage(front: Frontend, http: HttpRequest) -> Response:
    """/v2/usage: nothing is counted or limited. Raises ApiError."""
    allowed_fields(front, http)
    return json_response(http, {"character_count": 0, "character_limit": UNLIMITED})


async def libretranslate_languages(front: Frontend, http: HttpRequest) -> Response:
    """GET /languages. Raises ApiError."""
    allowed_fields(front, http)
    return json_response(
        http, [{"code": code, "name": name_of(code), "targets": LIBRETRANSLATE} for code in LIBRETRANSLATE]
    )


async def detects(front: Frontend, http: HttpRequest) -> Response:
    """POST /detect: of `q` as LibreTranslate answers, of `text` as MTranServer does. Raises ApiError."""
    body = allowed_fields(front, http, required=True)
    fields = DetectFields.from_json(body)
    found = detect("\n".join(fields.q))
    if "q" not in body:
        return json_response(http, {"language": found.code or ""})
    language = (
        [{"confidence": round(100.0 * found.confidence, 1), "language": libretranslate_code(found.code)}]
        if found.code
        else []
    )
    return json_response(http, language)


def translator_of(asked: TextsAsked, model: EngineInfo, settings: FrontendConfig) -> Translator:
    """What translates this by that model. Raises ApiError 413."""
    refuse_long(asked.texts)
    asked = replace(asked, glossary=asked.glossary.before(_glossary(settings.glossary)))
    translator = Translator(asked, form_of(model.checkpoint), WORDS, model.fingerprint)
    if len(translator.segments) > MAX_PROMPTS:
        raise ApiError(413, f"The texts have more than {MAX_PROMPTS} paragraphs; send fewer at once.")
    return translator


async def _answer(
    front: Frontend, http: HttpRequest, fields: Json, wire: AnyTranslationService
) -> HttpResponse:
    if wire in IN_URL and fields.get("model") in GOOGLE_MODELS:
        fields = fields | {"model": None}
    stored = await stored_glossary(front, http, fields) if wire is DEEPL else NO_GLOSSARY
    slow = is_large(http)
    urgency = Urgency.from_json({name: fields[name] for name in Urgency.model_fields if name in fields})

    def prepare(body: Json, model: EngineInfo) -> Prepared:
        asked, make = wire.read(body)
        asked = replace(asked, glossary=asked.glossary.before(stored))
        prepared = prepare_translation(asked, make, model, front.settings, wire.shape, slow)
        return prepared._replace(request=urgency.ranked(prepared.request))

    # What finds the terms of a large glossary takes a third of a second to make.
    return await generate_from(front, http, fields, prepare, in_thread=slow or bool(stored))


def prepare_translation(
    asked: TextsAsked,
    make: Make,
    model: EngineInfo,
    settings: FrontendConfig,
    shape: ErrorShape,
    slow: bool = False,
) -> Prepared:
    """The request and the reply for what is asked; see TranslationReply. Raises ApiError."""
    reply = TranslationReply(translator_of(asked, model, settings), shape, make, slow)
    return Prepared(request_of(reply.rows), False, reply)


def refuse_long(texts: Sequence[str]) -> None:
    """Raises ApiError 413 for more than one request may have."""
    if sum(map(len, texts)) > MOST_CHARACTERS:
        raise ApiError(413, f"The texts have more than {MOST_CHARACTERS} characters; send fewer at once.")


def is_large(http: HttpRequest) -> bool:
    """Whether cutting its texts takes so long that other requests would wait. Its body has been read."""
    size = len(http.body) + sum(len(text) for texts in http.query.values() for text in texts)
    if size <= LARGE and http.headers.get("content-encoding"):  # a few bytes may be a long text
        size = len(http.data(http.max_body))
    return size > LARGE


@lru_cache(1)
def _glossary(text: str) -> Glossary:
    """That of --glossary, whose file was read when the server started."""
    return parse(text)
