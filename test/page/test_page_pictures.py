"""The pictures of the page in docs/: `make test-page ARGS="-k picture --pictures"` makes them anew.

Without --pictures the same steps are tests only.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import UPDATED
from frontend_process import FrontendProcess
from page_steps import COMPLETIONS, answer, send, show, with_fields
from playwright.sync_api import Route, expect
from scripted_engine import ScriptedEngine
from serving import Server

SEED = 18
TIDES = """## Tides in two places

The height is the sum of *partial tides*, each with an amplitude $A_i$ and a phase $p_i$:

$$
h(t) = A_1 cos(w_1 t + p_1) + A_2 cos(w_2 t + p_2) + ...
$$

1. **M2** comes from the moon, twice a day.
2. **S2** comes from the sun, twice a day.

| place | M2 | S2 |
|:--|--:|--:|
| Brest | 2.05 m | 0.75 m |
| Dover | 2.25 m | 0.71 m |

```python
def height(hours, parts):
    return sum(a * math.cos(w * hours + p) for a, w, p in parts)  # metres
```

More is in [the tables](https://example.com/tides).
"""


@pytest.fixture(scope="module")
def fresh(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server without the sessions of other tests, where these would be in a picture."""
    if not request.config.getoption("--pictures"):
        yield request.getfixturevalue("server")
        return
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
    turn = send(page, "What is my name?")
    assert "Liudmila" in answer(turn)
    turn.hover()
    turn.get_by_role("button", name="Answer again").click()
    expect(page.locator(".versions span")).to_have_text("2/2")
    expect(page.locator("#own-sessions li")).to_have_count(3)
    expect(page.locator("#pulse")).to_be_visible()
    picture(page, "page-chat")


def test_a_picture_of_markdown(watched, picture, tmp_path: Path):
    """The bundled model writes none."""
    with ScriptedEngine(f"ipc://{tmp_path}/engine") as engine, FrontendProcess(engine) as process:
        page = watched.open(f"http://127.0.0.1:{process.port}", viewport={"width": 1280, "height": 860})
        page.clock.set_fixed_time(UPDATED)  # when the engine says that it has stored the session
        engine.answers["tides"] = re.findall(r"\s*\w+|[^\w]+", TIDES)
        send(page, "How high are the tides? Show me the numbers and some code.")
        expect(page.locator(".hl-keyword").first).to_be_visible()
        page.locator("#conversation").evaluate("c => c.scrollTop = 0")
        picture(page, "page-markdown")


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
