#!/usr/bin/env python3
"""Writes the lists of routes and of flags, in English and Chinese, from what the server has.

    python docs/make_lists.py

English texts are those of the server itself: `routes/openapi/operations.py` and the command line. Chinese
ones are in docs/lists.zh-CN.json, one for each.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from app import command_line
from routes.http.errors import anthropic_shape, native_shape, ollama_shape, openai_shape
from routes.openapi.document import document
from routes.table import ROUTES
from routes.translate.errors import deepl_shape, google_shape, plain_shape

FOLDER = Path(__file__).resolve().parent
CHINESE = json.loads((FOLDER / "lists.zh-CN.json").read_text(encoding="utf-8"))
FAMILIES = (
    (openai_shape, "OpenAI, vLLM, llama.cpp", "OpenAI、vLLM、llama.cpp"),
    (anthropic_shape, "Anthropic", "Anthropic"),
    (ollama_shape, "Ollama", "Ollama"),
    (
        plain_shape,
        "LibreTranslate, DeepLX, MTranServer, kiss-translator, hcfy",
        "LibreTranslate、DeepLX、MTranServer、简约翻译、划词翻译",
    ),
    (deepl_shape, "DeepL", "DeepL"),
    (google_shape, "Google Translate", "Google 翻译"),
    (native_shape, "RWKV, and the server itself", "RWKV 接口与服务器自身"),
)
ROUTES_PAGE = {
    "en": """# Routes

[简体中文](routes.zh-CN.md)

`/docs` of a running server shows every route with its fields, `/openapi.json` the same for programs.
[Examples](examples.md) has a command for most.
`python docs/make_lists.py` writes this list.
""",
    "zh": """# 接口

[English](routes.md)

运行中的服务器在 `/docs` 列出每个接口及其字段，`/openapi.json` 供程序读取。
[示例](examples.md)（英文）中有大部分接口的命令。
本列表由 `python docs/make_lists.py` 生成。
""",
}
FLAGS_PAGE = {
    "en": """# Flags

[简体中文](flags.zh-CN.md)

Of `.venv/bin/python app.py`, or of `make serve ARGS="..."`. `python docs/make_lists.py` writes this list.
""",
    "zh": """# 参数

[English](flags.md)

用于 `.venv/bin/python app.py`，或 `make serve ARGS="..."`。本列表由 `python docs/make_lists.py` 生成。
""",
}


def chinese_of(kind: str, name: str) -> str:
    """The Chinese text of a route's summary or of a flag. Raises KeyError with a sentence."""
    if name not in CHINESE[kind]:
        raise KeyError(f"docs/lists.zh-CN.json has no Chinese text for {name}; add one below {kind}.")
    return str(CHINESE[kind][name])


def routes(language: str) -> Iterator[str]:
    """The lines of the list: a table for each family, a row for all paths that do the same."""
    yield ROUTES_PAGE[language]
    paths = document(ROUTES, guarded=False)["paths"]
    for shape, english, chinese in FAMILIES:
        rows: dict[str, list[str]] = {}
        for route in ROUTES:
            if route.shape is shape:
                path = "/".join(f"{{{p[1:]}}}" if p.startswith(":") else p for p in route.path.split("/"))
                operation = paths[path][route.methods.split()[0].lower()]
                rows.setdefault(operation["summary"], []).append(
                    f"`{route.methods.replace(' ', ', ')} {path}`"
                )
        yield f"## {english if language == 'en' else chinese}\n"
        yield "| route | what it does |\n|---|---|" if language == "en" else "| 接口 | 作用 |\n|---|---|"
        for summary, names in rows.items():
            yield f"| {', '.join(names)} | {summary if language == 'en' else chinese_of('routes', summary)} |"
        yield ""


def flags(language: str) -> Iterator[str]:
    """The lines of the list: a row for each flag."""
    parser = command_line()
    yield FLAGS_PAGE[language]
    yield "| flag | what it does |\n|---|---|" if language == "en" else "| 参数 | 作用 |\n|---|---|"
    for action in parser._actions:
        name = next(option for option in action.option_strings if option.startswith("--"))
        values = ", ".join(map(str, action.choices)) if action.choices else action.metavar or ""
        if isinstance(action, argparse.BooleanOptionalAction):
            shown = ", ".join(f"`{option}`" for option in action.option_strings)
        elif action.choices:
            shown = f"`{name}` " + ", ".join(f"`{choice}`" for choice in action.choices)
        elif action.nargs == 0:
            shown = f"`{name}`"
        else:
            shown = f"`{name} {values or action.dest.upper()}`"
        about = (
            parser._get_formatter()._expand_help(action) if language == "en" else chinese_of("flags", name)
        )
        shown = shown.replace("|", r"\|")  # which would end the cell
        yield f"| {shown} | {about} |"


def pages() -> dict[str, str]:
    """The name of each page in docs/, and its text."""
    made = {name: make(language) for name, (make, language) in PAGES.items()}
    return {name: "\n".join(lines).rstrip("\n") + "\n" for name, lines in made.items()}


PAGES = {
    "routes.md": (routes, "en"),
    "routes.zh-CN.md": (routes, "zh"),
    "flags.md": (flags, "en"),
    "flags.zh-CN.md": (flags, "zh"),
}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
