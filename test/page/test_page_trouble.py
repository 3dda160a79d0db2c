"""The page in a browser when things go wrong or grow large.

Over a real front end, and an engine with given answers.
"""

import re
from collections.abc import Iterator
from html import unescape

import pytest
from fake_engine import INFO
from frontend_process import FrontendProcess
from msgspec import structs
from page_steps import answer, at_end, names_like, send, show
from playwright.sync_api import APIResponse, Page, Route, expect
from scripted_engine import SILENCE, ScriptedEngine
from serving import until

from rwkv_batch.wire.supervision import Serving

HOSTILE = (
    '<img src=x onerror="alert(1)"><script>alert(2)</script><svg/onload=alert(3)>'
    '<a href="javascript:alert(4)">here</a><iframe src="https://example.com"></iframe>'
    "<style>body{display:none}</style></div></article>&lt;b&gt;&amp;<!-- \u202e ]]> {{7*7}} \x1b[31m"
)
WORDS = [f"word{number}" + (" " if number % 40 else ".\n") for number in range(1, 10_001)]
TALE = ["Once ", "upon ", "a ", "time "] * 2500
UNREACHABLE = "The server cannot be reached. Trying again …"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(f"ipc://{tmp_path_factory.mktemp('wire')}/engine") as running:
        yield running


@pytest.fixture(scope="module")
def processes() -> Iterator[list[FrontendProcess]]:
    """The front end that answers, or none yet."""
    running: list[FrontendProcess] = []
    yield running
    for process in running:
        process.__exit__()


@pytest.fixture
def engine(shared: ScriptedEngine) -> ScriptedEngine:
    """Without what other tests have left."""
    for kept in (shared.answers, shared.requests, shared.cancelled, shared.sessions, shared.turns):
        kept.clear()
    shared.infos = [INFO]
    return shared


@pytest.fixture
def process(engine: ScriptedEngine, processes: list[FrontendProcess]) -> FrontendProcess:
    """One front end for all tests, until one of them ends it."""
    if not processes or not processes[-1].process.is_alive():
        processes.append(FrontendProcess(engine).__enter__())
    return processes[-1]


@pytest.fixture
def page(watched, process: FrontendProcess) -> Page:
    opened = watched.open(f"http://127.0.0.1:{process.port}")
    expect(opened.get_by_text("What would you like to ask?")).to_be_visible()
    return opened


def elements(page: Page) -> dict[str, int]:
    """How many of each that no text may make."""
    count = "document.querySelectorAll('%s').length"
    return {tag: page.evaluate(count % tag) for tag in ("script", "iframe", "style", "body img", "a", "b")}


def test_a_hostile_answer_is_text(page, engine):
    engine.answers["attack"] = [HOSTILE[i : i + 7] for i in range(0, len(HOSTILE), 7)]
    before = elements(page)
    turn = send(page, "attack")
    assert answer(turn) == unescape(HOSTILE)
    # the session in the list, and what looks like an address
    assert elements(page) == before | {"a": before["a"] + 2}
    expect(page.locator("body")).to_be_visible()


def test_a_hostile_thought_is_text(page, engine):
    engine.answers["attack"] = ["<think>", HOSTILE, "</think>", "\n", HOSTILE]
    turn = send(page, "attack")
    turn.get_by_text("Thought").click()
    expect(turn.locator(".thought .text")).to_have_text(HOSTILE)
    assert answer(turn) == unescape(HOSTILE)


def test_a_hostile_message_is_text_also_as_a_name_and_in_the_history(page):
    before = elements(page)
    message = HOSTILE.replace("\x1b", "")
    send(page, message)
    expect(names_like(page, "<img src=x")).to_have_count(1)
    page.reload()
    expect(page.locator(".turn")).to_contain_text("<script>alert(2)</script>")
    assert elements(page) == before | {"a": before["a"] + 1}


def test_hostile_rows_of_a_batch_are_text(page, engine):
    engine.answers["attack"] = [HOSTILE]
    show(page, "Batch")
    before = elements(page)
    page.get_by_role("textbox", name="Prompt").fill("attack")
    page.get_by_role("spinbutton", name="Rows").fill("1")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".card .text")).to_have_text(HOSTILE)
    assert elements(page) == before


def test_ten_thousand_tokens(page, engine):
    """All of them arrive, are written once a frame at most, and are not read out piece by piece."""
    engine.answers["all words"] = WORDS
    page.evaluate(
        """window.portions = 0; window.spoken = 0; window.drawn = 0;
        const count = () => { drawn++; requestAnimationFrame(count); };
        count();
        new MutationObserver(() => portions++).observe(document.querySelector('#turns'),
            {childList: true, subtree: true, characterData: true});
        new MutationObserver(() => spoken++)
            .observe(document.querySelector('#announcer'), {childList: true})"""
    )
    page.get_by_role("button", name="Options").click()
    page.get_by_role("spinbutton", name="Max tokens").fill("20000")
    page.keyboard.press("Escape")
    turn = send(page, "all words")
    assert answer(turn) == "".join(WORDS).rstrip()
    expect(turn).to_contain_text("10,000 tokens")
    assert page.evaluate("portions <= drawn + 10 && portions > 1 && spoken === 2")
    at_end(page)


def test_reading_further_up_is_not_disturbed(page, engine, process):
    engine.answers["tale"] = TALE
    page.get_by_role("textbox", name="Message").fill("tale")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "c => c.scrollHeight > 2 * c.clientHeight", arg=page.locator("#conversation").element_handle()
    )
    page.locator("#conversation").evaluate("c => c.scrollTop = 0")
    expect(page.get_by_role("button", name="Jump to the end")).to_be_visible()
    expect(page.locator(".turn[aria-busy]")).to_have_count(0)
    assert page.locator("#conversation").evaluate("c => c.scrollTop") == 0
    page.get_by_role("button", name="Jump to the end").click()
    at_end(page)


def away(process: FrontendProcess) -> None:
    process.process.kill()
    process.process.join()


def test_a_server_that_goes_away_and_comes_back(page, engine, process):
    send(page, "hello")
    engine.answers["are you there"] = ["I was ", "away."]
    away(process)
    page.get_by_role("textbox", name="Message").fill("are you there")
    page.keyboard.press("Enter")
    expect(page.get_by_text(UNREACHABLE)).to_be_visible()
    expect(page.get_by_role("textbox", name="Message")).to_have_value("are you there")
    expect(page.locator(".turn")).to_have_count(1)
    with FrontendProcess(engine, port=process.port):
        expect(page.get_by_text(UNREACHABLE)).to_be_hidden()
        expect(page.get_by_role("textbox", name="Message")).to_have_value("are you there")
        page.get_by_role("textbox", name="Message").press("Enter")
        expect(page.locator(".turn").nth(1).locator(".reply")).to_contain_text("I was away.")
        until(lambda: len(engine.turns["hello"]) == 2)


def test_a_message_that_is_sent_before_the_turns_have_come_stands_behind_them(page, engine):
    send(page, "hello")
    engine.answers["are you there"] = ["I am ", "here."]
    held: list[Route] = []
    late: list[tuple[Route, APIResponse]] = []
    page.route("**/state/history?*", lambda route: route.continue_() if late else held.append(route))
    with page.expect_request("**/state/history?*"):
        page.reload()
    page.get_by_role("textbox", name="Message").fill("are you there")
    until(lambda: page.evaluate("true") and bool(held))
    late += [(route, route.fetch()) for route in held]
    page.get_by_role("textbox", name="Message").press("Enter")
    for route, response in late:
        route.fulfill(response=response)
    expect(page.locator(".turn").nth(1).locator(".reply")).to_contain_text("I am here.")
    expect(page.locator(".turn")).to_have_count(2)
    until(lambda: len(engine.turns["hello"]) == 2)


def test_it_notices_by_itself(page, process):
    """The figures are asked for all the time."""
    away(process)
    expect(page.get_by_text(UNREACHABLE)).to_be_visible()


def test_an_answer_that_breaks_off_can_be_asked_for_again(page, engine, process):
    send(page, "hello")
    page.get_by_role("textbox", name="Message").fill("!trickle on")
    engine.answers["trickle"] = ["some ", "text", SILENCE]
    page.get_by_role("textbox", name="Message").press("Enter")
    expect(page.locator(".turn").nth(1)).to_contain_text("some text")
    away(process)
    expect(page.get_by_text(UNREACHABLE)).to_be_visible()
    expect(page.locator(".turn.broken")).to_contain_text("Interrupted")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("!trickle on")
    engine.answers["trickle"] = ["this time ", "it worked"]
    with FrontendProcess(engine, port=process.port):
        expect(page.locator(".turn")).to_have_count(1)
        page.get_by_role("textbox", name="Message").press("Enter")
        expect(page.locator(".turn").nth(1)).to_contain_text("this time it worked")


def test_a_model_that_is_not_ready_is_waited_for(watched, engine):
    with FrontendProcess(engine, ready=False, name="second") as process:
        page = watched.open(f"http://127.0.0.1:{process.port}")
        expect(page.get_by_text("The server is not ready yet. Waiting for it …")).to_be_visible()
        process.serve(Serving(process.infos))
        expect(page.get_by_text("The server is not ready yet. Waiting for it …")).to_be_hidden()
        expect(page.get_by_label("Model")).to_have_value("fake-rwkv")


@pytest.mark.parametrize(
    ("message", "said"),
    [("!overloaded", "finds this overloaded"), ("!invalid", "finds this invalid"), ("!fail", "failed")],
)
def test_a_refused_message_stays_in_the_box(page, message, said):
    page.get_by_role("textbox", name="Message").fill(message)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text(said)
    expect(page.get_by_role("textbox", name="Message")).to_have_value(message)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_stop_cancels_where_nothing_else_helps(page, engine):
    page.get_by_role("textbox", name="Message").fill("!hang")
    page.keyboard.press("Enter")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("")  # the server has it
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".turn")).to_contain_text("Stopped")
    assert engine.wait_for(lambda: engine.cancelled, 60)


def test_a_translation_can_be_stopped(page, engine):
    engine.answers["patience"] = [SILENCE]
    show(page, "Translate")
    page.get_by_role("textbox", name="Text").fill("patience")
    page.get_by_role("textbox", name="Text").press("Control+Enter")
    assert engine.wait_for(lambda: engine.requests, 60)
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Translate")).to_be_visible()
    assert engine.wait_for(lambda: engine.cancelled, 60)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_text(UNREACHABLE)).to_be_hidden()


def test_the_chosen_model_is_asked(watched, engine):
    engine.infos.append(structs.replace(INFO, model="second"))
    with FrontendProcess(engine, infos=engine.infos, name="second") as process:
        page = watched.open(f"http://127.0.0.1:{process.port}")
        send(page, "hello")
        show(page, "Batch")
        page.get_by_label("Model").select_option("second")
        page.get_by_role("textbox", name="Prompt").fill("hello")
        page.get_by_role("button", name="Run").click()
        expect(page.locator("#batch-progress")).to_contain_text("16 rows finished")
        page.get_by_role("link", name="Chat", exact=True).click()
        expect(page.locator("#chat-title")).to_have_text("New chat")
        page.reload()
        expect(page.get_by_label("Model")).to_have_value("second")
        assert [request.to_model for request in engine.requests] == ["fake-rwkv", "second"]


def test_many_sessions_come_in_pages(page, engine):
    """A name that is taken on a page that has not come is not taken again."""
    for name in [f"session {number:03}" for number in range(600)] + ["zebra"]:
        engine.sessions[name], engine.turns[name] = "User: hi", ["User: hi"]
    page.reload()
    expect(page.locator("#session-list li")).to_have_count(500)
    send(page, "zebra")
    expect(page.locator("#chat-title")).to_have_text("zebra (2)")
    assert len(engine.turns["zebra"]) == 1
    page.get_by_role("button", name="Show more").click()
    expect(page.locator("#session-list li")).to_have_count(602)
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()
    page.get_by_role("searchbox", name="Find a session").fill("SION 59")
    expect(page.locator("#session-list li")).to_have_count(10)
    page.get_by_role("searchbox", name="Find a session").fill("no such")
    expect(page.get_by_text("No session has this in its name.")).to_be_visible()


def test_more_sessions_are_shown_while_the_list_is_asked_for_anew(page, engine):
    for name in (f"session {number:03}" for number in range(600)):
        engine.sessions[name], engine.turns[name] = "User: hi", ["User: hi"]
    page.reload()
    expect(page.locator("#session-list li")).to_have_count(500)
    held: list[Route] = []
    released: list[bool] = []

    def hold(route: Route) -> None:
        first = '"limit":500' in (route.request.post_data or "") and not released
        held.append(route) if first else route.continue_()

    page.route("**/state/status", hold)
    page.get_by_role("textbox", name="Message").fill("hello")
    page.keyboard.press("Enter")
    until(lambda: page.evaluate("true") and bool(held))
    page.get_by_role("button", name="Show more").click()
    released.append(True)
    for route in held:
        route.continue_()
    expect(page.locator("#session-list li")).to_have_count(601)
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()


def test_a_session_of_another_client_is_shown_as_it_is(page, engine):
    engine.sessions["raw one"] = "Question? Answer."
    engine.turns["raw one"] = ["Question? Answer."]
    page.reload()
    page.get_by_role("link", name=re.compile("raw one")).click()
    expect(page.locator(".asked.raw")).to_have_text("Question? Answer.")
