"""Conversations in which the user states something about themselves and asks for it some turns later."""
from dataclasses import dataclass
from random import Random

from demo.training import names
from demo.training.arithmetic import calculation
from demo.training.conversation import conversation, some_system
from demo.training.example import Example
from demo.training.facts import capital as capital_fact
from demo.training.facts import small_fact
from demo.training.unknown import unknown
from rwkv_batch.chat.templates import Message

NAMES = ["Alice", "Bob", "Anna", "Tom", "Maria", "Paul", "Peter", "Mary", "John", "Emma", "Oliver", "Sophia", "Liam", "Mia", "Noah", "Lucas", "Emily", "Jack", "Grace", "Henry", "Lucy", "Daniel", "Sarah", "David", "Laura", "Mark", "Julia", "Simon", "Clara", "Max", "Nina", "Oscar", "Eva", "Hugo", "Leo", "Rosa", "Ivan", "Olga", "Yuki", "Ken", "Wei", "Ming", "Priya", "Ravi", "Omar", "Fatima", "Carlos", "Elena", "Pedro", "Lena", "Felix", "Ruby", "Adam", "Kate", "George", "Victoria", "Sam", "Alex", "Chris", "Robert", "Linda", "James", "Karen", "Steven", "Helen", "Frank", "Diana", "Walter", "Irene", "Martin", "Susan", "Philip", "Nora", "Arthur", "Bella", "Jonas"]
CITIES = (
    "Paris", "Berlin", "London", "Madrid", "Rome", "Vienna", "Tokyo", "Beijing", "Shanghai", "Moscow", "Oslo", "Lisbon", "Dublin", "Athens", "Cairo",
    "Boston", "Chicago", "New York", "Toronto", "Sydney", "Melbourne", "Hamburg", "Munich", "Lyon", "Milan", "Barcelona", "Prague", "Budapest", "Warsaw",
    "Seoul", "Delhi", "Mumbai", "Bangkok", "Lima", "Havana", "Seattle", "Houston", "Denver", "Geneva", "Zurich", "Amsterdam", "Brussels", "Stockholm",
)
COLOURS = ["red", "blue", "green", "yellow", "purple", "orange", "pink", "black", "white", "brown", "grey", "silver", "gold"]
FOODS = ["pizza", "pasta", "sushi", "rice", "soup", "bread", "cheese", "chocolate", "salad", "fish", "chicken", "curry", "noodles", "pancakes", "potatoes", "steak", "ice-cream", "tofu"]
JOBS = ("teacher", "doctor", "nurse", "farmer", "driver", "singer", "lawyer", "baker", "painter", "pilot", "writer", "cook", "dentist", "gardener")
PETS = ["cat", "dog", "rabbit", "horse", "parrot", "hamster", "turtle"]
PET_NAMES = ["Rex", "Bella", "Coco", "Max", "Luna", "Oscar", "Milo", "Kitty", "Charlie", "Rocky", "Daisy", "Simba", "Buddy", "Snowy", "Ginger", "Shadow", "Tiger", "Lucky", "Molly", "Felix", "Toby", "Nemo", "Pepper", "Zoe"]
WORDS = (
    "banana apple window river mountain guitar pencil candle rocket lemon butterfly diamond forest island mirror ocean piano rainbow castle "
    "sunflower thunder umbrella volcano whisper yellow zebra elephant garden hammer kitchen"
).split()
ZH_NAMES = ["小明", "小红", "小丽", "小刚", "李雷", "王芳", "张伟", "李娜", "刘洋", "陈静", "安娜", "汤姆", "玛丽亚", "保罗"]


@dataclass(frozen=True)
class Topic:
    """One thing a user can state; `{}` stands for the value, `{pet}` for the kind of pet."""

    statements: tuple[str, ...]
    acknowledge: str
    ask: tuple[str, ...]
    answer: str
    unknown: str
    values: tuple[str, ...]
    joined: tuple[str, str, str] = ("", "", "")  # "and ..." in a statement, in a question, in an answer


KINDS = {
    "name": Topic(("My name is {}.", "My name is {}", "Hi, my name is {}.", "I am {}.", "I'm {}.", "Hello! My name is {}.", "Call me {}."),
                 "Nice to meet you, {}!", ("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "what is my name?", "What was my name?"),
                 "Your name is {}.", "You have not told me your name.", tuple(NAMES), ("my name is {}", "what is my name", "your name is {}")),
    "city": Topic(("I live in {}.", "I live in {}", "My home is in {}.", "I live in the city of {}."), "{} is a nice place to live.",
                 ("Where do I live?", "In which city do I live?", "Do you remember where I live?", "Which city do I live in?"), "You live in {}.",
                 "You have not told me where you live.", CITIES, ("I live in {}", "where do I live", "you live in {}")),
    "colour": Topic(("My favourite colour is {}.", "My favorite color is {}.", "I like the colour {} most."), "I like {} too.",
                   ("What is my favourite colour?", "What is my favorite color?", "Which colour do I like most?", "What's my favourite colour?"),
                   "Your favourite colour is {}.", "You have not told me your favourite colour.", tuple(COLOURS),
                   ("my favourite colour is {}", "what is my favourite colour", "your favourite colour is {}")),
    "food": Topic(("My favourite food is {}.", "My favorite food is {}.", "I love to eat {}."), "I have heard that {} is delicious.",
                 ("What is my favourite food?", "What is my favorite food?", "What do I love to eat?"), "Your favourite food is {}.",
                 "You have not told me your favourite food.", tuple(FOODS)),
    "job": Topic(("I work as a {}.", "I am a {}.", "My job is {}."), "A {} has an interesting job.", ("What is my job?", "What do I do for a living?", "What's my job?"),
                "You work as a {}.", "You have not told me your job.", JOBS),
    "number": Topic(("My lucky number is {}.", "My favourite number is {}.", "Please remember the number {}.", "Remember the number {}."),
                   "I will remember the number {}.", ("What is my lucky number?", "What is my number?", "Which number did I tell you?", "What was the number?"),
                   "Your number is {}.", "You have not told me a number.", tuple(map(str, range(2, 100)))),
    "pet": Topic(("I have a {pet} named {}.", "I have a {pet} called {}.", "My {pet} is called {}.", "My {pet}'s name is {}."), "{} is a lovely name for a {pet}.",
                ("What is my {pet} called?", "What is the name of my {pet}?", "What is my {pet}'s name?", "Do you remember the name of my {pet}?"),
                "Your {pet} is called {}.", "You have not told me about your {pet}.", tuple(PET_NAMES)),
    "friend": Topic(("My best friend is {}.", "My best friend is called {}.", "{} is my best friend."), "{} must be a good friend.",
                   ("Who is my best friend?", "What is the name of my best friend?", "What is my best friend called?"), "Your best friend is {}.",
                   "You have not told me about your best friend.", tuple(NAMES)),
    "word": Topic(("The secret word is {}.", "Remember the word {}.", "Please remember the word {}.", "The password is {}.", "My secret word is {}."),
                 "I will remember the word {}.", ("What is the secret word?", "Which word did I tell you?", "What was the word?", "What is the password?",
                 "What was the secret word?", "Tell me the secret word."), "The word is {}.", "You have not told me a word.", tuple(WORDS)),
    "zh_name": Topic(("我叫{}。", "我叫{}", "你好，我叫{}。", "我的名字是{}。"), "很高兴认识你，{}！", ("我叫什么名字？", "我叫什么？", "你记得我的名字吗？"),
                    "你叫{}。", "你还没有告诉我你的名字。", tuple(ZH_NAMES)),
    "fr_name": Topic(("Je m'appelle {}.", "Je m'appelle {}", "Bonjour, je m'appelle {}.", "Mon nom est {}.", "Moi, c'est {}."), "Enchanté, {} !",
                     ("Comment je m'appelle ?", "Quel est mon nom ?", "Te souviens-tu de mon nom ?"), "Tu t'appelles {}.", "Tu ne m'as pas dit ton nom.", tuple(NAMES)),
    "de_name": Topic(("Ich heiße {}.", "Ich heiße {}", "Hallo, ich heiße {}.", "Mein Name ist {}.", "Ich bin {}."), "Freut mich, {}!",
                     ("Wie heiße ich?", "Was ist mein Name?", "Erinnerst du dich an meinen Namen?", "Weißt du noch, wie ich heiße?"), "Du heißt {}.",
                     "Du hast mir deinen Namen nicht gesagt.", tuple(NAMES)),
}
NAME_KINDS = ("name", "zh_name", "fr_name", "de_name")
NEUTRAL = ("OK.", "Got it.", "I will remember that.", "Thank you for telling me.", "Good to know.")


def fill(text: str, value: str, pet: str) -> str:
    return text.replace("{pet}", pet).replace("{}", value)


def draw_value(rng: Random, kind: str) -> str:
    """Mostly something that stands in no list, so that it has to be read from the conversation."""
    if kind in ("name", "friend", "pet", "city", "fr_name", "de_name") and rng.random() < 0.75:
        return names.name(rng)
    if kind == "zh_name" and rng.random() < 0.8:
        return names.free(rng, (names.chinese_name, names.chinese_name, names.latin))
    if kind == "word" and rng.random() < 0.8:
        return names.word(rng)
    if kind in ("food", "job", "colour") and rng.random() < 0.15:
        return names.token_word(rng)
    if kind == "number" and rng.random() < 0.5:
        return str(rng.randint(100, 99999))
    return rng.choice(KINDS[kind].values)


def filler(rng: Random) -> tuple[str, str]:
    """An unrelated question and its answer."""
    maker = rng.choice((capital_fact, calculation, small_fact, unknown))
    while True:
        question, answer, _, system = maker(rng)
        if not system and "name" not in question:
            return question, answer


def draw_facts(rng: Random, count: int) -> dict[str, str]:
    """What the user states: kind -> value, all different."""
    while True:
        values = {kind: draw_value(rng, kind) for kind in rng.sample(list(KINDS), count)}
        if len(set(values.values())) == count and sum(kind in NAME_KINDS for kind in values) < 2:
            return values


def memory(rng: Random) -> Example:
    """Up to about eight turns; the last one asks, states, or asks for something else."""
    values = draw_facts(rng, rng.choice((1, 1, 2, 2, 3, 4)))
    pet = rng.choice(PETS)
    turns: list[Message] = []
    stated = list(values.items())

    def say(question: str, answer: str) -> None:
        turns.extend((Message("user", question), Message("assistant", answer)))

    if {"name", "city"} <= values.keys() and rng.random() < 0.4:
        stated = [(k, v) for k, v in stated if k not in ("name", "city")]
        say(f"My name is {values['name']} and I live in {values['city']}.", f"Nice to meet you, {values['name']}!")
    for kind, value in stated:
        say(fill(rng.choice(KINDS[kind].statements), value, pet), fill(KINDS[kind].acknowledge, value, pet) if rng.random() < 0.8 else rng.choice(NEUTRAL))
        if rng.random() < 0.2:
            say(*filler(rng))
    goal = rng.random()
    told = tuple(values.values())
    if goal > 0.82:  # what was stated last is still to be answered
        if not stated:
            return conversation(rng, "memory", turns[:1], turns[1].text, thought="The user tells me something.", system=some_system(rng), names=told)
        kind, value = stated[-1]
        while turns[-1].text != fill(KINDS[kind].acknowledge, value, pet) and turns[-1].text not in NEUTRAL:
            turns = turns[:-2]
        return conversation(rng, "memory", turns[:-1], fill(KINDS[kind].acknowledge, value, pet), thought="The user tells me something.",
                            system=some_system(rng), names=told)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 4, 5))):
        if rng.random() < 0.2:
            asked = rng.choice(list(values))
            say(fill(rng.choice(KINDS[asked].ask), values[asked], pet), fill(KINDS[asked].answer, values[asked], pet))
        else:
            say(*filler(rng))
    if goal > 0.7:
        question, answer = filler(rng)
        return conversation(rng, "memory", [*turns, Message("user", question)], answer, thought="A question.", system=some_system(rng), names=told)
    if goal > 0.62:
        named = any(k in values for k in NAME_KINDS)
        kind = rng.choice([k for k in KINDS if k not in values and not (named and k in NAME_KINDS)])
        keep = turns if rng.random() < 0.7 else []
        return conversation(rng, "memory", [*keep, Message("user", fill(rng.choice(KINDS[kind].ask), "", pet))], fill(KINDS[kind].unknown, "", pet),
                            thought="I do not know.", system=some_system(rng), names=told)
    askable = [k for k in values if KINDS[k].joined[0]]
    if len(askable) > 1 and rng.random() < 0.2:
        a, b = rng.sample(askable, 2)
        question = f"{KINDS[a].joined[1].capitalize().replace(' i ', ' I ')} and {KINDS[b].joined[1]}?"
        first = KINDS[a].joined[2].format(values[a])
        answer = f"{first[0].upper()}{first[1:]} and {KINDS[b].joined[2].format(values[b])}."
    else:
        kind = rng.choice(list(values))
        if kind in NAME_KINDS and rng.random() < 0.2:  # asked in another language than it was told in
            values[other := rng.choice(NAME_KINDS)] = values[kind]
            kind = other
        question, answer = fill(rng.choice(KINDS[kind].ask), values[kind], pet), fill(KINDS[kind].answer, values[kind], pet)
    return conversation(rng, "memory", [*turns, Message("user", question)], answer, thought="I look back at what the user told me.",
                        system=some_system(rng), names=told)
