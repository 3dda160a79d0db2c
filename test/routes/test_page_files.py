"""The files of the page over HTTP: who gets them, with which headers, and what they hold.

test/page has what they do.
"""

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from frontend_process import FrontendProcess

from routes.page.files import FILES, FOLDER, prefers_html
from routes.table import ROUTES

VENDOR = FOLDER / "vendor"
README = (VENDOR / "README.md").read_text(encoding="utf-8")
KINDS = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture(scope="module")
def server():
    with FrontendProcess(password="secret") as process:
        yield process


class HeldByHtml(HTMLParser):
    """Attributes, and text in scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str]] = []
        self.inline: list[str] = []
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(name, value or "") for name, value in attrs]
        self._tag = tag

    def handle_data(self, data):
        if self._tag in ("script", "style") and data.strip():
            self.inline.append(data)


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (BROWSER["accept"], True),
        ("text/html", True),
        ("TEXT/HTML; q=0.5", True),
        ("*/*", False),
        ("", False),
        ("application/json", False),
        ("application/json, text/html;q=0.9", False),
        ("text/html, application/json", False),
        ("text/html;q=0", False),
        ("text/html;q=much", False),
    ],
)
def test_what_a_client_accepts_decides(accept, html):
    assert prefers_html(accept) == html


def test_browsers_get_the_page_and_programs_the_routes(server):
    page = server.http.get("/", headers=BROWSER)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    routes = server.http.get("/")
    assert set(routes.json()["endpoints"]) == {route.path for route in ROUTES}
    assert page.headers["vary"] == routes.headers["vary"] == "Accept"
    head = server.http.head("/", headers=BROWSER)
    assert (head.headers["content-type"], head.content) == (page.headers["content-type"], b"")


def test_nobody_may_frame_it_and_it_runs_its_own_scripts_only(server):
    headers = server.http.get("/", headers=BROWSER).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_every_file_that_it_names_is_there_without_a_password(server):
    document = server.http.get("/", headers=BROWSER).text
    named = set(re.findall(r"""(?:src|href)="page/([^"]+)""", document))
    seen: set[str] = set()
    while new := named - seen:
        for name in new:
            answer = server.http.get(f"/page/{name}")
            assert answer.status_code == 200, name
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-type"].partition(";")[0] == KINDS[Path(name).suffix]
            if not name.startswith("vendor/"):
                named |= set(re.findall(r"""(?:from|import) ?\(?"\./([^"]+)""", answer.text))
        seen |= new
    assert seen == set(FILES) - {"index.html"} == {*served(FOLDER), *served(VENDOR)} - {"index.html"}


def served(folder: Path) -> set[str]:
    """All files of a folder but licences."""
    inside = (path for path in folder.iterdir() if path.suffix in KINDS or path.suffix == ".html")
    return {path.relative_to(FOLDER).as_posix() for path in inside}


def test_what_is_not_ours_is_as_it_was_distributed_and_has_its_licence():
    """vendor/README.md names each file with its version, and the digest of what the package holds."""
    listed = re.findall(r"^\| `(\S+)` \| (\S+) (\S+) \|.*\| `([0-9a-f]{64})` \|$", README, re.MULTILINE)
    assert {name for name, *_ in listed} == {path.name for path in VENDOR.iterdir() if path.suffix in KINDS}
    for name, package, version, digest in listed:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest
        assert version in (VENDOR / name).read_text(encoding="utf-8")[:300], package
        licence = (VENDOR / f"{name.partition('.')[0]}.LICENSE.txt").read_text(encoding="utf-8")
        assert "Copyright" in licence or "License" in licence


def test_a_module_of_somebody_else_is_reached_by_its_folder_only(server):
    assert server.http.get("/page/vendor/purify.min.js").headers["etag"]
    for path in ("/page/purify.min.js", "/page/vendor/app.js", "/page/vendor/README.md", "/page/vendor/"):
        assert server.http.get(path).status_code == 404, path


def test_a_file_that_has_not_changed_is_not_sent_again(server):
    for path, headers in (("/page/app.js", {}), ("/", BROWSER)):
        first = server.http.get(path, headers=headers)
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f'"other", W/{tag}', "*"):
            again = server.http.get(path, headers=headers | {"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert server.http.get(path, headers=headers | {"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "name", ["index.html", "nothing.js", "..%2Ffiles.py", "%2e%2e%2ffiles.py", "app.js%00"]
)
def test_nothing_else_is_served(server, name):
    answer = server.http.get(f"/page/{name}")
    assert answer.status_code == 404 and "error" in answer.json()


def test_its_calls_need_the_password(server):
    for path in ("/v1/models", "/stats", "/v1/state/history?session_id=x"):
        assert server.http.get(path, headers=BROWSER).status_code == 401


def test_without_it_everybody_gets_the_routes():
    with FrontendProcess(page=False) as process:
        answer = process.http.get("/", headers=BROWSER)
        assert answer.json()["name"] == "rwkv-batch"
        missing = process.http.get("/page/app.js")
        assert missing.status_code == 404 and "--no-page" in missing.json()["error"]


def test_the_document_holds_no_script_style_or_foreign_address():
    held = HeldByHtml(FILES["index.html"].text)
    assert held.inline == []
    assert not [name for name, _ in held.attributes if name == "style" or name.startswith("on")]
    assert not [value for _, value in held.attributes if "//" in value]


def test_no_module_writes_html_or_names_another_host():
    ours = {name: found.text for name, found in FILES.items() if not name.startswith("vendor/")}
    scripts = {name: text for name, text in ours.items() if name.endswith((".js", ".css"))}
    assert len(scripts) > 10
    for name, text in scripts.items():
        addresses = set(re.findall(r"\bhttps?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|@import", text
        ), name
