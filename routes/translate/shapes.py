"""The shapes of replies. They document."""

from typing import Any, NotRequired

from typing_extensions import TypeAliasType, TypedDict


class Translation(TypedDict):
    detected_source_lang: str
    text: str


class TranslatedTexts(TypedDict):
    """Immersive Translate's."""

    translations: list[Translation]


class DeepLTranslation(TypedDict):
    detected_source_language: str
    text: str
    billed_characters: NotRequired[int]


class DeepLTexts(TypedDict):
    translations: list[DeepLTranslation]


class DeepLUsage(TypedDict):
    character_count: int
    character_limit: int


class DeepLLanguage(TypedDict):
    language: str
    name: str
    supports_formality: NotRequired[bool]


class DeepLGlossary(TypedDict):
    """A stored glossary."""

    glossary_id: str
    ready: bool
    name: str
    source_lang: str
    target_lang: str
    creation_time: str
    entry_count: int


class DeepLGlossaries(TypedDict):
    glossaries: list[DeepLGlossary]


class GlossaryDictionary(TypedDict):
    source_lang: str
    target_lang: str
    entry_count: int


class MultilingualGlossary(TypedDict):
    """A stored glossary of several pairs of languages."""

    glossary_id: str
    name: str
    dictionaries: list[GlossaryDictionary]
    creation_time: str


class MultilingualGlossaries(TypedDict):
    glossaries: list[MultilingualGlossary]


class DictionaryEntries(TypedDict):
    source_lang: str
    target_lang: str
    entries: str  # a term, a tab and what it becomes on each line
    entries_format: str


class DictionaryList(TypedDict):
    dictionaries: list[DictionaryEntries]


class DeepLPair(TypedDict):
    source_lang: str
    target_lang: str


class DeepLPairs(TypedDict):
    supported_languages: list[DeepLPair]


class DeepLXText(TypedDict):
    code: int
    id: int
    data: str
    alternatives: list[str]
    source_lang: str
    target_lang: str
    method: str


class DetectedLanguage(TypedDict):
    confidence: float
    language: str


class LibreTranslateText(TypedDict):
    """LibreTranslate's; lists where it was sent a list."""

    translatedText: str | list[str]
    detectedLanguage: NotRequired[DetectedLanguage | list[DetectedLanguage]]
    alternatives: NotRequired[list[str] | list[list[str]]]


class LibreTranslateLanguage(TypedDict):
    code: str
    name: str
    targets: list[str]


class MTranServerText(TypedDict):
    """MTranServer's, and kiss-translator's older one."""

    result: str
    text: str
    src: str


class KissTranslation(TypedDict):
    text: str
    src: str


class MTranServerTexts(TypedDict):
    """MTranServer's, and kiss-translator's."""

    results: list[str]
    translations: list[KissTranslation]


# `from` is no name in Python.
HcfyText = TypedDict("HcfyText", {"text": str, "from": str, "to": str, "result": list[str]})


class GoogleLanguage(TypedDict):
    language: str
    name: NotRequired[str]


class GoogleLanguageList(TypedDict):
    languages: list[GoogleLanguage]


class GoogleLanguages(TypedDict):
    data: GoogleLanguageList


class GoogleDetection(TypedDict):
    language: str
    confidence: float
    isReliable: bool


class GoogleDetectionLists(TypedDict):
    detections: list[list[GoogleDetection]]


class GoogleDetections(TypedDict):
    data: GoogleDetectionLists


class GoogleTranslation(TypedDict):
    translatedText: str
    detectedSourceLanguage: NotRequired[str]


class GoogleTranslations(TypedDict):
    translations: list[GoogleTranslation]


class GoogleTexts(TypedDict):
    data: GoogleTranslations


class GoogleWebSentence(TypedDict):
    trans: str
    orig: str
    backend: int


class GoogleWebObject(TypedDict):
    """An answer of objects."""

    sentences: list[GoogleWebSentence]
    src: str
    confidence: float


# In the lists a place says what is there: [[translation, text, null, null, 1]], null, the language, and more.
GoogleWebList = TypeAliasType("GoogleWebList", list[Any])
GoogleWebText = GoogleWebList | GoogleWebObject

AnyTranslated = (
    TranslatedTexts
    | DeepLXText
    | DeepLTexts
    | LibreTranslateText
    | MTranServerText
    | MTranServerTexts
    | HcfyText
)
