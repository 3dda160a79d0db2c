"""The words of the training text with all their forms, read from the .txt files beside this module.

The files say what their columns are. Forms that follow a rule are made here; the others stand in the files.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

LANGUAGES = ("en", "zh", "fr", "de")
FOLDER = Path(__file__).parent
GROUPS = {  # kinds that are lists of words, besides the headings of nouns.txt
    "door": "door window box cupboard suitcase",
    "box": "box suitcase bag basket",
    "dish": "plate glass cup bowl bottle pot pan",
    "container": "bottle box cup glass bag suitcase basket bucket fridge",
    "toy": "ball doll toy kite",
    "room": "dining_room attic hall room kitchen bathroom bedroom living_room classroom garage office cellar",
    "machine": "tablet calculator drill lawnmower sewing_machine dishwasher drone loudspeaker laptop fan microwave vacuum_cleaner computer phone printer camera radio robot machine television washing_machine fridge",
    "question": "question",
    "problem": "problem",
    "secret": "secret",
    "song": "song bell concert",
    "gift": "gift",
    "baby": "baby child",
    "contract": "contract",
    "soup": "soup",
    "flower": "flower rose sunflower tulip lily daisy orchid violet daffodil carnation",
    "plant": "cactus oak tulip lettuce tree flower rose tomato potato onion carrot strawberry pumpkin",
    "fruit": "mandarin mango pineapple grapefruit grape fig apricot raspberry apple pear banana orange cherry strawberry peach plum lemon melon tomato",
    "wearable": "raincoat sandal swimsuit uniform shirt T-shirt blouse coat jacket pullover dress skirt suit shoe boot sock",
    "roadvehicle": "car bus truck taxi tractor ambulance van coach fire_engine police_car",
    "crossing": "street bridge river field forest desert meadow stream path",
    "stones": "stone leaf brick coin stick",
    "bill": "bill",
    "contest": "medal competition game election race",
    "instrument": "guitar piano violin flute drum trumpet cello harp accordion clarinet organ",
    "tune": "song melody",
    "hangable": "picture mirror curtain coat lamp clock flag calendar poster lantern chandelier",
    "icecream": "ice_cream lollipop",
    "pill": "pill",
    "meat": "meat chicken beef pork fish salmon steak cutlet",
    "knitted": "scarf sock glove pullover cap cardigan",
    "mount": "horse pony donkey camel elephant mule",
    "digital": "song film game photo message article file program",
    "signed": "contract letter form certificate document",
    "event": "trip party wedding concert meeting competition festival ceremony excursion",
    "feast": "birthday wedding party victory success festival",
    "transit": "train bus plane ferry tram",
    "proposed": "idea plan solution trip game method name",
    "utterance": "word sentence question answer mistake number",
    "spoken": "word name sentence",
    "told": "story joke fairy_tale dream secret adventure legend lie fable",
    "slope": "mountain hill volcano staircase",
    "lightable": "candle cigarette match lantern",
    "candle": "candle match",
    "calculable": "price number distance weight length speed temperature size",
    "blade": "knife sword axe saw razor needle spear",
}
W = TypeVar("W", "Noun", "Verb", "Adjective")


@dataclass(frozen=True)
class Noun:
    """`en`, `fr` (singular, plural), `de` (nominative, accusative, plural); the plural of a mass noun is "".

    `h`: the French noun begins with an aspirated h. `unclear`: languages in which another noun reads the same.
    """

    kinds: frozenset[str]
    en: tuple[str, str]
    zh: str
    measure: str
    fr_gender: str
    fr: tuple[str, str]
    h: bool
    de_gender: str
    de: tuple[str, str, str]
    unclear: frozenset[str] = frozenset()

    @property
    def mass(self) -> bool:
        return not self.en[1]

    @property
    def animate(self) -> bool:
        return bool(self.kinds & {"animal", "person", "kin", "job"})

    def heads(self) -> tuple[str, ...]:
        return self.en[0], self.zh, self.fr[0], self.de[0]


@dataclass(frozen=True)
class Profession:
    """A profession said of someone. fr and de: masculine, feminine."""

    en: str
    zh: str
    fr: tuple[str, str]
    de: tuple[str, str]


@dataclass(frozen=True)
class Adjective:
    """fr: masculine, feminine and their plurals. `predicate`: as a predicate Chinese has 是...的 around it."""

    en: str
    zh: str
    fr: tuple[str, str, str, str]
    de: str
    before: bool
    predicate: bool
    kinds: frozenset[str]
    unclear: frozenset[str] = frozenset()

    def suits(self, noun: Noun) -> bool:
        return bool(self.kinds & noun.kinds) or ("any" in self.kinds and "language" not in noun.kinds)

    def heads(self) -> tuple[str, ...]:
        return self.en, self.zh, self.fr[0], self.de


@dataclass(frozen=True)
class Verb:
    """en: base, third person, past, -ing form. fr: je tu il nous ils; de: ich du er wir.

    `fr_link`, `de_link`: what stands before the object ("dat": it is in the dative). `fr_be`, `de_be`: the past
    has être, sein. `state`: Chinese has no 了 and no place with it.
    """

    en: tuple[str, str, str, str]
    zh: str
    state: bool
    fr_infinitive: str
    fr: tuple[str, ...]
    fr_participle: str
    fr_be: bool
    fr_link: str
    de_infinitive: str
    de: tuple[str, ...]
    de_prefix: str
    de_participle: str
    de_be: bool
    de_link: str
    objects: frozenset[str]
    unclear: frozenset[str] = frozenset()

    @property
    def generic(self) -> bool:
        """French says `aimer les chats` of cats in general."""
        return self.fr_infinitive in ("aimer", "adorer", "détester", "préférer")

    def heads(self) -> tuple[str, ...]:
        return self.en[0], self.zh, self.fr_infinitive, self.de_infinitive


def read(name: str) -> Iterator[tuple[str, list[str]]]:
    """The lines of a file: the heading they stand under, and their words (underscores become spaces)."""
    heading = ""
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            heading = line.strip("[]")
        elif line and not line.startswith("#"):
            yield heading, line.split()


def spaced(text: str) -> str:
    return text.replace("_", " ")


def english_s(word: str) -> str:
    """The plural of a noun, the third person of a verb."""
    if re.search(r"(s|x|z|ch|sh|o)$", word):
        return word + "es"
    return word[:-1] + "ies" if re.search(r"[^aeiou]y$", word) else word + "s"


def french_plural(word: str) -> str:
    if word[-1] in "sxz":
        return word
    if word.endswith("al"):
        return word[:-1] + "ux"
    return word + ("x" if word.endswith(("eau", "eu")) and word not in ("bleu", "pneu") else "s")


def noun(heading: str, cells: list[str]) -> Noun:
    en, zh, measure, fr_gender, fr, de_gender, de = cells
    one, many = [*en.split(","), english_s(en)][:2]
    fr_one, fr_many = [*fr.lstrip("*").split(","), french_plural(fr.lstrip("*"))][:2]
    nominative, de_many, *rest = map(spaced, de.split(","))
    kinds = {heading, *(kind for kind, words in GROUPS.items() if one in words.split())}
    forms = (nominative, rest[0] if rest else nominative, de_many.strip("-"))
    return Noun(
        frozenset(kinds), (spaced(one), spaced(many).strip("-") if many == "-" else spaced(many)), zh, measure,
        fr_gender, (spaced(fr_one), spaced(fr_many)), fr.startswith("*"), de_gender, forms,
    )  # fmt: skip


def job_noun(cells: list[str]) -> Noun:
    """The masculine as a noun like the others; Chinese says 位 of most."""
    en, zh, fr, _, de, _ = cells
    return noun("job", [en, zh, "个", "m", fr, "m", de])


def job(cells: list[str]) -> Profession:
    en, zh, fr, fr_female, de, de_female = cells
    first = [spaced(cell.split(",")[0]) for cell in (en, fr, fr_female, de, de_female)]
    return Profession(first[0], zh, (first[1], first[2]), (first[3], first[4]))


def adjective(cells: list[str]) -> Adjective:
    en, zh, fr, de, kinds = cells
    masculine, *rest = fr.lstrip("<").split(",")
    feminine = rest[0] if rest else masculine if masculine.endswith("e") else masculine + "e"
    plural = rest[1] if len(rest) > 1 else french_plural(masculine)
    feminines = feminine if len(rest) > 1 else feminine + "s"
    forms = (spaced(masculine), spaced(feminine), spaced(plural), spaced(feminines))
    listed = frozenset(kinds.split(","))
    people = {"kin", "job"} if "person" in listed else set()
    return Adjective(en, zh.lstrip("="), forms, de, fr[0] == "<", zh[0] == "=", listed | people)


def french_present(infinitive: str) -> tuple[str, ...]:
    """je, tu, il, nous, ils of a regular verb in -er, -ir (finir) or -re (vendre)."""
    stem, ending = infinitive[:-2], infinitive[-2:]
    if ending == "ir":
        return tuple(stem + e for e in ("is", "is", "it", "issons", "issent"))
    if ending == "re":
        return tuple(stem + e for e in ("s", "s", "", "ons", "ent"))
    strong = re.sub(r"[eé]([bcdfgjklmnprstvz]|ch|qu)$", r"è\1", stem)
    strong = {"appel": "appell", "jet": "jett"}.get(stem, strong)
    strong = re.sub("y$", "i", strong)
    ours = stem + ("e" if stem.endswith("g") else "")
    ours = ours[:-1] + "ç" if ours.endswith("c") else ours
    return strong + "e", strong + "es", strong + "e", ours + "ons", strong + "ent"


def french_participle(infinitive: str) -> str:
    return infinitive[:-2] + {"er": "é", "ir": "i", "re": "u"}[infinitive[-2:]]


def german_present(infinitive: str, third: str, second: str) -> tuple[str, ...]:
    """ich, du, er, wir. `third` and `second` are given where the stem changes."""
    stem = infinitive[:-2] if infinitive.endswith("en") else infinitive[:-1]
    first = third if infinitive == "mögen" else stem[:-2] + "le" if infinitive.endswith("eln") else stem + "e"
    link = "e" if re.search(r"(t|d|chn|ffn)$", stem) else ""
    third = third or stem + link + "t"
    changed = third[:-1] if third.endswith("t") else third
    second = second or changed + ("t" if re.search(r"[sßzx]$", changed) else "st")
    return first, second, third, infinitive


def german_participle(infinitive: str, prefix: str) -> str:
    stem = infinitive[:-2] if infinitive.endswith("en") else infinitive[:-1]
    return f"{prefix}ge{stem}{'e' if re.search(r'(t|d|chn|ffn)$', stem) else ''}t"


def verb(heading: str, cells: list[str]) -> Verb:
    en, zh, fr, de, *objects = cells
    base, past, ing = [*map(spaced, en.split(",")), "", ""][:3]
    first, *rest_words = base.split(" ")
    tail = "".join(" " + word for word in rest_words)
    past = past or re.sub(r"([^aeiou])y$", r"\1i", first.removesuffix("e")) + "ed" + tail
    ing = ing or (first.removesuffix("e") if not first.endswith("ee") else first) + "ing" + tail
    fr_infinitive, participle, forms = [*fr.split(","), "", ""][:3]
    fr_infinitive, _, fr_link = fr_infinitive.partition(">")
    fr_be, fr_infinitive = "*" in fr_infinitive, spaced(fr_infinitive.rstrip("*"))
    present = tuple(map(spaced, forms.split("+"))) if forms else french_present(fr_infinitive)
    whole, de_participle, third, second = [*map(spaced, de.split(",")), "", "", ""][:4]
    whole, _, de_link = whole.partition(">")
    de_be, whole = "*" in whole, whole.rstrip("*")
    prefix, _, simple = whole.rpartition("|")
    third = third.removesuffix(f" {prefix}") if prefix else third
    return Verb(
        (base, english_s(first) + tail if base != "have" else "has", past, ing), zh.rstrip("~"), zh.endswith("~"),
        fr_infinitive, present, spaced(participle) or french_participle(fr_infinitive), fr_be, fr_link,
        prefix + simple, german_present(simple, third, second), prefix,
        de_participle or german_participle(simple, prefix), de_be, de_link,
        frozenset(objects[0].split(",")) if objects else frozenset(),
    )  # fmt: skip


def marked(words: Iterable[W]) -> tuple[W, ...]:
    """The words, each with the languages in which an earlier word is written alike.

    Kin counts apart: only they have an owner, and `ma fille` is a daughter, `la fille` a girl.
    """
    seen: set[tuple[str, str, bool]] = set()
    result: list[W] = []
    for word in words:
        kin = isinstance(word, Noun) and "kin" in word.kinds
        heads = [(code, head, kin) for code, head in zip(LANGUAGES, word.heads(), strict=True)]
        result.append(replace(word, unclear=frozenset(head[0] for head in heads if head in seen)))
        seen.update(heads)
    return tuple(result)


JOB_LINES = [cells for _, cells in read("jobs.txt")]
JOBS = tuple(map(job, JOB_LINES))
LISTED = [noun(heading, cells) for heading, cells in read("nouns.txt")]
NOUNS = marked(sorted([*LISTED, *map(job_noun, JOB_LINES)], key=lambda n: "kin" in n.kinds))
ADJECTIVES = marked(adjective(cells) for _, cells in read("adjectives.txt"))
MOODS = tuple(a for a in ADJECTIVES if a.kinds == {"person", "kin", "job"})
VERBS = marked(verb(h, c) for h, c in read("verbs.txt"))
TRANSITIVE = tuple(v for v in VERBS if v.objects)
INTRANSITIVE = tuple(v for v in VERBS if not v.objects)


def of_kind(*kinds: str) -> tuple[Noun, ...]:
    return tuple(n for n in NOUNS if n.kinds & set(kinds))


OBJECTS_OF = {v: of_kind(*v.objects) for v in TRANSITIVE}
ADJECTIVES_OF = {n: tuple(a for a in ADJECTIVES if a.suits(n)) for n in NOUNS}
