"""Where and when: adverbs in the order English, Chinese, French, German, and places made of any fitting noun."""

from random import Random

from demo import french, german
from demo.facts import CAPITALS
from demo.lexicon import of_kind
from demo.meaning import Phrase

Row = tuple[str, str, str, str]


def rows(text: str) -> tuple[Row, ...]:
    """One row a line, its cells between commas."""
    found = []
    for line in text.strip().splitlines():
        en, zh, fr, de = (cell.strip() for cell in line.split(","))
        found.append((en, zh, fr, de))
    return tuple(found)


NOW = rows("""
today, 今天, aujourd'hui, heute
now, 现在, maintenant, jetzt
every day, 每天, tous les jours, jeden Tag
every week, 每周, toutes les semaines, jede Woche
this week, 这周, cette semaine, diese Woche
in the morning, 早上, le matin, am Morgen
in the afternoon, 下午, l'après-midi, am Nachmittag
in the evening, 晚上, le soir, am Abend
at night, 夜里, la nuit, in der Nacht
on the weekend, 周末, le week-end, am Wochenende
in spring, 春天, au printemps, im Frühling
in summer, 夏天, en été, im Sommer
in autumn, 秋天, en automne, im Herbst
in winter, 冬天, en hiver, im Winter
on Monday, 星期一, lundi, am Montag
on Tuesday, 星期二, mardi, am Dienstag
on Wednesday, 星期三, mercredi, am Mittwoch
on Thursday, 星期四, jeudi, am Donnerstag
on Friday, 星期五, vendredi, am Freitag
on Saturday, 星期六, samedi, am Samstag
on Sunday, 星期天, dimanche, am Sonntag
""")
PAST = rows("""
yesterday, 昨天, hier, gestern
last week, 上周, la semaine dernière, letzte Woche
last year, 去年, l'année dernière, letztes Jahr
last month, 上个月, le mois dernier, letzten Monat
today, 今天, aujourd'hui, heute
on Monday, 星期一, lundi, am Montag
on Sunday, 星期天, dimanche, am Sonntag
""")
FUTURE = rows("""
tomorrow, 明天, demain, morgen
next week, 下周, la semaine prochaine, nächste Woche
next year, 明年, l'année prochaine, nächstes Jahr
next month, 下个月, le mois prochain, nächsten Monat
today, 今天, aujourd'hui, heute
soon, 很快, bientôt, bald
on Friday, 星期五, vendredi, am Freitag
on Saturday, 星期六, samedi, am Samstag
""")
OFTEN = rows("""
often, 经常, souvent, oft
always, 总是, toujours, immer
sometimes, 有时, parfois, manchmal
""")
PLACES = rows("""
at home, 在家里, à la maison, zu Hause
at school, 在学校, à l'école, in der Schule
at the market, 在市场, au marché, auf dem Markt
at the station, 在车站, à la gare, am Bahnhof
at work, 在上班的地方, au travail, bei der Arbeit
here, 在这里, ici, hier
there, 在那里, là-bas, dort
outside, 在外面, dehors, draußen
""")
PREPOSITIONS = (  # en, zh behind the noun, fr, de with the dative, kinds of nouns
    ("in", "里", "dans", "in", ("building", "room", "box", "vehicle")),
    ("on", "上", "sur", "auf", ("furniture", "box")),
    ("under", "下面", "sous", "unter", ("furniture",)),
    ("next to", "旁边", "à côté de", "neben", ("building", "furniture", "vehicle", "nature")),
    ("in front of", "前面", "devant", "vor", ("building", "furniture", "vehicle")),
    ("behind", "后面", "derrière", "hinter", ("building", "furniture", "vehicle")),
)
NOT_IN = {"school", "station", "bicycle", "motorbike", "bridge", "wall", "door", "farm", "carpet"}
NOT_ON = {"window", "door", "curtain", "wall", "mirror", "lamp", "shower", "clock", "bathtub", "oven"}
UNDER = ("bed", "table", "chair", "sofa", "desk", "bench", "carpet", "lamp")
SPOTS = tuple(
    (preposition, noun)
    for preposition in PREPOSITIONS
    for noun in of_kind(*preposition[4])
    if not noun.unclear
    and noun.en[0] not in {"in": NOT_IN, "on": NOT_ON}.get(preposition[0], ())
    and (preposition[0] != "under" or noun.en[0] in UNDER)
)
GOALS = tuple(n for n in of_kind("building") if not n.unclear and n.en[0] not in ("bathroom", "room"))
CITIES = rows("""
Paris, 巴黎, Paris, Paris
London, 伦敦, Londres, London
Berlin, 柏林, Berlin, Berlin
Beijing, 北京, Pékin, Peking
Shanghai, 上海, Shanghai, Shanghai
Tokyo, 东京, Tokyo, Tokio
Rome, 罗马, Rome, Rom
Madrid, 马德里, Madrid, Madrid
Vienna, 维也纳, Vienne, Wien
Moscow, 莫斯科, Moscou, Moskau
New York, 纽约, New York, New York
Munich, 慕尼黑, Munich, München
Geneva, 日内瓦, Genève, Genf
Lyon, 里昂, Lyon, Lyon
Hamburg, 汉堡市, Hambourg, Hamburg
Warsaw, 华沙, Varsovie, Warschau
Lisbon, 里斯本, Lisbonne, Lissabon
""")


def french_country(of: str) -> str:
    """`de la France` -> `en France`, `du Japon` -> `au Japon`, `des Pays-Bas` -> `aux Pays-Bas`."""
    for start, instead in (
        ("de la ", "en "),
        ("de l'", "en "),
        ("du ", "au "),
        ("des ", "aux "),
        ("de ", "à "),
    ):
        if of.startswith(start):
            return instead + of.removeprefix(start)
    raise ValueError(f"{of!r} is not of a country.")


COUNTRIES = tuple(
    (row[0], row[2], french_country(row[4]), row[6].removeprefix("von "))
    for row in CAPITALS
    if row[6].startswith("von ")
)


def spot(rng: Random) -> Row:
    """Next to the table."""
    (en, zh, fr, de, _), noun = rng.choice(SPOTS)
    where = Phrase("the", noun)
    de_text = f"{de} {german.phrase(where, 'dative')}"
    if de == "in":
        de_text = de_text.replace("in dem ", "im ")
    link = "de" if fr.endswith(" de") else ""
    fr_text = f"{fr.removesuffix(' de')} {french.phrase(where, link)}"
    return f"{en} the {noun.en[0]}", f"在{noun.zh}{zh}", fr_text, de_text


def place(rng: Random) -> Row:
    """Where something happens."""
    roll = rng.random()
    if roll < 0.4:
        return rng.choice(PLACES)
    if roll < 0.6:
        en, zh, fr, de = rng.choice(CITIES)
        return f"in {en}", f"在{zh}", f"à {fr}", f"in {de}"
    if roll < 0.7:
        en, zh, fr, de = rng.choice(COUNTRIES)
        return f"in {en}", f"在{zh}", fr, f"in {de}"
    return spot(rng)


def goal(rng: Random) -> Row:
    """Where someone goes; Chinese 去 included."""
    roll = rng.random()
    if roll < 0.25:
        en, zh, fr, de = rng.choice(CITIES)
        return f"to {en}", f"去{zh}", f"à {fr}", f"nach {de}"
    if roll < 0.4:
        en, zh, fr, de = rng.choice(COUNTRIES)
        return f"to {en}", f"去{zh}", fr, f"nach {de}"
    where = Phrase("the", rng.choice(GOALS))
    de_text = f"zu {german.phrase(where, 'dative')}".replace("zu dem ", "zum ").replace("zu der ", "zur ")
    return f"to the {where.noun.en[0]}", f"去{where.noun.zh}", french.phrase(where, "à"), de_text
