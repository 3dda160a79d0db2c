"""What a request holds is free once it has been answered."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from routes.guard.limits import Limits
from routes.guard.reads import Guard
from routes.http.frontend import Frontend
from routes.table import application
from rwkv_batch.config import FrontendConfig


class Headers(dict[str, str]):
    """Those of a request."""


@pytest.fixture
def without_collections() -> Iterator[None]:
    """A front end makes few objects for a request, so that none may come for long."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("path", ["/health", "/nowhere"])
def test_a_request_is_gone_when_it_has_been_answered(path: str):
    """With its body, which may be 256 MB."""
    front = Frontend(FrontendConfig(), None)
    app = application(front, Guard(Limits(body=1000)), 1)
    place = path if path == "/health" else "/*path"
    handler = next(r.function.handler for r in app.router.get_routes() if r.route == place)
    request = SimpleNamespace(
        method="GET",
        url=SimpleNamespace(path=path),
        headers=Headers(),
        body=b"",
        query_params=SimpleNamespace(to_dict=dict),
        ip_addr="127.0.0.1",
    )
    held = weakref.ref(request.headers)
    reply = asyncio.run(handler(request))
    assert reply.status_code in (200, 404, 503)
    del request
    assert held() is None
