"""Markdown in answers: what it looks like, while it comes and after, and that nothing in it gets out.

One front end for all tests, over an engine with given answers.
"""

import re
from collections.abc import Iterator, Sequence

import pytest
from frontend_process import FrontendProcess
from page_steps import answer, at_end, send
from playwright.sync_api import Locator, Page, expect
from scripted_engine import SILENCE, ScriptedEngine

DOCUMENT = """# Plan

Some *quiet* and **loud** words, `code`, ~~gone~~ and a line
that is broken.

1. one
2. two
   - inner
   - other

> said

| left | right |
|:-----|------:|
| a    | 1     |
| b    | 2     |

```python
def double(x):
    return 2 * x  # twice
```

***

[a page](https://example.com/x?a=1&b=2) and https://example.com/bare
"""
HOSTILE = """<script>window.bad = 1</script><img src=x onerror="window.bad = 2">

[run](javascript:window.bad=3) [data](data:text/html,<script>window.bad=4</script>) [vb](vbscript:x)
[local](/v1/state/status) [good](https://example.com/) [mail](mailto:a@example.com)
[JaVa](JaVaScRiPt:window.bad=5) <javascript:window.bad=6> [tab](java&#x09;script:window.bad=7)

![spy](https://example.com/spy.png) ![inline](data:image/png;base64,iVBORw0KGgo=)

<style>body{display:none}</style><iframe src="https://example.com"></iframe>

| <b>bold</b> | `<i>` |
|---|---|
| <a href="javascript:window.bad=8">x</a> | &lt;u&gt; |

[ref]: javascript:window.bad=9
[ref] "> <svg/onload=window.bad=10>

```"><script>window.bad=11</script>
</code></pre><script>window.bad=12</script>
```
"""
SCRIPTS = "script, iframe, style, object, embed, form, [onerror], [onload], [style]"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(f"ipc://{tmp_path_factory.mktemp('wire')}/engine") as running:
        yield running


@pytest.fixture(scope="module")
def process(engine: ScriptedEngine) -> Iterator[FrontendProcess]:
    with FrontendProcess(engine) as running:
        yield running


@pytest.fixture
def page(watched, process: FrontendProcess) -> Page:
    return watched.open(f"http://127.0.0.1:{process.port}")


def pieces(text: str, size: int = 3) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def answered(page: Page, engine: ScriptedEngine, given: str | Sequence[str]) -> Locator:
    """The answer's element when all of the text has come."""
    name = f"case {len(engine.answers)}."
    engine.answers[name] = pieces(given) if isinstance(given, str) else given
    return send(page, name).locator(".reply > .text")


def begun(page: Page, engine: ScriptedEngine, given: Sequence[str]) -> Locator:
    """The element of an answer that does not end."""
    name = f"case {len(engine.answers)}."
    engine.answers[name] = [*given, SILENCE]
    page.get_by_role("textbox", name="Message").fill(name)
    page.keyboard.press("Enter")
    return page.locator(".turn").last.locator(".reply > .text")


def test_all_of_it(page, engine):
    text = answered(page, engine, DOCUMENT)
    tags = text.evaluate("root => [...root.children].map(each => each.tagName.toLowerCase())")
    assert tags == ["h1", "p", "ol", "blockquote", "div", "figure", "hr", "p"]
    expect(text.locator("h1")).to_have_text("Plan")
    assert text.locator("em, strong, s, p code").all_text_contents() == ["quiet", "loud", "code", "gone"]
    expect(text.locator("p br")).to_have_count(1)
    expect(text.locator("ol > li")).to_have_count(2)
    expect(text.locator("ol ul > li")).to_have_text(["inner", "other"])
    expect(text.locator("td")).to_have_text(["a", "1", "b", "2"])
    assert text.locator("td.right").all_text_contents() == ["1", "2"]
    expect(text.locator("figcaption")).to_contain_text("python")
    expect(text.locator(".code code")).to_have_text("def double(x):\n    return 2 * x  # twice\n")
    expect(text.locator(".hl-keyword")).to_have_text(["def", "return"])
    assert text.locator(".code").evaluate("code => getComputedStyle(code.querySelector('.hl-keyword')).color")
    page.reload()
    again = page.locator(".turn .reply > .text")
    expect(again).to_be_attached()


def test_links_open_a_page_of_their_own(page, engine):
    text = answered(page, engine, DOCUMENT)
    links = text.get_by_role("link")
    addresses = links.evaluate_all("all => all.map(each => each.href)")
    assert addresses == ["https://example.com/x?a=1&b=2", "https://example.com/bare"]
    for link in links.all():
        expect(link).to_have_attribute("target", "_blank")
        expect(link).to_have_attribute("rel", "noopener noreferrer nofollow")
        expect(link).to_have_attribute("title", re.compile("^https://example.com/"))


def test_code_is_copied_as_it_is(page, engine):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = answered(page, engine, DOCUMENT)
    text.get_by_role("button", name="Copy the code").click()
    code = "def double(x):\n    return 2 * x  # twice\n"
    page.wait_for_function("async text => await navigator.clipboard.readText() === text", arg=code)
    page.locator(".turn").hover()
    page.locator(".turn .under").get_by_role("button", name="Copy").click()
    page.wait_for_function("async text => await navigator.clipboard.readText() === text", arg=DOCUMENT)


def test_formulas_stay_as_they_are_written(page, engine):
    text = answered(
        page,
        engine,
        "With $a_1 + b_1 * c_2$ and \\(x^{*}_{*}\\) it costs $5 and $6.\n\n"
        "$$\n\\sum_{i=1}^n x_i * y_i\n$$\n\n\\[ e = mc^2 \\]\n\nDone: \\* and `$x$`.",
    )
    formulas = ["a_1 + b_1 * c_2", "x^{*}_{*}", "\\sum_{i=1}^n x_i * y_i", "e = mc^2"]
    assert text.locator(".math").all_text_contents() == formulas
    expect(text.locator("p").first).to_contain_text("it costs $5 and $6.")
    expect(text.locator("em")).to_have_count(0)
    expect(text.locator("p").last).to_have_text("Done: * and $x$.")


def test_what_comes_in_pieces_is_what_comes_at_once(page, engine):
    """However a text is cut, also where a piece alone would mean another thing."""
    texts = [
        DOCUMENT,
        HOSTILE,
        "para\n- item\n- item\n\ntext\n===\n\npara\n#tag\n\npara\n***bold*** end\n\npara\n1. one\n",
        "para\n| a | b |\n|---|---|\n| 1 | 2 |\n\n|---|x\n",
        "```js\nlet a = 1;\n``` no\n````\nafter\n\n~~~\n~~ \n~~~\nend",
        "- one\n\n      code\n- two\n  ```sh\n  ls\n  ```\n\n  more\n\n[x] and [y][]\n\n[x]: https://example.com/1\n"
        '[y]: https://example.com/2\n"title"\n',
        "> a\nlazy\n\n> b\n\n1) x\n\n\n2) y\n\ttab\n\n```\nnever closed\n",
    ]
    differing = page.evaluate(
        """async texts => {
            const { MarkdownSink } = await import('./page/streamed.js');
            await import('./page/vendor/highlight.min.js');
            const { codeBlock } = await import('./page/code.js');
            codeBlock('let a;', 'js');
            await new Promise(done => setTimeout(done));
            const made = (text, size) => {
                const sink = new MarkdownSink(document.createElement('div'));
                for (let at = 0; at < text.length; at += size) {
                    sink.append(text.slice(at, at + size));
                    if (at + size < text.length) sink.flush(false);
                }
                sink.flush();
                for (const code of sink.element.querySelectorAll('pre code'))
                    code.replaceChildren(code.textContent); // its lines are elements of any number
                return sink.element.innerHTML;
            };
            const wrong = [];
            for (const [number, text] of texts.entries())
                for (const size of [1, 2, 3, 5, 8, 13, 40])
                    if (made(text, size) !== made(text, text.length))
                        wrong.push([number, size, made(text, size), made(text, text.length)]);
            return wrong;
        }""",
        texts,
    )
    assert differing == []


def test_code_that_comes_before_the_colours_is_whole(page):
    """The highlighter is there once all has come, however that was cut."""
    texts = [
        "```python\ndef f():\n    return 1\n```\n\nAfter.\n",
        "1. one\n\n   ```js\n   let a;\n   ```\n2. two\n   ~~~\n   text\n   ~~~\n\nAfter.\n",
        "~~~\nnone\n~~~\n\n```c\nint x;",
    ]
    differing = page.evaluate(
        """async texts => {
            const { MarkdownSink } = await import('./page/streamed.js');
            const cut = (text, ...ends) => {
                const sink = new MarkdownSink(document.createElement('div'));
                let from = 0;
                for (const end of ends) {
                    sink.append(text.slice(from, end));
                    sink.flush(false);
                    from = end;
                }
                sink.append(text.slice(from));
                sink.flush();
                return { text, ends, sink };
            };
            const all = [];
            for (const text of texts)
                for (let first = 0; first < text.length; first++)
                    for (let second = first; second < text.length; second += 3)
                        all.push(cut(text, first, second));
            await import('./page/vendor/highlight.min.js');
            await new Promise(done => setTimeout(done));
            const shown = sink => {
                for (const code of sink.element.querySelectorAll('pre code > div'))
                    code.replaceWith(...[...code.childNodes].flatMap(
                        each => each.nodeName === 'DIV' ? [...each.childNodes] : each));
                sink.element.normalize();
                return sink.element.innerHTML;
            };
            return all.map(({ text, ends, sink }) => [ends, shown(sink), shown(cut(text).sink)])
                .filter(([, made, wanted]) => made !== wanted);
        }""",
        texts,
    )
    assert differing == []


@pytest.mark.parametrize("size", [5, 10_000])
def test_a_hostile_answer_does_nothing(page, engine, size):
    text = answered(page, engine, pieces(HOSTILE, size))
    assert page.evaluate("window.bad") is None
    assert text.locator(SCRIPTS).count() == text.locator("img").count() == 0
    addresses = text.get_by_role("link").evaluate_all("all => all.map(each => each.getAttribute('href'))")
    assert set(addresses) == {
        "https://example.com",
        "https://example.com/",
        "mailto:a@example.com",
        "https://example.com/spy.png",
    }
    expect(text).to_contain_text("<script>window.bad = 1</script>")
    expect(text).to_contain_text("[run](javascript:window.bad=3)")
    expect(text.locator("th").first).to_have_text("<b>bold</b>")
    expect(text.locator(".code code")).to_have_text("</code></pre><script>window.bad=12</script>\n")


def test_a_hostile_answer_does_nothing_while_it_comes(page, engine):
    """At each of its characters, as the last of them have not come yet."""
    found = page.evaluate(
        """async ([text, scripts]) => {
            const { MarkdownSink } = await import('./page/streamed.js');
            const place = document.querySelector('#turns').appendChild(document.createElement('div'));
            const sink = new MarkdownSink(place);
            const wrong = [];
            for (const character of text) {
                sink.append(character);
                sink.flush(false);
                const links = [...place.querySelectorAll('a')].map(each => each.protocol);
                if (place.querySelector(scripts + ', img') || window.bad
                    || links.some(each => !['https:', 'mailto:'].includes(each)))
                    wrong.push(place.textContent.slice(-80));
            }
            return wrong;
        }""",
        [HOSTILE, SCRIPTS],
    )
    assert found == []


def test_a_huge_table(page, engine):
    rows = "".join(f"| {number} | **{number * number}** | `x` |\n" for number in range(1, 2001))
    text = answered(page, engine, pieces("| a | b | c |\n|---|--:|---|\n" + rows, 400))
    expect(text.locator("tbody tr")).to_have_count(2000)
    expect(text.locator("tbody tr").last).to_have_text("20004000000x")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_ten_thousand_lines_of_code(page, engine):
    code = "".join(f"line_{number} = {number} * 'x'  # {'long ' * 3}\n" for number in range(10_000))
    text = answered(page, engine, pieces("Here:\n\n```python\n" + code + "```\n\nDone.", 2000))
    assert text.locator(".code code").text_content() == code
    expect(text.locator("p")).to_have_text(["Here:", "Done."])
    at_end(page)


@pytest.mark.parametrize("mark", ["$a ", "$$a ", "\\(", "\\[\n", "$$\n", "[", "> "])
def test_marks_that_never_end_end(page, mark):
    """Looking for the end of each through all of the text would take minutes."""
    length = page.evaluate(
        """async mark => {
            const { MarkdownSink } = await import('./page/streamed.js');
            const sink = new MarkdownSink(document.createElement('div'));
            sink.append(mark.repeat(10000));
            sink.flush();
            return sink.element.textContent.length;
        }""",
        mark,
    )
    assert length or mark == "> "


def test_a_fence_that_never_closes(page, engine):
    text = begun(
        page, engine, ["See:\n\n", "```python\n", "def f():\n", "    return '```", "'\n", "  ```x\n"]
    )
    expect(text.locator(".code code")).to_have_text("def f():\n    return '```'\n  ```x\n")
    expect(text.locator(".hl-keyword")).to_have_text(["def", "return"])
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(text.locator(".code code")).to_have_text("def f():\n    return '```'\n  ```x\n")


def test_what_has_come_is_left_alone(page, engine):
    """While an answer grows, its complete blocks stay the same elements; a selection in them stays too."""
    engine.answers["long list"] = pieces("First *words*.\n\n" + "".join(f"- item {n}\n" for n in range(300)))
    page.evaluate(
        """window.removed = 0;
        new MutationObserver(all => {
            for (const { removedNodes } of all)
                for (const node of removedNodes)
                    if (['P', 'LI', 'UL', 'EM'].includes(node.tagName) && node.textContent) removed++;
        }).observe(document.querySelector('#turns'), {childList: true, subtree: true})"""
    )
    text = send(page, "long list").locator(".reply > .text")
    expect(text.locator("li")).to_have_count(300)
    assert page.evaluate("removed") <= 1  # what the first character of a list looks like


def test_code_comes_coloured_and_is_not_made_again_when_it_is_complete(page, engine):
    text = begun(page, engine, ["```js\n", "const a = 1;\n", "const b"])
    expect(text.locator(".hl-keyword")).to_have_count(1)
    expect(text.locator(".code code")).to_have_text("const a = 1;\nconst b")


def test_a_language_that_is_not_known_is_text(page, engine):
    text = answered(page, engine, "```brainfuck\n+[-->-]\n```\n\n    indented <b>\n")
    assert text.locator(".code code").all_text_contents() == ["+[-->-]\n", "indented <b>\n"]
    assert text.locator("figcaption span").all_text_contents() == ["brainfuck", "text"]


def test_the_page_asks_for_colours_only_where_there_is_code(page, engine):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    assert answer_of(answered(page, engine, "No code here.")) == "No code here."
    assert not [url for url in asked if "highlight" in url]
    with page.expect_response(re.compile("highlight")):
        answered(page, engine, "```c\nint x;\n```\n")


def answer_of(text: Locator) -> str:
    return text.text_content() or ""


def test_a_stored_answer_looks_as_it_did(page, server):
    """From the history, over the bundled model, which echoes nothing but what it has learned."""
    page.goto(server.url)
    turn = send(page, "What is 12 + 5?")
    before = turn.locator(".reply > .text").inner_html()
    page.reload()
    expect(page.locator(".turn .reply > .text")).to_have_text(answer(page.locator(".turn")))
    assert page.locator(".turn .reply > .text").inner_html() == before
