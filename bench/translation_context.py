#!/usr/bin/env python3
"""Whether it helps a translation to know what stands around a text.

    python bench/translation_context.py [--texts 120]

Translations by the bundled model with other sentences in front of the prompt, in several forms, of which as
many as are exactly right are counted; and the languages of short texts, alone and with their neighbours.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo.training import exam
from rwkv_batch.engine import Engine
from rwkv_batch.translation.language.detection import detect_together
from rwkv_batch.wire.protocol import Sampling

LANGUAGES = ((exam.EN, "English", exam.DE, "German"), (exam.ZH, "Chinese", exam.EN, "English"))
PROMPT = "{source}: {text}\n\n{target}:"
FRONTS = {  # "pair": the sentence before with its translation
    "nothing": "",
    "as a text": "{source}: {before}\n\n",
    "bare": "{before}\n\n",
    "named": "Context: {before}\n\n",
    "pair": "{source}: {before}\n\n{target}: {translated}\n\n",
    "in brackets": "{source}: ({before}) ",
}
SHORT = 2  # words
SENTENCES = Path(__file__).resolve().parents[1] / "test" / "helpers" / "language_sentences.tsv"


def translations(engine: Engine, count: int) -> None:
    dice = random.Random(7)
    texts = [exam.finished(*dice.choice(exam.PATTERNS)(dice)) for _ in range(count)]
    for own, source, other, target in LANGUAGES:
        for name, front in FRONTS.items():
            form = front + (PROMPT.removeprefix("{source}: ") if name == "in brackets" else PROMPT)
            prompts = [
                form.format(
                    source=source,
                    target=target,
                    text=text[own],
                    before=texts[number - 1][own],
                    translated=texts[number - 1][other],
                )
                for number, text in enumerate(texts)
            ]
            rows = engine.generate(
                prompts,
                max_tokens=100,
                stop_ids=[0],
                stop_strings=[f"\n\n{source}:"],
                sampling=Sampling(temperature=0),
            )
            right = sum(row.text.strip() == text[other] for row, text in zip(rows, texts, strict=True))
            print(f"| {source} to {target} | {name} | {right} of {count} |", flush=True)


def languages() -> None:
    lines = [line.rstrip("\n").split("\t") for line in SENTENCES.read_text(encoding="utf-8").splitlines()]
    texts = [(code, text.split()) for code, text in lines if len(text.split()) > SHORT + 1]
    right = dict.fromkeys(("alone", "with the rest as a neighbour", "with the rest as context"), 0)
    for code, words in texts:
        short, rest = " ".join(words[:SHORT]), " ".join(words[SHORT:])
        asked = ([short], ""), ([short, rest], ""), ([short], rest)
        for name, (together, around) in zip(right, asked, strict=True):
            right[name] += detect_together(together, around)[0].code == code
    for name, count in right.items():
        print(f"the language of the first {SHORT} words, {name}: right for {count} of {len(texts)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench/translation_context.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--texts", type=int, default=120, help="how many (default %(default)s)")
    options = parser.parse_args()
    languages()
    translations(Engine(), options.texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
