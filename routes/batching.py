"""The process that runs batches: a front end without HTTP, whose requests are the rows of files."""

import asyncio
import itertools
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import get_args

import msgspec
from robyn import Headers, Response

from routes.batches.handlers import Endpoint
from routes.callers.caller import Caller
from routes.errors import disk_error
from routes.http.errors import ApiError, ErrorShape, Json, openai_shape
from routes.http.exchange import RETRY_AFTER, HttpRequest, audit_entry
from routes.http.frontend import Frontend
from routes.http.priority import MOST_SECONDS
from routes.http.stream import JobStream
from routes.server import REFUSED, begin, receive, wire_to
from rwkv_batch.batches.lines import InputLine
from rwkv_batch.batches.runner import Answer, BatchRunner, RowReply
from rwkv_batch.batches.store import BatchesError, BatchStore
from rwkv_batch.config import FrontendConfig
from rwkv_batch.logs import begin_logging
from rwkv_batch.wire.supervision import Begun, LoadFailure

TICK = 0.1  # seconds
CLAIM_AGAIN = 0.5  # seconds until a folder is asked for again whose batches another server runs
QUEUED = 2  # rows for each slot: one that ends has a successor
FOREVER = 1e7  # seconds within which a reply is awaited whole

log = logging.getLogger(__name__)


def run(config: FrontendConfig, name: str, addresses: Sequence[str], control: Connection) -> None:
    """Run the batches of the folder until the supervisor sends `Drain` or is gone; see routes.server.run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    begin_logging(config.log_level, config.log_format, name)
    logging.getLogger("rwkv_batch.access").setLevel(logging.WARNING)  # a row is no request of a client
    assert config.batch_dir
    try:
        store = BatchStore(config.batch_dir, config.batch_bytes)
    except BatchesError as error:
        control.send(LoadFailure(str(error)))
        raise SystemExit(REFUSED) from None
    front = begin(of_rows(config), wire_to(addresses, name, config, control), control)
    threading.Thread(
        target=receive, args=(front, control, config, _leave), name="supervisor", daemon=True
    ).start()
    threading.Thread(target=_tick, args=(front,), name="tick", daemon=True).start()
    control.send(Begun())
    for waited in itertools.count():
        if store.claim():
            break
        if not waited:
            log.warning(
                "another server runs the batches of %s; this one waits until it ends", config.batch_dir
            )
        time.sleep(CLAIM_AGAIN)
    runner = BatchRunner(store, answers(front), lambda: rows_at_once(front), config.batch_days)
    asyncio.run(runner.run())


def _leave(front: Frontend, seconds: float) -> None:
    """Rows that run are run again when the server is started again."""
    front.close()
    logging.shutdown()
    os._exit(0)


def _tick(front: Frontend) -> None:
    while True:
        time.sleep(TICK)
        front.tick()


def of_rows(config: FrontendConfig) -> FrontendConfig:
    """The configuration of a front end whose requests are rows of batches."""
    return replace(
        config,
        password=None,  # whoever has made a batch had it
        max_streams=1 << 30,
        max_body=max(config.max_body, config.max_state),
        plain_seconds=FOREVER,
    )


def rows_at_once(front: Frontend) -> int:
    """How many rows keep all slots busy."""
    return QUEUED * sum(info.slots for info in front.models.values())


def answers(front: Frontend) -> Answer:
    """What answers a line: the handler of its route, as if its owner had sent it."""
    from routes.table import ROUTES  # which imports Robyn's application

    allowed = get_args(Endpoint)
    routes = {route.path: route for route in ROUTES if route.path in allowed and "POST" in route.methods}

    async def answer(line: InputLine, deadline: float, owner: str) -> RowReply:
        identity = os.urandom(16).hex()
        route = routes.get(line.url)
        if route is None:
            unknown = ApiError(404, f"`url` should be {' or '.join(allowed)}.", "url")
            return RowReply(404, identity, openai_shape(unknown))
        http = _request(front, line, deadline, identity, route.shape)
        try:
            http.caller = caller_of(front, owner)
            if line.body.get("stream"):
                raise ApiError(400, "`stream`: a row of a batch is not streamed; leave it out.", "stream")
            reply = await route.handler(front.seen_by(http.caller) if front.metered else front, http)
        except ApiError as error:
            asked = http.caller.headers.get("retry-after") or RETRY_AFTER.get(error.status)
            return RowReply(error.status, identity, http.shape(error), float(asked or 0))
        except Exception as error:  # the message may quote a prompt, so it is not logged
            if refusal := disk_error(error):
                log.error("a row waits: %s", refusal.message)
                return RowReply(refusal.status, identity, http.shape(refusal))
            log.error("a row failed: %s", type(error).__name__, exc_info=log.isEnabledFor(logging.DEBUG))
            message = "The row could not be answered; this is a fault of the server."
            return RowReply(500, identity, http.shape(ApiError(500, message)))
        if isinstance(reply, Response):
            asked = reply.headers.get("retry-after")
            body = msgspec.json.decode(reply.description)
            return RowReply(reply.status_code, identity, body, float(asked or 0))
        stream: object = reply.content  # of a large translation
        assert isinstance(stream, JobStream)
        try:
            body = msgspec.json.decode(await asyncio.to_thread(b"".join, stream))
        except asyncio.CancelledError:
            stream.close()
            raise
        return RowReply(stream.status, identity, body)

    return answer


def caller_of(front: Frontend, owner: str) -> Caller:
    """Whoever has made the batch. Raises ApiError 403 for a key that is not taken any more."""
    caller = Caller(hashes=front.audit is not None)
    caller.vouched = True
    if not owner:
        caller.is_operator()
    else:
        key = front.accounts.keys.named(owner) if front.accounts else None
        if key is None or key.ended:
            raise ApiError(403, "The key of this batch is not taken any more.", code="key_ended")
        caller.is_key(key)
    return caller


def _request(
    front: Frontend, line: InputLine, deadline: float, identity: str, shape: ErrorShape
) -> HttpRequest:
    """The line as its owner would have sent it, at the lowest priority."""
    urgency: Json = {"priority": "batch"}
    if math.isfinite(deadline):
        left = deadline - time.time()  # which is more than its window where the clock has been set back
        urgency["deadline"] = min(max(1.0, left), MOST_SECONDS)

    def note(http: HttpRequest, status: int) -> None:
        if front.audit and http.caller.served.model:
            front.audit.add(audit_entry(http, status))

    return HttpRequest(
        method="POST",
        path=line.url,
        id=identity,
        body=msgspec.json.encode(line.body | urgency),
        query={},
        headers=Headers({"content-type": "application/json"}),
        began=time.monotonic(),
        max_body=front.settings.max_body,
        shape=shape,
        count=note,
    )
