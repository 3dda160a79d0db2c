"""What browser extensions ask of the address of Google's own page. The engine echoes prompts."""

import pytest
from frontend_process import PASSWORD, FrontendProcess

PATH = "/translate_a/single"
ASKED = {"client": "gtx", "sl": "en", "tl": "de", "dt": "t"}
HELLO = "English: Hello\n\nGerman:"


@pytest.fixture(scope="module")
def closed():
    """Translation needs the password too."""
    with FrontendProcess(password=PASSWORD, protect_translate=True) as process:
        yield process


def asked_in_each_way(server, text: str, **changes: str | list[str]) -> list:
    """The answers to a URL, to a form, and to a form of the text alone. All are the same."""
    fields = ASKED | changes
    answers = [
        server.http.get(PATH, params=fields | {"q": text}),
        server.http.post(PATH, data=fields | {"q": text}),
        server.http.post(PATH, params=fields, data={"q": text}),
    ]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    first, *others = (answer.json() for answer in answers)
    assert others == [first] * 2
    return first


def test_lists(server):
    found = asked_in_each_way(server, "Hello")
    assert found[0] == [[HELLO, "Hello", None, None, 1]] and found[1:3] == [None, "en"]
    found = asked_in_each_way(server, "Das ist ein sehr schöner Tag. a & b + ä", sl="auto", tl="en")
    text = "".join(sentence[0] for sentence in found[0])
    assert text == "German: Das ist ein sehr schöner Tag. a & b + ä\n\nEnglish:"
    assert found[2] == found[8][0][0] == "de" and 0.5 < found[6] <= 1
    several = asked_in_each_way(server, "One\n\ntwo", dt=["at", "bd", "t"], hl="en")
    assert several[0][0][0] == "English: One\n\nGerman:\n\nEnglish: two\n\nGerman:", "the lines stay"


def test_objects(server):
    found = asked_in_each_way(server, "Hello", dj="1")
    assert found["sentences"] == [{"trans": HELLO, "orig": "Hello", "backend": 1}] and found["src"] == "en"


def test_codes_of_google(server):
    for code, name in (("iw", "Hebrew"), ("zh-TW", "Traditional Chinese"), ("no", "Norwegian")):
        assert name in asked_in_each_way(server, "Hello", tl=code)[0][0][0]


def test_terms(server):
    found = asked_in_each_way(server, "Hello world", glossary='{"world": "Erdball"}')
    assert "Hello Erdball" in found[0][0][0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tl": "xx"}, '`tl`: "xx" is no language'),
        ({"sl": "xx"}, '`sl`: "xx" is no language'),
        ({"tl": "auto"}, "only the source"),
        ({"tl": []}, "`tl`"),
        ({"q": []}, "`q`"),
        ({"q": ["a", "b"]}, "`q`"),
        ({"dt": ["at", "bd"]}, "`dt`: must have t"),
        ({"dj": "2"}, "`dj`"),
    ],
)
def test_what_is_refused(server, change, why):
    for sent in ("params", "data"):
        answer = server.http.request(
            "GET" if sent == "params" else "POST", PATH, **{sent: ASKED | {"q": "Hello"} | change}
        )
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == 400 and why in error["message"]
    assert server.http.get("/translate_a/unknown").json()["error"]["code"] == 404


def test_the_key(closed, locked):
    asked = ASKED | {"q": "Hello"}
    for key, status in (
        ({}, 403),
        ({"key": "wrong"}, 403),
        ({"key": PASSWORD}, 200),
        ({"token": PASSWORD}, 200),
    ):
        assert closed.http.get(PATH, params=asked | key).status_code == status
        assert closed.http.post(PATH, data=asked | key).status_code == status
    assert locked.http.get(PATH, params=asked).status_code == 200, "without --protect-translate"
