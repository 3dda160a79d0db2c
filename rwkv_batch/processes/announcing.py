"""What the server says when it is ready: what is served, and where."""

import contextlib
import http.client
import logging
import sys
import time

from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.supervision import EngineInfo

ANSWER_SECONDS = 20  # until it is said that no front end answers
PROBE_PAUSE = 0.05  # seconds until a front end that has not answered is asked again

log = logging.getLogger(__name__)


def served(models: list[EngineInfo], frontend: FrontendConfig, engines: int = 1) -> list[str]:
    """A line for each model, with its size, where it runs and who may ask it."""
    secret = "password" if frontend.keys is None else "key"
    access = f"{secret} on every route" if _guarded(frontend) else "no password"
    if _guarded(frontend) and not frontend.protect_translate:
        access += " but /translate, which is open (--protect-translate closes it)"
    where = f" in {engines} engines" if engines > 1 else ""
    return [
        f"{info.model}: {info.layers} layers, width {info.width}, {info.parameters:,} parameters, "
        f"{info.dtype} on {info.device}, {info.slots} slots{where}, {access}"
        for info in models
    ]


def _guarded(frontend: FrontendConfig) -> bool:
    return frontend.password is not None or frontend.keys is not None


def describe(models: list[EngineInfo], frontend: FrontendConfig, engines: int = 1) -> str:
    """What is served, where, and a command that is answered at once; between blank lines."""
    secret = "PASSWORD" if frontend.keys is None else "KEY"
    url = _url(frontend.host, frontend.port)
    here = _url(_here(frontend.host), frontend.port)
    key = f" -H 'Authorization: Bearer {secret}'" if _guarded(frontend) else ""
    chat = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    page = [f"  page        {here}/"] if frontend.page else []
    lines = [
        "",
        *(f"  {line}" for line in served(models, frontend, engines)),
        "",
        f"  ready on    {url}",
        *page,
        f"  try         curl {here}/v1/chat/completions{key} -d '{chat}'",
        "",
    ]
    return "\n".join(lines)


def _here(host: str) -> str:
    """An address under which this machine reaches the server."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announce(
    models: list[EngineInfo], frontend: FrontendConfig, engines: int = 1, log_format: str = "text"
) -> None:
    """Say what is served as soon as it is: when a front end has answered a request.

    A log of JSON has lines of it only, as what collects it could not read others.
    """
    host, silent_since = _here(frontend.host), time.monotonic()
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(host, frontend.port, timeout=ANSWER_SECONDS)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    if log_format == "json":
                        for line in served(models, frontend, engines):
                            log.info("%s", line)
                        log.info("ready on %s", _url(frontend.host, frontend.port))
                    else:
                        print(describe(models, frontend, engines), file=sys.stderr, flush=True)
                    return
        if time.monotonic() - silent_since > ANSWER_SECONDS:
            log.error(
                "the front ends have not answered on %s:%d for %d s", host, frontend.port, ANSWER_SECONDS
            )
            silent_since = time.monotonic()
        time.sleep(PROBE_PAUSE)
