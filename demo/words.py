"""The words of the composed sentences, with the forms that English, Chinese, French and German need."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Noun:
    """A countable noun. `classifier` is the Chinese measure word; fr is (gender, singular, plural), de (gender, nominative, accusative, plural)."""

    en: str
    en_plural: str
    zh: str
    classifier: str
    fr: tuple[str, str, str]
    de: tuple[str, str, str, str]


def noun(line: str) -> Noun:
    """`Noun` from its forms in order; an accusative that differs comes last, an underscore stands for a space."""
    en, en_plural, zh, classifier, fr_gender, fr, fr_plural, de_gender, de, de_plural, *rest = (word.replace("_", " ") for word in line.split())
    return Noun(en, en_plural, zh, classifier, (fr_gender, fr, fr_plural), (de_gender, de, rest[0] if rest else de, de_plural))


THINGS = tuple(map(noun, (
    "book books 书 本 m livre livres n Buch Bücher", "table tables 桌子 张 f table tables m Tisch Tische",
    "chair chairs 椅子 把 f chaise chaises m Stuhl Stühle", "car cars 汽车 辆 f voiture voitures n Auto Autos",
    "house houses 房子 座 f maison maisons n Haus Häuser", "hat hats 帽子 顶 m chapeau chapeaux m Hut Hüte",
    "bag bags 包 个 m sac sacs f Tasche Taschen", "lamp lamps 灯 盏 f lampe lampes f Lampe Lampen",
    "key keys 钥匙 把 f clé clés m Schlüssel Schlüssel", "flower flowers 花 朵 f fleur fleurs f Blume Blumen",
    "ball balls 球 个 m ballon ballons m Ball Bälle", "bicycle bicycles 自行车 辆 m vélo vélos n Fahrrad Fahrräder",
    "clock clocks 钟 个 f horloge horloges f Uhr Uhren", "boat boats 船 艘 m bateau bateaux n Boot Boote",
    "shirt shirts 衬衫 件 f chemise chemises n Hemd Hemden", "phone phones 手机 部 m téléphone téléphones n Telefon Telefone",
    "tree trees 树 棵 m arbre arbres m Baum Bäume", "guitar guitars 吉他 把 f guitare guitares f Gitarre Gitarren",
)))
ANIMALS = tuple(map(noun, (
    "cat cats 猫 只 m chat chats f Katze Katzen", "dog dogs 狗 只 m chien chiens m Hund Hunde",
    "bird birds 鸟 只 m oiseau oiseaux m Vogel Vögel", "horse horses 马 匹 m cheval chevaux n Pferd Pferde",
    "rabbit rabbits 兔子 只 m lapin lapins n Kaninchen Kaninchen",
    "cow cows 牛 头 f vache vaches f Kuh Kühe", "sheep sheep 羊 只 m mouton moutons n Schaf Schafe",
    "elephant elephants 大象 头 m éléphant éléphants m Elefant Elefanten Elefanten", "mouse mice 老鼠 只 f souris souris f Maus Mäuse",
)))
FOODS = tuple(map(noun, (
    "apple apples 苹果 个 f pomme pommes m Apfel Äpfel", "egg eggs 鸡蛋 个 m œuf œufs n Ei Eier",
    "banana bananas 香蕉 根 f banane bananes f Banane Bananen", "tomato tomatoes 西红柿 个 f tomate tomates f Tomate Tomaten",
    "potato potatoes 土豆 个 f pomme_de_terre pommes_de_terre f Kartoffel Kartoffeln", "orange oranges 橙子 个 f orange oranges f Orange Orangen",
    "cake cakes 蛋糕 块 m gâteau gâteaux m Kuchen Kuchen", "pear pears 梨 个 f poire poires f Birne Birnen",
)))
DRINKS = tuple(map(noun, (
    "coffee coffees 咖啡 杯 m café cafés m Kaffee Kaffees", "tea teas 茶 杯 m thé thés m Tee Tees",
    "juice juices 果汁 杯 m jus jus m Saft Säfte", "beer beers 啤酒 杯 f bière bières n Bier Biere",
)))
TEXTS = tuple(map(noun, (
    "letter letters 信 封 f lettre lettres m Brief Briefe", "story stories 故事 个 f histoire histoires f Geschichte Geschichten",
    "poem poems 诗 首 m poème poèmes n Gedicht Gedichte", "book books 书 本 m livre livres n Buch Bücher",
)))


@dataclass(frozen=True)
class Adjective:
    """fr holds masculine, feminine and their plurals; `de` is the stem that endings join. `before`: stands before the French noun.

    `colour`: Chinese needs 是...的 around it as a predicate.
    """

    en: str
    zh: str
    fr: tuple[str, str, str, str]
    de: str
    before: bool = False
    colour: bool = False


COLOURS = (
    Adjective("red", "红色", ("rouge", "rouge", "rouges", "rouges"), "rot", colour=True),
    Adjective("blue", "蓝色", ("bleu", "bleue", "bleus", "bleues"), "blau", colour=True),
    Adjective("green", "绿色", ("vert", "verte", "verts", "vertes"), "grün", colour=True),
    Adjective("white", "白色", ("blanc", "blanche", "blancs", "blanches"), "weiß", colour=True),
    Adjective("black", "黑色", ("noir", "noire", "noirs", "noires"), "schwarz", colour=True),
    Adjective("yellow", "黄色", ("jaune", "jaune", "jaunes", "jaunes"), "gelb", colour=True),
)
SIZES = (
    Adjective("big", "大", ("grand", "grande", "grands", "grandes"), "groß", before=True),
    Adjective("small", "小", ("petit", "petite", "petits", "petites"), "klein", before=True),
)
HEAT = (
    Adjective("hot", "热", ("chaud", "chaude", "chauds", "chaudes"), "heiß"),
    Adjective("cold", "冷", ("froid", "froide", "froids", "froides"), "kalt"),
)
QUALITIES = (
    *SIZES,
    Adjective("expensive", "贵", ("cher", "chère", "chers", "chères"), "teuer"),
    Adjective("new", "新", ("neuf", "neuve", "neufs", "neuves"), "neu"),
)
MOODS = (
    Adjective("tall", "高", ("grand", "grande", "grands", "grandes"), "groß"),
    Adjective("young", "年轻", ("jeune", "jeune", "jeunes", "jeunes"), "jung"),
    Adjective("happy", "高兴", ("content", "contente", "contents", "contentes"), "froh"),
    Adjective("tired", "累", ("fatigué", "fatiguée", "fatigués", "fatiguées"), "müde"),
    Adjective("busy", "忙", ("occupé", "occupée", "occupés", "occupées"), "beschäftigt"),
    Adjective("sad", "难过", ("triste", "triste", "tristes", "tristes"), "traurig"),
)


@dataclass(frozen=True)
class Verb:
    """Present forms. fr: je, tu, il, nous, ils; de: ich, du, er, wir/sie; `modal`: can follow want, can and will."""

    en: str
    en_third: str
    zh: str
    fr: tuple[str, str, str, str, str]
    fr_infinitive: str
    de: tuple[str, str, str, str]
    objects: tuple[Noun, ...]
    modal: bool = True
    de_infinitive = property(lambda self: self.de[3])


def regular(stem: str) -> tuple[str, str, str, str, str]:
    """The present of a French verb in -er."""
    return (stem + "e", stem + "es", stem + "e", stem + "ons", stem + "ent")


GOODS = (*THINGS, *ANIMALS)
VERBS = (
    Verb("buy", "buys", "买", ("achète", "achètes", "achète", "achetons", "achètent"), "acheter", ("kaufe", "kaufst", "kauft", "kaufen"), GOODS + FOODS),
    Verb("sell", "sells", "卖", ("vends", "vends", "vend", "vendons", "vendent"), "vendre",
         ("verkaufe", "verkaufst", "verkauft", "verkaufen"), GOODS + FOODS),
    Verb("like", "likes", "喜欢", regular("aim"), "aimer", ("mag", "magst", "mag", "mögen"), GOODS + FOODS + DRINKS, modal=False),
    Verb("have", "has", "有", ("ai", "as", "a", "avons", "ont"), "avoir", ("habe", "hast", "hat", "haben"), GOODS + FOODS, modal=False),
    Verb("look for", "looks for", "找", regular("cherch"), "chercher", ("suche", "suchst", "sucht", "suchen"), GOODS),
    Verb("draw", "draws", "画", regular("dessin"), "dessiner", ("zeichne", "zeichnest", "zeichnet", "zeichnen"), GOODS),
    Verb("eat", "eats", "吃", ("mange", "manges", "mange", "mangeons", "mangent"), "manger", ("esse", "isst", "isst", "essen"), FOODS),
    Verb("drink", "drinks", "喝", ("bois", "bois", "boit", "buvons", "boivent"), "boire", ("trinke", "trinkst", "trinkt", "trinken"), DRINKS),
    Verb("read", "reads", "读", ("lis", "lis", "lit", "lisons", "lisent"), "lire", ("lese", "liest", "liest", "lesen"), TEXTS),
    Verb("write", "writes", "写", ("écris", "écris", "écrit", "écrivons", "écrivent"), "écrire",
         ("schreibe", "schreibst", "schreibt", "schreiben"), TEXTS),
)


@dataclass(frozen=True)
class Modal:
    """want, can, will before an infinitive. fr: je, tu, il, nous, ils; de: ich, du, er, wir/sie."""

    en: tuple[str, str]
    en_not: tuple[str, str]
    zh: str
    fr: tuple[str, str, str, str, str]
    de: tuple[str, str, str, str]


WANT = Modal(("want to", "wants to"), ("do not want to", "does not want to"), "想", ("veux", "veux", "veut", "voulons", "veulent"),
             ("will", "willst", "will", "wollen"))
CAN = Modal(("can", "can"), ("cannot", "cannot"), "能", ("peux", "peux", "peut", "pouvons", "peuvent"), ("kann", "kannst", "kann", "können"))
WILL = Modal(("will", "will"), ("will not", "will not"), "会", ("vais", "vas", "va", "allons", "vont"), ("werde", "wirst", "wird", "werden"))


@dataclass(frozen=True)
class Subject:
    """`person`: 0 I, 1 you, 2 he/she/a noun, 3 we, 4 they. `female` chooses the forms of what is said about the subject."""

    en: str
    zh: str
    fr: str
    de: str
    person: int = 2
    female: bool = False


PRONOUNS = (
    Subject("I", "我", "je", "ich", 0), Subject("you", "你", "tu", "du", 1), Subject("he", "他", "il", "er"),
    Subject("she", "她", "elle", "sie", female=True), Subject("we", "我们", "nous", "wir", 3), Subject("they", "他们", "ils", "sie", 4),
)
PEOPLE = (
    Subject("my mother", "我的妈妈", "ma mère", "meine Mutter", female=True), Subject("my father", "我的爸爸", "mon père", "mein Vater"),
    Subject("my brother", "我的哥哥", "mon frère", "mein Bruder"), Subject("my sister", "我的姐姐", "ma sœur", "meine Schwester", female=True),
    Subject("my friend", "我的朋友", "mon ami", "mein Freund"), Subject("the teacher", "老师", "le professeur", "der Lehrer"),
    Subject("the doctor", "医生", "le médecin", "der Arzt"), Subject("the student", "学生", "l'étudiant", "der Student"),
    Subject("the child", "孩子", "l'enfant", "das Kind"), Subject("the woman", "那位女士", "la femme", "die Frau", female=True),
    Subject("the man", "那位先生", "l'homme", "der Mann"), Subject("my neighbour", "我的邻居", "mon voisin", "mein Nachbar"),
)
NAMED = (
    Subject("Anna", "安娜", "Anna", "Anna", female=True), Subject("Tom", "汤姆", "Tom", "Tom"),
    Subject("Maria", "玛丽亚", "Maria", "Maria", female=True), Subject("Paul", "保罗", "Paul", "Paul"),
)
JOBS = (  # en, zh, fr (m, f), de (m, f)
    ("a teacher", "老师", ("professeur", "professeure"), ("Lehrer", "Lehrerin")), ("a doctor", "医生", ("médecin", "médecin"), ("Arzt", "Ärztin")),
    ("a student", "学生", ("étudiant", "étudiante"), ("Student", "Studentin")), ("a cook", "厨师", ("cuisinier", "cuisinière"), ("Koch", "Köchin")),
    ("a farmer", "农民", ("agriculteur", "agricultrice"), ("Bauer", "Bäuerin")), ("a driver", "司机", ("chauffeur", "chauffeuse"), ("Fahrer", "Fahrerin")),
    ("a singer", "歌手", ("chanteur", "chanteuse"), ("Sänger", "Sängerin")), ("a lawyer", "律师", ("avocat", "avocate"), ("Anwalt", "Anwältin")),
)
PLACES = (  # where something is or happens: en, zh, fr, de
    ("in the park", "在公园里", "dans le parc", "im Park"), ("at home", "在家里", "à la maison", "zu Hause"),
    ("at school", "在学校", "à l'école", "in der Schule"), ("at the market", "在市场", "au marché", "auf dem Markt"),
    ("in the garden", "在花园里", "dans le jardin", "im Garten"), ("in the kitchen", "在厨房里", "dans la cuisine", "in der Küche"),
    ("at the library", "在图书馆", "à la bibliothèque", "in der Bibliothek"), ("at the station", "在车站", "à la gare", "am Bahnhof"),
    ("at the restaurant", "在餐厅", "au restaurant", "im Restaurant"), ("in Paris", "在巴黎", "à Paris", "in Paris"),
    ("in Berlin", "在柏林", "à Berlin", "in Berlin"), ("in Beijing", "在北京", "à Pékin", "in Peking"), ("in London", "在伦敦", "à Londres", "in London"),
)
SPOTS = (  # where a thing is
    ("on the table", "在桌子上", "sur la table", "auf dem Tisch"), ("under the table", "在桌子下", "sous la table", "unter dem Tisch"),
    ("on the chair", "在椅子上", "sur la chaise", "auf dem Stuhl"), ("in the house", "在房子里", "dans la maison", "im Haus"),
    ("in the car", "在汽车里", "dans la voiture", "im Auto"), ("under the tree", "在树下", "sous l'arbre", "unter dem Baum"),
)
GOALS = (  # where someone goes: en, zh, fr, de
    ("to school", "去学校", "à l'école", "in die Schule"), ("to the park", "去公园", "au parc", "in den Park"),
    ("to the market", "去市场", "au marché", "auf den Markt"), ("to the library", "去图书馆", "à la bibliothèque", "in die Bibliothek"),
    ("to the station", "去车站", "à la gare", "zum Bahnhof"), ("to the restaurant", "去餐厅", "au restaurant", "ins Restaurant"),
    ("to Paris", "去巴黎", "à Paris", "nach Paris"), ("to Berlin", "去柏林", "à Berlin", "nach Berlin"),
    ("to Beijing", "去北京", "à Pékin", "nach Peking"), ("to London", "去伦敦", "à Londres", "nach London"),
)
TIMES = (
    ("today", "今天", "aujourd'hui", "heute"), ("every day", "每天", "tous les jours", "jeden Tag"), ("now", "现在", "maintenant", "jetzt"),
    ("in the morning", "早上", "le matin", "am Morgen"), ("in the evening", "晚上", "le soir", "am Abend"),
    ("on the weekend", "周末", "le week-end", "am Wochenende"), ("on Monday", "星期一", "lundi", "am Montag"),
    ("on Tuesday", "星期二", "mardi", "am Dienstag"), ("on Wednesday", "星期三", "mercredi", "am Mittwoch"),
    ("on Thursday", "星期四", "jeudi", "am Donnerstag"), ("on Friday", "星期五", "vendredi", "am Freitag"),
    ("on Saturday", "星期六", "samedi", "am Samstag"), ("on Sunday", "星期天", "dimanche", "am Sonntag"),
)
FUTURE_TIMES = (("tomorrow", "明天", "demain", "morgen"), ("next week", "下周", "la semaine prochaine", "nächste Woche"), TIMES[0], *TIMES[5:])
NUMBERS = (  # en, zh before a measure word, fr, de
    ("two", "两", "deux", "zwei"), ("three", "三", "trois", "drei"), ("four", "四", "quatre", "vier"), ("five", "五", "cinq", "fünf"),
    ("six", "六", "six", "sechs"), ("seven", "七", "sept", "sieben"), ("eight", "八", "huit", "acht"), ("nine", "九", "neuf", "neun"), ("ten", "十", "dix", "zehn"),
)
HOURS = (
    ("one", "一", "une", "ein"), *NUMBERS, ("eleven", "十一", "onze", "elf"), ("twelve", "十二", "douze", "zwölf"),
)
