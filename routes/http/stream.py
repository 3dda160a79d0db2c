"""Replies that are sent in pieces: events, and JSON whose connection is kept alive meanwhile.

The HTTP library pulls these iterators from threads of its own and drops them when the client has left.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from routes.guard.threads import keep_state
from routes.http.errors import Json
from routes.http.replies import Reply, encode_json
from rwkv_batch.wire.client import Job, RequestFailed, RequestRejected
from rwkv_batch.wire.protocol import RowDelta

HEARTBEAT_EVERY = 0.25  # seconds of silence after which a byte is sent; a write shows that a client has left
STOPPED = "client stopped taking"
UNREAD = "The reply was not read for too long, and has ended before it was complete."
EVENT_EVERY = 0.05  # seconds between events of one stream while many streams are live
# reason -> HTTP status
REJECTIONS = {
    "overloaded": 429,
    "invalid": 400,
    "not_found": 404,
    "exists": 409,
    "conflict": 409,
    "unavailable": 503,
}

Drop = Callable[[Callable[[], object]], object]

log = logging.getLogger(__name__)


def failure_status(error: RequestRejected | RequestFailed, engine_lives: bool) -> int:
    """The HTTP status for a job or command that the engine rejected or failed."""
    if isinstance(error, RequestRejected):
        return REJECTIONS[error.reason]
    return 500 if engine_lives else 503


class JobStream(ABC):
    """An iterator over the bytes of one job's reply."""

    def __init__(
        self, job: Job, reply: Reply, closed: Callable[[str], None], dropped: Drop, store: Callable[[], None]
    ) -> None:
        """`closed(outcome)` is called once, when the stream has ended or was dropped.

        `dropped` is what calls it then, as DroppedStreams.put. `store` is called before the last piece of a
        reply that has succeeded. It may block, and raise.
        """
        self.job, self.reply, self._dropped = job, reply, dropped
        self._closed: Callable[[str], None] | None = closed
        self._store = store
        self._lock = threading.Lock()
        self.status = 200  # or that of the error with which it has ended
        self._over = False
        self._unread = ""  # what a client that reads on is to get, as it has read nothing for too long
        self._pulling = False
        self._pulled_at = time.monotonic()

    def __iter__(self) -> "JobStream":
        return self

    def __next__(self) -> bytes:
        keep_state()
        if self._unread:
            message, self._unread = self._unread, ""
            return self._fail(message, 503)
        if self._over:
            self.close("ended")
            raise StopIteration
        self._pulling = True
        try:
            return self._next()
        except (RequestRejected, RequestFailed) as error:
            self._over, self.status = True, failure_status(error, engine_lives=True)
            return self._fail(str(error), self.status)
        except Exception as error:
            log.error("a reply failed: %s", type(error).__name__, exc_info=log.isEnabledFor(logging.DEBUG))
            self._over, self.status = True, 500
            return self._fail("The reply could not be made; this is a fault of the server.", 500)
        finally:
            self._pulled_at = time.monotonic()
            self._pulling = False

    def idle(self) -> float:
        """Seconds since the client last took something."""
        return 0.0 if self._pulling else time.monotonic() - self._pulled_at

    @property
    def live(self) -> bool:
        """Whether it has not been closed. A client that reads nothing keeps one that has."""
        return self._closed is not None

    def stop(self) -> None:
        """End it, as its client reads nothing. One that reads on gets an error, and no end of a reply."""
        if self.live and not self._over:
            self._unread = UNREAD
        self.close(STOPPED)

    def close(self, outcome: str = "client left") -> None:
        """Cancel what is left of the job. Safe from any thread, more than once; the first outcome counts."""
        with self._lock:
            closed, self._closed = self._closed, None
        if closed:
            self._over = True
            self.job.cancel()
            closed(outcome)

    def __del__(self) -> None:
        if self.live:
            self._dropped(self.close)

    @abstractmethod
    def _next(self) -> bytes:
        """The next piece of the reply; sets `_over` with the last one. May raise."""

    @abstractmethod
    def _fail(self, message: str, status: int) -> bytes:
        """The last piece of a reply that has failed."""


class EventStream(JobStream):
    """The events of a reply, framed as it says. What came since the last pull goes out as one event."""

    def __init__(
        self,
        job: Job,
        reply: Reply,
        closed: Callable[[str], None],
        dropped: Drop,
        crowded: Callable[[], bool],
        store: Callable[[], None] = lambda: None,
    ) -> None:
        """`crowded`: whether so many streams are live that events wait for more text."""
        super().__init__(job, reply, closed, dropped, store)
        self._crowded = crowded
        self._begun = False
        self._event_due = 0.0  # when the next event may go out in a crowd

    def _next(self) -> bytes:
        if not self._begun:
            self._begun = True
            if opening := self._frames(self.reply.first(self.job)):
                return opening
        wait = self._event_due - time.monotonic()
        if wait > 0 and self._crowded():
            time.sleep(wait)
        deltas = self.job.read(HEARTBEAT_EVERY)
        if not deltas:
            return self.reply.beat
        self._event_due = time.monotonic() + EVENT_EVERY
        frames = self._frames(self.reply.events(deltas))
        if self.job.exhausted:
            self._over = True
            frames += self._frames(self.reply.last(self.job)) + self.reply.done
            self._store()
        return frames or self.reply.beat

    def _fail(self, message: str, status: int) -> bytes:
        return self._frames([self.reply.failure(message, status)]) + self.reply.done

    def _frames(self, events: list[Json]) -> bytes:
        return b"".join(map(self.reply.frame, events))


class SlowJson(JobStream):
    """One JSON body; line feeds, which JSON allows in front of it, go out until it is complete."""

    def __init__(
        self,
        job: Job,
        reply: Reply,
        closed: Callable[[str], None],
        dropped: Drop,
        deltas: list[RowDelta],
        store: Callable[[], None] = lambda: None,
    ) -> None:
        """`deltas`: what has been read of the job so far."""
        super().__init__(job, reply, closed, dropped, store)
        self._deltas = deltas

    def _next(self) -> bytes:
        self._deltas += self.job.read(HEARTBEAT_EVERY)
        if not self.job.exhausted:
            return b"\n"
        self._over = True
        body = self.reply.whole(self.job, self._deltas)
        self._store()
        return encode_json(body)

    def _fail(self, message: str, status: int) -> bytes:
        return encode_json(self.reply.error(message, status))
