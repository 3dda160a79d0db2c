"""A model in this process."""

from collections.abc import Iterator, Sequence

from rwkv_batch.engine import Engine
from rwkv_batch.evaluate.asks import Ask, EvaluationError, ModelAnswer, demand_texts
from rwkv_batch.wire.protocol import Failed, GenerateRequest, Progress, Rejected

QUEUED = 2  # requests for each row that runs at once: a row that ends has a successor
CALLER = b"evaluate"


class LocalModel:
    """The engine, which reads and continues as many prompts at a time as there are rows."""

    most_top = 65530

    def __init__(self, engine: Engine) -> None:
        """Raises EvaluationError for a model that takes no texts."""
        demand_texts(engine.info.vocabulary)
        self._engine = engine
        self.name = f"{engine.info.model} ({engine.info.fingerprint}) on {engine.info.device}"

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, ModelAnswer]]:
        engine, left, live = self._engine, iter(enumerate(asks)), 0
        try:
            while True:
                while live < QUEUED * engine.info.slots and (following := next(left, None)):
                    engine.add((CALLER, str(following[0])), _request(*following))
                    live += 1
                if not live:
                    return
                for key, event in engine.step():
                    if isinstance(event, Rejected | Failed):
                        raise EvaluationError(event.message)
                    if isinstance(event, Progress):  # the whole answer, as nothing is streamed
                        (row,) = event.rows
                        if row.error:
                            raise EvaluationError(row.error)
                        live -= 1
                        yield (
                            int(key[1]),
                            ModelAnswer(row.text, row.ids, row.finish_reason or "", row.logprobs, row.prompt),
                        )
        finally:
            engine.cancel_frontend(CALLER)


def _request(number: int, ask: Ask) -> GenerateRequest:
    return GenerateRequest(
        id=str(number),
        prompts=[ask.prompt],
        max_tokens=ask.max_tokens,
        sampling=ask.sampling,
        stop_ids=list(ask.stop_ids),
        stop_strings=list(ask.stops),
        top_logprobs=ask.top,
        prompt_logprobs=None if ask.score_from is None else 1,
        scored_from=ask.score_from or 0,
        return_ids=True,
        prefix_cache=False,
    )
