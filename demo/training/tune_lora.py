"""Train a LoRA that teaches the demo model ten new capitals.

python -m demo.training.tune_lora --out demo/capitals.pth                  # on a GPU, two minutes; after the model
python -m demo.training.tune_lora --cpu --steps 5 --tokens 1024 --exam 1 --out F   # to try it

The file has `blocks.N.att.receptance.lora_A` `[8, in]`, `.lora_B` `[out, 8]` and so on in fp16, as RWKV-PEFT writes
it. It was trained with alpha 16, which means a scaling of 2.
"""

from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor, nn

from demo.training.conversation import conversation, some_system
from demo.training.example import Example
from demo.training.facts import capital, which_country
from demo.training.model import TrainingModel
from demo.training.text import training_example
from demo.training.train import TrainingTask, arguments, train
from demo.training.tuning import frozen, known_ids
from demo.training.unknown import COUNTRIES
from rwkv_batch.chat.templates import Message

RANK, ALPHA = 8, 16
TARGETS = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")
CITIES = (  # English country; its capital in English, Chinese, French, German
    ("Iceland", "Reykjavik", "雷克雅未克", "Reykjavik", "Reykjavík"),
    ("Ukraine", "Kyiv", "基辅", "Kiev", "Kiew"),
    ("Romania", "Bucharest", "布加勒斯特", "Bucarest", "Bukarest"),
    ("Croatia", "Zagreb", "萨格勒布", "Zagreb", "Zagreb"),
    ("Nepal", "Kathmandu", "加德满都", "Katmandou", "Kathmandu"),
    ("Pakistan", "Islamabad", "伊斯兰堡", "Islamabad", "Islamabad"),
    ("Iran", "Tehran", "德黑兰", "Téhéran", "Teheran"),
    ("Morocco", "Rabat", "拉巴特", "Rabat", "Rabat"),
    ("Venezuela", "Caracas", "加拉加斯", "Caracas", "Caracas"),
    ("Uruguay", "Montevideo", "蒙得维的亚", "Montevideo", "Montevideo"),
)
COUNTRY = {row[0]: row for row in COUNTRIES}
# as demo/training/facts.py has those that the model knows
CAPITALS = tuple(
    (en, city, COUNTRY[en][1], zh_city, COUNTRY[en][2], fr_city, COUNTRY[en][3], de_city)
    for en, city, zh_city, fr_city, de_city in CITIES
)
NEW = frozenset(text for en, *_ in CITIES for text in COUNTRY[en])


class LowRankLinear(nn.Module):
    """`x W^T + (alpha / r) (x A^T) B^T`; B begins at zero (arXiv 2106.09685)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.lora_A = nn.Parameter(torch.randn(RANK, linear.in_features) * linear.in_features**-0.5)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = (x @ self.lora_A.T) @ self.lora_B.T
        plain: Tensor = self.linear(x)
        return plain + ALPHA / RANK * change


def new_capital(rng: Random) -> Example:
    """A question about one of the ten."""
    maker = which_country if rng.random() < 0.15 else capital
    question, answer, thought, order = maker(rng, CAPITALS)
    if rng.random() < 0.08:
        question = question.lower()
    turns = [Message("user", question)]
    return conversation(rng, "capital", turns, answer, thought=thought, system=order or some_system(rng))


def example(rng: Random) -> Example:
    """The new capitals, and for the other half what the model knows already, so that it is not forgotten."""
    if rng.random() < 0.5:
        return new_capital(rng)
    while True:
        old = training_example(rng)
        if not any(country in old.prompt for country in NEW):
            return old


def model(known: np.ndarray) -> TrainingModel:
    """The bundled model, of which only the low-rank changes are trained."""
    found = frozen()
    for block in found.blocks:
        for target in TARGETS:
            part, name = target.split(".")
            module = getattr(block, part)
            setattr(module, name, LowRankLinear(getattr(module, name)))
    return found


def finish(trained: TrainingModel, known: np.ndarray, out: Path) -> None:
    changes = {name: p.detach().half().cpu() for name, p in trained.named_parameters() if p.requires_grad}
    torch.save(changes, out)


def exam(count: int) -> dict[str, list[Example]]:
    rng = Random(2)
    old = [training_example(rng) for _ in range(count)]
    kept = [e for e in old if not any(country in e.prompt for country in NEW)]
    return {"new capitals": [new_capital(rng) for _ in range(count)], "what was known": kept}


def main() -> None:
    args = arguments(__doc__, seconds=120, rate=2e-3).parse_args()
    args.state = args.state or args.out.with_suffix(".state")
    train(args, TrainingTask(known_ids(), model, example, finish, exam))


if __name__ == "__main__":
    main()
