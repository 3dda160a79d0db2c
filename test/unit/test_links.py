"""Every link between pages of the repository leads to a page and to a heading that it has."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "cuda", "demo", "deploy", "docs", "hip")
PAGES = sorted([*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))])


@cache
def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them in addresses."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for title in re.findall(r"(?m)^#{1,6} (.*)$", text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        again = sum(1 for other in found if other == name or re.fullmatch(rf"{re.escape(name)}-\d+", other))
        found.add(f"{name}-{again}" if again else name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    broken = []
    for address in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = address.partition("#")
        if re.match(r"\w+:", address):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (heading and heading not in anchors(target)):
            broken.append(address)
    assert broken == []
