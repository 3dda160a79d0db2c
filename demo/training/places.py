"""Where and when: adverbs in the order English, Chinese, French, German, and places made of any fitting noun."""

from random import Random

from demo.training import french, german
from demo.training.facts import CAPITALS
from demo.training.lexicon import of_kind
from demo.training.meaning import Phrase

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
this month, 这个月, ce mois-ci, diesen Monat
this year, 今年, cette année, dieses Jahr
tonight, 今晚, ce soir, heute Abend
every morning, 每天早上, tous les matins, jeden Morgen
every evening, 每天晚上, tous les soirs, jeden Abend
every month, 每个月, tous les mois, jeden Monat
every year, 每年, tous les ans, jedes Jahr
at noon, 中午, à midi, am Mittag
at midnight, 半夜, à minuit, um Mitternacht
in January, 一月, en janvier, im Januar
in February, 二月, en février, im Februar
in March, 三月, en mars, im März
in April, 四月, en avril, im April
in May, 五月, en mai, im Mai
in June, 六月, en juin, im Juni
in July, 七月, en juillet, im Juli
in August, 八月, en août, im August
in September, 九月, en septembre, im September
in October, 十月, en octobre, im Oktober
in November, 十一月, en novembre, im November
in December, 十二月, en décembre, im Dezember
""")
PAST = rows("""
yesterday, 昨天, hier, gestern
last week, 上周, la semaine dernière, letzte Woche
last year, 去年, l'année dernière, letztes Jahr
last month, 上个月, le mois dernier, letzten Monat
the day before yesterday, 前天, avant-hier, vorgestern
last night, 昨晚, hier soir, gestern Abend
a week ago, 一周前, il y a une semaine, vor einer Woche
today, 今天, aujourd'hui, heute
on Monday, 星期一, lundi, am Montag
on Sunday, 星期天, dimanche, am Sonntag
""")
FUTURE = rows("""
tomorrow, 明天, demain, morgen
next week, 下周, la semaine prochaine, nächste Woche
next year, 明年, l'année prochaine, nächstes Jahr
next month, 下个月, le mois prochain, nächsten Monat
the day after tomorrow, 后天, après-demain, übermorgen
in a week, 一周后, dans une semaine, in einer Woche
today, 今天, aujourd'hui, heute
soon, 很快, bientôt, bald
on Friday, 星期五, vendredi, am Freitag
on Saturday, 星期六, samedi, am Samstag
""")
OFTEN = rows("""
often, 经常, souvent, oft
always, 总是, toujours, immer
sometimes, 有时, parfois, manchmal
rarely, 很少, rarement, selten
usually, 通常, d'habitude, normalerweise
secretly, 偷偷, secrètement, heimlich
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
abroad, 在国外, à l'étranger, im Ausland
upstairs, 在楼上, en haut, oben
downstairs, 在楼下, en bas, unten
in the countryside, 在乡下, à la campagne, auf dem Land
at the seaside, 在海边, au bord de la mer, am Meer
""")
ALONE = rows("""
who, 谁, qui, wer
what, 什么, quoi, was
where, 哪里, où, wo
when, 什么时候, quand, wann
why, 为什么, pourquoi, warum
how, 怎么, comment, wie
how much, 多少, combien, wie viel
and, 和, et, und
or, 或者, ou, oder
but, 但是, mais, aber
because, 因为, parce que, weil
if, 如果, si, wenn
although, 虽然, bien que, obwohl
with, 跟, avec, mit
without, 没有, sans, ohne
for, 为了, pour, für
against, 反对, contre, gegen
between, 之间, entre, zwischen
since, 自从, depuis, seit
until, 直到, jusqu'à, bis
never, 从不, jamais, nie
perhaps, 也许, peut-être, vielleicht
very, 非常, très, sehr
too, 太, trop, zu
also, 也, aussi, auch
only, 只, seulement, nur
again, 再, encore, wieder
already, 已经, déjà, schon
almost, 几乎, presque, fast
enough, 够, assez, genug
together, 一起, ensemble, zusammen
alone, 独自, seul, allein
immediately, 马上, tout de suite, sofort
suddenly, 突然, soudain, plötzlich
finally, 终于, enfin, endlich
everything, 一切, tout, alles
nothing, 什么都没有, rien, nichts
something, 某事, quelque chose, etwas
somebody, 有人, quelqu'un, jemand
nobody, 没有人, personne, niemand
everybody, 大家, tout le monde, alle
everywhere, 到处, partout, überall
more, 更多, plus, mehr
less, 更少, moins, weniger
left, 左边, gauche, links
right, 右边, droite, rechts
north, 北方, nord, Norden
south, 南方, sud, Süden
east, 东方, est, Osten
west, 西方, ouest, Westen
Monday, 周一, lundi, Montag
hour, 小时, heure, Stunde
minute, 分钟, minute, Minute
second, 秒, seconde, Sekunde
day, 天, jour, Tag
week, 星期, semaine, Woche
month, 月, mois, Monat
year, 年, an, Jahr
spring, 春季, printemps, Frühling
summer, 夏季, été, Sommer
autumn, 秋季, automne, Herbst
winter, 冬季, hiver, Winter
morning, 上午, matin, Morgen
evening, 傍晚, soir, Abend
night, 夜晚, nuit, Nacht
half, 一半, moitié, Hälfte
first, 第一, premier, erster
last, 最后, dernier, letzter
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
