"""Responses that go out in pieces. What is kept of a response is stored before its last word is sent."""

from collections.abc import Callable

from routes.http.stream import HEARTBEAT_EVERY, EventStream, JobStream, encode_json
from routes.responses.reply import ResponseReply
from rwkv_batch.wire.client import Job

DONE = b"data: [DONE]\n\n"  # how other streams end; these end with an event


class ResponseEvents(EventStream):
    """Server-sent events that carry their type in a line of their own, and no `[DONE]`. `keep` stores; it may
    block, and raise.
    """

    reply: ResponseReply

    def __init__(
        self,
        job: Job,
        reply: ResponseReply,
        closed: Callable[[str], None],
        crowded: Callable[[], bool],
        keep: Callable[[], None],
    ) -> None:
        super().__init__(job, reply, closed, crowded)
        self._keep = keep

    def _next(self) -> bytes:
        frames = super()._next()
        if self._over:
            self._keep()
        return frames.removesuffix(DONE)

    def _fail(self, message: str, status: int) -> bytes:
        return self._frames(self.reply.failed(message, status))

    @staticmethod
    def _frames(events: list[dict]) -> bytes:
        return b"".join(
            b"event: " + event["type"].encode() + b"\ndata: " + encode_json(event) + b"\n\n"
            for event in events
        )


class SlowResponse(JobStream):
    """One JSON body; line feeds, which JSON allows in front of it, go out until it is there."""

    reply: ResponseReply

    def __init__(
        self, job: Job, reply: ResponseReply, closed: Callable[[str], None], keep: Callable[[], None]
    ) -> None:
        super().__init__(job, reply, closed)
        self._keep = keep

    def _next(self) -> bytes:
        self.reply.events(self.job.read(HEARTBEAT_EVERY))
        if not self.job.exhausted:
            return b"\n"
        self._over = True
        body = self.reply.whole(self.job, [])
        self._keep()
        return encode_json(body)

    def _fail(self, message: str, status: int) -> bytes:
        return encode_json(self.reply.error(message, status))
