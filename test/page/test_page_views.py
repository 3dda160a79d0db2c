"""The page's batches, translation and figures in a browser, against the bundled model.

Also its language, its theme, and a narrow screen.
"""

import re

import pytest
from page_steps import COMPLETIONS, endless, keep_messages, send, show
from playwright.sync_api import Page, Route, expect
from serving import Server

PROMPT = "What is the capital of Italy?"


@pytest.fixture
def page(watched, server: Server) -> Page:
    opened = watched.open(server.url)
    expect(opened.get_by_text("What would you like to ask?")).to_be_visible()
    return opened


def run_batch(page: Page, prompt: str, rows: int) -> None:
    page.get_by_role("textbox", name="Prompt").fill(prompt)
    page.get_by_role("spinbutton", name="Rows").fill(str(rows))
    page.get_by_role("button", name="Run").click()


def test_a_batch_fills_a_card_for_each_row(page):
    show(page, "Batch")
    run_batch(page, PROMPT, 20)
    expect(page.locator("#batch-progress")).to_contain_text("20 rows finished")
    texts = page.locator(".card .text").all_text_contents()
    assert len(texts) == 20 and all("Rome" in text for text in texts)
    expect(page.locator("#batch-progress")).to_contain_text("1 distinct answer ·")
    assert page.locator("#batch-bar").evaluate("bar => bar.value") == 1
    expect(page.locator("#batch-problem")).to_be_hidden()


def test_a_batch_of_raw_text_is_continued(page):
    show(page, "Batch")
    page.get_by_label("Prompt is").select_option("raw text")
    run_batch(page, "The capital of France is", 3)
    expect(page.locator(".card")).to_have_text([re.compile("The capital of France is Paris")] * 3)


def test_a_batch_is_live_and_can_be_stopped(page):
    keep_messages(page)
    page.route(COMPLETIONS, endless)
    show(page, "Batch")
    run_batch(page, PROMPT, 4)
    for card in page.locator(".card").all():
        expect(card).to_have_attribute("data-state", "running")
        expect(card).to_contain_text("Rome")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#batch-progress")).to_contain_text("Stopped after about")
    expect(page.get_by_role("button", name="Run")).to_be_visible()


def test_a_card_says_that_it_does_not_show_all_of_its_text(page):
    show(page, "Batch")
    run_batch(page, "Tell me a story about a fox", 2)
    expect(page.locator("#batch-progress")).to_contain_text("2 rows finished")
    card = page.locator(".card").first
    expect(card).to_have_class(re.compile("hides"))
    card.get_by_role("button", name="Show all").click()
    expect(card).not_to_have_class(re.compile("hides"))
    assert card.locator(".text").evaluate("box => box.scrollHeight <= box.clientHeight + 1")
    card.get_by_role("button", name="Show less").click()
    expect(card).to_have_class(re.compile("hides"))
    run_batch(page, PROMPT, 1)
    expect(page.locator("#batch-progress")).to_contain_text("1 row finished")
    expect(page.get_by_role("button", name="Show all")).to_have_count(0)


def test_rows_that_have_generated_nothing_yet_have_no_speed(page):
    """While 16 rows read their prompts, "0 tokens/s" would look like a server that stands still."""
    made, drawn = {"running": 16, "generation_tokens": 1000}, 0

    def stats(route: Route) -> None:
        found = route.fetch().json()
        made["generation_tokens"] += drawn
        found["models"][0] |= made
        route.fulfill(json=found)

    page.route("**/stats", stats)
    expect(page.locator("#pulse")).to_have_text("16 running")
    with page.expect_response("**/stats"):
        pass
    expect(page.locator("#pulse")).to_have_text("16 running")
    drawn = 4000  # from each answer to the next
    expect(page.locator("#pulse")).to_have_text(re.compile(r"^\s*[1-9][\d,]* tokens/s · 16 running"))
    made["running"] = drawn = 0
    expect(page.locator("#pulse")).to_have_text("0 tokens/s · 0 running")


def test_a_wrong_field_is_said_by_the_server(page):
    show(page, "Batch")
    page.get_by_role("spinbutton", name="Top p").fill("0.5")
    page.locator("#batch-ask").evaluate("form => form.noValidate = true")
    page.get_by_role("spinbutton", name="Top p").fill("7")
    run_batch(page, PROMPT, 2)
    expect(page.get_by_role("alert")).to_contain_text("top_p")


def test_translation_stands_beside_the_text(page):
    show(page, "Translate")
    page.get_by_label("To", exact=True).select_option("French")
    page.get_by_role("textbox", name="Text").fill("The red car is fast.\n\nGood morning!")
    page.get_by_role("textbox", name="Text").press("Control+Enter")
    expect(page.locator("#result p")).to_have_text(["La voiture rouge est rapide.", "", "Bonjour !"])
    left, right = (page.locator(place).bounding_box() for place in ("#source", "#result"))
    assert left and right and left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]
    page.get_by_role("button", name="Swap the languages").click()
    expect(page.get_by_label("From", exact=True)).to_have_value("fr")
    expect(page.get_by_label("To", exact=True)).to_have_value("en")
    expect(page.get_by_role("textbox", name="Text")).to_have_value(
        "La voiture rouge est rapide.\n\nBonjour !"
    )


def test_the_figures_are_those_of_now(page):
    show(page, "Figures")
    drawn = page.locator(".tile", has_text="Tokens generated").locator("dd")
    expect(drawn).to_have_text(re.compile(r"^[\d,]+$"))
    before = int(drawn.text_content().replace(",", ""))
    expect(page.get_by_role("row").nth(1)).to_contain_text("rwkv7-demo")
    page.get_by_role("link", name="Chat", exact=True).click()
    send(page, "Tell me a story about a cow")
    show(page, "Figures")
    page.wait_for_function(
        "before => +document.querySelectorAll('.tile dd')[4].textContent.replace(',', '') >= before + 100",
        arg=before,
    )


def test_it_speaks_chinese_to_those_whose_browser_does(watched, server):
    page = watched.open(server.url, locale="zh-CN")
    expect(page.get_by_text("想问点什么？")).to_be_visible()
    assert page.locator("html").get_attribute("lang") == "zh-Hans"
    page.get_by_role("button", name="English").click()
    expect(page.get_by_text("What would you like to ask?")).to_be_visible()
    expect(page.get_by_role("textbox", name="Message")).to_have_attribute("placeholder", "Write a message")
    page.reload()
    expect(page.get_by_text("What would you like to ask?")).to_be_visible()


def test_nothing_is_left_in_english(watched, server):
    """Every text of the document has a Chinese one, and no element is without a text."""
    page = watched.open(server.url, locale="zh-CN")
    expect(page.get_by_text("想问点什么？")).to_be_visible()
    table = page.evaluate("import('./page/texts.js').then(texts => texts.TABLE)")
    same = {key for key, (english, chinese) in table.items() if english == chinese}
    assert same <= {"topP", "topK"} and all(english and chinese for english, chinese in table.values())
    named = page.evaluate(
        """['text', 'label', 'hint', 'tip'].flatMap(kind =>
        [...document.querySelectorAll(`[data-${kind}]`)].map(element => element.dataset[kind]))"""
    )
    assert set(named) <= set(table) and len(named) > 60


def colours(page: Page) -> tuple[str, str]:
    style = "getComputedStyle(document.body)"
    return page.evaluate(f"[{style}.backgroundColor, {style}.color]")


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def test_dark_and_light(watched, server):
    light, dark = (watched.open(server.url, color_scheme=scheme) for scheme in ("light", "dark"))
    for page, is_dark in ((light, False), (dark, True)):
        ground, ink = map(brightness, colours(page))
        assert (ground < ink) == is_dark and abs(ground - ink) > 150
    dark.get_by_role("button", name="Theme: as the system").click()
    expect(dark.get_by_role("button", name="Theme: light")).to_be_visible()
    assert colours(dark) == colours(light)
    dark.reload()
    expect(dark.get_by_role("button", name="Theme: light")).to_be_visible()
    assert colours(dark) == colours(light)


def test_a_narrow_screen_has_all_of_it(watched, server):
    page = watched.open(server.url, viewport={"width": 360, "height": 640})
    send(page, "My job is baker.")
    page.get_by_role("button", name="Show sessions").click()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Show sessions").click()
    page.get_by_role("link", name="My job is baker.").click()
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator("#sessions")).to_be_hidden()
    for view in ("Batch", "Translate", "Figures"):
        show(page, view)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.locator("main > section:visible").evaluate("all => all.scrollWidth <= all.clientWidth")
    table = page.locator("#figures .wide")
    expect(table.get_by_role("row")).to_have_count(2)
    assert table.evaluate("panel => panel.scrollHeight <= panel.clientHeight")
