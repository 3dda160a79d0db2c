"""Composed sentences, rendered alike in English, Chinese, French and German.

Each maker draws one meaning and returns a `Sentence`: its four texts and a key for that meaning. Every text stands for one meaning only,
so that a translation is a function of its source.
"""
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.words import (
    ANIMALS,
    CAN,
    COLOURS,
    DRINKS,
    FOODS,
    FUTURE_TIMES,
    GOALS,
    HEAT,
    HOURS,
    JOBS,
    MOODS,
    NAMED,
    NUMBERS,
    PEOPLE,
    PLACES,
    PRONOUNS,
    QUALITIES,
    SIZES,
    SPOTS,
    THINGS,
    TIMES,
    VERBS,
    WANT,
    WILL,
    Adjective,
    Noun,
    Subject,
)

SUBJECTS = (*PRONOUNS, *PEOPLE, *NAMED)
VOWELS = "aeiouhéèêâœàô"
GENDERS = "mfn"
DETERMINERS = ("a", "the", "this", "my")
DEFINITE = DETERMINERS[1:]


@dataclass(frozen=True)
class Sentence:
    """One meaning in four languages, with its final mark. `key` is empty for small closed sets."""

    en: str
    zh: str
    fr: str
    de: str
    key: str = ""


def finish(kind: str, question: bool, en: str, zh: str, fr: str, de: str, open_set: bool = True) -> Sentence:
    """Capital letters, spaces and the final mark."""
    def tidy(text: str) -> str:
        text = " ".join(text.split())
        return text[0].upper() + text[1:]
    marks = ("?", "？", " ?", "?") if question else (".", "。", ".", ".")
    texts = (tidy(en) + marks[0], "".join(zh.split()) + marks[1], tidy(fr) + marks[2], tidy(de) + marks[3])
    return Sentence(*texts, key=f"{kind}:{texts[0]}" if open_set else "")


def elide(word: str, following: str) -> str:
    """French: the last vowel of je, ne, que gives way to a vowel."""
    return f"{word[:-1]}'{following}" if following[0].lower() in VOWELS else f"{word} {following}"


def french_start(subject: Subject, verb: str, question: bool, negated: bool = False) -> str:
    """Subject and verb with elision, negation and the question's opening."""
    core = f"{elide('ne', verb)} pas" if negated else verb
    whole = elide("je", core) if subject.fr == "je" else f"{subject.fr} {core}"
    return elide("est-ce que", whole) if question else whole


def french_adjective(adjective: Adjective, gender: str, plural: bool) -> str:
    return adjective.fr[2 * plural + (gender == "f")]


def french_phrase(determiner: str, noun: Noun, adjective: Adjective | None) -> str:
    """`determiner`: a, the, this, my, or a French number word."""
    gender, singular, plural = noun.fr
    count = determiner not in DETERMINERS
    words = [plural if count else singular]
    if adjective:
        words.insert(0 if adjective.before else 1, french_adjective(adjective, gender, count))
    vowel = words[0][0] in VOWELS
    if count:
        head = determiner
    elif determiner == "a":
        head = "une" if gender == "f" else "un"
    elif determiner == "the":
        return ("l'" if vowel else "la " if gender == "f" else "le ") + " ".join(words)
    elif determiner == "this":
        head = "cette" if gender == "f" else "cet" if vowel else "ce"
    else:
        head = "ma" if gender == "f" and not vowel else "mon"
    return f"{head} {' '.join(words)}"


def german_adjective(adjective: Adjective, ending: str) -> str:
    return ("teur" if adjective.de == "teuer" else adjective.de) + ending


def german_phrase(determiner: str, noun: Noun, adjective: Adjective | None, accusative: bool) -> str:
    """`determiner`: a, the, this, my, or a German number word."""
    gender, nominative, object_form, plural = noun.de
    if determiner not in DETERMINERS:
        return " ".join(filter(None, (determiner, german_adjective(adjective, "e") if adjective else "", plural)))
    index = GENDERS.index(gender)
    stem = {"a": "ein", "my": "mein"}.get(determiner, "dies")
    if determiner in ("this", "the"):
        head = stem + (("en", "e", "es") if accusative else ("er", "e", "es"))[index]
        if determiner == "the":
            head = {"diesen": "den", "dieser": "der", "diese": "die", "dieses": "das"}[head]
        ending = (("en", "e", "e") if accusative else ("e", "e", "e"))[index]
    else:
        head = stem + (("en", "e", "") if accusative else ("", "e", ""))[index]
        ending = (("en", "e", "es") if accusative else ("er", "e", "es"))[index]
    adjective_form = german_adjective(adjective, ending) if adjective else ""
    return " ".join(filter(None, (head, adjective_form, object_form if accusative else nominative)))


@dataclass(frozen=True)
class Phrase:
    """A determiner, perhaps an adjective, and a noun."""

    determiner: str | tuple[str, str, str, str]  # a, the, this, my, or a number in the four languages
    noun: Noun
    adjective: Adjective | None

    @property
    def count(self) -> bool:
        return isinstance(self.determiner, tuple)

    def en(self) -> str:
        adjective = self.adjective.en if self.adjective else ""
        noun = self.noun.en_plural if self.count else self.noun.en
        head = self.determiner[0] if self.count else str(self.determiner)
        following = adjective or noun
        return f"{'an' if head == 'a' and following[0] in 'aeiou' else head} {adjective} {noun}"

    def zh(self) -> str:
        heads = {"a": f"一{self.noun.classifier}", "the": "", "this": f"这{self.noun.classifier}", "my": "我的"}
        head = self.determiner[1] + self.noun.classifier if isinstance(self.determiner, tuple) else heads[self.determiner]
        return head + (f"{self.adjective.zh}的" if self.adjective else "") + self.noun.zh

    def fr(self) -> str:
        return french_phrase(self.determiner[2] if self.count else str(self.determiner), self.noun, self.adjective)

    def de(self, accusative: bool) -> str:
        return german_phrase(self.determiner[3] if self.count else str(self.determiner), self.noun, self.adjective, accusative)


def draw_phrase(rng: Random, noun: Noun, definite: bool) -> Phrase:
    adjectives: tuple[Adjective, ...] = HEAT + SIZES if noun in DRINKS else SIZES + COLOURS[:3] if noun in FOODS else (*COLOURS, *QUALITIES)
    if noun in ANIMALS:
        adjectives = (*COLOURS, *SIZES)
    adjective = rng.choice(adjectives) if rng.random() < 0.6 else None
    kind = rng.random()
    if not definite and kind < 0.35:
        return Phrase("a", noun, adjective)
    if not definite and kind < 0.6:
        return Phrase(rng.choice(NUMBERS), noun, adjective)
    return Phrase(rng.choice(DEFINITE), noun, adjective)


def action(rng: Random) -> Sentence:
    """Someone does, wants to do, can do or will do something to something, somewhere, some time; also denied or asked."""
    subject, verb = rng.choice(SUBJECTS), rng.choice(VERBS)
    modal = rng.choice((WANT, CAN, WILL)) if verb.modal and rng.random() < 0.4 else None
    mood = rng.random()
    negated, question = mood < 0.2, 0.2 <= mood < 0.4
    thing = draw_phrase(rng, rng.choice(verb.objects), definite=negated)
    time = rng.choice(FUTURE_TIMES if modal is WILL else TIMES) if rng.random() < 0.45 else ("",) * 4
    place = rng.choice(PLACES) if verb.modal and not negated and rng.random() < 0.35 else ("",) * 4
    third = subject.person == 2
    if modal:
        positive, denied = modal.en[third], modal.en_not[third]
        en_verb = f"{denied if negated else positive} {verb.en}"
    else:
        en_verb = f"{'does' if third else 'do'} not {verb.en}" if negated else verb.en_third if third else verb.en
    if question and modal in (CAN, WILL):
        en_start = f"{modal.en[0]} {subject.en} {verb.en}"
    elif question:
        en_start = f"{'does' if third else 'do'} {subject.en} {modal.en[0] if modal else ''} {verb.en}"
    else:
        en_start = f"{subject.en} {en_verb}"
    en = f"{en_start} {thing.en()} {place[0]} {time[0]}"

    zh_verb = ("" if not negated else "没" if verb.zh == "有" else "不") + (modal.zh if modal else "") + place[1] + verb.zh
    zh = subject.zh + time[1] + zh_verb + thing.zh() + ("吗" if question else "")

    fr_verb = modal.fr[subject.person] if modal else verb.fr[subject.person]
    fr_start = french_start(subject, fr_verb, question, negated)
    fr = f"{fr_start} {verb.fr_infinitive if modal else ''} {thing.fr()} {place[2]} {time[2]}"

    person = min(subject.person, 3)
    finite, end = (modal.de[person], verb.de_infinitive) if modal else (verb.de[person], "")
    start = f"{finite} {subject.de}" if question else f"{subject.de} {finite}"
    de = f"{start} {time[3]} {thing.de(accusative=True)} {'nicht' if negated else ''} {place[3]} {end}"
    return finish("action", question, en, zh, fr, de)


def quality(rng: Random) -> Sentence:
    """This or my thing is (very) so."""
    noun = rng.choice(THINGS + ANIMALS)
    adjectives = (*COLOURS, *SIZES) if noun in ANIMALS else (*COLOURS, *QUALITIES)
    adjective = rng.choice(adjectives)
    phrase = Phrase(rng.choice(DEFINITE), noun, None)
    mood = rng.random()
    negated, question = mood < 0.25, 0.25 <= mood < 0.45
    very = not (negated or question or adjective.colour) and rng.random() < 0.4
    en = (f"is {phrase.en()} {adjective.en}" if question
          else f"{phrase.en()} is {'not' if negated else ''} {'very' if very else ''} {adjective.en}")
    state = adjective.zh
    if adjective.colour:
        zh = f"{phrase.zh()}{'不' if negated else ''}是{state}的"
    else:
        zh = phrase.zh() + ("不" if negated else "" if question else "非常" if very else "很") + state
    gender = noun.fr[0]
    fr_be = "n'est pas" if negated else "est"
    fr = f"{phrase.fr()} {fr_be} {'très' if very else ''} {french_adjective(adjective, gender, False)}"
    fr = elide("est-ce que", fr) if question else fr
    subject = phrase.de(accusative=False)
    de = (f"ist {subject} {adjective.de}" if question
          else f"{subject} ist {'nicht' if negated else ''} {'sehr' if very else ''} {adjective.de}")
    return finish("quality", question, en, zh + ("吗" if question else ""), fr, de)


BE_EN, BE_FR, BE_DE = ("am", "are", "is", "are", "are"), ("suis", "es", "est", "sommes", "sont"), ("bin", "bist", "ist", "sind", "sind")


def mood(rng: Random) -> Sentence:
    """Someone is (very) so, (not) now."""
    subject, adjective = rng.choice(SUBJECTS), rng.choice(MOODS)
    roll = rng.random()
    negated, question = roll < 0.25, 0.25 <= roll < 0.5
    very = not (negated or question) and rng.random() < 0.4
    time = rng.choice((TIMES[0], TIMES[2])) if adjective in MOODS[2:] and rng.random() < 0.5 else ("",) * 4
    be = BE_EN[subject.person]
    en = (f"{be} {subject.en} {adjective.en} {time[0]}" if question
          else f"{subject.en} {be} {'not' if negated else ''} {'very' if very else ''} {adjective.en} {time[0]}")
    degree = "不" if negated else "" if question else "非常" if very else "很"
    zh = f"{subject.zh}{time[1]}{degree}{adjective.zh}" + ("吗" if question else "")
    fr_form = french_adjective(adjective, "f" if subject.female else "m", subject.person > 2)
    fr = f"{french_start(subject, BE_FR[subject.person], question, negated)} {'très' if very else ''} {fr_form} {time[2]}"
    finite = BE_DE[subject.person]
    start = f"{finite} {subject.de}" if question else f"{subject.de} {finite}"
    de = f"{start} {time[3]} {'nicht' if negated else ''} {'sehr' if very else ''} {adjective.de}"
    return finish("mood", question, en, zh, fr, de)


def job(rng: Random) -> Sentence:
    """Someone is (not) a doctor."""
    subject, (en_job, zh_job, fr_job, de_job) = rng.choice((*PRONOUNS[:4], *PEOPLE[:5], *NAMED, PEOPLE[-1])), rng.choice(JOBS)
    roll = rng.random()
    negated, question = roll < 0.2, 0.2 <= roll < 0.4
    be = BE_EN[subject.person]
    en = f"{be} {subject.en} {en_job}" if question else f"{subject.en} {be} {'not' if negated else ''} {en_job}"
    zh = f"{subject.zh}{'不' if negated else ''}是{zh_job}" + ("吗" if question else "")
    fr = f"{french_start(subject, BE_FR[subject.person], question, negated)} {fr_job[subject.female]}"
    finite = BE_DE[subject.person]
    start = f"{finite} {subject.de}" if question else f"{subject.de} {finite}"
    de = f"{start} {'kein' if negated and not subject.female else 'keine' if negated else ''} {de_job[subject.female]}"
    return finish("job", question, en, zh, fr, de)


def existence(rng: Random) -> Sentence:
    """There are three cats in the garden."""
    phrase = draw_phrase(rng, rng.choice(THINGS + ANIMALS + FOODS), definite=False)
    while isinstance(phrase.determiner, str) and phrase.determiner != "a":
        phrase = draw_phrase(rng, rng.choice(THINGS + ANIMALS + FOODS), definite=False)
    place = rng.choice(PLACES + SPOTS)
    question = rng.random() < 0.3
    be = "are" if phrase.count else "is"
    en = f"{be} there {phrase.en()} {place[0]}" if question else f"there {be} {phrase.en()} {place[0]}"
    zh = f"{place[1].removeprefix('在')}有{phrase.zh()}" + ("吗" if question else "")
    fr = f"{elide('est-ce que', 'il y a') if question else 'il y a'} {phrase.fr()} {place[2]}"
    de = f"{'gibt es' if question else 'es gibt'} {phrase.de(accusative=True)} {place[3]}"
    return finish("existence", question, en, zh, fr, de)


def location(rng: Random) -> Sentence:
    """Someone or my thing is somewhere."""
    place = rng.choice(PLACES + SPOTS)
    roll = rng.random()
    negated, question = roll < 0.2, 0.2 <= roll < 0.5
    if rng.random() < 0.5:
        phrase = Phrase(rng.choice(DEFINITE), rng.choice(THINGS + ANIMALS), None)
        subject = Subject(phrase.en(), phrase.zh(), phrase.fr(), phrase.de(accusative=False))
    else:
        subject = rng.choice(SUBJECTS)
    time = rng.choice(TIMES) if rng.random() < 0.4 else ("",) * 4
    be = BE_EN[subject.person]
    en = f"{be} {subject.en} {place[0]} {time[0]}" if question else f"{subject.en} {be} {'not' if negated else ''} {place[0]} {time[0]}"
    zh = f"{subject.zh}{time[1]}{'不' if negated else ''}{place[1]}" + ("吗" if question else "")
    fr = f"{french_start(subject, BE_FR[subject.person], question, negated)} {place[2]} {time[2]}"
    finite = BE_DE[subject.person]
    start = f"{finite} {subject.de}" if question else f"{subject.de} {finite}"
    de = f"{start} {time[3]} {'nicht' if negated else ''} {place[3]}"
    return finish("location", question, en, zh, fr, de)


GO_EN, GO_FR, GO_DE = ("go", "go", "goes", "go", "go"), WILL.fr, ("gehe", "gehst", "geht", "gehen")


def travel(rng: Random) -> Sentence:
    """Someone goes, wants to go or can go somewhere."""
    subject, goal = rng.choice(SUBJECTS), rng.choice(GOALS)
    modal = rng.choice((WANT, CAN)) if rng.random() < 0.4 else None
    roll = rng.random()
    negated, question = roll < 0.2, 0.2 <= roll < 0.45
    time = rng.choice(TIMES) if rng.random() < 0.6 else ("",) * 4
    third = subject.person == 2
    if question and modal is CAN:
        en = f"can {subject.en} go"
    elif question:
        en = f"{'does' if third else 'do'} {subject.en} {modal.en[0] if modal else ''} go"
    elif modal:
        en = f"{subject.en} {(modal.en_not if negated else modal.en)[third]} go"
    else:
        en = f"{subject.en} {('does' if third else 'do') + ' not go' if negated else GO_EN[subject.person]}"
    zh = f"{subject.zh}{time[1]}{'不' if negated else ''}{modal.zh if modal else ''}{goal[1]}" + ("吗" if question else "")
    fr_verb = (modal.fr if modal else GO_FR)[subject.person]
    fr = f"{french_start(subject, fr_verb, question, negated)} {'aller' if modal else ''} {goal[2]} {time[2]}"
    person = min(subject.person, 3)
    finite = (modal.de if modal else GO_DE)[person]
    start = f"{finite} {subject.de}" if question else f"{subject.de} {finite}"
    de = f"{start} {time[3]} {'nicht' if negated else ''} {goal[3]} {'gehen' if modal else ''}"
    return finish("travel", question, f"{en} {goal[0]} {time[0]}", zh, fr, de)


def clock(rng: Random) -> Sentence:
    """It is three o'clock."""
    en, zh, fr, de = rng.choice(HOURS)
    hours = "heure" if fr == "une" else "heures"
    return finish("clock", False, f"it is {en} o'clock", f"现在{zh}点", f"il est {fr} {hours}", f"es ist {de} Uhr", False)


def weather(rng: Random) -> Sentence:
    """It is cold today."""
    en, zh, fr, de = rng.choice((("cold", "冷", "froid", "kalt"), ("hot", "热", "chaud", "heiß")))
    time = rng.choice((TIMES[0], TIMES[2]))
    very = rng.random() < 0.5
    return finish("weather", False, f"it is {'very' if very else ''} {en} {time[0]}", f"{time[1]}{'非常' if very else '很'}{zh}",
                  f"il fait {'très' if very else ''} {fr} {time[2]}", f"es ist {time[3]} {'sehr' if very else ''} {de}", False)


MAKERS: tuple[tuple[Callable[[Random], Sentence], float], ...] = (
    (action, 10), (quality, 3), (mood, 2.5), (job, 1.5), (existence, 2.5), (location, 3), (travel, 2.5), (clock, 0.3), (weather, 0.3),
)


def sentence(rng: Random) -> Sentence:
    """One sentence of any kind."""
    maker, = rng.choices([m for m, _ in MAKERS], [w for _, w in MAKERS])
    return maker(rng)
