"""The services whose clients are answered: what each one's body asks for, and what its reply says."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from routes.http.errors import ErrorShape, Json, native_shape
from routes.translate.errors import deepl_shape, deeplx_shape, google_shape, plain_shape
from routes.translate.names import chinese_name, deepl_code, libretranslate_code
from routes.translate.schemas import (
    DeepLFields,
    DeepLXFields,
    GoogleFields,
    GoogleWebFields,
    HcfyFields,
    LibreTranslateFields,
    MTranServerBatchFields,
    MTranServerFields,
    TermFields,
    TranslateFields,
)
from rwkv_batch.chat.languages import find
from rwkv_batch.translation.language.detection import detect
from rwkv_batch.translation.marks import HTML, PLAIN, Handling
from rwkv_batch.translation.segments import Sentences
from rwkv_batch.translation.translator import TextsAsked, Translator

Fields = TypeVar("Fields", bound=TermFields)
Made = Json | list[Any]
Make = Callable[[Translator], Made]
HTML_FORMAT = ("html", None, "")
SENTENCES: dict[object, Sentences] = {"nonewlines": "texts", "0": "whole", "1": "lines"}


@dataclass(frozen=True)
class TranslationService(Generic[Fields]):
    """A service."""

    body: type[Fields]
    shape: ErrorShape
    ask: Callable[[Fields], TextsAsked]
    make: Callable[[Fields, Json, Translator], Made]  # of the fields, and the body as it came

    def read(self, body: Json) -> tuple[TextsAsked, Make]:
        """What a body asks for, and what makes the reply. Raises ApiError."""
        fields = self.body.from_json(body)
        asked = replace(self.ask(fields), glossary=fields.own_terms)
        return asked, lambda translator: self.make(fields, body, translator)


def _immersive(fields: TranslateFields) -> TextsAsked:
    handling = Handling(literals=tuple(fields.placeholders or ()))
    return TextsAsked(fields.text_list, fields.target_lang, fields.source_lang, handling=handling)


def _immersive_reply(fields: TranslateFields, body: Json, done: Translator) -> Json:
    """One translation per text, by position. Blank texts come back as they are."""
    return {
        "translations": [
            {"detected_source_lang": code, "text": text.strip() or text}
            for text, code in zip(done.texts(), done.sources, strict=True)
        ]
    }


def _tags(kind: str | None, ignored: Sequence[str] = ()) -> Handling:
    if kind == "html":
        return replace(HTML, silent=frozenset(ignored))
    return Handling(escaped=kind == "xml", silent=frozenset(ignored))


def _deepl(fields: DeepLFields) -> TextsAsked:
    handling = replace(
        _tags(fields.tag_handling, fields.ignore_tags),
        parting=frozenset(fields.splitting_tags),
        joining=frozenset(fields.non_splitting_tags),
    )
    usual = "nonewlines" if fields.tag_handling else "1"
    return TextsAsked(
        fields.text,
        fields.target_lang,
        fields.source_lang,
        context=fields.context or "",
        sentences=SENTENCES[fields.split_sentences or usual],
        handling=handling,
    )


def _deepl_reply(fields: DeepLFields, body: Json, done: Translator) -> Json:
    translations: list[Json] = [
        {"detected_source_language": deepl_code(code), "text": text}
        for text, code in zip(done.texts(), done.sources, strict=True)
    ]
    if fields.show_billed_characters:
        for text, each in zip(fields.text, translations, strict=True):
            each["billed_characters"] = len(text)
    return {"translations": translations}


def _deeplx(fields: DeepLXFields) -> TextsAsked:
    return TextsAsked(
        [fields.text], fields.target_lang, fields.source_lang, handling=_tags(fields.tag_handling)
    )


def _deeplx_reply(fields: DeepLXFields, body: Json, done: Translator) -> Json:
    return {
        "code": 200,
        "id": random.randrange(10**9, 10**10),
        "data": done.texts()[0],
        "alternatives": [],
        "source_lang": deepl_code(done.sources[0]),
        "target_lang": fields.target_lang.upper(),
        "method": "Free",
    }


def _libretranslate(fields: LibreTranslateFields) -> TextsAsked:
    return TextsAsked(
        fields.q, fields.target, fields.source, handling=HTML if fields.format == "html" else PLAIN
    )


def _libretranslate_reply(fields: LibreTranslateFields, body: Json, done: Translator) -> Json:
    several = not isinstance(body["q"], str)
    found = [
        {"confidence": round(100.0 * confidence, 1), "language": libretranslate_code(code)}
        for code, confidence in zip(done.sources, done.confidences, strict=True)
    ]
    texts = done.texts()
    reply: Json = {"translatedText": texts if several else texts[0]}
    if fields.source is None:
        reply["detectedLanguage"] = found if several else found[0]
    if fields.alternatives:
        reply["alternatives"] = [[] for _ in texts] if several else []
    return reply


def _mtranserver(fields: MTranServerFields) -> TextsAsked:
    return TextsAsked([fields.text], fields.to, fields.from_, handling=HTML if fields.html else PLAIN)


def _mtranserver_reply(fields: MTranServerFields, body: Json, done: Translator) -> Json:
    (text,) = done.texts()
    return {"result": text, "text": text, "src": done.sources[0]}


def _mtranserver_batch(fields: MTranServerBatchFields) -> TextsAsked:
    return TextsAsked(fields.texts, fields.to, fields.from_, handling=HTML if fields.html else PLAIN)


def _mtranserver_batch_reply(fields: MTranServerBatchFields, body: Json, done: Translator) -> Json:
    texts = done.texts()
    each = [{"text": text, "src": code} for text, code in zip(texts, done.sources, strict=True)]
    return {"results": texts, "translations": each}


def _hcfy(fields: HcfyFields) -> TextsAsked:
    """Into the second language if the text is in the first one already."""
    first, *others = fields.destination
    target, source = find(first), find(fields.source or detect(fields.text).code or "")
    same = target is not None and source is not None and target.name == source.name
    return TextsAsked([fields.text], others[0] if same and others else first, fields.source)


def _hcfy_reply(fields: HcfyFields, body: Json, done: Translator) -> Json:
    return {
        "text": fields.text,
        "from": chinese_name(done.sources[0]),
        "to": chinese_name(done.asked.target),
        "result": done.texts()[0].splitlines() or [""],
    }


def _google(fields: GoogleFields) -> TextsAsked:
    handling = HTML if fields.format in HTML_FORMAT else PLAIN
    return TextsAsked(fields.q, fields.target, fields.source, handling=handling)


def _google_reply(fields: GoogleFields, body: Json, done: Translator) -> Json:
    detected = [{"detectedSourceLanguage": code} if fields.source is None else {} for code in done.sources]
    texts = zip(done.texts(), detected, strict=True)
    return {"data": {"translations": [{"translatedText": text} | found for text, found in texts]}}


def _google_web(fields: GoogleWebFields) -> TextsAsked:
    return TextsAsked([fields.q], fields.tl, fields.sl)


def _google_web_reply(fields: GoogleWebFields, body: Json, done: Translator) -> Made:
    """Objects with `dj`, and otherwise lists, in which a place says what is there."""
    (text,), (code,), (confidence,) = done.texts(), done.sources, done.confidences
    confidence = round(confidence, 3)
    if fields.dj == "1":
        sentence = {"trans": text, "orig": fields.q, "backend": 1}
        return {"sentences": [sentence], "src": code, "confidence": confidence}
    found = [[code], None, [confidence], [code]]
    return [[[text, fields.q, None, None, 1]], None, code, None, None, None, confidence, [], found]


IMMERSIVE = TranslationService(TranslateFields, native_shape, _immersive, _immersive_reply)
DEEPL = TranslationService(DeepLFields, deepl_shape, _deepl, _deepl_reply)
DEEPLX = TranslationService(DeepLXFields, deeplx_shape, _deeplx, _deeplx_reply)
LIBRETRANSLATE = TranslationService(LibreTranslateFields, plain_shape, _libretranslate, _libretranslate_reply)
MTRANSERVER = TranslationService(MTranServerFields, plain_shape, _mtranserver, _mtranserver_reply)
MTRANSERVER_BATCH = TranslationService(
    MTranServerBatchFields, plain_shape, _mtranserver_batch, _mtranserver_batch_reply
)
HCFY = TranslationService(HcfyFields, plain_shape, _hcfy, _hcfy_reply)
GOOGLE = TranslationService(GoogleFields, google_shape, _google, _google_reply)
GOOGLE_WEB = TranslationService(GoogleWebFields, google_shape, _google_web, _google_web_reply)
AnyTranslationService = TranslationService[Any]
IN_URL: tuple[AnyTranslationService, ...] = (GOOGLE, GOOGLE_WEB)  # whose fields may be parameters of the URL
# By which field a body of /translate is known, the first that it has.
BY_FIELD: tuple[tuple[str, AnyTranslationService], ...] = (
    ("text_list", IMMERSIVE),
    ("destination", HCFY),
    ("q", LIBRETRANSLATE),
    ("texts", MTRANSERVER_BATCH),
    ("to", MTRANSERVER),
    ("from", MTRANSERVER),
    ("target_lang", DEEPLX),
    ("source_lang", DEEPLX),
)


def wire_of(body: Json) -> AnyTranslationService | None:
    """The service whose body it is; None: nobody's."""
    wire = next((wire for field, wire in BY_FIELD if field in body), None)
    return DEEPL if wire is DEEPLX and isinstance(body.get("text"), list) else wire
