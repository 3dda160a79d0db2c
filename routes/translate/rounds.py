"""A reply whose rows are not all known at the beginning: what an answer lacks is asked for meanwhile."""

import asyncio
import contextlib
import threading
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from routes.http.errors import ApiError, ErrorShape, Json
from routes.http.replies import Reply
from rwkv_batch.translation.translator import PromptRow, Translated, Translator
from rwkv_batch.wire.client import Job, RequestFailed, Wire
from rwkv_batch.wire.deltas import merge
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, Sampling

END_OF_TEXT = 0  # a token id
MOST_ROWS = 4096  # at a time, of one reply
MOST_PIECES = 50_000  # rows that a request may become at worst
MOST_TOKENS = 2048  # of a row
# Tokens that a translation may have, for those of short texts and for each byte of the prompt: what has more
# repeats itself.
TOKENS_ALWAYS, TOKENS_A_BYTE = 64, 2


def request_of(rows: list[PromptRow]) -> GenerateRequest:
    """What the engine does for rows."""
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


class _Asked(NamedTuple):
    """One of the requests."""

    job: Job
    first: int  # the number of its first row


class _Rows:
    """The rows that run, and those that wait for that."""

    def __init__(
        self,
        running: int,
        most: int,
        later: list[PromptRow],
        take: Callable[[int, Translated], list[PromptRow]],
    ) -> None:
        """`most`: at a time. `take`: from an answer to the rows that it makes necessary."""
        self.submitted = self._running = running
        self._most = most
        self._later, self._take = deque(later), take
        self._texts: dict[int, RowDelta] = {}  # of rows that run, what has come of them

    def put(self, new: RowDelta) -> None:
        """What has come of a row."""
        old = self._texts.pop(new.row, None)
        whole = new if old is None else replace(new, text=old.text + new.text)
        if new.finish_reason:
            self._running -= 1
            self._later += self._take(new.row, Translated(whole.text, new.finish_reason == "stop"))
        else:
            self._texts[new.row] = whole

    def next(self) -> list[PromptRow]:
        """Those that run from now on."""
        count = min(len(self._later), self._most - self._running)
        self._running, self.submitted = self._running + count, self.submitted + count
        return [self._later.popleft() for _ in range(count)]


class GrowingJob(Job):
    """The jobs of all rows, to whoever reads it: one job. It ends when no answer asks for more.

    Rows are numbered in the order in which they are known.
    """

    def __init__(
        self,
        client: Wire,
        request: GenerateRequest,
        later: list[PromptRow],
        take: Callable[[int, Translated], list[PromptRow]],
    ) -> None:
        """`later`: rows for which the request had no room. `take`: from an answer to what it asks for.

        A key that may have so many rows at once has no more than the request begins with.
        """
        super().__init__(request, lambda _: None)
        self._client = client
        most = MOST_ROWS if client.most_rows is None else len(request.prompts)
        self._numbered = _Rows(len(request.prompts), most, later, take)
        self._cancelled = False
        self._first = client.submit(request)
        self._asked = [_Asked(self._first, 0)]

    async def accepted(self, within: float | None = None) -> None:
        """Wait until the engine has accepted the first rows. Raises RequestRejected or RequestFailed."""
        await self._first.accepted(within)
        self.acceptance = self._first.acceptance

    def read(self, timeout: float) -> list[RowDelta]:
        """New deltas of all rows. Raises RequestRejected or RequestFailed."""
        if len(self._asked) > 1:
            arrived = threading.Event()
            for each in self._asked:
                each.job.when_readable(arrived.set)
            arrived.wait(timeout)
            timeout = 0
        return self._took([(each, each.job.read(timeout)) for each in self._asked])

    async def read_async(self, timeout: float) -> list[RowDelta]:
        """`read` for an event loop."""
        if len(self._asked) == 1:
            (only,) = self._asked
            return self._took([(only, await only.job.read_async(timeout))])
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        for each in self._asked:
            each.job.when_readable(lambda: loop.call_soon_threadsafe(arrived.set))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(arrived.wait(), timeout)
        return self._took([(each, each.job.read(0)) for each in self._asked])

    def cancel(self) -> None:
        """Stop the request. Safe from any thread, at any time, more than once."""
        self._cancelled = True
        for each in list(self._asked):
            each.job.cancel()

    def _took(self, found: list[tuple[_Asked, list[RowDelta]]]) -> list[RowDelta]:
        """What was read of each request, rows counted through; asks for what these answers make necessary."""
        deltas = [
            replace(delta, row=asked.first + delta.row) if asked.first else delta
            for asked, read in found
            for delta in read
        ]
        self._asked = [each for each in self._asked if not each.job.exhausted]
        for new in merge(deltas):
            if new.error:
                self.cancel()
                raise RequestFailed(new.error)
            self._numbered.put(new)
        if not self._cancelled:
            first = self._numbered.submitted
            if rows := self._numbered.next():
                self._submit(rows, first)
        self.exhausted = not self._asked
        return deltas

    def _submit(self, rows: list[PromptRow], first: int) -> None:
        asked = request_of(rows)
        job = self._client.submit(
            replace(
                self.request,
                id=asked.id,
                prompts=asked.prompts,
                max_tokens=asked.max_tokens,
                stop_strings=asked.stop_strings,
                flush_tokens=0,
            )
        )
        self._asked.append(_Asked(job, first))
        if self._cancelled:  # meanwhile, by another thread
            job.cancel()


class TranslationReply(Reply):
    """What a wire answers with, once all texts are translated."""

    def __init__(
        self,
        translator: Translator,
        shape: ErrorShape,
        make: Callable[[Translator], Json | list[Any]],
        slow: bool = False,
    ) -> None:
        """`make`: the body that the wire has for the translations. `slow`: they are long. Raises ApiError."""
        self.slow = slow
        self.translator, self.shape, self._make = translator, shape, make
        rows = translator.start()
        if translator.most_pieces > MOST_PIECES:
            raise ApiError(
                413,
                f"The texts have more than {MOST_PIECES} pieces between their marks and terms; "
                "send fewer texts at once.",
            )
        self.rows, self._later = rows[:MOST_ROWS], rows[MOST_ROWS:]

    def begin(self, client: Wire, request: GenerateRequest) -> Job:
        if request.adapter or request.start_state or request.mixture:
            self.translator.keep_apart()
        most = max(1, client.most_rows or MOST_ROWS)
        first = replace(request, prompts=request.prompts[:most])
        return GrowingJob(client, first, self.rows[most:] + self._later, self.translator.take)

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json | list[Any]:
        return self._make(self.translator)

    def events(self, deltas: list[RowDelta]) -> list[Json]:
        return []  # only chats are streamed
