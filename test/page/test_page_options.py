"""The options of a chat, and what goes with a message: files and long texts.

One front end for all tests, over an engine that echoes.
"""

import json
from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from frontend_process import FrontendProcess
from page_steps import keep_messages, send
from playwright.sync_api import Page, expect

from rwkv_batch.wire.protocol import AdapterInfo, StartStateInfo


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    with (
        FakeEngine(f"ipc://{tmp_path_factory.mktemp('wire')}/engine") as engine,
        FrontendProcess(engine, sampling_profile="open_think") as running,
    ):
        info = StartStateInfo("pirate", json.dumps({"temperature": 0.25}).encode(), 1.0, 2, 1, bytes(16))
        engine.start_states["pirate"] = "vk", b"", info
        engine.adapters["capitals"] = AdapterInfo("capitals", "5eed" * 8, 4, 1.0, "x")
        yield running


@pytest.fixture
def engine(process: FrontendProcess) -> FakeEngine:
    for kept in (process.engine.requests, process.engine.sessions, process.engine.turns):
        kept.clear()
    return process.engine


@pytest.fixture
def page(watched, engine: FakeEngine, process: FrontendProcess) -> Page:
    return watched.open(f"http://127.0.0.1:{process.port}", as_made=True)


def options(page: Page) -> None:
    page.locator("#options-button").click()
    expect(page.locator("#options")).to_be_visible()


def test_the_defaults_are_shown_and_counted(page, engine):
    options(page)
    shown = {
        "Temperature": "0.96",
        "Top p": "0.76",
        "Top k": "32",
        "Presence penalty": "1",
        "Frequency penalty": "0.1",
        "Penalty decay": "0.988",
        "Max tokens": "4096",
        "Seed": "random",
    }
    for name, value in shown.items():
        expect(page.get_by_role("spinbutton", name=name)).to_have_attribute("placeholder", value)
    page.get_by_label("Start state").select_option("pirate")
    expect(page.get_by_role("spinbutton", name="Temperature")).to_have_attribute("placeholder", "0.25")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    send(page, "hello")
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.alpha_decay) == (0.25, 32, 0.988)


def test_each_option_is_sent_and_stays(page, engine):
    options(page)
    given = {
        "Temperature": "0.5",
        "Top p": "0.4",
        "Top k": "7",
        "Presence penalty": "0.3",
        "Frequency penalty": "0.2",
        "Penalty decay": "0.9",
        "Max tokens": "50",
        "Seed": "11",
    }
    for name, value in given.items():
        page.get_by_role("spinbutton", name=name).fill(value)
    page.get_by_label("System prompt").fill("Be kind.")
    page.get_by_label("Stop at these texts").fill("END\\n\nenough")
    page.get_by_label("Adapter").select_option("capitals")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Think").click()
    expect(page.get_by_role("button", name="Options (11)")).to_be_visible()
    page.reload()
    expect(page.get_by_role("button", name="Options (11)")).to_be_visible()
    expect(page.get_by_role("button", name="Think")).to_have_attribute("aria-pressed", "true")
    send(page, "hello")
    request = engine.requests[-1]
    drawn = request.sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.seed) == (0.5, 0.4, 7, 11)
    assert (drawn.alpha_presence, drawn.alpha_frequency, drawn.alpha_decay) == (0.3, 0.2, 0.9)
    assert request.max_tokens == 50 and request.late_stops.strings == ["END\n", "enough"]
    assert request.adapter == "capitals"
    assert str(request.prompts[0]) == "System: Be kind.\n\nUser: hello\n\nAssistant: <think"
    options(page)
    page.get_by_label("Adapter").select_option("")
    page.get_by_role("button", name="Use the defaults").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Options", exact=True)).to_be_visible()
    send(page, "again")
    # the chat goes on with what it began with, and is drawn as is said now
    assert engine.requests[-1].adapter == "capitals" and engine.requests[-1].sampling.top_k == 32
    page.reload()
    options(page)
    expect(page.get_by_role("spinbutton", name="Temperature")).to_have_value("")
    expect(page.get_by_label("System prompt")).to_have_value("")


def test_a_model_is_listed_once_with_all_that_belongs_to_it(page):
    expect(page.locator("#model option")).to_have_text(["fake-rwkv"])


def test_a_text_file_goes_with_a_message(page, engine):
    note = {"name": "my notes.txt", "mimeType": "text/plain", "buffer": "one\r\n```\n\ntwö\n".encode()}
    page.locator("#attach-file").set_input_files([note])
    expect(page.locator("#attached li")).to_contain_text("my notes.txt")
    expect(page.locator("#attached small")).to_have_text("12 characters")
    turn = send(page, "What is in it?")
    prompt = str(engine.requests[-1].prompts[0])
    assert "User: What is in it?\nFile: my notes.txt\n````\none\n```\n\ntwö\n````\n\n" in prompt
    expect(page.locator("#attached")).to_be_hidden()
    for _ in range(2):
        expect(turn.locator(".asked p")).to_have_text("What is in it?")
        expect(turn.locator(".asked summary")).to_contain_text("my notes.txt")
        expect(turn.locator(".asked pre")).to_be_hidden()
        turn.locator(".asked summary").click()
        expect(turn.locator(".asked pre")).to_have_text("one\n```\n\ntwö")
        page.reload()
    expect(page.locator("#session-list .name")).to_have_text("What is in it?")
    page.get_by_role("button", name="Edit this message").click()
    expect(page.locator(".edit textarea")).to_have_value("What is in it?")
    page.locator(".edit textarea").fill("What else?")
    page.keyboard.press("Enter")
    assert engine.wait_for(lambda: "What else?" in str(engine.requests[-1].prompts[0]), 60)
    assert "File: my notes.txt\n````\none" in str(engine.requests[-1].prompts[0])


def test_what_is_no_text_is_refused_and_what_is_attached_can_go_again(page):
    files = [
        {"name": "a.txt", "mimeType": "text/plain", "buffer": b"fine"},
        {"name": "b.png", "mimeType": "image/png", "buffer": b"\x89PNG\xff\xfe"},
    ]
    keep_messages(page)
    page.locator("#attach-file").set_input_files(files)
    expect(page.locator(".toast")).to_have_text("b.png is no text in UTF-8.")
    expect(page.locator("#attached li")).to_have_count(1)
    large = {"name": "c.txt", "mimeType": "text/plain", "buffer": b"x" * ((1 << 20) + 1)}
    page.locator("#attach-file").set_input_files([large])
    expect(page.locator(".toast")).to_have_text("c.txt has more than 1 MiB.")
    page.get_by_role("button", name="Remove this text").click()
    expect(page.locator("#attached")).to_be_hidden()
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()


def test_a_file_of_many_fences_and_lines_goes_and_comes_back(page):
    found = page.evaluate(
        """async () => {
            const { withFiles, apart } = await import('/page/attach.js');
            const content = '```\\n'.repeat(200000) + '\\n'.repeat(200000) + 'end';
            const { message, files } = apart(withFiles('What?', [{ name: 'a.md', content }]));
            return [message, files.length, files[0].content === content];
        }"""
    )
    assert found == ["What?", 1, True]


def test_what_a_message_is_about(page):
    found = page.evaluate(
        """async () => {
            const { subjectOf, withFiles } = await import('/page/attach.js');
            const files = [{ name: 'a.md', content: 'x' }];
            return ['Hi', ' ', '', withFiles('', files), withFiles('Why?', files)].map(subjectOf);
        }"""
    )
    assert found == ["Hi", "", "", "a.md", "Why?"]


def paste(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").evaluate(
        """(box, text) => {
            const clipboardData = new DataTransfer();
            clipboardData.setData('text/plain', text);
            const event = new ClipboardEvent('paste', {clipboardData, bubbles: true, cancelable: true});
            if (box.dispatchEvent(event)) box.setRangeText(text, box.value.length, box.value.length, 'end');
        }""",
        text,
    )


def test_a_long_text_that_is_pasted_does_not_fill_the_box(page, engine):
    paste(page, "short ")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("short ")
    paste(page, "long text. " * 300)
    expect(page.locator("#attached li")).to_contain_text("Pasted text")
    expect(page.locator("#attached small")).to_have_text("3,300 characters")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("short ")
    page.get_by_role("textbox", name="Message").press("Enter")
    expect(page.locator(".asked summary")).to_contain_text("Pasted text")
    assert engine.wait_for(lambda: engine.requests, 60)
    assert str(engine.requests[-1].prompts[0]).count("long text.") == 300


def test_files_can_be_dropped_and_go_without_a_message(page, engine):
    page.locator("#conversation").evaluate(
        """place => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File(['dropped'], 'd.md'));
            for (const name of ['dragover', 'drop'])
                place.dispatchEvent(new DragEvent(name, {dataTransfer, bubbles: true, cancelable: true}));
        }"""
    )
    expect(page.locator("#attached li")).to_contain_text("d.md")
    page.get_by_role("textbox", name="Message").press("Enter")
    expect(page.locator(".asked summary")).to_contain_text("d.md")
    assert engine.wait_for(lambda: engine.requests, 60)
    assert "User: File: d.md\n```\ndropped\n```" in str(engine.requests[-1].prompts[0])


def test_a_refused_message_keeps_what_goes_with_it(page, engine):
    page.locator("#attach-file").set_input_files(
        [{"name": "a.txt", "mimeType": "text/plain", "buffer": b"fine"}]
    )
    options(page)
    page.get_by_role("spinbutton", name="Top p").fill("7")
    page.keyboard.press("Escape")
    page.get_by_role("textbox", name="Message").fill("see this")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("top_p")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("see this")
    expect(page.locator("#attached li")).to_contain_text("a.txt")


def test_a_long_message_is_folded(page):
    turn = send(page, "line\n" * 400)
    words = turn.locator(".asked p")
    assert words.evaluate("p => p.scrollHeight > p.clientHeight")
    turn.get_by_role("button", name="Show all").click()
    assert words.evaluate("p => p.scrollHeight <= p.clientHeight + 1")
    turn.get_by_role("button", name="Show less").click()
    assert words.evaluate("p => p.scrollHeight > p.clientHeight")
