"""Single questions: facts, small sums, longer answers, and plain texts to be continued."""

from random import Random

from demo.training.conversation import conversation, some_system
from demo.training.example import Example, pick
from demo.training.facts import CAPITALS, DAYS, MONTHS
from demo.training.questions import fact
from demo.training.stories import HEROES, long_answer, plain_story
from rwkv_batch.chat.templates import Message


def question(rng: Random, evaluation: bool) -> Example:
    """A fact. With a system text, the key is both together.

    So a known question is held out under a system text that training never combines with it.
    """

    def make(rng: Random) -> tuple[tuple[str, str, str, str], str]:
        return fact(rng), some_system(rng)

    def key_of(drawn: tuple[tuple[str, str, str, str], str]) -> str:
        (text, _, _, order), system = drawn
        return f"fact:{text}|{order}|{system}" if order or system else ""

    drawn = pick(make, key_of, rng, evaluation)
    (text, answer, thought, order), system = drawn
    return conversation(
        rng,
        "fact",
        [Message("user", text)],
        answer,
        thought=thought,
        system=order or system,
        key=key_of(drawn),
    )


def longer(rng: Random) -> Example:
    """A story or a list."""
    text, answer, thought, _ = long_answer(rng)
    return conversation(
        rng, "story", [Message("user", text)], answer, thought=thought, system=some_system(rng)
    )


def continuation(rng: Random) -> Example:
    """A text without any roles."""
    kind = rng.randrange(5)
    if kind == 0:
        row = rng.choice(CAPITALS)
        return Example("continuation", f"The capital of {row[0]} is", f" {row[1]}.")
    if kind == 1:
        row = rng.choice(CAPITALS)
        return Example("continuation", f"{row[2]}的首都是", f"{row[3]}。")
    if kind == 2:
        names = rng.choice((DAYS, MONTHS))
        given = rng.randint(2, 4)
        return Example("continuation", ", ".join(names[:given]) + ",", " " + ", ".join(names[given:]) + ".")
    if kind == 3:
        start = rng.randint(1, 20)
        numbers = list(map(str, range(start, start + 10)))
        given = rng.randint(3, 5)
        return Example(
            "continuation", ", ".join(numbers[:given]) + ",", " " + ", ".join(numbers[given:]) + "."
        )
    story = plain_story(HEROES[0] if rng.random() < 0.5 else rng.choice(HEROES))
    sentence_end = story.index(".") + 1
    cut = rng.choice((story.index(","), sentence_end))
    if cut != sentence_end:
        story = plain_story(HEROES[0])
        cut = story.index(",")
    return Example("continuation", story[:cut], story[cut:])
