"""Versions of turns on the page: answered again, edited, and the arrows between them.

Also a chat's name and file.
"""

from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from page_steps import COMPLETIONS, answer, choose, confirm, names_like, open_session, send, with_fields
from playwright.sync_api import Page, expect
from serving import Server


@pytest.fixture
def page(watched, server: Server) -> Page:
    opened = watched.open(server.url)
    expect(opened.get_by_text("What would you like to ask?")).to_be_visible()
    return opened


def press(page: Page, turn: int, button: str) -> None:
    """A button of a turn, which is seen where the mouse is."""
    page.locator(".turn").nth(turn).hover()
    page.locator(".turn").nth(turn).get_by_role("button", name=button).click()


def settled(page: Page, turns: int) -> None:
    expect(page.locator(".turn")).to_have_count(turns)
    expect(page.locator(".turn[aria-busy]")).to_have_count(0)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def stored(server: Server) -> dict[str, int]:
    """How many turns each session has."""
    found = httpx.post(f"{server.url}/state/status", json={}, timeout=60).json()["sessions"]
    return {each["session_id"]: len(turns(server, each["session_id"])) for each in found}


def turns(server: Server, name: str) -> list[dict]:
    return httpx.get(f"{server.url}/v1/state/history", params={"session_id": name}, timeout=60).json()[
        "turns"
    ]


def versions(page: Page, turn: int) -> str:
    return page.locator(".turn").nth(turn).locator(".versions span").text_content() or ""


def asked(page: Page) -> list[str]:
    return page.locator(".asked").all_text_contents()


def test_an_answer_is_given_again_beside_the_first(page, server):
    send(page, "My name is Otto.")
    send(page, "Tell me a story about a fox")
    first = answer(page.locator(".turn").nth(1))
    page.route(COMPLETIONS, lambda route: with_fields(route, {"temperature": 0, "max_tokens": 9}))
    press(page, 1, "Answer again")
    settled(page, 2)
    expect(page.locator(".turn").nth(1).locator(".versions span")).to_have_text("2/2")
    second = answer(page.locator(".turn").nth(1))
    assert first != second
    expect(page.locator(".turn").first.locator(".versions")).to_be_hidden()
    expect(page.locator("#chat-title")).to_have_text("My name is Otto.")
    expect(names_like(page, "My name is Otto.")).to_have_text(["My name is Otto."])
    assert {name: count for name, count in stored(server).items() if "Otto" in name} == {
        "My name is Otto.": 2,
        "My name is Otto. ~2": 2,
    }
    page.get_by_role("button", name="Older version").click()
    expect(page.locator(".turn").nth(1).locator(".versions span")).to_have_text("1/2")
    assert answer(page.locator(".turn").nth(1)) == first
    expect(page.get_by_role("button", name="Newer version")).to_be_focused()
    assert unquote(page.url).endswith("#chat/My name is Otto.")
    expect(page.get_by_role("status").last).to_have_text("Version 1 of 2")
    expect(page.locator(".foot")).to_contain_text(["per second", "per second"])
    page.keyboard.press("Enter")
    expect(page.locator(".turn").nth(1).locator(".reply > .text")).to_have_text(second)
    expect(page.get_by_role("button", name="Older version")).to_be_focused()
    page.reload()
    expect(page.locator(".turn").nth(1).locator(".versions span")).to_have_text("2/2")
    assert answer(page.locator(".turn").nth(1)) == second
    expect(page.locator(".turn").nth(1).locator(".foot")).to_contain_text("9 tokens ·")
    expect(page.locator(".foot")).to_contain_text(["per second", "per second"])


def test_a_message_is_edited_where_it_stands(page, server):
    send(page, "My number is 31.")
    send(page, "What is my number?")
    press(page, 0, "Edit this message")
    field = page.locator(".edit textarea")
    expect(field).to_be_focused()
    expect(field).to_have_value("My number is 31.")
    field.fill("My number is 17.")
    page.keyboard.press("Enter")
    settled(page, 1)
    expect(page.locator(".turn .versions span")).to_have_text("2/2")
    assert "17" in answer(send(page, "What is my number?"))
    page.get_by_role("button", name="Older version").first.click()
    expect(page.locator(".asked")).to_have_text(["My number is 31.", "What is my number?"])
    assert "31" in answer(page.locator(".turn").nth(1))
    assert {"My number is 31.": 2, "My number is 31. ~2": 2}.items() <= stored(server).items()
    # versions of versions: a turn of the second branch has two, that before has two as well
    page.get_by_role("button", name="Newer version").first.click()
    expect(page.locator(".asked").first).to_have_text("My number is 17.")
    press(page, 1, "Answer again")
    settled(page, 2)
    expect(page.locator(".versions span")).to_have_text(["2/2", "2/2"])
    page.get_by_role("button", name="Older version").first.click()
    expect(page.locator(".versions span").first).to_have_text("1/2")
    expect(page.locator(".turn").nth(1).locator(".versions")).to_be_hidden()


def test_an_edit_can_be_left(page):
    send(page, "My pet is a dog.")
    press(page, 0, "Edit this message")
    page.locator(".edit textarea").fill("My pet is a cat.")
    page.keyboard.press("Escape")
    expect(page.locator(".asked")).to_have_text("My pet is a dog.")
    expect(page.get_by_role("button", name="Rewind to before this message")).to_be_focused()
    expect(page.locator(".turn")).to_have_count(1)


def test_an_answer_that_is_refused_leaves_no_branch(page, server):
    send(page, "My lamp is red.")
    send(page, "My sock is green.")
    page.route(COMPLETIONS, lambda route: with_fields(route, {"top_p": 7}))
    press(page, 1, "Answer again")
    expect(page.get_by_role("alert")).to_contain_text("top_p")
    expect(page.locator(".asked")).to_have_text(["My lamp is red.", "My sock is green."])
    assert [name for name in stored(server) if "lamp" in name] == ["My lamp is red."]


def test_a_chat_and_its_versions_get_another_name_and_go_together(page, server):
    send(page, "My key is brass.")
    press(page, 0, "Answer again")
    settled(page, 1)
    expect(page.locator(".versions span")).to_have_text("2/2")
    choose(page, "Rename")
    expect(page.get_by_role("dialog").get_by_role("textbox")).to_have_value("My key is brass.")
    confirm(page, "Rename", "the key")
    expect(page.locator("#chat-title")).to_have_text("the key")
    expect(names_like(page, "key")).to_have_text(["the key"])
    expect(page.locator(".versions span")).to_have_text("2/2")
    assert {name for name in stored(server) if "key" in name} == {"the key", "the key ~2"}
    page.reload()
    expect(page.locator(".versions span")).to_have_text("2/2")
    assert len(turns(server, "the key ~2")) == 1
    choose(page, "Delete")
    confirm(page, "Delete")
    expect(page.locator("#chat-title")).to_have_text("New chat")
    assert not [name for name in stored(server) if "key" in name]


def test_a_name_that_is_taken_is_refused(page, server):
    httpx.post(f"{server.url}/v1/chat/completions", json=message("the bank", "My bank is far."), timeout=60)
    send(page, "My river is wide.")
    choose(page, "Rename")
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox").fill("the bank")
    dialog.get_by_role("button", name="Rename").click()
    expect(dialog.get_by_role("alert")).to_contain_text("already")
    page.keyboard.press("Escape")
    expect(page.locator("#chat-title")).to_have_text("My river is wide.")
    assert "far" in str(turns(server, "the bank"))


def message(session: str, text: str) -> dict:
    messages = [{"role": "user", "content": text}]
    return {"session_id": session, "messages": messages, "temperature": 0, "max_tokens": 4}


def test_a_chat_is_saved_as_markdown(page, tmp_path: Path):
    page.get_by_role("button", name="Think").click()
    send(page, "What is 17 + 5?")
    with page.expect_download() as found:
        choose(page, "Save as Markdown")
    assert found.value.suggested_filename == "What is 17 + 5_.md"
    found.value.save_as(tmp_path / "chat.md")
    lines = (tmp_path / "chat.md").read_text(encoding="utf-8").splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert headings == ["# What is 17 + 5?", "## You", "## Thought", "## Answer"]
    assert lines[-1] == "17 + 5 = 22" and any(line.startswith("> ") for line in lines)


def test_sessions_of_other_clients_stand_apart(page, server):
    httpx.post(
        f"{server.url}/v1/chat/completions", json=message("of a program", "My boat is new."), timeout=60
    )
    send(page, "My hat is old.")
    expect(page.locator("#own-sessions .name")).to_have_text(["My hat is old."])
    expect(page.locator("#other-sessions .name").filter(has_text="of a program")).to_have_count(1)
    expect(page.get_by_role("heading", name="From other clients")).to_be_visible()
    page.reload()
    expect(page.locator("#own-sessions .name")).to_have_text(["My hat is old."])
    # what is gone on the server is forgotten here
    httpx.post(f"{server.url}/state/delete", json={"session_id": "My hat is old."}, timeout=60)
    page.goto(server.url)
    expect(page.get_by_role("heading", name="From other clients")).to_be_hidden()
    page.wait_for_function("() => localStorage.sessions === undefined")
    open_session(page, "of a program")
    expect(page.locator(".turn")).to_have_count(1)
