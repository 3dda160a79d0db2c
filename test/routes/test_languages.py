"""Languages by name and code, against those of Unicode CLDR as babel has them."""

import pytest
from babel import Locale, UnknownLocaleError
from babel.core import get_global
from frontend_process import FrontendProcess
from native_calls import TRANSLATE

from rwkv_batch.chat.language_names import LANGUAGES, SCRIPT_OF_REGION, SCRIPTS, VARIANTS
from rwkv_batch.chat.languages import find

ROWS = [line.split("|") for line in LANGUAGES.strip().splitlines()]
CODES = [codes.split()[0] for codes, *_ in ROWS]
ENGLISH = Locale("en")
APART = {  # codes that CLDR takes for those of other languages, and the names of these here
    "cnr": "Montenegrin",
    "prs": "Dari",
    "sh": "Serbo-Croatian",
    "hbs": "Serbo-Croatian",
    "twi": "Twi",
    "tw": "Twi",
}
SHARED = ("Ga", "isiNdebele")  # the code of Irish too; what both Ndebele call themselves
# What plugins and services send; each code is that of a language of CLDR
GOOGLE = (
    "ab ace ach aa af sq alz am ar hy as av awa ay az ban bal bm bci ba eu btx bts bbc be bem bn bew "
    "bho bik bs br bg bua yue ca ceb ch ce ny zh-CN zh-TW chk cv co crh crh-Latn hr cs da fa-AF dv "
    "din doi dov nl dyu dz en eo et ee fo fj tl fi fon fr fr-CA fy fur ff gaa gl ka de el gn gu ht "
    "cnh ha haw iw he hil hi hmn hu hrx iba is ig ilo id ga it jam ja jw jv kac kl kn kr pam kk kha "
    "km cgg kg rw ktu trp kv gom ko kri ku ckb ky lo ltg la lv lij li ln lt lmo lg luo lb mk mad mai "
    "mak mg ms ms-Arab ml mt gv mi mr mh mwr mfe chm mni-Mtei min lus mn my nhe ndc-ZW nr new ne "
    "bm-Nkoo no nus oc or om os pag pap ps fa pl pt pt-BR pt-PT pa pa-Arab qu kek rom ro rn ru se sm "
    "sg sa sat-Latn sat gd nso sr st crs shn sn scn szl sd si sk sl so es su sus sw ss sv ty tg "
    "ber-Latn ber tcy ta tt te tet th bo ti tiv tpi to ts tn tum tr tk tyv udm uk ur ug uz ve vec vi "
    "war cy wo xh sah yi yo yua zu zap"
)
DEEPL = (
    "AR BG CS DA DE EL EN EN-GB EN-US ES ES-419 ET FI FR HE HU ID IT JA KO LT LV NB NL PL PT PT-BR "
    "PT-PT RO RU SK SL SV TH TR UK VI ZH ZH-HANS ZH-HANT KMR LMO PRS QU AN"
)
BING = (
    "zh-Hans zh-Hant yue lzh fr-CA pt-PT mn-Cyrl mn-Mong iu iu-Latn sr-Cyrl sr-Latn tlh-Latn tlh-Piqd "
    "fil mww otq yua hsb dsb ikt brx hne ks kmr mni nb prs"
)
OTHERS = (
    "zt pb wyw tlh-Qaak zh-CHS zh-CHT zh_CN zh_TW cht jp kor fra spa vie zh-HK zh-yue in ji mo sr_RS pt_br"
)


@pytest.mark.parametrize("code", CODES)
def test_each_language_has_the_names_and_the_script_of_cldr(code):
    english = ENGLISH.languages.get(code)
    assert english in (None, *SHARED) or find(english) == find(code)
    try:
        own = Locale.parse(code).languages.get(code)
    except (UnknownLocaleError, ValueError):
        own = None
    assert own in (None, *SHARED) or find(own) == find(code)
    likely = get_global("likely_subtags").get(code)
    if likely and code not in ("mww", "ber"):  # mww: translation services write Latin
        assert find(f"{code}-{likely.split('_')[1]}") == find(code)


def test_every_name_is_that_of_one_language():
    for codes, _, english, own in ROWS:
        for name in filter(None, (*english.split("/"), *own.split("/"))):
            if len(name) > 3:  # shorter ones may be the code of another
                assert find(name) == find(codes.split()[0]), name
    for names in VARIANTS.values():
        first, *others = names.split("/")
        assert {found.name for name in others if (found := find(name))} <= {first}
        assert all(map(find, others))


def test_codes_of_three_letters_are_those_of_iso_639():
    known = set(CODES)
    for alias, code in get_global("language_aliases").items():
        if code in known and alias.isalpha() and alias in {c for codes, *_ in ROWS for c in codes.split()}:
            assert find(alias).name == APART.get(alias, find(code).name), alias
    two_letters = {a: c for a, c in get_global("language_aliases").items() if len(a) == 3 and len(c) == 2}
    missing = [
        a for a, c in two_letters.items() if c in known and a in ("ger", "deu", "chi", "cmn", "por", "swa")
    ]
    assert missing and all(map(find, missing))


def test_names_of_varieties_and_scripts_are_those_of_cldr():
    names = {tag.replace("-", "_"): first.split("/")[0] for tag, first in VARIANTS.items()}
    for tag, name in names.items():
        assert ENGLISH.languages.get(tag, name) == name
    likely = get_global("likely_subtags")
    for script, tags in SCRIPT_OF_REGION.items():
        for tag in tags:
            code, region = tag.split("-")
            assert likely.get(f"{code}_{region}", f"_{script}_").split("_")[1] == script, tag
    assert all(code in ENGLISH.scripts or code == "Piqd" for code in SCRIPTS)


@pytest.mark.parametrize("code", f"{GOOGLE} {DEEPL} {BING} {OTHERS}".split())
def test_the_codes_of_services_are_known(code):
    found = find(code)
    assert found and found.name and found.name != code
    assert find(code.lower()) == find(code.upper()) == find(code.replace("-", "_")) == found
    assert found.name in SHARED or find(found.name).name == found.name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("FR", "French"),
        ("fr-FR", "French"),
        ("Français", "French"),
        ("zh", "Chinese"),
        ("zh-Hans", "Chinese"),
        ("zh-Hans-TW", "Chinese"),
        ("zh-TW", "Traditional Chinese"),
        ("zh-Hant-HK", "Traditional Chinese"),
        ("繁體中文", "Traditional Chinese"),
        ("Chinese (Traditional)", "Traditional Chinese"),
        ("zh-cmn-Hans-CN", "Chinese"),
        ("zh-yue", "Cantonese"),
        ("ko", "Korean"),
        ("it", "Italian"),
        ("pt", "Portuguese"),
        ("pt_BR", "Brazilian Portuguese"),
        ("vi", "Vietnamese"),
        ("ar-EG", "Arabic"),
        ("en-US", "English"),
        ("en-GB", "British English"),
        ("no", "Norwegian"),
        ("sr-Latn-RS", "Serbian (Latin)"),
        ("Serbian (Cyrillic)", "Serbian"),
        ("pa-PK", "Punjabi (Arabic)"),
        ("de-DE-1996", "German"),
        ("de-x-none", "German"),
        ("Luba-Katanga", "Luba-Katanga"),
        (" norwegian  BOKMAL ", "Norwegian"),
    ],
)
def test_languages_by_code_and_name(text, name):
    assert find(text).name == name


@pytest.mark.parametrize(
    "text", ["", " ", "xx", "auto", "fr-Qaak", "fr-foo", "en\n\nUser:", "English: a", "1", "-"]
)
def test_what_is_no_language(text):
    assert find(text) is None


@pytest.fixture(scope="module")
def server():
    with FrontendProcess() as process:
        yield process


@pytest.mark.parametrize("source", ["Auto", "AUTO", "auto", None])
def test_a_source_that_is_to_be_found_out(server, source):
    body = {"source_lang": source, "target_lang": "Deutsch", "text_list": ["Привет"]}
    answer = server.http.post(TRANSLATE, json=body).json()
    assert answer == {"translations": [{"detected_source_lang": "ru", "text": "Russian: Привет\n\nGerman:"}]}


def test_languages_stand_by_name_in_prompts(server):
    body = {"source_lang": "IT-it", "target_lang": "zh_TW", "text_list": ["Ciao"]}
    answer = server.http.post(TRANSLATE, json=body).json()
    text = "Italian: Ciao\n\nTraditional Chinese:"
    assert answer == {"translations": [{"detected_source_lang": "IT-it", "text": text}]}
    assert server.engine.requests[-1].stop_strings == ["\n\nItalian:"]
    body = {"source_lang": "auto", "target_lang": "en-GB", "text_list": ["Ciao", "Qzx"]}
    ciao, unknown = (each["text"] for each in server.http.post(TRANSLATE, json=body).json()["translations"])
    assert ciao == "Italian: Ciao\n\nBritish English:"
    assert unknown == "auto: Qzx\n\nBritish English:", "into English, what tells nothing is of any language"


@pytest.mark.parametrize("field", ["source_lang", "target_lang"])
@pytest.mark.parametrize("value", ["xx", "Elvish", "fr-Qaak", "English\n\nUser"])
def test_what_is_no_language_is_refused(server, field, value):
    body = {"source_lang": "en", "target_lang": "fr", "text_list": ["a"]} | {field: value}
    answer = server.http.post(TRANSLATE, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(f'`{field}`: "{value}" is no language')
    assert "the code or English name" in answer.json()["error"]


def test_the_target_cannot_be_found_out(server):
    for value in ("auto", "Auto"):
        answer = server.http.post(TRANSLATE, json={"target_lang": value, "text_list": ["a"]})
        assert answer.status_code == 400 and "only the source" in answer.json()["error"]
