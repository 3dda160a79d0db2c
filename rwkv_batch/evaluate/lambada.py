"""LAMBADA: is the last word of a passage what the model expects?

As RWKV-LM scores it, whose figures are published: the passage without its last word follows the end of the
text before (token 0), the word with the space in front of it is scored, the perplexity is that of words, not
of tokens, and a word is right if each of its tokens is the likeliest one.
"""

from collections.abc import Sequence

from rwkv_batch.evaluate.asks import TOKENIZER, Ask, AskedModel, ModelAnswer, document, is_likeliest
from rwkv_batch.evaluate.files import Json, text_of
from rwkv_batch.evaluate.report import Result, collect, perplexity_of, summary_table


def passage(fields: Json) -> tuple[str, str]:
    """What comes before the last word, and the word with its space. Raises ValueError."""
    before, space, word = text_of(fields).rpartition(" ")
    if not (space and before and word.strip()):
        raise ValueError('"text" should end with a word behind a space')
    return before, space + word


def lambada(model: AskedModel, passages: Sequence[tuple[str, str]]) -> Result:
    """Raises EvaluationError."""
    asks = []
    for before, word in passages:
        prompt = document(before)
        asks.append(Ask(prompt + TOKENIZER.encode(word), score_from=len(prompt)))
    seen = right = 0

    def note(place: int, answer: ModelAnswer) -> str:
        nonlocal seen, right
        seen, right = seen + 1, right + _right(answer)
        return f"accuracy {right / seen:.4f}"

    answers = collect(model.answers(asks), len(asks), "lambada", note)
    records = [
        {
            "index": i,
            "target": word,
            "logprob": _logprob(answer),
            "tokens": len(answer.scored),
            "right": _right(answer),
        }
        for i, ((_, word), answer) in enumerate(zip(passages, answers, strict=True))
    ]
    total, tokens = sum(map(_logprob, answers)), sum(len(answer.scored) for answer in answers)
    summary = {
        "examples": len(answers),
        "accuracy": sum(map(_right, answers)) / len(answers),
        "perplexity": perplexity_of(total, len(answers)),
        "perplexity_per_token": perplexity_of(total, tokens),
    }
    return Result(records, summary, [summary_table(summary)])


def _logprob(answer: ModelAnswer) -> float:
    return sum(entry.logprob for entry in answer.scored)


def _right(answer: ModelAnswer) -> bool:
    return all(map(is_likeliest, answer.scored))
