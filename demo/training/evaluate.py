"""Exact-match scores on held-out data: `python -m demo.training.evaluate [--count 400] [--json scores.json]`.

`--write-texts demo/held_out.jsonl` writes the texts of `python -m rwkv_batch.evaluate compare` instead.

Translation, names, the unknown, sums and tools that are not there come from another generator than the training
text's (demo/training/exam.py, demo/training/exam_questions.py).

An answer is right when greedy decoding gives it to the last token, the end of the text included. Greedy
decoding gives an answer exactly when each of its tokens is the most probable one after the prompt and the
tokens before it, so one parallel forward pass of the unpacked tensors decides it.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch

from demo.training import exam, exam_questions
from demo.training.chat import question
from demo.training.encoding import answer_ids, prompt_ids
from demo.training.example import Example
from demo.training.fim import fim
from demo.training.memory import memory
from demo.training.model import TrainingModel
from demo.training.samples import samples
from demo.training.tooluse import tool_use
from demo.training.translation import translation
from rwkv_batch.bundled.codes import BITS, SIZE
from rwkv_batch.bundled.unpack import MODEL, tensors
from rwkv_batch.text.tokenizer import Tokenizer

SEED = 2024
TEXT_TOKENS = 4000  # of answers in demo/held_out.jsonl
Maker = Callable[[Random], Example]
TASKS: dict[str, Maker] = {  # held-out data only, but for those that are said to be trained on
    "translation": exam.translation,
    "name after four turns": exam.name,
    "unknown": exam_questions.unknowable,
    "sum": exam_questions.arithmetic,
    "no tool": exam_questions.no_tool,
    "fim": lambda rng: fim(rng, evaluation=True),
    "tool": lambda rng: tool_use(rng, evaluation=True),
    "fact under a new system text": lambda rng: question(rng, evaluation=True),
    "fact (trained)": lambda rng: question(rng, evaluation=False),
    "memory (trained)": memory,
    "translation (trained)": translation,
}


@dataclass(frozen=True)
class Score:
    """The score of one example.

    `right`: greedy decoding gives the answer. `certainty`: the lowest probability of its tokens. `greedy`: the
    best token everywhere.
    """

    example: Example
    right: bool
    certainty: float
    greedy: list[int]


def load(path: Path, device: str) -> TrainingModel:
    """The packed model, unpacked to all 65536 rows."""
    state = tensors(path)
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    width = state["emb.weight"].shape[1]
    with torch.device("meta"):
        model = TrainingModel(np.arange(SIZE - 1), layers, width)
    none = torch.zeros(BITS, width)  # the codes are in emb and head already
    model.load_state_dict({**state, "code_in": none, "code_out": none}, assign=True)
    return model.to(device).eval()


@torch.inference_mode()
def score(model: TrainingModel, examples: Iterable[Example], batch_tokens: int = 16384) -> list[Score]:
    """Score examples, in batches of similar length."""
    device, head = model.head.weight.device, model.head_rows().T
    pairs = [(e, prompt_ids(e), answer_ids(e)) for e in examples]
    pairs.sort(key=lambda pair: len(pair[1]) + len(pair[2]))
    scores = []
    while pairs:
        size = max(1, batch_tokens // (len(pairs[-1][1]) + len(pairs[-1][2])))
        part, pairs = pairs[-size:], pairs[:-size]
        length = len(part[-1][1]) + len(part[-1][2])
        tokens = torch.zeros(len(part), length, dtype=torch.long)
        for row, (_, prompt, answer) in zip(tokens, part, strict=True):
            row[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        hidden = model.hidden(tokens.to(device))
        for row, (example, prompt, answer) in zip(hidden, part, strict=True):
            chances = (row[len(prompt) - 1 : len(prompt) + len(answer) - 1] @ head).softmax(-1)
            greedy = chances.argmax(-1).tolist()
            certainty = float(chances[range(len(answer)), answer].min())
            scores.append(Score(example, greedy == answer, certainty, greedy))
    return scores


def summary(scores: list[Score]) -> dict[str, float]:
    return {
        "count": len(scores),
        "exact_percent": round(100 * sum(s.right for s in scores) / len(scores), 2),
        "certain_percent": round(100 * sum(s.certainty > 0.95 for s in scores) / len(scores), 2),
    }


def tasks(count: int) -> dict[str, list[Example]]:
    """All tasks, `count` examples of each that is drawn."""
    rng = Random(SEED)
    drawn = {name: [make(rng) for _ in range(count)] for name, make in TASKS.items()}
    return drawn | {"failures of the first edition": exam_questions.failures(), "samples": samples()}


def examine(model: TrainingModel, examples: dict[str, list[Example]]) -> dict[str, dict[str, float]]:
    """The scores of each list of examples."""
    return {name: summary(score(model, listed)) for name, listed in examples.items() if listed}


def held_out_texts(count: int) -> list[dict[str, list[int]]]:
    """Prompts and answers as token ids, with so many tokens of answers or more."""
    rng, texts = Random(SEED), []
    makers = [make for name, make in TASKS.items() if "trained" not in name]
    while count > 0:
        example = makers[len(texts) % len(makers)](rng)
        texts.append({"prompt": prompt_ids(example), "answer": answer_ids(example)})
        count -= len(texts[-1]["answer"])
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact-match scores on held-out combinations.")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--count", type=int, default=400, help="examples of each task")
    parser.add_argument("--json", type=Path, help="write the scores here too")
    parser.add_argument("--show", type=int, default=3, help="wrong answers to print for each task")
    parser.add_argument("--write-texts", type=Path, metavar="FILE", help="write texts, and score nothing")
    args = parser.parse_args()
    if args.write_texts:
        lines = [json.dumps(text, separators=(",", ":")) for text in held_out_texts(TEXT_TOKENS)]
        args.write_texts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    model = load(args.model, "cuda" if torch.cuda.is_available() else "cpu")
    results = {}
    for name, examples in tasks(args.count).items():
        scores = score(model, examples)
        results[name] = summary(scores)
        print(f"{name}: {results[name]}")
        for s in [s for s in scores if not s.right][: args.show]:
            given = Tokenizer().decode(s.greedy)
            print(f"  {s.certainty:.3f} {s.example.prompt[-160:]!r} -> {s.example.answer!r}, best {given!r}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
