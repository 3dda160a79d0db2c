"""README.zh-CN.md says what README.md says: the same commands, tables, flags, links and numbers."""

import re
from collections import Counter
from itertools import zip_longest

import pytest
from serving import ROOT

SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)#]*)(#?)[^)]*\)")
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)*", re.ASCII)


def sections(name: str) -> list[tuple[str, str]]:
    """The headings of a README, each with what stands below it."""
    parts = re.split(r"^(#+ .*)$", (ROOT / name).read_text(), flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))


PAIRS = list(zip_longest(sections("README.md"), sections("README.zh-CN.md"), fillvalue=("(no heading)", "")))
ids = [english.strip("# ") for (english, _), _ in PAIRS]
each_section = pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=ids)


def blocks(text: str) -> list[str]:
    """Those in a language; a drawing has words in it."""
    return re.findall(r"^```\w+\n.*?^```$", text, re.S | re.M)


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]


def facts(text: str) -> Counter[str]:
    """What no translation changes: code, links and numbers. A link inside of the page is only that."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    found = SPAN.findall(prose)
    links = ["".join(link) for link in LINK.findall(prose)]
    words = LINK.sub("]", SPAN.sub("", prose))
    return Counter([*found, *links, *NUMBER.findall(words)])


def differences(english: Counter[str], chinese: Counter[str]) -> str:
    lacks, more = english - chinese, chinese - english
    return f"README.zh-CN.md lacks {sorted(lacks)} and has {sorted(more)} that README.md has not"


@each_section
def test_a_section_has_the_same_heading_and_commands(english: tuple[str, str], chinese: tuple[str, str]):
    assert english[0].split()[0] == chinese[0].split()[0], f"{english[0]} stands where {chinese[0]} does"
    there, here = blocks(english[1]), blocks(chinese[1])
    for block in there:
        assert block in here, f"README.zh-CN.md, {chinese[0]}, lacks this block of README.md:\n{block}"
    for block in here:
        assert block in there, f"README.md, {english[0]}, lacks this block of README.zh-CN.md:\n{block}"
    assert here == there, f"the blocks below {chinese[0]} are in another order than in README.md"
    assert english[1].count("```") == chinese[1].count("```")


@each_section
def test_a_table_has_the_same_rows(english: tuple[str, str], chinese: tuple[str, str]):
    there, here = rows(english[1]), rows(chinese[1])
    for row, translated in zip_longest(there, here):
        assert translated is not None, f"README.zh-CN.md, {chinese[0]}, lacks the row |{'|'.join(row)}|"
        assert row is not None, f"README.md, {english[0]}, lacks the row |{'|'.join(translated)}|"
        shown = f"|{'|'.join(row)}|\n|{'|'.join(translated)}|"
        assert len(row) == len(translated), f"rows with more or fewer cells:\n{shown}"
        for cell, other in zip(row, translated, strict=True):
            other = other.replace(".zh-CN.md", ".md")  # lists that are there in both languages
            assert facts(cell) == facts(other), f"{differences(facts(cell), facts(other))}:\n{shown}"


@each_section
def test_a_section_names_the_same_things(english: tuple[str, str], chinese: tuple[str, str]):
    if english[0].startswith("# "):  # where each links to the other one
        english = (english[0], english[1].replace("(README.zh-CN.md)", "(README.md)"))
    there, here = facts(english[1]), facts(chinese[1].replace(".zh-CN.md", ".md"))
    assert there == here, f"{chinese[0]}: {differences(there, here)}"
