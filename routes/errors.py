"""The error of a request, which every route may raise; routes/http/errors.py has its forms."""


class ApiError(Exception):
    """A request that cannot be served. `message` is one sentence that names the thing and the way out."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
