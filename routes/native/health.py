"""Probes: /health/live, whether the process answers; /health/ready, whether a request would be answered."""

import logging

from robyn import Response

from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from routes.native.shapes import Live, Ready
from rwkv_batch.wire.host.merging import name_of

log = logging.getLogger(__name__)


async def live(front: Frontend, http: HttpRequest) -> Response:
    """GET /health/live: 200 as long as a front end answers."""
    body: Live = {"status": "live"}
    return json_response(http, body)


async def ready(front: Frontend, http: HttpRequest) -> Response:
    """GET /health/ready: 200 when a request would be answered, else 503 with the reason, logged once.

    Of several engines it says what each does, as one that serves is enough; and how many front ends are down.
    """
    state, reason = front.readiness_now
    before, front.readiness.noted = front.readiness.noted, state
    if reason and state != before:
        log.warning("/health/ready answers 503: %s", reason)
    body: Ready = {"status": state}
    if reason:
        body["reason"] = reason
    if (count := front.client.count) > 1:
        body["engines"] = {name_of(engine): front.readiness.of(engine) for engine in range(count)}
    if down := front.restarts.down:
        body["down"] = down
    return json_response(http, body, 503 if reason else 200)
