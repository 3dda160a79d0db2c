"""Stands between a client and the server, for what the client has no setting for."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx

Body = dict[str, Any]
Change = Callable[[Body], Body]  # fields of a request's body -> those that are other
NOT_FORWARDED = {"host", "content-length", "connection", "accept-encoding", "transfer-encoding"}


class Between:
    """Forwards requests to `target`, with the fields that `change` gives. `bodies`: as they came."""

    def __init__(self, target: str, change: Change) -> None:
        self.bodies: list[Body] = []
        between = self

        class Forwarding(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._forward(b"")

            do_HEAD = do_GET

            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["Content-Length"]))
                body = json.loads(sent)
                between.bodies.append(body)
                self._forward(json.dumps(body | change(body)).encode())

            def _forward(self, content: bytes) -> None:
                headers = {k: v for k, v in self.headers.items() if k.lower() not in NOT_FORWARDED}
                asked = httpx.stream(
                    self.command, target + self.path, content=content, headers=headers, timeout=None
                )
                with asked as reply:
                    self.send_response(reply.status_code)
                    for name, value in reply.headers.items():
                        if name not in NOT_FORWARDED:
                            self.send_header(name, value)
                    self.end_headers()
                    for part in reply.iter_raw():
                        self.wfile.write(part)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Forwarding)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
