"""Questions to evaluate with: what the model cannot know, sums, tools that nobody offers, and what the first edition got wrong.

None of the questions about the unknown stands in the training text: countries, people and things are others.
"""

from random import Random

from demo.training.conversation import CHAT, conversation
from demo.training.example import Example
from demo.training.tooluse import CALCULATE, draw_tool
from demo.training.unknown import UNKNOWN
from rwkv_batch.chat import templates
from rwkv_batch.chat.templates import Message

PLACES = "Kyrgyzstan Tajikistan Bhutan Malta Cyprus Andorra Monaco Liechtenstein Samoa Fiji Tonga Botswana Namibia Zambia Malawi Rwanda Burundi Gabon Togo Benin Mali Niger Chad Eritrea Djibouti Oman Yemen Qatar Bahrain Belize Honduras Nicaragua Guatemala Suriname Guyana Dominica Grenada Barbados".split()
PERSONS = "Marie Curie; Isaac Newton; Vincent van Gogh; Pablo Picasso; Frida Kahlo; Nelson Mandela; Julius Caesar; Charles Darwin; Nikola Tesla; Alan Turing; Ada Lovelace; Johann Sebastian Bach; Frédéric Chopin; Marco Polo; Joan of Arc; Galileo Galilei; Agatha Christie; Jules Verne; Bob Marley; Elvis Presley".split("; ")
MATTERS = "the Northern Lights; a harmonica; chewing gum; the Bermuda Triangle; a periscope; papyrus; the stapler; a saxophone; the printing press; cinnamon; a hurricane; quicksand; the Loch Ness monster; marzipan; a barometer; porcelain; the zip fastener; hieroglyphs; a black widow; algebra; the compass; magnetism; a comet; Stonehenge; amber; stalactites; the Silk Road; an iceberg; penicillin; the sundial".split("; ")
WORKS = "Don Quixote; War and Peace; The Little Prince; the Mona Lisa; Hamlet; Faust; the Odyssey; The Magic Flute; Moby Dick; Pinocchio; Star Wars; Jurassic Park; the Decameron; Robinson Crusoe".split("; ")
ENGLISH = (
    ("What is the capital of {}?", PLACES), ("Tell me, what's the capital city of {}?", PLACES), ("Who rules {}?", PLACES),
    ("How many inhabitants does {} have?", PLACES), ("What money do people use in {}?", PLACES), ("Is {} an island?", PLACES),
    ("When was {} born?", PERSONS), ("When did {} die?", PERSONS), ("Where did {} live?", PERSONS), ("Who was {}?", PERSONS),
    ("What did {} do?", PERSONS), ("Was {} married?", PERSONS), ("What is {} famous for?", PERSONS), ("How old was {}?", PERSONS),
    ("What is {}?", MATTERS), ("Who invented {}?", MATTERS), ("How does {} work?", MATTERS), ("How old is {}?", MATTERS),
    ("Why do we have {}?", MATTERS), ("Where can one see {}?", MATTERS), ("What do you call {} in Latin?", MATTERS), ("How much is {}?", MATTERS),
    ("Can you tell me about {}?", MATTERS), ("Please define {}.", MATTERS), ("How many grams does {} weigh?", MATTERS),
    ("Who wrote {}?", WORKS), ("Who made {}?", WORKS), ("How does {} end?", WORKS), ("In which year did {} come out?", WORKS), ("What is {} about?", WORKS),
)  # fmt: skip
CHINESE = (
    ("{}的首都是哪里？", ("吉尔吉斯斯坦", "不丹", "马耳他", "塞浦路斯", "摩纳哥", "斐济", "卢旺达", "也门", "卡塔尔", "危地马拉")),
    ("{}是什么时候出生的？", ("居里夫人", "牛顿", "梵高", "毕加索", "达尔文", "图灵", "贝多芬", "鲁迅", "杜甫", "武则天")),
    ("{}是谁？", ("居里夫人", "牛顿", "梵高", "毕加索", "达尔文", "图灵", "贝多芬", "鲁迅", "杜甫", "武则天")),
    ("谁写了《{}》？", ("红楼梦", "西游记", "战争与和平", "小王子", "浮士德", "老人与海")),
    ("什么是{}？", ("极光", "口香糖", "日晷", "飓风", "代数", "指南针", "彗星", "冰山", "青霉素", "琥珀")),
    ("谁发明了{}？", ("口香糖", "日晷", "指南针", "火药", "气压计", "拉链")),
    ("{}有多重？", ("日晷", "冰山", "彗星", "气压计")),
)
FRENCH = (
    ("Quelle est la capitale {} ?", ("du Bhoutan", "de Malte", "de Monaco", "des Fidji", "du Rwanda", "du Yémen", "du Qatar", "du Honduras", "du Tchad", "de la Zambie")),
    ("Quand est né {} ?", ("Isaac Newton", "Pablo Picasso", "Jules Verne", "Charles Darwin", "Nikola Tesla", "Marco Polo")),
    ("Qui était {} ?", ("Marie Curie", "Frida Kahlo", "Jeanne d'Arc", "Jules Verne", "Galilée", "Agatha Christie")),
    ("Qui a écrit {} ?", ("Don Quichotte", "Le Petit Prince", "Guerre et Paix", "Hamlet", "l'Odyssée", "Germinal")),
    ("Qui a inventé {} ?", ("le parachute", "la boussole", "le baromètre", "le saxophone", "l'imprimerie", "le cadran solaire")),
    ("Comment fonctionne {} ?", ("un parachute", "une boussole", "un baromètre", "un cadran solaire")),
)
GERMAN = (
    ("Was ist die Hauptstadt von {}?", ("Bhutan", "Malta", "Zypern", "Monaco", "Fidschi", "Ruanda", "Katar", "Honduras", "Sambia", "Guatemala")),
    ("Wann wurde {} geboren?", ("Isaac Newton", "Pablo Picasso", "Jules Verne", "Charles Darwin", "Nikola Tesla", "Vivaldi")),
    ("Wer war {}?", ("Marie Curie", "Frida Kahlo", "Johanna von Orléans", "Vivaldi", "Beethoven", "Kepler")),
    ("Wer schrieb {}?", ("Don Quijote", "Der kleine Prinz", "Krieg und Frieden", "Hamlet", "die Odyssee", "Faust")),
    ("Wer hat {} erfunden?", ("den Fallschirm", "den Kompass", "das Barometer", "das Saxophon", "den Buchdruck", "die Sonnenuhr")),
    ("Wie funktioniert {}?", ("ein Fallschirm", "ein Kompass", "ein Barometer", "eine Sonnenuhr")),
)
UNKNOWABLE = {"en": ENGLISH, "zh": CHINESE, "fr": FRENCH, "de": GERMAN}
SUMS = ("What is {} + {}?", "{}+{}", "{} + {} =", "What's {} plus {}?", "So how much is {} and {} together?", "Tell me the sum: {} + {}", "{}加{}是多少？", "Combien font {} et {} ?", "Was ergibt {} plus {}?")
DIFFERENCES = ("What is {} - {}?", "{}-{}", "{} - {} =", "What's {} minus {}?", "Could you tell me how much {} minus {} is?", "{}减{}是多少？", "Combien font {} moins {} ?", "Was ergibt {} minus {}?")


def unknowable(rng: Random) -> Example:
    """A question that the model can only say it does not know."""
    (language,) = rng.choices(tuple(UNKNOWABLE), (4, 2, 1, 1))
    question, things = rng.choice(UNKNOWABLE[language])
    return conversation(rng, "unknown", [Message("user", question.format(rng.choice(things)))], UNKNOWN[language])


def arithmetic(rng: Random) -> Example:
    """A sum of at most 100, or a difference of numbers up to 100."""
    a = rng.randint(0, 100)
    b = rng.randint(0, 100 - a)
    if rng.random() < 0.5:
        return conversation(rng, "sum", [Message("user", rng.choice(SUMS).format(a, b))], f"{a} + {b} = {a + b}")
    asked = rng.choice(DIFFERENCES).format(a + b, a)
    return conversation(rng, "sum", [Message("user", asked)], f"{a + b} - {a} = {b}")


def no_tool(rng: Random) -> Example:
    """What would be a tool's task, with nothing or with another tool's choice "none" on offer."""
    a, b = rng.randint(20, 60), rng.randint(10, 40)
    city = rng.choice(("Paris", "Tokyo", "Madrid", "Boston", "Oslo"))
    question, answer = rng.choice((
        (f"What is {a} + {b}?", f"{a} + {b} = {a + b}"), (f"Calculate {a} - {b}.", f"{a} - {b} = {a - b}"),
        (f"What is the weather in {city}?", f"I cannot look up the weather in {city}."),
        (f"What time is it in {city}?", f"I cannot look up the time in {city}."), ("Call the tool get_weather.", "I have no tools."),
    ))  # fmt: skip
    tools = [draw_tool(rng, CALCULATE).spec] if rng.random() < 0.3 else []
    return conversation(rng, "no tool", [Message("user", question)], answer, tools=tools, choice="none", way=CHAT)


def failures() -> list[Example]:
    """What the first edition got wrong, word for word."""
    rng = Random(0)
    asked = [("What is 23 + 45?", "23 + 45 = 68"), ("How old is the moon?", UNKNOWN["en"]), ("My name is Zoltan", "Nice to meet you, Zoltan!")]
    rows = (
        ("The teacher drinks cold water.", "老师喝冷水。", "Le professeur boit de l'eau froide.", "Der Lehrer trinkt kaltes Wasser."),
        ("The red cat eats a big apple.", "红色的猫吃一个大苹果。", "Le chat rouge mange une grande pomme.", "Die rote Katze isst einen großen Apfel."),
    )

    def chat(turns: list[Message], answer: str) -> Example:
        return conversation(rng, "failure", turns, answer, names=("Zoltan",) * ("Zoltan" in answer), way=CHAT)

    found = [chat([Message("user", question)], answer) for question, answer in asked]
    told = [Message("user", "My name is Zoltan"), Message("assistant", "Nice to meet you, Zoltan!"), Message("user", "What is my name?")]
    found.append(chat(told, "Your name is Zoltan."))
    for english, *others in rows:
        for code, other in zip(("zh-CN", "fr", "de"), others, strict=True):
            found.append(Example("failure", templates.translation(english, "en", code), f" {other}"))
            found.append(Example("failure", templates.translation(other, code, "en"), f" {english}"))
            unmarked, short = english.rstrip("."), other.rstrip(".。")
            found.append(Example("failure", templates.translation(unmarked, "en", code), f" {short}"))
    return found
