"""What a sentence says, before it is put into a language."""

from dataclasses import dataclass

from demo.training.lexicon import Adjective, Noun, Verb

OWNERS = ("my", "your", "his", "her", "our", "their")
DEFINITE = ("the", "this", *OWNERS)
NOWHERE = ("", "", "", "")


@dataclass(frozen=True)
class Phrase:
    """A noun with what stands before it.

    determiner: a, the, this, one of OWNERS, bare (a mass noun or an unnumbered plural), number. count: 1, 0 for
    an unnumbered plural, or the number.
    """

    determiner: str
    noun: Noun
    adjective: Adjective | None = None
    count: int = 1

    @property
    def plural(self) -> bool:
        return self.count != 1

    @property
    def unclear(self) -> frozenset[str]:
        """Languages in which the phrase reads like another one."""
        found = set(self.noun.unclear) | (self.adjective.unclear if self.adjective else set())
        if self.determiner in ("his", "her"):
            found.add("fr")
        if self.determiner in ("her", "their"):
            found.add("de")
        if self.count == 0 and self.determiner in OWNERS:
            found.add("zh")
        if self.noun.en[0] == self.noun.en[1] and self.determiner in ("the", *OWNERS):
            found.add("en")
        return frozenset(found)


@dataclass(frozen=True)
class Subject:
    """Whom or what a sentence is about, or a name as an object.

    person: 0 I, 1 you, 2 he, she or one thing, 3 we, 4 they. `female` decides the forms of what is said in French,
    which follow the French noun's gender. `named`: a name that is the same in all languages.
    h: the French begins with an aspirated h.
    """

    en: str
    zh: str
    fr: str
    de: str
    person: int = 2
    female: bool = False
    unclear: frozenset[str] = frozenset()
    h: bool = False
    named: bool = False


@dataclass(frozen=True)
class Clause:
    """Someone does something. tense: a key of the tables of the languages. Rows: en, zh, fr, de."""

    subject: Subject
    verb: Verb
    thing: Phrase | Subject | None = None
    tense: str = "present"
    negated: bool = False
    question: bool = False
    often: tuple[str, str, str, str] = NOWHERE
    place: tuple[str, str, str, str] = NOWHERE
    time: tuple[str, str, str, str] = NOWHERE


@dataclass(frozen=True)
class Being:
    """Someone is something or somewhere: `what` is the predicate in the four languages.

    kind: adjective, job, place. `plain`: the Chinese predicate takes 是 or 在 itself, and no 很.
    """

    subject: Subject
    kind: str
    what: tuple[str, str, str, str]
    plain: bool = False
    very: bool = False
    past: bool = False
    negated: bool = False
    question: bool = False
    time: tuple[str, str, str, str] = NOWHERE


@dataclass(frozen=True)
class Sentence:
    """One meaning in four languages, with its final mark.

    `key`: the English text, by which a sentence is held out; "" in small closed sets. `unclear`: languages whose
    text has another meaning too, so that it is never translated from. `names`: those that are copied.
    """

    en: str
    zh: str
    fr: str
    de: str
    key: str = ""
    unclear: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
