"""The likeliest next tokens after prompts, with their probabilities."""

import math
from collections.abc import Sequence

from rwkv_batch.evaluate.asks import TOKENIZER, Ask, AskedModel, EvaluationError
from rwkv_batch.evaluate.report import Result, collect

# A beginning in English, one in Chinese, and a question whose answer everybody knows.
PROMPTS = ("The capital of France is", "中国的首都是", "User: What is 7 + 5?\n\nAssistant:")


def next_token(model: AskedModel, prompts: Sequence[str], top: int) -> Result:
    """Prompts are read as they are, nothing is in front of them. Raises EvaluationError."""
    if top > model.most_top:
        most = model.most_top
        raise EvaluationError(f"A URL gives at most {most} tokens; use --top {most}, or --model-path.")
    tokens = [TOKENIZER.encode(prompt) for prompt in prompts]
    if not all(tokens):
        raise EvaluationError("A prompt is empty; give it some text.")
    asks = [Ask(prompt, 1, top=top) for prompt in tokens]
    answers = collect(model.answers(asks), len(asks), "next-token")
    records = [
        {
            "prompt": prompt,
            "next": [
                {"token": _text(name), "bytes": list(name), "probability": math.exp(logprob)}
                for name, logprob in answer.drawn[0].top[:top]
            ],
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    tables: list[list[Sequence[object]]] = [
        [
            (f"after {prompt!r}", "probability"),
            *((repr(_text(name)), math.exp(logprob)) for name, logprob in answer.drawn[0].top[:top]),
        ]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return Result(records, {"prompts": len(prompts)}, tables)


def _text(token: bytes) -> str:
    return token.decode(errors="replace")
