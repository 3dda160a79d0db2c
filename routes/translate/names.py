"""Languages as the services name and list them."""

from rwkv_batch.chat.chinese_names import CHINESE_NAMES
from rwkv_batch.chat.languages import find

LIBRETRANSLATE = [
    "ar",
    "az",
    "be",
    "bg",
    "bn",
    "bs",
    "ca",
    "cs",
    "da",
    "de",
    "el",
    "en",
    "eo",
    "es",
    "et",
    "eu",
    "fa",
    "fi",
    "fr",
    "ga",
    "gl",
    "gu",
    "he",
    "hi",
    "hr",
    "hu",
    "hy",
    "id",
    "is",
    "it",
    "ja",
    "ka",
    "kk",
    "kn",
    "ko",
    "ky",
    "lt",
    "lv",
    "mk",
    "ml",
    "mn",
    "mr",
    "ms",
    "my",
    "nb",
    "ne",
    "nl",
    "pa",
    "pl",
    "pt",
    "pt-BR",
    "ro",
    "ru",
    "sk",
    "sl",
    "sq",
    "sr",
    "sv",
    "sw",
    "ta",
    "te",
    "th",
    "tl",
    "tr",
    "uk",
    "ur",
    "uz",
    "vi",
    "zh-Hans",
    "zh-Hant",
]
DEEPL_SOURCES = [
    "AR",
    "BG",
    "CS",
    "DA",
    "DE",
    "EL",
    "EN",
    "ES",
    "ET",
    "FI",
    "FR",
    "HE",
    "HU",
    "ID",
    "IT",
    "JA",
    "KO",
    "LT",
    "LV",
    "NB",
    "NL",
    "PL",
    "PT",
    "RO",
    "RU",
    "SK",
    "SL",
    "SV",
    "TH",
    "TR",
    "UK",
    "VI",
    "ZH",
]
DEEPL_TARGETS = sorted(
    {*DEEPL_SOURCES, "EN-GB", "EN-US", "ES-419", "PT-BR", "PT-PT", "ZH-HANS", "ZH-HANT"} - {"EN", "PT"}
)
WRITTEN = {"zh-CN": "zh-Hans", "zh-TW": "zh-Hant"}


def libretranslate_code(code: str) -> str:
    return WRITTEN.get(code, code)


def deepl_code(code: str) -> str:
    """DeepL's codes of sources have no variety."""
    found = find(code)
    return (found.code if found else code).upper()


def chinese_name(code: str) -> str:
    """The name that hcfy has for a language."""
    found = find(code)
    if found is None:
        return code
    variety = {"Traditional Chinese": "zh-TW", "Chinese": "zh"}.get(found.name, found.code)
    return CHINESE_NAMES.get(variety, found.name).split("/")[0]
