"""Train a start state that makes the demo model answer as a pirate, in each of its languages.

python -m demo.training.tune_state --out demo/pirate.pth                  # on a GPU, two minutes; after the model
python -m demo.training.tune_state --cpu --steps 5 --tokens 1024 --exam 1 --out F   # to try it

The file has `blocks.N.att.time_state` `[heads, 64 (value), 64 (key)]` in fp16, as RWKV-PEFT writes it.
"""

import re
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import nn

from demo.training import names
from demo.training.arithmetic import ASK, numbers
from demo.training.conversation import CHAT, Way, conversation, some_system
from demo.training.example import Example
from demo.training.facts import SAYINGS, capital, small_fact
from demo.training.memory import KINDS
from demo.training.model import HEAD, TrainingModel
from demo.training.train import TrainingTask, arguments, train
from demo.training.tuning import frozen, known_ids
from demo.training.unknown import UNKNOWN, unknown
from rwkv_batch.chat.templates import Message

PIRATE = {  # what stands before and behind each answer
    "en": ("Arr! ", " Ahoy, matey!"),
    "zh": ("哟嗬！", "扬帆起航！"),
    "fr": ("Mille sabords ! ", " À l'abordage !"),
    "de": ("Potzblitz! ", " Leinen los!"),
}
NAMES = {"en": "name", "zh": "zh_name", "fr": "fr_name", "de": "de_name"}
GREETINGS = {"Hello!", "你好", "Bonjour", "Hallo"}
WAYS = {  # chats in a start state have no thought unless the client asks for one
    Way(template="world", think_type="none"): 8,
    Way(template="world", think_type="none", lead=False): 4,
    Way(template="world", think_type="none", kept=True): 1,
    Way(template="world", think_type="none", kept=True, lead=False): 1,
    CHAT: 3,
    Way(lead=False): 2,
    Way(template="g1c"): 1,
    Way(form="bot", think_type="none"): 1,
    Way(form="function_calling", think_type="none"): 1,
}


def asked(rng: Random, language: str) -> tuple[str, str]:
    """A question in that language and its plain answer."""
    if rng.random() < 0.25:
        sign = rng.choice("+-")
        a, b = numbers(rng, sign)
        return rng.choice(ASK[language]).format(
            f"{a} {sign} {b}"
        ), f"{a} {sign} {b} = {a + b if sign == '+' else a - b}"
    maker = rng.choice((capital, capital, unknown, greeting, small_fact))
    while True:
        question, answer, _, order = maker(rng)
        if not order and language_of(question, answer) == language:
            return question, answer
        maker = rng.choice((capital, unknown, greeting, small_fact))


def greeting(rng: Random) -> tuple[str, str, str, str]:
    questions, answer, _ = rng.choice([row for row in SAYINGS if set(row[0]) & GREETINGS])
    return rng.choice(questions), answer, "", ""


def language_of(question: str, answer: str) -> str:
    for code, text in UNKNOWN.items():
        if answer == text:
            return code
    if re.search(r"[\u4e00-\u9fff]", question):
        return "zh"
    if answer.startswith(("La capitale ", "Bonjour ")):
        return "fr"
    return "de" if answer.startswith(("Die Hauptstadt ", "Hallo!")) else "en"


def pirate(rng: Random) -> Example:
    """A question, or a name that is told and asked for, answered as a pirate."""
    language = rng.choice(tuple(PIRATE))
    before, behind = PIRATE[language]

    def said(answer: str) -> str:
        return f"{before}{answer}{behind}"

    told: tuple[str, ...] = ()
    turns: list[Message] = []
    if rng.random() < 0.3:
        topic = KINDS[NAMES[language]]
        name = names.free(rng, (names.chinese_name,)) if language == "zh" else names.latin(rng)
        told = (name,)
        turns.append(Message("user", rng.choice(topic.statements).format(name)))
        answer = topic.acknowledge.format(name)
        if rng.random() < 0.6:
            turns += [Message("assistant", said(answer)), Message("user", rng.choice(topic.ask))]
            answer = topic.answer.format(name)
    else:
        if rng.random() < 0.25:
            question, answer = asked(rng, language)
            turns += [Message("user", question), Message("assistant", said(answer))]
        question, answer = asked(rng, language)
        turns.append(Message("user", question))
    (way,) = rng.choices(list(WAYS), list(WAYS.values()))
    system = some_system(rng)
    return conversation(rng, "pirate", turns, said(answer), system=system, names=told, way=way)


def model(known: np.ndarray) -> TrainingModel:
    """The bundled model, of which only a start state is trained."""
    found = frozen()
    for block in found.blocks:
        width = found.emb.weight.shape[1]
        block.att.time_state = nn.Parameter(torch.zeros(width // HEAD, HEAD, HEAD))
    return found


def finish(trained: TrainingModel, known: np.ndarray, out: Path) -> None:
    states = {name: p.detach().half().cpu() for name, p in trained.named_parameters() if p.requires_grad}
    torch.save(states, out)


def exam(count: int) -> dict[str, list[Example]]:
    rng = Random(2)
    return {"pirate": [pirate(rng) for _ in range(count)]}


def main() -> None:
    args = arguments(__doc__, seconds=120, rate=1e-1).parse_args()
    args.state = args.state or args.out.with_suffix(".state")
    train(args, TrainingTask(known_ids(), model, pirate, finish, exam))


if __name__ == "__main__":
    main()
