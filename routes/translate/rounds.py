"""A reply whose texts come in rounds: what the rows of one have made decides what the next one asks for."""

import uuid
from collections.abc import Callable

from msgspec.structs import replace

from routes.http.errors import ErrorShape, Json
from routes.http.replies import Reply, merge_in_order
from rwkv_batch.translation.translator import PromptRow, Translated, Translator
from rwkv_batch.wire.client import Job, Wire
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, Sampling

END_OF_TEXT = 0  # a token id
MOST_TOKENS = 2048  # of a row
# Tokens that a translation may have, for those of short texts and for each byte of the prompt: what has more
# repeats itself.
TOKENS_ALWAYS, TOKENS_A_BYTE = 64, 2


def request_of(rows: list[PromptRow]) -> GenerateRequest:
    """What the engine does for the rows of the first round."""
    longest = max((len(row.prompt.encode()) for row in rows), default=0)
    return GenerateRequest(
        id=uuid.uuid4().hex,
        prompts=[row.prompt for row in rows],
        max_tokens=min(MOST_TOKENS, TOKENS_ALWAYS + TOKENS_A_BYTE * longest),
        sampling=Sampling(temperature=0.0),
        stop_ids=[END_OF_TEXT],
        stop_strings=sorted({row.stop for row in rows}),
        pausable=False,
    )


class Rounds(Job):
    """The jobs of all rounds, one after the other, to whoever reads it: one job."""

    def __init__(
        self, client: Wire, request: GenerateRequest, again: Callable[[list[RowDelta]], list[PromptRow]]
    ) -> None:
        """`again`: from what a round has made to the rows of the next one, none after the last."""
        super().__init__(request, lambda _: None)
        self._client, self._again = client, again
        self._round: list[RowDelta] = []
        self._cancelled = False
        self._job = client.submit(request)

    async def accepted(self) -> None:
        """Wait until the engine has accepted the first round. Raises RequestRejected or RequestFailed."""
        await self._job.accepted()
        self.acceptance = self._job.acceptance

    def read(self, timeout: float) -> list[RowDelta]:
        """New deltas of the round that runs. Raises RequestRejected or RequestFailed."""
        return self._took(self._job.read(timeout))

    async def read_async(self, timeout: float) -> list[RowDelta]:
        """`read` for an event loop."""
        return self._took(await self._job.read_async(timeout))

    def cancel(self) -> None:
        """Stop the request. Safe from any thread, at any time, more than once."""
        self._cancelled = True
        self._job.cancel()

    def _took(self, deltas: list[RowDelta]) -> list[RowDelta]:
        self._round += deltas
        if not self._job.exhausted or self.exhausted:
            return deltas
        rows = self._again(self._round)
        if not rows or self._cancelled:
            self.exhausted = True
            return deltas
        asked, self._round = request_of(rows), []
        self._job = self._client.submit(
            replace(
                self.request,
                id=asked.id,
                prompts=asked.prompts,
                max_tokens=asked.max_tokens,
                stop_strings=asked.stop_strings,
                flush_tokens=0,
            )
        )
        if self._cancelled:  # meanwhile, by another thread
            self._job.cancel()
        return deltas


class TranslationReply(Reply):
    """What a wire answers with, once all texts are translated."""

    def __init__(self, translator: Translator, shape: ErrorShape, make: Callable[[Translator], Json]) -> None:
        """`make`: the body that the wire has for the translations."""
        self.translator, self.shape, self._make = translator, shape, make
        self._rounds, self.number = translator.rounds(), 1  # of the round that runs
        self.rows = self._after(next(self._rounds, None))

    def begin(self, client: Wire, request: GenerateRequest) -> Job:
        return Rounds(client, request, self.again)

    def again(self, deltas: list[RowDelta]) -> list[PromptRow]:
        """The rows of the next round; none: the texts are translated."""
        self.number += 1
        answers = [Translated(row.text, row.finish_reason == "stop") for row in merge_in_order(deltas)]
        return self._after(self._send(answers))

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        return self._make(self.translator)

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        return []  # only chats are streamed

    def _send(self, answers: list[Translated]) -> list[PromptRow] | None:
        try:
            return self._rounds.send(answers)
        except StopIteration:
            return None

    def _after(self, rows: list[PromptRow] | None) -> list[PromptRow]:
        """These rows, or where there are none, those of the first round behind them that has some."""
        while rows is not None and not rows:
            rows = self._send([])
        return rows or []
