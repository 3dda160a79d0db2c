"""Blank lines inside messages.

RWKV models were trained on conversations whose turns are parted by blank lines and hold none. Code is the
exception: there a blank line is part of the text, so it stays inside a fence (``` or ~~~, as CommonMark has
it). Nowhere does it stay in front of what begins a turn.
"""

import re

OPENING = re.compile(r"\s*(`{3,}(?=[^`]*$)|~{3,})")


def fold(text: str, heads: tuple[str, ...], keep: bool = False) -> str:
    """The text with the blank lines of its code only; `keep`: with all. `heads`: what turns begin with."""
    lines: list[str] = []
    blank, fence = 0, ""
    for line in text.split("\n"):
        if not line:
            blank += bool(fence or keep)
            continue
        lines += [""] * (0 if line.startswith(heads) else blank)
        lines.append(line)
        blank, fence = 0, _fence(line, fence)
    return "\n".join(lines)


def _fence(line: str, fence: str) -> str:
    """The fence that is open behind a line, before which `fence` is; empty: none."""
    if not fence:
        opened = OPENING.match(line)
        return opened[1] if opened else ""
    mark = line.strip()
    return "" if len(mark) >= len(fence) and not mark.strip(fence[0]) else fence
