"""The page and passwords in a browser: asked for once, sent as a header, kept for the tab."""

from frontend_process import FrontendProcess
from page_steps import answer, keep_messages, send, show
from playwright.sync_api import Request, expect
from serving import Server

WORD = "open sesame"
OTHER = "figures only"


def enter(page, word: str) -> None:
    page.get_by_label("Password", exact=True).fill(word)
    page.get_by_role("button", name="Continue").click()


def test_the_password_is_asked_for_once(watched, locked_server: Server):
    page = watched.open(locked_server.url)
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    expect(page.get_by_role("heading", name="This server asks for a password")).to_be_visible()
    expect(page.get_by_label("Password", exact=True)).to_be_focused()
    enter(page, "sesame")
    expect(page.get_by_role("alert")).to_have_text("That password is not the right one.")
    enter(page, WORD)
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert answer(send(page, "What is 20 + 22?")) == "20 + 22 = 42"
    for request in asked:
        assert "sesame" not in request.url and "sesame" not in (request.post_data or "")
    assert page.evaluate("[sessionStorage.password, document.cookie]") == [WORD, ""]
    assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    assert answer(page.locator(".turn")) == "20 + 22 = 42"
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_question_that_follows_at_once_can_be_answered(watched, locked_server: Server):
    """The dialog's event of being closed comes later than a question that opens it again."""
    page = watched.open(locked_server.url)
    expect(page.get_by_role("dialog")).to_be_visible()
    page.evaluate(
        """async () => {
            const { askPassword } = await import("/page/password.js");
            const closed = new Promise((done) =>
                document.getElementById("password-dialog").addEventListener("close", done, { once: true }));
            document.getElementById("password").value = "sesame";
            document.getElementById("password-form").requestSubmit();
            for (let i = 0; i < 20; i++) await null; // until the first question is over, but no event
            askPassword("password", "sesame");
            if (!document.getElementById("password-dialog").open) throw new Error("not asked again");
            await closed;
        }"""
    )
    enter(page, WORD)
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert answer(send(page, "What is 20 + 22?")) == "20 + 22 = 42"


def test_without_a_password_it_says_what_is_missing(watched, locked_server: Server):
    page = watched.open(locked_server.url)
    expect(page.get_by_role("dialog")).to_be_visible()
    keep_messages(page)
    page.keyboard.press("Escape")
    expect(page.locator(".toast")).to_have_text("The server asks for a password.")
    page.get_by_role("button", name="What is the capital of France?").click()
    enter(page, WORD)
    expect(page.locator(".turn .reply")).to_contain_text("Paris")
    expect(page.get_by_label("Model")).to_have_value("rwkv7-demo")
    expect(page.locator("#pulse")).to_be_visible()


def test_figures_may_have_a_password_of_their_own(watched):
    with FrontendProcess(metrics_password=OTHER) as process:
        page = watched.open(f"http://127.0.0.1:{process.port}")
        send(page, "hello")
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.get_by_role("link", name="Figures").click()
        expect(page.get_by_role("heading", name="These figures have a password of their own")).to_be_visible()
        enter(page, OTHER)
        expect(page.locator(".tile", has_text="Rows running")).to_contain_text("of 8")
        page.reload()
        show(page, "Figures")
        expect(page.locator(".tile", has_text="Rows running")).to_contain_text("of 8")
