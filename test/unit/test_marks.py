"""What is not translated: finding it, and whether an answer has it whole and in an order that parses."""

import random

import pytest

from rwkv_batch.translation.marks import HTML, PLAIN, Handling, Mark, fits, split


def marks(text: str, handling: Handling = PLAIN) -> list[str]:
    return [token.text for token in split(text, handling) if isinstance(token, Mark)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Hi {0}, {name} and {{x}} of ${y}!", ["{0}", "{name}", "{{x}}", "${y}"]),
        ("%s has %d of %1$s, %(name)s and %.2f", ["%s", "%d", "%1$s", "%(name)s", "%.2f"]),
        ("100% of it, 5% sure, 20%discount", []),
        ("<b0>bold</b0> and <br/> a < b > c", ["<b0>", "</b0>", "<br/>"]),
        ('[text](https://a.b/c_(d) "x") ![i](j.png)', ["[", '](https://a.b/c_(d) "x")', "![", "](j.png)"]),
        ("use `a[0](b)` or ``c`d``", ["`a[0](b)`", "``c`d``"]),
        ("see https://a.b/c?d=e. Or www.f.org, or g@h.de!", ["https://a.b/c?d=e", "www.f.org", "g@h.de"]),
        ("看https://a.b。谢谢", ["https://a.b"]),
        ("a\n```py\nx = '<b>'\n```\nb <!-- c --> d", ["```py\nx = '<b>'\n```", "<!-- c -->"]),
        ("[not a link] {not one} a_b {}", ["{}"]),
    ],
)
def test_what_is_found(text, found):
    assert marks(text) == found


def test_elements_without_text_stay_whole_in_html():
    text = '<p>A <code>x &lt; 1</code> <span translate="no">Brand</span> 3 &lt; 4<script>"<b>"</script></p>'
    assert marks(text, HTML) == [
        "<p>",
        "<code>x &lt; 1</code>",
        '<span translate="no">Brand</span>',
        "&lt;",
        '<script>"<b>"</script>',
        "</p>",
    ]
    assert marks("a <keep>b</keep> c", Handling(escaped=True, silent=frozenset({"keep"}))) == [
        "<keep>b</keep>"
    ]
    span = '<span class="math notranslate"><span>x</span><span a="b">2</span></span>'
    assert marks(f"a {span} b <span>c</span>", HTML) == [span, "<span>", "</span>"], "with others of its name"
    assert (
        marks('<keep/>a <keep translate="no"/>b</keep>', Handling(escaped=True))[1]
        == '<keep translate="no"/>'
    )
    broken = '<i translate="no"><i>x</i> y'
    assert marks(broken, HTML) == ['<i translate="no"><i>x</i>'], "what does not end ends at the first tag"
    assert marks("a #1# b", Handling(literals=("#1#",))) == ["#1#"]


PIECES = [
    "{0}",
    "%s",
    "<b>",
    "</b>",
    "<br>",
    "`",
    "```",
    "[",
    "](",
    ")",
    "\n",
    "<!--",
    "-->",
    "&lt;",
    "a",
    " ",
]


@pytest.mark.parametrize("handling", [PLAIN, HTML, Handling(escaped=True)], ids=["text", "html", "xml"])
def test_the_parts_of_any_text_are_the_text(handling):
    dice = random.Random(1)
    for _ in range(500):
        text = "".join(dice.choices(PIECES, k=dice.randrange(1, 20)))
        tokens = split(text, handling)
        assert "".join(t.text if isinstance(t, Mark) else t for t in tokens) == text


@pytest.mark.parametrize(
    ("source", "answer", "good"),
    [
        ("a {0} b {1}", "{1} a {0} b", True),
        ("a {0} b", "a b", False),
        ("a {0} b", "a {0} {0} b", False),
        ("%s of %d", "%d of %s", False),
        ("%1$s of %2$d", "%2$d of %1$s", True),
        ("<b>a</b> <i>b</i>", "<i>b</i> <b>a</b>", True),
        ("<b>a</b> <i>b</i>", "<b>a<i>b</i></b>", True),
        ("<b>a</b> <i>b</i>", "<b>a<i>b</b></i>", False),
        ("<b>a</b>", "</b>a<b>", False),
        ("a</b> <i>b", "a</b> <i>b", True),
        ("a</b> <i>b", "<i>a</b> b", False),
        ("[a](x) [b](y)", "[b](y) [a](x)", True),
    ],
)
def test_orders_that_parse(source, answer, good):
    found = [[t for t in split(text) if isinstance(t, Mark)] for text in (source, answer)]
    if "](" in source:  # marks of links are told apart by their numbers
        names = {mark.text: mark for mark in found[0]}
        found[1] = [names[mark.text] for mark in found[1]]
        found[1][0], found[1][2] = found[0][2], found[0][0]
    assert fits(*found) is good


@pytest.mark.parametrize(
    "piece", ["<a", "`", "` `` ", "[", "](", "{", "<!--", "a@", "%", "<code>", "\n```", "]((("]
)
def test_hostile_texts_are_read_in_one_go(piece):
    """What looked through the rest of the text at each place would not end within the hour."""
    text = piece * 40_000
    for handling in (PLAIN, HTML):
        assert sum(len(t.text if isinstance(t, Mark) else t) for t in split(text, handling)) == len(text)
