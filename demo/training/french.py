"""French phrases and clauses: agreement, elision, contraction, negation."""

from demo.training.lexicon import Adjective
from demo.training.meaning import Being, Clause, Phrase, Subject
from demo.training.numerals import french as number

VOWELS = "aeiouyhéèêëàâîïôœæ"
CONSONANTS = ("yaourt", "y", "onz")  # begin like a consonant
ETRE, AVOIR = ("suis", "es", "est", "sommes", "sont"), ("ai", "as", "a", "avons", "ont")
WAS = ("étais", "étais", "était", "étions", "étaient")
MODALS = {
    "future": ("vais", "vas", "va", "allons", "vont"),
    "want": ("veux", "veux", "veut", "voulons", "veulent"),
    "wish": ("voudrais", "voudrais", "voudrait", "voudrions", "voudraient"),
    "can": ("peux", "peux", "peut", "pouvons", "peuvent"),
    "should": ("devrais", "devrais", "devrait", "devrions", "devraient"),
    "must": ("dois", "dois", "doit", "devons", "doivent"),
}
OWNER = {"my": "mon ma mes", "your": "ton ta tes", "his": "son sa ses", "her": "son sa ses"}
BEFORE_VOWEL = {"beau": "bel", "nouveau": "nouvel", "vieux": "vieil"}


def vowel(word: str, h: bool = False) -> bool:
    """Whether a word takes elision; `h`: an aspirated h, which takes none."""
    word = word.lower()
    return not h and word[0] in VOWELS and not word.startswith(CONSONANTS)


def elide(word: str, following: str, h: bool = False) -> str:
    """The last vowel of je, ne, que, de, le, la gives way to a vowel."""
    return f"{word[:-1]}'{following}" if vowel(following, h) else f"{word} {following}"


def agree(adjective: Adjective, female: bool, plural: bool) -> str:
    return adjective.fr[2 * plural + female]


def phrase(p: Phrase, link: str = "", negated: bool = False, generic: bool = False) -> str:
    """`link`: de or à before it. `negated`: an indefinite object after pas. `generic`: of all of a kind."""
    female, plural = p.noun.fr_gender == "f", p.plural
    words, h = [p.noun.fr[plural]], p.noun.h
    if p.adjective:
        form = agree(p.adjective, female, plural)
        if p.adjective.before:
            if not female and not plural and vowel(words[0], h):
                form = BEFORE_VOWEL.get(form, form)
            words.insert(0, form)
            h = False
        else:
            words.append(form)
    text = " ".join(words)
    starts = vowel(text, h)
    determiner = "the" if generic and p.determiner == "bare" else p.determiner
    if determiner == "bare" or (determiner == "a" and negated and not link):
        return indefinite(
            text, female, plural, starts, link, negated, bool(p.adjective and p.adjective.before)
        )
    if determiner == "the":
        return contracted(link, text, female, plural, starts)
    if determiner == "a":
        head = "une" if female else "un"
    elif determiner == "number":
        head = number(p.count)
    elif determiner == "this":
        head = "ces" if plural else "cette" if female else "cet" if starts else "ce"
    elif determiner in OWNER:
        head = OWNER[determiner].split()[2 if plural else female and not starts]
    else:
        head = {"our": ("notre", "nos"), "their": ("leur", "leurs")}[determiner][plural]
    return linked(link, f"{head} {text}")


def linked(link: str, text: str, h: bool = False) -> str:
    return text if not link else elide(link, text, h) if link == "de" else f"{link} {text}"


def indefinite(
    text: str, female: bool, plural: bool, starts: bool, link: str, negated: bool, before: bool
) -> str:
    """du, de la, des; de alone after pas, after de, and before a plural adjective."""
    if link == "à":
        return "à " + ("des " if plural else "de l'" if starts else "de la " if female else "du ") + text
    if negated or link or (plural and before):
        return ("d'" if starts else "de ") + text
    return ("des " if plural else "de l'" if starts else "de la " if female else "du ") + text


def contracted(link: str, text: str, female: bool, plural: bool, starts: bool) -> str:
    if plural:
        return {"": "les ", "de": "des ", "à": "aux "}[link] + text
    if starts:
        return f"{link} l'{text}".strip()
    if female:
        return f"{link} la {text}".strip()
    return {"": "le ", "de": "du ", "à": "au "}[link] + text


def opening(subject: Subject, finite: str, negated: bool, question: bool) -> str:
    """Subject and finite verb, with negation and est-ce que."""
    core = f"{elide('ne', finite)} pas" if negated else finite
    whole = elide("je", core) if subject.fr == "je" else f"{subject.fr} {core}"
    return elide("est-ce que", whole, subject.h) if question else whole


def participle(c: Clause) -> str:
    plural = c.subject.person > 2
    ending = ("e" if c.subject.female else "") + ("s" if plural else "")
    return c.verb.fr_participle + (ending if c.verb.fr_be else "")


def clause(c: Clause) -> str:
    person, rest = c.subject.person, c.verb.fr_infinitive
    if c.tense == "past":
        finite, rest = (ETRE if c.verb.fr_be else AVOIR)[person], participle(c)
    elif c.tense in MODALS:
        finite = MODALS[c.tense][person]
    else:
        finite, _, rest = c.verb.fr[person].partition(" ")
    thing = ""
    if isinstance(c.thing, Phrase):
        thing = phrase(c.thing, c.verb.fr_link, c.negated, c.verb.generic or "language" in c.thing.noun.kinds)
    elif c.thing:
        thing = linked(c.verb.fr_link, c.thing.fr)
    start = opening(c.subject, finite, c.negated, c.question)
    return " ".join(f"{start} {c.often[2]} {rest} {thing} {c.place[2]} {c.time[2]}".split())


def being(b: Being) -> str:
    start = opening(b.subject, (WAS if b.past else ETRE)[b.subject.person], b.negated, b.question)
    return " ".join(f"{start} {'très' if b.very else ''} {b.what[2]} {b.time[2]}".split())
