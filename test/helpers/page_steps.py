"""What a person does on the page, and changes to its requests on their way."""

import json
import re
from typing import Any

from playwright.sync_api import Locator, Page, Route, expect

COMPLETIONS = "**/completions"


def with_fields(route: Route, fields: dict[str, Any], defaults: dict[str, Any] | None = None) -> None:
    """Send a request on with other fields in its body."""
    body = json.loads(route.request.post_data or "{}")
    route.continue_(post_data=json.dumps((defaults or {}) | body | fields))


def greedy(route: Route) -> None:
    """A request without chance, unless it says how tokens are drawn."""
    with_fields(route, {}, {"temperature": 0})


def endless(route: Route) -> None:
    """A request whose answer does not end by itself."""
    with_fields(route, {"ignore_eos": True, "max_tokens": 100_000, "temperature": 0})


def send(page: Page, message: str) -> Locator:
    """Send a message, and wait for its answer; the turn."""
    before = page.locator(".turn").count()
    with page.expect_response("**/state/history?*"):  # asked for last: the list of sessions is there, too
        page.get_by_role("textbox", name="Message").fill(message)
        page.keyboard.press("Enter")
    turn = page.locator(".turn").nth(before)
    expect(turn).to_be_visible()
    expect(page.locator(".turn[aria-busy]")).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    return turn


def answer(turn: Locator) -> str:
    return turn.locator(".reply > .text").text_content() or ""


def open_session(page: Page, name: str) -> None:
    page.locator("#session-list").get_by_role("link").filter(
        has=page.locator(".name", has_text=re.compile(f"^{re.escape(name)}$"))
    ).click()
    expect(page.locator("#chat-title")).to_have_text(name)


def names_like(page: Page, text: str) -> Locator:
    """The names of sessions in the list that hold a text, newest first."""
    return page.locator("#session-list .name").filter(has_text=text)


def show(page: Page, view: str) -> None:
    """Open a view by its link."""
    page.get_by_role("navigation").get_by_role("link", name=view).click()
    expect(page.get_by_role("heading", name=view, exact=True)).to_be_visible()


def at_end(page: Page) -> None:
    """Wait until the end of the conversation is seen, which a frame may still have to show."""
    end = "c => c.scrollHeight - c.scrollTop - c.clientHeight < 2"
    page.wait_for_function(end, arg=page.locator("#conversation").element_handle())


def keep_messages(page: Page) -> None:
    """What is shown for a moment stays: a machine that stands still for so long would see nothing of it.

    Nor is a request that was stopped given up because its end does not come for seconds.
    """
    page.evaluate(
        """() => {
            const usual = window.setTimeout;
            window.setTimeout = (call, after, ...rest) =>
                usual(call, [3000, 4000].includes(after) ? 1e6 : after, ...rest);
        }"""
    )


def choose(page: Page, action: str) -> None:
    """Do something with the open session, by its menu."""
    page.locator("#session-menu-button").click()
    page.locator("#session-menu").get_by_role("button", name=action).click()


def confirm(page: Page, button: str, name: str | None = None) -> None:
    """Answer the question that is open."""
    dialog = page.get_by_role("dialog")
    if name is not None:
        dialog.get_by_role("textbox").fill(name)
    dialog.get_by_role("button", name=button).click()
    expect(dialog).to_have_count(0)
