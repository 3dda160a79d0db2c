"""Composed sentences. Each maker draws one meaning, and the modules of the languages put it into words."""

from collections.abc import Callable
from random import Random

from demo.training import chinese, english, french, german, names
from demo.training.lexicon import (
    ADJECTIVES,
    ADJECTIVES_OF,
    INTRANSITIVE,
    JOBS,
    LANGUAGES,
    MOODS,
    NOUNS,
    OBJECTS_OF,
    TRANSITIVE,
    Adjective,
    Noun,
    Verb,
    of_kind,
)
from demo.training.meaning import NOWHERE, OWNERS, Being, Clause, Phrase, Sentence, Subject
from demo.training.numerals import IN_WORDS
from demo.training.places import ALONE, CITIES, FUTURE, NOW, OFTEN, PAST, Row, goal, place, spot

PRONOUNS = (
    Subject("I", "我", "je", "ich", 0),
    Subject("you", "你", "tu", "du", 1),
    Subject("he", "他", "il", "er"),
    Subject("she", "她", "elle", "sie", female=True),
    Subject("we", "我们", "nous", "wir", 3),
    Subject("they", "他们", "ils", "sie", 4),
)
NAMED = tuple(
    Subject(en, zh, en, en, female=female)
    for en, zh, female in (
        ("Anna", "安娜", True), ("Tom", "汤姆", False), ("Maria", "玛丽亚", True), ("Paul", "保罗", False),
        ("Peter", "彼得", False), ("Emma", "艾玛", True), ("David", "大卫", False), ("Lisa", "丽莎", True),
        ("Jack", "杰克", False), ("Sophie", "苏菲", True), ("Daniel", "丹尼尔", False), ("Alice", "爱丽丝", True),
        ("Thomas", "托马斯", False), ("Julia", "朱莉娅", True), ("Martin", "马丁", False), ("Laura", "劳拉", True),
    )
)  # fmt: skip
PEOPLE, ANIMALS, KIN = of_kind("person", "job"), of_kind("animal"), of_kind("kin")
WHOLE = {v.zh for v in INTRANSITIVE}  # 唱歌 is to sing, and to sing songs
THINGS = tuple(n for n in NOUNS if not n.mass and not n.animate and not n.kinds & {"body", "abstract"})
OF_ANIMALS = {
    "fly",
    "crawl",
    "bite",
    "breathe",
    "eat",
    "see",
    "hear",
    "find",
    "like",
    "follow",
    "catch",
    "sleep",
    "run",
    "swim",
    "jump",
    "come",
}
NO_PROGRESSIVE = {"see", "find", "hear", "forget", "arrive", "fall", "lose", "meet", "discover"}
MODALS = ("want", "want", "can", "can", "future", "future", "must", "should", "wish")
GO = Verb(
    ("go", "goes", "went", "going"), "去", False, "aller", ("vais", "vas", "va", "allons", "vont"), "allé", True, "",
    "gehen", ("gehe", "gehst", "geht", "gehen"), "", "gegangen", True, " ", frozenset(),
)  # fmt: skip


KNOWN = {
    head.lower() for word in (*NOUNS, *ADJECTIVES, *TRANSITIVE, *INTRANSITIVE) for head in word.heads()
} | {form.lower() for verb in (*TRANSITIVE, *INTRANSITIVE) for form in verb.en}  # no names


def subject_of(p: Phrase) -> Subject:
    """A phrase as a subject."""
    texts = english.phrase(p), chinese.phrase(p, subject=True), french.phrase(p), german.phrase(p)
    return Subject(*texts, 4 if p.plural else 2, p.noun.fr_gender == "f", p.unclear, p.noun.h)


def finish(
    question: bool,
    texts: tuple[str, ...],
    unclear: frozenset[str],
    closed: bool = False,
    copied: tuple[str, ...] = (),
) -> Sentence:
    """Capital letters and the final mark."""
    marks = ("?", "？", " ?", "?") if question else (".", "。", ".", ".")
    en, zh, fr, de = (text[0].upper() + text[1:] + mark for text, mark in zip(texts, marks, strict=True))
    return Sentence(en, zh, fr, de, "" if closed else en, unclear, copied)


def adjective_of(rng: Random, noun: Noun, share: float) -> Adjective | None:
    fitting = ADJECTIVES_OF[noun]
    return rng.choice(fitting) if fitting and rng.random() < share else None


def determined(rng: Random, noun: Noun, share: float, choices: str) -> Phrase:
    """A phrase whose determiner suits the noun; `choices` are drawn from: a, the, this, owner, number, bare."""
    adjective = adjective_of(rng, noun, share)
    if noun.mass:
        owned = "language" not in noun.kinds and rng.random() < 0.2
        return Phrase(rng.choice(OWNERS) if owned else "bare", noun, adjective)
    determiner = rng.choice(choices.split())
    if noun.kinds & {"kin", "body"}:
        determiner = "owner"
    elif noun.kinds & {"person", "job"} and determiner == "owner":
        determiner = "the"
    if determiner == "number":
        return Phrase(
            "number", noun, adjective, rng.randint(2, 12) if rng.random() < 0.85 else rng.randint(13, 99)
        )
    if determiner == "bare":
        return Phrase("bare", noun, adjective, 0)
    if determiner == "owner":
        determiner = rng.choice(("my", "my", *OWNERS))
    plural = determiner != "a" and not noun.kinds & {"body", "kin"} and rng.random() < 0.15
    return Phrase(determiner, noun, adjective, 0 if plural else 1)


def invented(rng: Random) -> Subject:
    name = names.latin(rng)
    while name.lower() in KNOWN:
        name = names.latin(rng)
    return Subject(*[name] * 4, named=True)


def draw_subject(rng: Random, animals: bool) -> Subject:
    roll = rng.random()
    if roll < 0.3:
        return rng.choice(PRONOUNS)
    if roll < 0.4:
        return rng.choice(NAMED)
    if roll < 0.5:
        return invented(rng)
    if roll < 0.62:
        return subject_of(determined(rng, rng.choice(KIN), 0.15, "owner"))
    nouns = ANIMALS if animals and rng.random() < 0.5 else PEOPLE
    return subject_of(determined(rng, rng.choice(nouns), 0.4, "the the the the this a owner number"))


def draw_thing(rng: Random, verb: Verb, negated: bool) -> Phrase | Subject:
    nouns = OBJECTS_OF[verb]
    noun = rng.choice(nouns)
    if noun.animate and "animal" not in noun.kinds and rng.random() < 0.3:
        return rng.choice(NAMED) if rng.random() < 0.5 else invented(rng)
    linked = verb.fr_link or verb.de_link
    choices = "a a a the the this owner number bare"
    if verb.generic:
        choices = "bare bare this owner"
    elif negated:
        choices = "the this owner" if linked else "a the this owner bare"
    found = determined(rng, noun, 0.5, choices)
    if negated and linked and found.determiner == "bare":
        return Phrase("my", found.noun, found.adjective)
    return found


def unclear_of(c: Clause) -> frozenset[str]:
    """Languages in which the clause has another meaning too."""
    found = set(c.subject.unclear) | set(c.verb.unclear if not c.verb.objects else ())
    if isinstance(c.thing, Phrase):
        found |= c.thing.unclear
        if c.verb.zh + c.thing.noun.zh in WHOLE:
            found.add("zh")
        if c.negated and c.thing.determiner == "a":
            found.add("zh")
    if c.tense == "progressive":
        found |= {"fr", "de"}
    if (
        c.tense == "past"
        and c.verb.en[0] == c.verb.en[2]
        and c.subject.person != 2
        and not (c.negated or c.question)
    ):
        found.add("en")
    return frozenset(found)


def render(c: Clause) -> Sentence:
    texts = english.clause(c), chinese.clause(c), french.clause(c), german.clause(c)
    whole = (c.subject, c.thing)
    copied = tuple(part.en for part in whole if isinstance(part, Subject) and part.named)
    return finish(c.question, texts, unclear_of(c), copied=copied)


def action(rng: Random) -> Sentence:
    """Someone does something to something, somewhere, some time; also denied, asked, past, to come, or wanted."""
    verb = rng.choice(TRANSITIVE) if rng.random() < 0.8 else rng.choice(INTRANSITIVE)
    mood = rng.random()
    negated, question = mood < 0.15, 0.15 <= mood < 0.33
    tense = "present"
    roll = rng.random()
    if not verb.state:
        if roll < 0.25:
            tense = "past"
        elif roll < 0.55:
            tense = rng.choice(MODALS)
        elif roll < 0.67 and not negated and verb.en[0] not in NO_PROGRESSIVE:
            tense = "progressive"
    if tense in ("must", "wish") and (negated or question):
        tense = "can"
    subject = draw_subject(rng, verb.en[0] in OF_ANIMALS)
    thing = draw_thing(rng, verb, negated) if verb.objects else None
    times = {"past": PAST, "future": FUTURE}.get(tense, NOW)
    time = rng.choice(times) if rng.random() < 0.4 else NOWHERE
    where = place(rng) if not verb.state and not negated and rng.random() < 0.25 else NOWHERE
    often = NOWHERE
    if tense == "present" and not (negated or question) and time == NOWHERE and rng.random() < 0.15:
        often = rng.choice(OFTEN)
    return render(Clause(subject, verb, thing, tense, negated, question, often, where, time))


def travel(rng: Random) -> Sentence:
    """Someone goes somewhere."""
    en, zh, fr, de = goal(rng)
    mood = rng.random()
    negated, question = mood < 0.15, 0.15 <= mood < 0.35
    tense = rng.choice(("present", "present", "past", "want", "can", "future", "should"))
    times = {"past": PAST, "future": FUTURE}.get(tense, NOW)
    time = rng.choice(times) if rng.random() < 0.5 else NOWHERE
    target = Subject(en, zh.removeprefix("去"), fr, de)
    return render(Clause(draw_subject(rng, False), GO, target, tense, negated, question, time=time))


def be(b: Being) -> Sentence:
    texts = english.being(b), chinese.being(b), french.being(b), german.being(b)
    return finish(b.question, texts, b.subject.unclear, copied=(b.subject.en,) if b.subject.named else ())


def drawn_mood(rng: Random) -> tuple[bool, bool]:
    roll = rng.random()
    return roll < 0.2, 0.2 <= roll < 0.4


def described(rng: Random, subject: Subject, adjective: Adjective, timed: bool) -> Sentence:
    negated, question = drawn_mood(rng)
    very = not (negated or question or adjective.predicate) and rng.random() < 0.35
    past = timed and rng.random() < 0.25
    time = rng.choice(PAST[:2]) if past else rng.choice(NOW[:2]) if timed and rng.random() < 0.4 else NOWHERE
    what = (
        adjective.en,
        adjective.zh,
        french.agree(adjective, subject.female, subject.person > 2),
        adjective.de,
    )
    plain = adjective.predicate
    return be(Being(subject, "adjective", what, plain, very, past, negated, question, time))


def quality(rng: Random) -> Sentence:
    """A thing is so."""
    while True:
        noun = rng.choice(THINGS + ANIMALS + of_kind("drink", "massfood"))
        if ADJECTIVES_OF[noun]:
            break
    adjective = rng.choice(ADJECTIVES_OF[noun])
    determiner = (
        rng.choice(("the", "the", "this", *OWNERS)) if not noun.mass else rng.choice(("the", "the", "my"))
    )
    p = Phrase(determiner, noun, None, 0 if not noun.mass and rng.random() < 0.2 else 1)
    return described(rng, subject_of(p), adjective, timed=False)


def feeling(rng: Random) -> Sentence:
    """Someone is so, or was."""
    people = [a for a in ADJECTIVES if "person" in a.kinds and a.en != "small"]
    adjective = rng.choice(MOODS) if rng.random() < 0.6 else rng.choice(people)
    return described(rng, draw_subject(rng, False), adjective, adjective in MOODS)


def profession(rng: Random) -> Sentence:
    """Someone is a doctor."""
    female = rng.random() < 0.5
    if rng.random() < 0.5:
        kin = [
            n
            for n in KIN
            if (n.fr_gender == "f") == female and n.en[0] not in ("friend", "colleague", "boss", "neighbour")
        ]
        subject = subject_of(Phrase(rng.choice(OWNERS), rng.choice(kin)))
    else:
        subject = rng.choice([s for s in (*PRONOUNS[:4], *NAMED) if s.female == female])
    job = rng.choice(JOBS)
    negated, question = drawn_mood(rng)
    en = f"{english.article(job.en)} {job.en}"
    what = (en, job.zh, job.fr[subject.female], job.de[subject.female])
    return be(Being(subject, "job", what, True, negated=negated, question=question))


def location(rng: Random) -> Sentence:
    """Someone or something is somewhere."""
    where = place(rng) if rng.random() < 0.5 else spot(rng)
    if rng.random() < 0.6:
        subject = subject_of(determined(rng, rng.choice(THINGS + ANIMALS), 0.3, "the the this owner"))
    else:
        subject = draw_subject(rng, True)
    negated, question = drawn_mood(rng)
    past = rng.random() < 0.15
    time = rng.choice(PAST[:2]) if past else rng.choice(NOW) if rng.random() < 0.3 else NOWHERE
    return be(Being(subject, "place", where, True, False, past, negated, question, time))


def existence(rng: Random) -> Sentence:
    """There are three cats in the garden."""
    p = determined(rng, rng.choice(THINGS + ANIMALS + PEOPLE + of_kind("food")), 0.4, "a number")
    if p.determiner not in ("a", "number"):
        return existence(rng)
    where = place(rng)
    while where[0] in ("here", "there"):
        where = place(rng)
    question = rng.random() < 0.25
    are = "are" if p.plural else "is"
    there = f"{are} there" if question else f"there {are}"
    texts = (
        f"{there} {english.phrase(p)} {where[0]}",
        f"{where[1].removeprefix('在')}有{chinese.phrase(p)}" + ("吗" if question else ""),
        f"{'est-ce qu’il y a' if question else 'il y a'} {french.phrase(p)} {where[2]}".replace("’", "'"),
        f"{'gibt es' if question else 'es gibt'} {german.phrase(p, 'accusative')} {where[3]}",
    )
    return finish(question, texts, p.unclear)


def clock(rng: Random) -> Sentence:
    """It is three o'clock."""
    n = rng.randint(1, 12)
    zh = "两" if n == 2 else IN_WORDS["zh"](n)
    fr = "une heure" if n == 1 else f"{IN_WORDS['fr'](n)} heures"
    de = "ein" if n == 1 else IN_WORDS["de"](n)
    texts = (f"it is {IN_WORDS['en'](n)} o'clock", f"现在{zh}点", f"il est {fr}", f"es ist {de} Uhr")
    return finish(False, texts, frozenset(), closed=True)


def weather(rng: Random) -> Sentence:
    """It is cold today."""
    en, zh, fr, de = rng.choice((("cold", "冷", "froid", "kalt"), ("hot", "热", "chaud", "heiß")))
    time, very = rng.choice(NOW[:2]), rng.random() < 0.5
    texts = (
        f"it is {'very ' * very}{en} {time[0]}", f"{time[1]}{'非常' if very else '很'}{zh}",
        f"il fait {'très ' * very}{fr} {time[2]}", f"es ist {time[3]} {'sehr ' * very}{de}",
    )  # fmt: skip
    return finish(False, texts, frozenset(), closed=True)


def dictionary() -> tuple[Sentence, ...]:
    """Single words. One that another word before it is written like is only translated into."""
    entries: list[Row] = [(n.en[0], n.zh, n.fr[0], n.de[0]) for n in NOUNS]  # kin last: Mann is a man
    entries += [(a.en, a.zh, a.fr[0], a.de) for a in ADJECTIVES]
    entries += [
        (f"to {v.en[0]}", v.zh, v.fr_infinitive, v.de_infinitive) for v in (*TRANSITIVE, *INTRANSITIVE)
    ]
    entries += [*NOW, *PAST[:7], *FUTURE[:6], *OFTEN, *CITIES, *ALONE]
    entries += [tuple(IN_WORDS[code](n) for code in LANGUAGES) for n in range(101)]  # type: ignore[misc]
    seen: set[tuple[str, str]] = set()
    found = []
    for entry in entries:
        pairs = list(zip(LANGUAGES, entry, strict=True))
        found.append(
            Sentence(*entry, unclear=frozenset(code for code, text in pairs if (code, text) in seen))
        )
        seen.update(pairs)
    return tuple(found)


WORDS = dictionary()


def single(rng: Random) -> Sentence:
    """A word alone."""
    return rng.choice(WORDS)


ALONE_NOUNS = tuple(n for n in NOUNS if not n.mass and not n.kinds & {"kin", "body"})


def bare_phrase(rng: Random) -> Sentence:
    """A phrase alone: the red cat."""
    noun = rng.choice(ALONE_NOUNS)
    p = determined(rng, noun, 0.8, "the a this owner number")
    texts = english.phrase(p), chinese.phrase(p, subject=True), french.phrase(p), german.phrase(p)
    alone = p.determiner == "the" and p.count == 1 and not p.adjective  # Chinese has the word alone
    return Sentence(*texts, key=texts[0], unclear=p.unclear | ({"zh"} if alone else set()))


MAKERS: tuple[tuple[Callable[[Random], Sentence], float], ...] = (
    (action, 11), (quality, 2.5), (feeling, 2.5), (profession, 1), (existence, 1.5), (location, 2),
    (travel, 2), (clock, 0.2), (weather, 0.2), (single, 2), (bare_phrase, 1.5),
)  # fmt: skip


def sentence(rng: Random) -> Sentence:
    """One sentence of any kind."""
    (maker,) = rng.choices([m for m, _ in MAKERS], [w for _, w in MAKERS])
    return maker(rng)
