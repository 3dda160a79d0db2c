"""Examples to evaluate with, made by another generator than the training text's.

It reads the same lexicon, because only known words can be asked for, and shares no code that builds sentences:
articles and endings stand in tables here, questions are written out, and the order of words is that of a pattern.
Everything it draws is held out of training: sentences and names by their hash (demo/training/example.py, demo/training/names.py),
listed names and all questions of UNKNOWABLE by not being in the training text.
"""

from collections.abc import Callable
from functools import cache
from random import Random

from demo.training.conversation import conversation
from demo.training.example import Example, held_out
from demo.training.lexicon import ADJECTIVES, NOUNS, VERBS, Adjective, Noun, Verb
from demo.training.names import RESERVED, kept
from rwkv_batch.chat import templates
from rwkv_batch.chat.templates import Message

FR_DETERMINERS = {  # (determiner, gender): before a consonant, before a vowel
    ("the", "m"): ("le ", "l'"), ("the", "f"): ("la ", "l'"), ("a", "m"): ("un ", "un "), ("a", "f"): ("une ", "une "),
    ("this", "m"): ("ce ", "cet "), ("this", "f"): ("cette ", "cette "), ("my", "m"): ("mon ", "mon "), ("my", "f"): ("ma ", "mon "),
    ("our", "m"): ("notre ", "notre "), ("our", "f"): ("notre ", "notre "),
}  # fmt: skip
DE_DETERMINERS = {  # (determiner, gender): subject and object, each with the ending of an adjective
    ("the", "m"): ("der -e", "den -en"), ("the", "f"): ("die -e", "die -e"), ("the", "n"): ("das -e", "das -e"),
    ("a", "m"): ("ein -er", "einen -en"), ("a", "f"): ("eine -e", "eine -e"), ("a", "n"): ("ein -es", "ein -es"),
    ("this", "m"): ("dieser -e", "diesen -en"), ("this", "f"): ("diese -e", "diese -e"), ("this", "n"): ("dieses -e", "dieses -e"),
    ("my", "m"): ("mein -er", "meinen -en"), ("my", "f"): ("meine -e", "meine -e"), ("my", "n"): ("mein -es", "mein -es"),
    ("our", "m"): ("unser -er", "unseren -en"), ("our", "f"): ("unsere -e", "unsere -e"), ("our", "n"): ("unser -es", "unser -es"),
}  # fmt: skip
IRREGULAR_STEMS = {"teuer": "teur", "dunkel": "dunkl", "sauer": "saur", "müde": "müd"}
FR_MASCULINES = {"beau": "bel", "nouveau": "nouvel", "vieux": "vieil"}
FR_VOWELS = tuple("aeiouhéèêâàœôî")
ZH_WITHOUT_DE = ("大", "小", "新", "旧", "冷", "热", "长", "短", "好")
FEW = ((2, "two", "两", "deux", "zwei"), (3, "three", "三", "trois", "drei"), (5, "five", "五", "cinq", "fünf"), (8, "eight", "八", "huit", "acht"))
PEOPLE = (  # en, zh, fr, de, index of the verb's form in fr and de; English third person
    ("I", "我", "je", "ich", 0, False), ("you", "你", "tu", "du", 1, False), ("he", "他", "il", "er", 2, True),
    ("she", "她", "elle", "sie", 2, True), ("we", "我们", "nous", "wir", 3, False), ("they", "他们", "ils", "sie", 4, False),
)  # fmt: skip
AN = ("umbrella", "ugly", "uncle", "unfriendly", "unhappy", "unknown", "underground", "underground station", "honest")
DAYS = (("today", "今天", "aujourd'hui", "heute"), ("every day", "每天", "tous les jours", "jeden Tag"), ("on Monday", "星期一", "lundi", "am Montag"))
EN, ZH, FR, DE = range(4)
CODES = ("en", "zh-CN", "fr", "de")
CLEAR = tuple(n for n in NOUNS if not n.unclear and not n.mass and not n.kinds & {"kin", "body"} and n.en[0] != n.en[1])
MASSES = tuple(n for n in NOUNS if n.mass and not n.unclear and "language" not in n.kinds)
PLAIN_VERBS = tuple(v for v in VERBS if v.objects and not (v.fr_link or v.de_link or v.state or v.generic or v.unclear))
PLAIN_VERBS = tuple(v for v in PLAIN_VERBS if any(n.kinds & v.objects for n in (*CLEAR, *MASSES)))
PAST_VERBS = tuple(v for v in PLAIN_VERBS if v.en[0] != v.en[2])
ABLE = {"en": "can", "zh": "能", "fr": ("peux", "peux", "peut", "pouvons", "peuvent"), "de": ("kann", "kannst", "kann", "können", "können")}
ZH_NOUNS = {n.zh for n in NOUNS}
Texts = tuple[str, str, str, str]


@cache
def fitting(noun: Noun) -> tuple[Adjective, ...]:
    return tuple(a for a in ADJECTIVES if a.suits(noun) and not a.unclear)


@cache
def nouns_for(verb: Verb, mass: bool) -> tuple[Noun, ...]:
    return tuple(n for n in (MASSES if mass else CLEAR) if n.kinds & verb.objects)


@cache
def people() -> tuple[Noun, ...]:
    return tuple(n for n in CLEAR if n.kinds & {"person", "job"})


@cache
def described() -> tuple[Noun, ...]:
    return tuple(n for n in CLEAR if fitting(n) and not n.animate)


def zh_join(adjective: Adjective | None, noun: Noun) -> str:
    if not adjective:
        return noun.zh
    both = adjective.zh + noun.zh
    return both if adjective.zh in ZH_WITHOUT_DE and both not in ZH_NOUNS else f"{adjective.zh}的{noun.zh}"


def fr_singular(determiner: str, noun: Noun, adjective: Adjective | None) -> str:
    word, form = noun.fr[0], ""
    vowel = word.startswith(FR_VOWELS) and not noun.h
    if adjective:
        form = adjective.fr[0] if noun.fr_gender == "m" else adjective.fr[1]
        if adjective.before:
            form = FR_MASCULINES.get(form, form) if vowel and noun.fr_gender == "m" else form
            word, vowel = f"{form} {word}", form.startswith(FR_VOWELS)
        else:
            word = f"{word} {form}"
    return FR_DETERMINERS[determiner, noun.fr_gender][vowel] + word


def de_singular(determiner: str, noun: Noun, adjective: Adjective | None, accusative: bool) -> str:
    head, ending = DE_DETERMINERS[determiner, noun.de_gender][accusative].split(" -")
    stem = IRREGULAR_STEMS.get(adjective.de, adjective.de) + ending + " " if adjective else ""
    return f"{head} {stem}{noun.de[1] if accusative else noun.de[0]}"


def singular(determiner: str, noun: Noun, adjective: Adjective | None, accusative: bool) -> Texts:
    """One thing, in the four languages."""
    first = adjective.en if adjective else noun.en[0]
    article = ("an" if (first[0] in "aeioAI" or first in AN) and first != "European" else "a") if determiner == "a" else determiner
    en = " ".join(filter(None, (article, adjective.en if adjective else "", noun.en[0])))
    zh = {"a": "一" + noun.measure, "this": "这" + noun.measure, "my": "我的", "our": "我们的", "the": "那" + noun.measure if accusative else ""}
    return en, zh[determiner] + zh_join(adjective, noun), fr_singular(determiner, noun, adjective), de_singular(determiner, noun, adjective, accusative)


def several(rng: Random, noun: Noun, adjective: Adjective | None) -> Texts:
    """A few things; nominative and accusative are the same."""
    _, en, zh, fr, de = rng.choice(FEW)
    if not adjective:
        return f"{en} {noun.en[1]}", zh + noun.measure + noun.zh, f"{fr} {noun.fr[1]}", f"{de} {noun.de[2]}"
    form = adjective.fr[2 if noun.fr_gender == "m" else 3]
    pair = f"{form} {noun.fr[1]}" if adjective.before else f"{noun.fr[1]} {form}"
    stem = IRREGULAR_STEMS.get(adjective.de, adjective.de)
    return f"{en} {adjective.en} {noun.en[1]}", zh + noun.measure + zh_join(adjective, noun), f"{fr} {pair}", f"{de} {stem}e {noun.de[2]}"


def some(noun: Noun, adjective: Adjective | None) -> Texts:
    """Some of a mass noun, as an object."""
    word = noun.fr[0]
    if adjective:
        form = adjective.fr[noun.fr_gender == "f"]
        word = f"{form} {word}" if adjective.before else f"{word} {form}"
    part = "de l'" if word.startswith(FR_VOWELS) else "du " if noun.fr_gender == "m" else "de la "
    ending = {"m": "en", "f": "e", "n": "es"}[noun.de_gender]
    de = f"{IRREGULAR_STEMS.get(adjective.de, adjective.de)}{ending} {noun.de[0]}" if adjective else noun.de[0]
    return f"{adjective.en} {noun.en[0]}" if adjective else noun.en[0], zh_join(adjective, noun), part + word, de


def thing(rng: Random, verb: Verb) -> Texts:
    masses, countable = nouns_for(verb, True), nouns_for(verb, False)
    if masses and (not countable or rng.random() < 0.4):
        noun = rng.choice(masses)
        return some(noun, drawn(rng, noun))
    noun = rng.choice(countable)
    if rng.random() < 0.25:
        return several(rng, noun, drawn(rng, noun))
    return singular(rng.choice(("a", "a", "the", "this", "my" if not noun.animate else "a")), noun, drawn(rng, noun), True)


def drawn(rng: Random, noun: Noun) -> Adjective | None:
    return rng.choice(fitting(noun)) if fitting(noun) and rng.random() < 0.6 else None


def someone(rng: Random) -> Texts:
    noun = rng.choice(people())
    return singular(rng.choice(("the", "the", "the", "this", "a")), noun, drawn(rng, noun), False)


def vowel_start(text: str) -> bool:
    return text.startswith(FR_VOWELS)


def does(rng: Random) -> tuple[Texts, str]:
    """The old teacher drinks cold water every day."""
    verb = rng.choice(PLAIN_VERBS)
    subject, what, day = someone(rng), thing(rng, verb), rng.choice((*DAYS, ("",) * 4))
    texts = (
        f"{subject[EN]} {verb.en[1]} {what[EN]} {day[EN]}", subject[ZH] + day[ZH] + verb.zh + what[ZH],
        f"{subject[FR]} {verb.fr[2]} {what[FR]} {day[FR]}", f"{subject[DE]} {verb.de[2]} {day[DE]} {what[DE]} {verb.de_prefix}",
    )  # fmt: skip
    return texts, "."


def pronoun(rng: Random) -> tuple[Texts, str]:
    """We see five birds."""
    en, zh, fr, de, at, third = rng.choice(PEOPLE)
    verb = rng.choice(PLAIN_VERBS)
    what, form = thing(rng, verb), verb.fr[at]
    fr = f"j'{form}" if fr == "je" and vowel_start(form) else f"{fr} {form}"
    texts = (
        f"{en} {verb.en[third]} {what[EN]}", zh + verb.zh + what[ZH], f"{fr} {what[FR]}",
        f"{de} {verb.de[min(at, 3)]} {what[DE]} {verb.de_prefix}",
    )  # fmt: skip
    return texts, "."


def able(rng: Random) -> tuple[Texts, str]:
    """Can you repair this car?"""
    en, zh, fr, de, at, _ = rng.choice(PEOPLE)
    verb = rng.choice(PLAIN_VERBS)
    what = thing(rng, verb)
    que = "est-ce qu'" if vowel_start(fr) else "est-ce que "
    texts = (
        f"{ABLE['en']} {en} {verb.en[0]} {what[EN]}", f"{zh}{ABLE['zh']}{verb.zh}{what[ZH]}吗",
        f"{que}{fr} {ABLE['fr'][at]} {verb.fr_infinitive} {what[FR]}", f"{ABLE['de'][at]} {de} {what[DE]} {verb.de_infinitive}",
    )  # fmt: skip
    return texts, "?"


def did(rng: Random) -> tuple[Texts, str]:
    """Yesterday's deeds."""
    verb = rng.choice([v for v in PAST_VERBS if not (v.fr_be or v.de_be)])
    subject, what = someone(rng), thing(rng, verb)
    texts = (
        f"{subject[EN]} {verb.en[2]} {what[EN]} yesterday", f"{subject[ZH]}昨天{verb.zh}了{what[ZH]}",
        f"{subject[FR]} a {verb.fr_participle} {what[FR]} hier", f"{subject[DE]} hat gestern {what[DE]} {verb.de_participle}",
    )  # fmt: skip
    return texts, "."


def so(rng: Random) -> tuple[Texts, str]:
    """The lamp is not expensive."""
    noun = rng.choice(described())
    adjective = rng.choice(fitting(noun))
    subject, no = singular(rng.choice(("the", "this", "my", "our")), noun, None, False), rng.random() < 0.3
    form = adjective.fr[noun.fr_gender == "f"]
    state = f"{'不' if no else ''}是{adjective.zh}的" if adjective.predicate else ("不" if no else "很") + adjective.zh
    texts = (
        f"{subject[EN]} is {'not ' if no else ''}{adjective.en}", subject[ZH] + state,
        f"{subject[FR]} {'n’est pas' if no else 'est'} {form}".replace("’", "'"), f"{subject[DE]} ist {'nicht ' if no else ''}{adjective.de}",
    )  # fmt: skip
    return texts, "."


PATTERNS: tuple[Callable[[Random], tuple[Texts, str]], ...] = (does, does, does, pronoun, able, did, so)


def finished(texts: Texts, mark: str) -> Texts:
    marks = {".": (".", "。", ".", "."), "?": ("?", "？", " ?", "?")}[mark]
    parts = [" ".join(text.split()) for text in texts]
    done = [part[0].upper() + part[1:] + end for part, end in zip(parts, marks, strict=True)]
    return done[0], done[1], done[2], done[3]


def translation(rng: Random) -> Example:
    """A sentence that training never showed, from any of the four languages into any other."""
    while True:
        texts = finished(*rng.choice(PATTERNS)(rng))
        if held_out(texts[EN]):
            break
    source, target = rng.sample(range(4), 2)
    prompt = templates.translation(texts[source], CODES[source], CODES[target])
    return Example("translation", prompt, f" {texts[target]}", texts[EN])


ALPHABETS = ("aeiou", "bcdfghjklmnprstvwz")


def unseen_name(rng: Random) -> str:
    """One of the list, or consonants and vowels in turn."""
    while True:
        if rng.random() < 0.5:
            return rng.choice(sorted(RESERVED - {""}))
        start = rng.randrange(2)
        name = "".join(rng.choice(ALPHABETS[(start + i) % 2]) for i in range(rng.randint(3, 9))).capitalize()
        if kept(name):
            return name


TOLD = (  # what is told, the reply, what is asked, the answer
    ("My name is {}.", "Nice to meet you, {}!", "What is my name?", "Your name is {}."),
    ("Hi, I am {}.", "Nice to meet you, {}!", "Do you remember my name?", "Your name is {}."),
    ("My best friend is {}.", "{} must be a good friend.", "Who is my best friend?", "Your best friend is {}."),
    ("I have a dog named {}.", "{} is a lovely name for a dog.", "What is my dog's name?", "Your dog is called {}."),
    ("我叫{}。", "很高兴认识你，{}！", "我叫什么名字？", "你叫{}。"),
    ("Je m'appelle {}.", "Enchanté, {} !", "Comment je m'appelle ?", "Tu t'appelles {}."),
    ("Ich heiße {}.", "Freut mich, {}!", "Wie heiße ich?", "Du heißt {}."),
)
BETWEEN = (
    ("What is the capital of Italy?", "The capital of Italy is Rome."), ("What is 5 + 6?", "5 + 6 = 11"), ("Thank you!", "You are welcome!"),
    ("What colour is snow?", "Snow is white."), ("Name the capital of Japan.", "The capital of Japan is Tokyo."), ("15 - 7 = ?", "15 - 7 = 8"),
    ("What is the opposite of big?", "The opposite of big is small."), ("What does a cow say?", "The cow says moo."), ("OK", "Is there anything else I can do for you?"),
    ("How many days are in a week?", "A week has 7 days."), ("法国的首都是哪里？", "法国的首都是巴黎。"), ("Who are you?", "I am a small RWKV-7 model that comes with this server."),
)  # fmt: skip


def name(rng: Random) -> Example:
    """A name that training never showed, asked for after four turns about other things."""
    value, (told, reply, asked, answer) = unseen_name(rng), rng.choice(TOLD)
    turns = [Message("user", told.format(value)), Message("assistant", reply.format(value))]
    for question, given in rng.sample(BETWEEN, 4):
        turns += [Message("user", question), Message("assistant", given)]
    turns.append(Message("user", asked))
    return conversation(rng, "name", turns, answer.format(value), key=f"name:{value}", names=(value,))
