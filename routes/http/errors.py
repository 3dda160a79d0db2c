"""Errors of requests, and their JSON form in the native and in the OpenAI family of routes."""

from collections.abc import Callable
from typing import Any

CODES = {
    401: "invalid_api_key",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

Json = dict[str, Any]  # a JSON object


class ApiError(Exception):
    """A request that cannot be served. `message` is one sentence that names the thing and the way out."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


ErrorShape = Callable[[ApiError], Json]


def native_shape(error: ApiError) -> Json:
    """The error body of the native routes."""
    return {"error": error.message}


def openai_shape(error: ApiError) -> Json:
    """The error body of the OpenAI routes. A code that the error does not have comes from its status."""
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    code = error.code or CODES.get(error.status)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def native_field(place: str, why: str) -> ApiError:
    """The native error for the field at `place`. `why` says what is wrong or would be right."""
    return ApiError(400, f"`{place}`: {why.replace('input should', 'must')}.", param=place)


def openai_field(place: str, why: str) -> ApiError:
    """The OpenAI error for the field at `place`. `why` says what is wrong or would be right."""
    return ApiError(400, f"{place}: {why}.", param=place)
