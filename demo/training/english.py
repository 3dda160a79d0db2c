"""English phrases and clauses."""

from demo.training.meaning import Being, Clause, Phrase
from demo.training.numerals import english as number

BE, WAS = ("am", "are", "is", "are", "are"), ("was", "were", "was", "were", "were")
AUXILIARIES = {"future": "will", "can": "can", "should": "should", "must": "must", "wish": "would"}


def phrase(p: Phrase) -> str:
    noun = p.noun.en[1] if p.plural else p.noun.en[0]
    words = [*([p.adjective.en] if p.adjective else []), noun]
    head = {"bare": "", "number": number(p.count)}.get(p.determiner, p.determiner)
    if head == "this" and p.plural:
        head = "these"
    if head == "a":
        head = article(words[0])
    return " ".join([head, *words]).strip()


def article(word: str) -> str:
    word = word.lower()
    vowel = word[0] in "aeiou" and not word.startswith(("uni", "use", "eu"))
    return "an" if vowel or word.startswith("honest") else "a"


def clause(c: Clause) -> str:
    person, (base, third, past, ing) = c.subject.person, c.verb.en
    he = person == 2
    auxiliary, rest = AUXILIARIES.get(c.tense, ""), base
    if c.tense == "wish":
        rest = f"like to {base}"
    elif c.tense == "progressive":
        auxiliary, rest = BE[person], ing
    elif not auxiliary:
        auxiliary = "did" if c.tense == "past" else "does" if he else "do"
        rest = f"want to {base}" if c.tense == "want" else base
    if c.question:
        start = f"{auxiliary} {c.subject.en} {rest}"
    elif c.negated:
        start = f"{c.subject.en} {'cannot' if auxiliary == 'can' else auxiliary + ' not'} {rest}"
    elif auxiliary in ("do", "does", "did"):
        finite = past if c.tense == "past" else third if he else base
        if c.tense == "want":
            finite = f"want{'s' if he else ''} to {base}"
        start = f"{c.subject.en} {c.often[0]} {finite}"
    else:
        start = f"{c.subject.en} {auxiliary} {rest}"
    thing = "" if c.thing is None else phrase(c.thing) if isinstance(c.thing, Phrase) else c.thing.en
    return " ".join(f"{start} {thing} {c.place[0]} {c.time[0]}".split())


def being(b: Being) -> str:
    finite = (WAS if b.past else BE)[b.subject.person]
    what = f"{'very' if b.very else ''} {b.what[0]} {b.time[0]}"
    start = (
        f"{finite} {b.subject.en}" if b.question else f"{b.subject.en} {finite} {'not' if b.negated else ''}"
    )
    return " ".join(f"{start} {what}".split())
