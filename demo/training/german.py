"""German phrases and clauses: cases, endings of adjectives, word order, nicht and kein."""

from demo.training.meaning import Being, Clause, Phrase
from demo.training.numerals import german as number

CASES = ("nominative", "accusative", "dative")
HABEN, SEIN = ("habe", "hast", "hat", "haben"), ("bin", "bist", "ist", "sind")
WAR = ("war", "warst", "war", "waren")
MODALS = {
    "future": ("werde", "wirst", "wird", "werden"),
    "want": ("will", "willst", "will", "wollen"),
    "wish": ("möchte", "möchtest", "möchte", "möchten"),
    "can": ("kann", "kannst", "kann", "können"),
    "should": ("sollte", "solltest", "sollte", "sollten"),
    "must": ("muss", "musst", "muss", "müssen"),
}
THE = {
    "m": ("der", "den", "dem"),
    "n": ("das", "das", "dem"),
    "f": ("die", "die", "der"),
    "p": ("die", "die", "den"),
}
THIS = {"m": ("er", "en", "em"), "n": ("es", "es", "em"), "f": ("e", "e", "er"), "p": ("e", "e", "en")}
A = {"m": ("", "en", "em"), "n": ("", "", "em"), "f": ("e", "e", "er"), "p": ("e", "e", "en")}
STEMS = {
    "a": "ein",
    "my": "mein",
    "your": "dein",
    "his": "sein",
    "her": "ihr",
    "our": "unser",
    "their": "ihr",
    "no": "kein",
}
WEAK = {"m": ("e", "en", "en"), "n": ("e", "e", "en"), "f": ("e", "e", "en"), "p": ("en", "en", "en")}
MIXED = {"m": ("er", "en", "en"), "n": ("es", "es", "en"), "f": ("e", "e", "en"), "p": ("en", "en", "en")}
STRONG = {"m": ("er", "en", "em"), "n": ("es", "es", "em"), "f": ("e", "e", "er"), "p": ("e", "e", "en")}
SHORTENED = {"teuer": "teur", "dunkel": "dunkl", "sauer": "saur"}


def phrase(p: Phrase, case: str = "nominative", negated: bool = False) -> str:
    """`negated`: kein takes the place of ein or of no article."""
    at, gender = CASES.index(case), "p" if p.plural else p.noun.de_gender
    determiner = "no" if negated and p.determiner in ("a", "bare") else p.determiner
    if determiner in STEMS:
        ending = A[gender][at]
        head, endings = STEMS[determiner] + ending, MIXED
        if determiner == "our" and ending:
            head = "unser" + ending
    elif determiner == "the":
        head, endings = THE[gender][at], WEAK
    elif determiner == "this":
        head, endings = "dies" + THIS[gender][at], WEAK
    else:
        head, endings = number(p.count) if determiner == "number" else "", STRONG
    adjective = ""
    if p.adjective:
        adjective = SHORTENED.get(p.adjective.de, p.adjective.de.removesuffix("e")) + endings[gender][at]
    return " ".join(f"{head} {adjective} {noun(p, case)}".split())


def noun(p: Phrase, case: str) -> str:
    nominative, accusative, plural = p.noun.de
    if not p.plural:
        return nominative if case == "nominative" else accusative
    return plural + ("n" if case == "dative" and plural[-1] not in "ns" else "")


def clause(c: Clause) -> str:
    person = min(c.subject.person, 3)
    if c.tense == "past":
        finite, end = (SEIN if c.verb.de_be else HABEN)[person], c.verb.de_participle
    elif c.tense in MODALS:
        finite, end = MODALS[c.tense][person], c.verb.de_infinitive
    else:
        finite, end = c.verb.de[person], c.verb.de_prefix
    link = c.verb.de_link
    case = "dative" if link == "dat" else "accusative"
    thing = kein = ""
    if isinstance(c.thing, Phrase):
        kein = "kein" if c.negated and c.thing.determiner in ("a", "bare") else ""
        thing = phrase(c.thing, case, bool(kein))
    elif c.thing:
        thing = c.thing.de
    no = "nicht" if c.negated and not kein else ""
    thing = f"{no} {link} {thing}" if link not in ("", "dat") else f"{thing} {no}"
    start = f"{finite} {c.subject.de}" if c.question else f"{c.subject.de} {finite}"
    return " ".join(f"{start} {c.often[3]} {c.time[3]} {thing} {c.place[3]} {end}".split())


def being(b: Being) -> str:
    finite = (WAR if b.past else SEIN)[min(b.subject.person, 3)]
    start = f"{finite} {b.subject.de}" if b.question else f"{b.subject.de} {finite}"
    no = "kein" if b.kind == "job" else "nicht"
    if b.kind == "job" and b.negated and b.what[3].endswith(("in", "frau")):
        no = "keine"
    return " ".join(
        f"{start} {b.time[3]} {no if b.negated else ''} {'sehr' if b.very else ''} {b.what[3]}".split()
    )
