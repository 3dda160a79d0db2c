"""What the clients of each service send. Fields that nobody knows are hints, as everywhere."""

from typing import Annotated, Literal

import msgspec
from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field
from typing_extensions import TypeAliasType

from routes.http.priority import PriorityFields
from routes.http.schemas import MAX_PROMPTS, RequestBody, not_bool, refused
from rwkv_batch.chat.languages import find, languages
from rwkv_batch.translation.glossary import NO_GLOSSARY, Glossary, GlossaryError, from_pairs

AUTO = "auto"
MOST_GLOSSARIES = 5  # stored ones of a translation
MOST_PLACEHOLDERS = 8000  # characters of all of them: each may be compared at each place of a text


def _unless_auto(value: object) -> object:
    """None where the language is to be found out."""
    return None if isinstance(value, str) and value.strip().lower() == AUTO else value


def _unless_named(value: object) -> object:
    """None for a field that a client has left empty, or means to be found out."""
    return None if isinstance(value, str) and not value.strip() else _unless_auto(value)


def _not_auto(value: object) -> object:
    if _unless_auto(value) is None and value is not None:
        raise ValueError('must name a language, as in "zh-CN"; only the source can be found out')
    return value


def _is_language(text: str) -> str:
    if find(text) is None:
        known = 'send the code or English name of one, as in "fr" or "French"'
        raise ValueError(f'"{text}" is no language that is known here; {known}')
    return text


def _one_or_many(value: object) -> object:
    if not isinstance(value, str | list):
        raise ValueError("must be a string, or a list of strings")
    return [value] if isinstance(value, str) else value


def _has_translation(parts: list[str]) -> list[str]:
    if "t" not in parts:
        raise ValueError("must have t, the translation: nothing else is made")
    return parts


def _names(value: object) -> object:
    """A list, which a form writes as one text."""
    return [name for name in value.split(",") if name] if isinstance(value, str) else value


def _as_digit(value: object) -> object:
    """A number or a boolean as a form writes it."""
    return str(int(value)) if isinstance(value, bool | int) else value


def _not_long(placeholders: list[str] | None) -> list[str] | None:
    if sum(map(len, placeholders or ())) > MOST_PLACEHOLDERS:
        raise ValueError(f"have more than {MOST_PLACEHOLDERS} characters together; send fewer texts at once")
    return placeholders


def _pairs(value: object) -> object:
    """An object, which a form writes as JSON or as lines of a term, a tab and what it becomes."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            raise ValueError("is no JSON object, though it begins like one") from None
    lines = [line.split("\t") for line in value.splitlines() if line.strip()]
    if not all(len(line) == 2 for line in lines):
        raise ValueError("must be a JSON object, or have a term, a tab and what it becomes on each line")
    return dict(lines)


def _terms(pairs: dict[str, str]) -> Glossary:
    try:
        return from_pairs(pairs)
    except GlossaryError as error:
        raise ValueError(str(error)) from None


# An alias has one place in the document, and not one in each field.
LanguageName = TypeAliasType(
    "LanguageName",
    Annotated[
        str, Field(max_length=64, json_schema_extra={"enum": languages()}), AfterValidator(_is_language)
    ],
)
AutoName = Annotated[
    LanguageName | None,
    BeforeValidator(_unless_auto, json_schema_input_type=Literal["auto"] | LanguageName | None),
]
OpenName = Annotated[
    LanguageName | None,
    BeforeValidator(_unless_named, json_schema_input_type=Literal["", "auto"] | LanguageName | None),
]
TargetName = Annotated[LanguageName, BeforeValidator(_not_auto)]
Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS)]
TextOrTexts = Annotated[Texts, BeforeValidator(_one_or_many, json_schema_input_type=str | Texts)]
TagNames = Annotated[list[str], BeforeValidator(_names, json_schema_input_type=str | list[str])]
Pairs = Annotated[dict[str, str], Field(max_length=5000)]
OwnTerms = Annotated[
    Pairs,
    BeforeValidator(_pairs, json_schema_input_type=Pairs),
    AfterValidator(_terms),  # what is kept of them
]
_WithTranslation = Annotated[list[str], Field(json_schema_extra={"contains": {"const": "t"}})]
Parts = Annotated[
    list[str],
    BeforeValidator(_one_or_many, json_schema_input_type=Literal["t"] | _WithTranslation),
    AfterValidator(_has_translation),
]
Key = Annotated[str | None, Field(description="the password")]


class TermFields(PriorityFields, RequestBody):
    """What every translation can have besides."""

    glossary: OwnTerms = Field(default={})  # term -> what it becomes; | parts forms

    @property
    def own_terms(self) -> Glossary:
        return self.glossary if isinstance(self.glossary, Glossary) else NO_GLOSSARY


class TranslateFields(TermFields):
    """The body of Immersive Translate's custom API."""

    source_lang: AutoName = None
    target_lang: TargetName
    text_list: Texts
    placeholders: Annotated[list[str] | None, AfterValidator(_not_long)] = (
        None  # further marks, which come back whole
    )


class DeepLFields(TermFields):
    """The body of DeepL's API."""

    text: TextOrTexts
    target_lang: TargetName
    source_lang: OpenName = None
    context: str | None = None  # says which language the texts are in where they leave it open
    split_sentences: Annotated[Literal["0", "1", "nonewlines"] | None, BeforeValidator(_as_digit)] = None
    tag_handling: Literal["xml", "html", ""] | None = None
    splitting_tags: TagNames = Field(default=[])
    non_splitting_tags: TagNames = Field(default=[])
    ignore_tags: TagNames = Field(default=[])
    show_billed_characters: bool | None = None
    formality: Literal["default", "more", "less", "prefer_more", "prefer_less"] | None = None  # a hint
    model_type: str | None = None  # a hint
    preserve_formatting: bool | None = None  # a hint: formatting always stays
    outline_detection: bool | None = None  # a hint
    tag_handling_version: str | None = None  # a hint
    auth_key: Key = None
    glossary_id: str | None = None  # of a stored one
    # of several, whose terms count in this order
    glossary_ids: Annotated[TagNames, Field(max_length=MOST_GLOSSARIES)] | None = None
    style_id: Annotated[None, refused("there are no stored styles; leave it out")] = None
    custom_instructions: Annotated[
        None, refused("the prompt has no place for instructions; leave it out, or send terms in `glossary`")
    ] = None


class DeepLXFields(TermFields):
    """The body of DeepLX."""

    text: str
    target_lang: TargetName
    source_lang: OpenName = None
    tag_handling: Literal["xml", "html", ""] | None = None


class LibreTranslateFields(TermFields):
    """The body of LibreTranslate."""

    q: TextOrTexts
    target: TargetName
    source: OpenName = None
    format: Literal["text", "html", ""] | None = None
    # a hint: one translation is made
    alternatives: Annotated[int, not_bool("must be a number, not true or false"), Field(ge=0)] | None = None
    api_key: Key = None


class MTranServerFields(TermFields):
    """The body of MTranServer for one text, and the older one of kiss-translator."""

    text: str
    to: TargetName
    from_: Annotated[OpenName, Field(validation_alias="from")] = None
    html: bool = False


class MTranServerBatchFields(TermFields):
    """The body of MTranServer for several texts, and that of kiss-translator."""

    texts: Texts
    to: TargetName
    from_: Annotated[OpenName, Field(validation_alias="from")] = None
    html: bool = False


class HcfyFields(TermFields):
    """The body of hcfy, whose languages have Chinese names."""

    text: str
    destination: Annotated[list[TargetName], Field(min_length=1, max_length=16)]
    source: OpenName = None
    name: str | None = None


class GoogleFields(TermFields):
    """The body of Google's Cloud Translation, version 2."""

    q: TextOrTexts
    target: TargetName
    source: OpenName = None
    format: Literal["text", "html", ""] | None = None  # html unless it is sent
    model: str | None = None
    key: Key = None


class GoogleWebFields(TermFields):
    """What browser extensions send to the address of Google's own page."""

    q: str
    tl: TargetName
    sl: OpenName = None
    dt: Parts = Field(default=["t"])  # of what is asked for beside t, the translation, nothing is made
    dj: Literal["0", "1"] | None = None  # 1: an answer of objects
    client: str | None = None  # a hint
    hl: str | None = None  # a hint
    key: Key = None


class DetectFields(RequestBody):
    """The body of LibreTranslate's and MTranServer's detection."""

    q: Annotated[TextOrTexts, Field(validation_alias=AliasChoices("q", "text"))]
    api_key: Key = None


class GoogleDetectFields(RequestBody):
    """The body of Google's detection."""

    q: TextOrTexts
    key: Key = None


class GoogleLanguagesFields(RequestBody):
    """The body of Google's list of languages."""

    target: OpenName = None  # in which they are named; only then names are listed
    model: str | None = None  # a hint
    key: Key = None


class LanguagesQuery(RequestBody):
    """The parameter of DeepL's list."""

    type: Literal["source", "target"] = "source"


AnyTranslation = (
    TranslateFields
    | DeepLFields
    | DeepLXFields
    | LibreTranslateFields
    | MTranServerFields
    | MTranServerBatchFields
    | HcfyFields
)
