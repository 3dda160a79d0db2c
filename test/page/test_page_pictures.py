"""The pictures of the page in docs/: `make test-page ARGS="-k picture --pictures"` makes them anew.

Without --pictures the same steps are tests only.
"""

from collections.abc import Iterator

import pytest
from page_steps import COMPLETIONS, answer, send, show, with_fields
from playwright.sync_api import Route, expect
from serving import Server

SEED = 18


@pytest.fixture(scope="module")
def fresh() -> Iterator[Server]:
    """A server without the sessions of other tests."""
    running = Server("--device", "cpu", "--frontends", "1")
    yield running
    assert running.stop() == 0, running.log()


def drawn_from_a_seed(route: Route) -> None:
    """A request that has the same answers each time."""
    with_fields(route, {"seed": SEED})


def test_a_picture_of_a_chat(watched, fresh, picture):
    page = watched.open(fresh.url)
    for message in ("法国的首都是什么？", "Tell me a story about a fox"):
        send(page, message)
        page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Think").click()
    turn = send(page, "What is 17 + 5?")
    assert answer(turn) == "17 + 5 = 22"
    turn.get_by_text("Thought").click()
    page.get_by_role("button", name="Think").click()
    send(page, "My name is Liudmila.")
    assert "Liudmila" in answer(send(page, "What is my name?"))
    expect(page.locator("#session-list li")).to_have_count(3)
    expect(page.locator("#pulse")).to_be_visible()
    picture(page, "page-chat")


def test_a_picture_of_a_batch(watched, fresh, picture):
    page = watched.open(fresh.url, color_scheme="dark")
    page.route(COMPLETIONS, drawn_from_a_seed)
    show(page, "Batch")
    page.get_by_role("textbox", name="Prompt").fill("The capital of")
    page.get_by_label("Prompt is").select_option("raw text")
    page.get_by_role("spinbutton", name="Rows").fill("64")
    page.get_by_role("spinbutton", name="Temperature").fill("1.2")
    page.get_by_role("spinbutton", name="Top p").fill("0.9")
    page.get_by_role("spinbutton", name="Max tokens").fill("40")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#batch-progress")).to_contain_text("64 rows finished")
    assert any("Lisbon" in text for text in page.locator(".card").all_text_contents())
    picture(page, "page-batch")
