"""Answers to random questions, and whether they depend on anything but the seed."""

import time
from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from rwkv_batch.evaluate.asks import Ask, AskedModel, ModelAnswer, document
from rwkv_batch.evaluate.report import Result, collect, summary_table
from rwkv_batch.text.tokenizer import END_OF_TEXT
from rwkv_batch.wire.protocol import Sampling

SUBJECTS = ("a cat", "the sea", "an old clock", "the moon", "a letter", "rain", "a bridge", "seven stars")
PLACES = ("France", "Japan", "Brazil", "Egypt", "Canada", "India", "Norway", "Kenya")
FORMS = (
    "Tell me a story about {subject}.",
    "Write a short poem about {subject}.",
    "What is the capital of {place}?",
    "What should I see in {place}?",
    "What is {a} + {b}?",
    "What is {a} times {b}?",
    "Translate to French: I have seen {subject}.",
    "用中文介绍一下{place}。",
)
STOP = "\n\nUser:"


def random_questions(count: int, seed: int) -> list[str]:
    """So many questions, which are the same for a seed."""
    rng = Random(seed)
    return [
        rng.choice(FORMS).format(
            subject=rng.choice(SUBJECTS), place=rng.choice(PLACES), a=rng.randint(2, 99), b=rng.randint(2, 99)
        )
        for _ in range(count)
    ]


def question_asks(questions: Sequence[str], max_tokens: int, sampling: Sampling, seed: int) -> list[Ask]:
    """Each with a seed of its own."""
    return [
        Ask(
            document(f"User: {question}\n\nAssistant:"),
            max_tokens,
            replace(sampling, seed=seed + number),
            (END_OF_TEXT,),
            (STOP,),
        )
        for number, question in enumerate(questions)
    ]


def generate(
    model: AskedModel, questions: Sequence[str], max_tokens: int, sampling: Sampling, seed: int
) -> Result:
    """Raises EvaluationError."""
    began = time.monotonic()
    asks = question_asks(questions, max_tokens, sampling, seed)
    answers = collect(model.answers(asks), len(asks), "generate")
    seconds = time.monotonic() - began
    records = [
        {
            "index": i,
            "prompt": question,
            "response": answer.text,
            "tokens": len(answer.ids),
            "finish_reason": answer.finish_reason,
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }
        for i, (question, answer) in enumerate(zip(questions, answers, strict=True))
    ]
    tokens = sum(len(answer.ids) for answer in answers)
    summary = {
        "questions": len(questions),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "ended_by_the_model": sum(answer.finish_reason == "stop" for answer in answers),
    }
    return Result(records, summary, [summary_table(summary)])


def determinism(
    model: AskedModel, questions: Sequence[str], max_tokens: int, sampling: Sampling, seed: int
) -> Result:
    """Compare answers of questions asked twice in one batch, and each alone. Raises EvaluationError."""
    asks = question_asks(questions, max_tokens, sampling, seed)
    one_by_one = ((i, answer) for i, ask in enumerate(asks) for _, answer in model.answers([ask]))
    first = collect(model.answers(asks), len(asks), "the first run")
    second = collect(model.answers(asks), len(asks), "the second run")
    alone = collect(one_by_one, len(asks), "each alone")
    records = []
    for i, (question, answer) in enumerate(zip(questions, first, strict=True)):
        again, by_itself = _difference(answer, second[i]), _difference(answer, alone[i])
        records.append({"index": i, "prompt": question, "differs_again": again, "differs_alone": by_itself})
    summary = {
        "questions": len(questions),
        "same_in_two_runs": sum(record["differs_again"] is None for record in records),
        "same_alone_and_batched": sum(record["differs_alone"] is None for record in records),
    }
    return Result(records, summary, [summary_table(summary)])


def _difference(one: ModelAnswer, other: ModelAnswer) -> int | None:
    """The place of the first token that differs; None: there is none. 0 where no ids are known."""
    if one.text == other.text and one.ids == other.ids:
        return None
    pairs = zip(one.ids, other.ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.ids), len(other.ids)))
