"""The page's chat in a browser, against the bundled model."""

from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from page_steps import (
    COMPLETIONS,
    answer,
    choose,
    confirm,
    endless,
    keep_messages,
    names_like,
    open_session,
    send,
)
from playwright.sync_api import Page, expect
from serving import Server


@pytest.fixture
def page(watched, server: Server) -> Page:
    opened = watched.open(server.url)
    expect(opened.get_by_text("What would you like to ask?")).to_be_visible()
    return opened


def stored(server: Server, name: str) -> list[str]:
    """What the server has of a session: the answers."""
    reply = httpx.get(f"{server.url}/v1/state/history", params={"session_id": name}, timeout=60)
    assert reply.status_code == 200, reply.text
    return [turn["completion"] for turn in reply.json()["turns"]]


def test_a_session_is_kept_by_the_server(page, server):
    send(page, "My name is Liudmila.")
    assert "Liudmila" in answer(send(page, "What is my name?"))
    assert len(stored(server, "My name is Liudmila.")) == 2
    assert unquote(page.url).endswith("#chat/My name is Liudmila.")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("")
    page.reload()
    expect(page.locator(".turn")).to_have_count(2)
    assert page.locator(".asked").all_text_contents() == ["My name is Liudmila.", "What is my name?"]
    assert "Liudmila" in answer(send(page, "What is my name?"))


def test_a_new_chat_begins_a_session_of_its_own(page, server):
    send(page, "My city is Oslo.")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    send(page, "My city is Oslo.")
    expect(names_like(page, "My city is Oslo.")).to_have_text(["My city is Oslo. (2)", "My city is Oslo."])
    assert len(stored(server, "My city is Oslo.")) == len(stored(server, "My city is Oslo. (2)")) == 1


def test_a_thought_is_folded(page):
    page.get_by_role("button", name="Think").click()
    turn = send(page, "What is 17 + 5?")
    assert answer(turn) == "17 + 5 = 22"
    thought = turn.locator(".thought .text")
    expect(thought).to_be_hidden()
    turn.get_by_text("Thought").press("Enter")
    expect(thought).to_contain_text("17 plus 5")
    page.reload()
    expect(page.locator(".thought .text")).to_be_hidden()
    assert answer(page.locator(".turn")) == "17 + 5 = 22"


def test_fork_rewind_and_delete(page, server):
    send(page, "My favourite food is rice.")
    send(page, "My pet is a horse.")
    first, second = page.locator(".turn").all()
    first.hover()
    first.get_by_role("button", name="Fork after this answer").click()
    confirm(page, "Fork", "the branch")
    expect(page.locator("#chat-title")).to_have_text("the branch")
    expect(page.locator(".turn")).to_have_count(1)
    assert "rice" in answer(send(page, "What is my favourite food?"))
    open_session(page, "My favourite food is rice.")
    expect(page.locator(".turn")).to_have_count(2)
    second = page.locator(".turn").nth(1)
    second.hover()
    second.get_by_role("button", name="Rewind to before this message").click()
    confirm(page, "Rewind")
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.get_by_role("textbox", name="Message")).to_have_value("My pet is a horse.")
    assert len(stored(server, "My favourite food is rice.")) == 1 and len(stored(server, "the branch")) == 2
    choose(page, "Delete")
    confirm(page, "Delete")
    expect(page.locator("#chat-title")).to_have_text("New chat")
    expect(names_like(page, "My favourite food is rice.")).to_have_count(0)
    expect(names_like(page, "the branch")).to_have_count(1)


def test_rewinding_before_the_first_message_leaves_a_new_chat(page, server):
    send(page, "My hobby is chess.")
    page.get_by_role("button", name="Rewind to before this message").click()
    confirm(page, "Rewind")
    expect(page.locator("#chat-title")).to_have_text("New chat")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("My hobby is chess.")
    expect(page.locator("#session-actions")).to_be_hidden()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(names_like(page, "My hobby is chess.")).to_have_count(0)
    assert page.url.endswith("#chat")
    page.keyboard.press("Enter")
    expect(names_like(page, "My hobby is chess.")).to_have_text(["My hobby is chess."])


def test_a_turn_of_several_messages_is_shown_as_messages(page, server):
    given = [("system", "Be brief."), ("user", "My cat is Tom."), ("assistant", "Nice."), ("user", "My cat?")]
    messages = [{"role": role, "content": content} for role, content in given]
    body = {"session_id": "several", "messages": messages, "temperature": 0, "max_tokens": 4}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    page.goto(f"{server.url}/#chat/several")
    page.reload()
    expect(page.locator(".turn .said, .turn .asked")).to_have_text([content for _, content in given])
    assert answer(page.locator(".turn")) == reply["choices"][0]["message"]["content"].strip()
    names = page.locator(".turn h3").all_text_contents()
    assert names == ["System prompt", "You", "Answer", "You", "Answer"]


def test_an_answer_is_copied_without_the_api_of_secure_pages(watched, server):
    """Over plain http from another machine, a browser has no navigator.clipboard."""
    page = watched.open(server.url)
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.reload()
    turn = send(page, "What is 9 + 5?")
    turn.get_by_role("button", name="Copy").click()
    page.get_by_role("textbox", name="Message").press("Control+V")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("9 + 5 = 14")


def test_a_new_chat_asks_for_nothing_that_is_not_there(page):
    failed = []
    page.on("response", lambda response: failed.append(response.url) if not response.ok else None)
    send(page, "My shoe is blue.")
    page.get_by_role("button", name="New chat").click()
    send(page, "My shoe is blue.")
    expect(names_like(page, "My shoe is blue.")).to_have_count(2)
    assert failed == []


def test_a_fork_does_not_replace_a_session(page):
    send(page, "My word is lamp.")
    choose(page, "Fork")
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox").fill("My word is lamp.")
    dialog.get_by_role("button", name="Fork").click()
    expect(dialog.get_by_role("alert")).to_contain_text("must differ")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(page.locator("#chat-title")).to_have_text("My word is lamp.")


def test_export_and_import(page, tmp_path: Path):
    send(page, "My number is 42.")
    with page.expect_download() as found:
        choose(page, "Export")
    file = tmp_path / found.value.suggested_filename
    assert file.suffix == ".rwkvstate"
    found.value.save_as(file)
    page.locator("#import-file").set_input_files(file)
    confirm(page, "Import", "the copy")
    expect(page.locator("#chat-title")).to_have_text("the copy")
    assert "42" in answer(send(page, "What is my number?"))


def test_a_file_that_is_no_session_is_refused_in_the_dialog(page, tmp_path: Path):
    file = tmp_path / "notes.rwkvstate"
    file.write_text("nothing of the kind")
    page.locator("#import-file").set_input_files(file)
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Import").click()
    expect(dialog.get_by_role("alert")).not_to_be_empty()
    expect(names_like(page, "notes")).to_have_count(0)


def test_stop_keeps_what_has_come(page, server):
    keep_messages(page)
    page.route(COMPLETIONS, endless)
    page.get_by_role("textbox", name="Message").fill("Tell me a story about a bear")
    page.keyboard.press("Enter")
    turn = page.locator(".turn")
    expect(turn.locator(".reply > .text")).to_contain_text("Once upon a time")
    page.keyboard.press("Escape")
    expect(turn).to_contain_text("Stopped")
    # As it was written: what comes by the time that it is stopped may hold marks, which are not shown.
    (kept,) = stored(server, "Tell me a story about a bear")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    turn.hover()
    turn.locator(".under").get_by_role("button", name="Copy").click()
    page.wait_for_function("async text => await navigator.clipboard.readText() === text", arg=kept.strip())
    page.unroute(COMPLETIONS)
    assert "12" in answer(send(page, "What is 7 + 5?"))


def test_options_of_a_request(page, server):
    page.get_by_role("button", name="Options").click()
    page.get_by_label("System prompt").fill("Your name is Max.")
    page.get_by_role("spinbutton", name="Max tokens").fill("3")
    page.keyboard.press("Escape")
    turn = send(page, "Tell me a story about a dog")
    expect(turn).to_contain_text("Reached the token limit")
    expect(turn).to_contain_text("3 tokens")
    reply = httpx.get(
        f"{server.url}/v1/state/history", params={"session_id": "Tell me a story about a dog"}, timeout=60
    )
    assert reply.json()["turns"][0]["prompt"].startswith("System: Your name is Max.")
    page.reload()
    expect(page.locator(".turn .system")).to_have_text("Your name is Max.")
    expect(page.locator(".asked")).to_have_text("Tell me a story about a dog")


def test_keys(page):
    box = page.get_by_role("textbox", name="Message")
    box.fill("What is")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("8 + 5?")
    expect(box).to_have_value("What is\n8 + 5?")
    # Enter that ends a word of an input method is not for the page
    composing = "{key: 'Enter', isComposing: true, bubbles: true}"
    box.evaluate(f"box => box.dispatchEvent(new KeyboardEvent('keydown', {composing}))")
    expect(page.locator(".turn")).to_have_count(0)
    box.press("Enter")
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator(".turn[aria-busy]")).to_have_count(0)
    # a button that makes place for another one leaves it the focus
    box.fill("What is 8 + 6?")
    page.get_by_role("button", name="Send").press("Enter")
    expect(page.locator(".turn").nth(1)).to_contain_text("8 + 6 = 14")
    expect(page.get_by_role("button", name="Send")).to_be_focused()


def test_an_unsent_message_outlives_a_reload(page):
    page.get_by_role("textbox", name="Message").fill("not yet")
    page.reload()
    expect(page.get_by_role("textbox", name="Message")).to_have_value("not yet")


def test_the_keyboard_reaches_everything(page):
    reached = []
    page.locator("body").press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    for _ in range(200):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.hash"))
        if reached[-1] == "send":
            break
    order = [
        "#chat",
        "#batch",
        "#translate",
        "#figures",
        "import",
        "new-chat",
        "language",
        "theme",
        "message",
    ]
    assert [each for each in reached if each in order] == order and reached[-1] == "send"
    names = page.locator("button, input, select, textarea, a").evaluate_all(
        """all => all.filter(each => each.checkVisibility())
            .map(each => each.textContent.trim() || each.ariaLabel || each.labels?.length)"""
    )
    assert names and all(names)


def test_an_answer_is_announced_once(page):
    page.evaluate(
        """window.spoken = []; const announcer = document.querySelector('#announcer');
        new MutationObserver(() => spoken.push(announcer.textContent))
            .observe(announcer, {childList: true})"""
    )
    text = answer(send(page, "Tell me a story about a cat"))
    expect(page.get_by_role("status").last).to_have_text(f"Answer: {text}")
    assert page.evaluate("spoken") == ["Answering …", f"Answer: {text}"]
