"""One line of the table of routes."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from routes.http.errors import ErrorShape
from routes.http.exchange import HttpRequest, HttpResponse
from routes.http.frontend import Frontend

Handler = Callable[[Frontend, HttpRequest], Awaitable[HttpResponse]]


class Route(NamedTuple):
    """One path. A part of it that begins with a colon stands for any text."""

    methods: str  # separated by a space
    path: str
    shape: ErrorShape  # of its errors
    handler: Handler
    takes_file: bool = False  # its body may be as large as a file

    def allowed(self) -> list[str]:
        """The methods; where there is GET, HEAD too."""
        return [*self.methods.split(), "HEAD"] if "GET" in self.methods else self.methods.split()

    def matches(self, path: str) -> bool:
        ours, theirs = self.path.split("/"), path.split("/")
        return len(ours) == len(theirs) and all(
            a == b or (a.startswith(":") and b) for a, b in zip(ours, theirs, strict=True)
        )
