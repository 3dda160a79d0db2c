"""Chromium, and what must hold for everything that the page does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import chromium
import pytest
from page_steps import COMPLETIONS, greedy
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    expect,
    sync_playwright,
)
from serving import ROOT
from tools import absent

PATIENCE = 60_000  # milliseconds until a test gives up: a deadline, for machines that are busy otherwise
OURS = "127.0.0.1"
NO_REQUESTS = ("blob", "data")  # schemes
# What a browser says of every reply that is an error, of which there are some on purpose.
EXPECTED = ("Failed to load resource",)

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for a file: while it is there, an event loop runs in this thread."""
    path = chromium.find()
    if path is None:
        absent("There is no Chromium; make test-page installs it.")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path)
        yield running
        running.close()


class Watched:
    """Pages, and what went wrong in them."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.contexts: list[BrowserContext] = []
        self.wrong: list[str] = []

    def open(self, url: str, as_made: bool = False, **options) -> Page:
        """A page in a new context, with nothing stored. as_made: its requests go as it makes them."""
        given = {"viewport": {"width": 1280, "height": 800}, "locale": "en-US", "color_scheme": "light"}
        context = self._browser.new_context(**given | options)
        self.contexts.append(context)
        context.set_default_timeout(PATIENCE)
        if not as_made:  # a route that went while the page loads might leave a request without an answer
            context.route(COMPLETIONS, greedy)
        context.on("request", self._requested)
        context.on("console", self._said)
        context.on("weberror", lambda error: self.wrong.append(str(error.error)))
        context.on("dialog", lambda dialog: self.wrong.append(f"a dialog: {dialog.message}"))
        page = context.new_page()
        page.goto(url)
        return page

    def _requested(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in NO_REQUESTS and parts.hostname != OURS:
            self.wrong.append(f"a request to {request.url}")

    def _said(self, message: ConsoleMessage) -> None:
        """Violations of the policy and of trusted types are said there too."""
        if message.type == "error" and not message.text.startswith(EXPECTED):
            self.wrong.append(message.text)


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    """No error of a script, no request to another host and nothing against the policy, in any test."""
    pages = Watched(browser)
    yield pages
    for context in pages.contexts:
        for page in context.pages:  # a request that a test answers may be under way
            page.unroute_all(behavior="ignoreErrors")
        context.unroute_all(behavior="ignoreErrors")
        context.close()
    assert pages.wrong == []


@pytest.fixture
def picture(pytestconfig: pytest.Config) -> Callable[[Page, str], None]:
    """Keeps a picture of a page in docs/, with --pictures."""

    def keep(page: Page, name: str) -> None:
        if pytestconfig.getoption("--pictures"):
            page.screenshot(path=Path(ROOT) / "docs" / f"{name}.png", scale="css")

    return keep
