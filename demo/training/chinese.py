"""Chinese phrases and clauses."""

from demo.training.lexicon import NOUNS
from demo.training.meaning import Being, Clause, Phrase
from demo.training.numerals import chinese as number

OWNER = {"my": "我的", "your": "你的", "his": "他的", "her": "她的", "our": "我们的", "their": "他们的"}
MODALS = {"future": "会", "want": "想", "wish": "想要", "can": "能", "should": "应该", "must": "必须"}
SHORT = set("大小新旧冷热长短好")  # stand before the noun without 的
WORDS = {n.zh for n in NOUNS}


def described(p: Phrase) -> str:
    """Adjective and noun; with 的 also where the two together would be another word."""
    if not p.adjective:
        return p.noun.zh
    short = p.adjective.zh in SHORT and p.adjective.zh + p.noun.zh not in WORDS
    return p.adjective.zh + ("" if short else "的") + p.noun.zh


def phrase(p: Phrase, subject: bool = False) -> str:
    """A definite subject needs no word for it; a definite object has 那 and its measure word."""
    if p.determiner == "number":
        head = ("两" if p.count == 2 else number(p.count)) + p.noun.measure
    elif p.determiner == "the":
        head = (
            ("那些" if p.count == 0 else "")
            if subject or p.noun.mass
            else "那些"
            if p.count == 0
            else "那" + p.noun.measure
        )
    elif p.determiner == "this":
        head = "这些" if p.count == 0 else "这" + p.noun.measure
    else:
        head = {"a": "一" + p.noun.measure, "bare": ""}.get(p.determiner) or OWNER.get(p.determiner, "")
    return head + described(p)


def clause(c: Clause) -> str:
    place, verb = c.place[1], c.verb.zh
    thing = ""
    if isinstance(c.thing, Phrase):
        thing = described(c.thing) if c.negated and c.thing.determiner == "a" else phrase(c.thing)
    elif c.thing:
        thing = c.thing.zh
    middle = MODALS.get(c.tense, "")
    if c.negated:
        middle = ("没" if c.tense == "past" or verb == "有" else "不") + middle
    elif c.tense == "progressive":
        middle = "正" if place else "正在"
    elif c.tense == "past":
        verb += "了"
    text = c.subject.zh + c.time[1] + c.often[1] + middle + place + verb + thing
    return text + ("吗" if c.question else "")


def being(b: Being) -> str:
    before = "不" if b.negated else ""
    if not b.plain:
        before = before or ("非常" if b.very else "" if b.question else "很")
    elif b.kind == "adjective":
        return f"{b.subject.zh}{b.time[1]}{before}是{b.what[1]}的" + ("吗" if b.question else "")
    elif b.kind == "job":
        before += "是"
    return b.subject.zh + b.time[1] + before + b.what[1] + ("吗" if b.question else "")
