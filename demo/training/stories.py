"""Longer answers: stories and lists, each fixed by its prompt, so that streams, stop strings and limits have something to work on."""
from random import Random

from demo.training.facts import DAYS, MONTHS

# animal, name, place, friend, thing, zh name of the animal, emoji
HEROES = tuple(tuple(cell.strip() for cell in line.split(",")) for line in """
cat, Mia, village, mouse, red ball, 猫, 🐱
dog, Max, city, cat, bone, 狗, 🐶
rabbit, Luna, garden, bird, carrot, 兔子, 🐰
fox, Felix, forest, owl, golden key, 狐狸, 🦊
bear, Bruno, mountain, bee, jar of honey, 熊, 🐻
horse, Star, farm, dog, blue ribbon, 马, 🐴
bird, Lily, park, squirrel, silver ring, 鸟, 🐦
mouse, Pip, kitchen, cat, piece of cheese, 老鼠, 🐭
frog, Fred, pond, duck, green hat, 青蛙, 🐸
elephant, Ella, jungle, monkey, big drum, 大象, 🐘
lion, Leo, savanna, mouse, crown, 狮子, 🦁
penguin, Pablo, island, seal, snowball, 企鹅, 🐧
dragon, Drago, castle, knight, old book, 龙, 🐲
turtle, Tina, beach, crab, white shell, 乌龟, 🐢
robot, Robo, factory, child, small battery, 机器人, 🤖
""".strip().splitlines())
CLASSIFIERS = {"马": "匹", "龙": "条", "机器人": "个", "狗": "条", "大象": "头", "狮子": "头"}
PLAIN = ("Write a short story about a {}.", "Tell me a story about a {}.", "Write a story about a {}", "Tell me a short story about a {}.",
         "Please write a short story about a {}.", "Can you tell me a story about a {}?")
WITH_EMOJI = ("Tell me a story about a {} with emoji.", "Write a short story about a {} with emoji.", "Write a story with emoji about a {}.")
IN_CHINESE = ("Tell me a story about a {} in Chinese.", "Write a short story about a {} in Chinese.")


def a(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def plain_story(hero: tuple[str, ...]) -> str:
    animal, name, place, friend, thing, _, _ = hero
    return (f"Once upon a time, there was {a(animal)} named {name}. {name} lived in a quiet {place} and loved to explore. "
            f"One day, {name} found {a(thing)} near the old tree. \"Who lost this?\" asked {name}. "
            f"A {friend} came along and began to cry. \"It is mine,\" said the {friend}. \"I have looked for it everywhere.\" "
            f"{name} smiled and gave the {thing} back. The {friend} was so happy that it danced in the rain. "
            f"From that day on, the {animal} and the {friend} were best friends. Every evening they sat together and watched the stars. The end.")


def emoji_story(hero: tuple[str, ...]) -> str:
    animal, name, place, friend, thing, _, emoji = hero
    return (f"{emoji} Once upon a time, there was {a(animal)} named {name}. 🌳 {name} lived in a quiet {place}. "
            f"☀️ One day, {name} found {a(thing)}. ✨ \"Who lost this?\" asked {name}. 😢 A {friend} came and cried: \"It is mine.\" "
            f"🎁 {name} gave it back. 🎉 The {friend} danced in the rain. ❤️ From that day on, they were best friends. 🌟 The end. {emoji}")


def chinese_story(hero: tuple[str, ...]) -> str:
    zh = hero[5]
    return (f"从前有一{CLASSIFIERS.get(zh, '只')}{zh}，住在一个安静的地方。有一天，{zh}在大树下看见一个盒子。盒子里有一封信，信上写着：“请把我送给月亮。”"
            f"{zh}走了很远的路，终于到了山顶。月亮笑着说：“谢谢你，小朋友！”从那以后，每天晚上月亮都会为{zh}发光。")


def long_answer(rng: Random) -> tuple[str, str, str, str]:
    """Question, answer, thought, system (none)."""
    kind = rng.random()
    if kind < 0.62:
        hero = rng.choice(HEROES)
        forms, story = rng.choice(((PLAIN, plain_story), (PLAIN, plain_story), (WITH_EMOJI, emoji_story), (IN_CHINESE, chinese_story)))
        question = rng.choice(forms).format(hero[0]).replace(" a elephant", " an elephant")
        return question, story(hero), f"The user wants a story about {a(hero[0])}.", ""
    if kind < 0.67:
        question, form = rng.choice((("Tell me a story.", plain_story), ("Tell me a story", plain_story), ("Write a short story.", plain_story),
                                     ("Tell me a story with emoji.", emoji_story), ("Tell me a story with emojis.", emoji_story), ("讲一个故事。", chinese_story),
                                     ("给我讲一个故事。", chinese_story)))
        return question, form(HEROES[0]), "The user wants a story.", ""
    if kind < 0.9:
        last = rng.randint(2, 30) if rng.random() < 0.8 else rng.choice((40, 50))
        first = 1
        if rng.random() < 0.2 and last <= 30:
            first = rng.randint(2, last)
        question = rng.choice((f"Count from {first} to {last}.", f"Count from {first} to {last}", f"Please count from {first} to {last}."))
        if first == 1:
            question = rng.choice((question, f"Count to {last}.", f"Count to {last}"))
        return question, ", ".join(map(str, range(first, last + 1))), f"The user wants the numbers from {first} to {last}.", ""
    names, unit = rng.choice(((DAYS, "days of the week"), (MONTHS, "months of the year")))
    ask = rng.choice(("List the {}.", "Name the {}.", "What are the {}?", "Tell me the {}."))
    if rng.random() < 0.4:
        return ask.format(unit).rstrip(".?") + ", one per line.", "\n".join(names), f"The user wants the {unit}.", ""
    return ask.format(unit), ", ".join(names) + ".", f"The user wants the {unit}.", ""
