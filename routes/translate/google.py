"""The lists of Google's Cloud Translation, version 2: its languages, and the language of a text."""

import asyncio

from robyn import Response

from routes.http.errors import Json
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from routes.translate.handlers import is_large, refuse_long
from routes.translate.keys import allowed_fields
from routes.translate.names import LIBRETRANSLATE, chinese_name
from routes.translate.schemas import GoogleDetectFields, GoogleLanguagesFields
from rwkv_batch.chat.languages import find, name_of
from rwkv_batch.translation.language.detection import UNSURE, Detected, detect

WRITTEN = {"zh-Hans": "zh-CN", "zh-Hant": "zh-TW", "nb": "no"}
UNDETERMINED = "und"


async def languages(front: Frontend, http: HttpRequest) -> Response:
    """GET and POST /language/translate/v2/languages: codes, and with `target` names. Raises ApiError."""
    fields = GoogleLanguagesFields.from_json(allowed_fields(front, http, in_url=True))
    codes = [WRITTEN.get(code, code) for code in LIBRETRANSLATE]
    listed = [
        {"language": code} | ({"name": _name(code, fields.target)} if fields.target else {}) for code in codes
    ]
    return json_response(http, {"data": {"languages": listed}})


async def detections(front: Frontend, http: HttpRequest) -> Response:
    """GET and POST /language/translate/v2/detect: one list for each text. Raises ApiError."""
    fields = GoogleDetectFields.from_json(allowed_fields(front, http, in_url=True))
    refuse_long(fields.q)
    found = await asyncio.to_thread(list, map(detect, fields.q)) if is_large(http) else map(detect, fields.q)
    return json_response(http, {"data": {"detections": [[_described(each)] for each in found]}})


def _described(found: Detected) -> Json:
    return {
        "language": found.code or UNDETERMINED,
        "confidence": found.confidence,
        "isReliable": found.confidence > UNSURE,
    }


def _name(code: str, language: str) -> str:
    """Its name in Chinese, or in English for all others."""
    found = find(language)
    return chinese_name(code) if found and found.code == "zh" else name_of(code)
