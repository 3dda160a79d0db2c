"""What is wrong with a request, and the two shapes in which clients are told."""

CODES = {
    401: "invalid_api_key",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that cannot be served. `message` is one sentence that names the thing and the way out."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        type_: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.type_ = status, message, param, code, type_


def native_error(message: str) -> dict:
    """The error body of the native routes."""
    return {"error": message}


def openai_error(
    message: str,
    status: int,
    param: str | None = None,
    code: str | None = None,
    type_: str = "invalid_request_error",
) -> dict:
    """The error body of the OpenAI routes. A code or type that the caller does not name comes from the
    status.
    """
    if type_ == "invalid_request_error":
        type_ = TYPES.get(status, "server_error" if status >= 500 else type_)
    return {"error": {"message": message, "type": type_, "param": param, "code": code or CODES.get(status)}}


def native_shape(error: ApiError) -> dict:
    """`error` as the native routes tell it."""
    return native_error(error.message)


def openai_shape(error: ApiError) -> dict:
    """`error` as the OpenAI routes tell it."""
    return openai_error(error.message, error.status, error.param, error.code, error.type_)
