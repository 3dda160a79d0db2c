"""Perplexity of texts, each read whole from its beginning, however long it is."""

import math
from collections.abc import Sequence

from rwkv_batch.evaluate.asks import Ask, AskedModel, document
from rwkv_batch.evaluate.report import Result, collect, perplexity_of, summary_table


def perplexity(model: AskedModel, texts: Sequence[str]) -> Result:
    """All tokens count, as the first follows the end of the text before. Raises EvaluationError."""
    asks = [Ask(document(text), score_from=1) for text in texts]
    answers = collect(model.answers(asks), len(asks), "perplexity")
    sums = [sum(entry.logprob for entry in answer.scored) for answer in answers]
    sizes = [len(text.encode()) for text in texts]
    records = [
        {
            "index": i,
            "tokens": len(answer.scored),
            "bytes": size,
            "logprob": total,
            "perplexity": perplexity_of(total, len(answer.scored)),
        }
        for i, (answer, total, size) in enumerate(zip(answers, sums, sizes, strict=True))
    ]
    tokens = sum(len(answer.scored) for answer in answers)
    summary = {
        "texts": len(texts),
        "tokens": tokens,
        "perplexity": perplexity_of(sum(sums), tokens),
        "bits_per_byte": -sum(sums) / math.log(2) / sum(sizes),
    }
    return Result(records, summary, [summary_table(summary)])
