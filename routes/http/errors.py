"""Errors of requests, and their JSON form in each family of routes."""

from collections.abc import Callable
from typing import Any

from routes.errors import ApiError as ApiError

CODES = {
    401: "invalid_api_key",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
TEXT_ONLY = "this server reads text only"  # where a field or part holds an image or a sound
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = TYPES | {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}

Json = dict[str, Any]  # a JSON object


ErrorShape = Callable[[ApiError], Json]


def native_shape(error: ApiError) -> Json:
    """The error body of the native routes."""
    return {"error": error.message}


def openai_shape(error: ApiError) -> Json:
    """The error body of the OpenAI routes. A code that the error does not have comes from its status."""
    kind = _type(error, TYPES, "server_error")
    code = error.code or CODES.get(error.status)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def anthropic_shape(error: ApiError) -> Json:
    """The error body of the Anthropic routes, and the last event of a stream that has failed."""
    kind = _type(error, ANTHROPIC_TYPES, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def ollama_shape(error: ApiError) -> Json:
    """The error body of the Ollama routes, where a model that is not served is missing."""
    return native_shape(error)


def _type(error: ApiError, types: dict[int, str], of_server: str) -> str:
    return types.get(error.status, of_server if error.status >= 500 else "invalid_request_error")


def native_field(place: str, why: str) -> ApiError:
    """The native error for the field at `place`. `why` says what is wrong or would be right."""
    return ApiError(400, f"`{place}`: {why.replace('input should', 'must')}.", param=place)


def openai_field(place: str, why: str) -> ApiError:
    """The OpenAI error for the field at `place`. `why` says what is wrong or would be right."""
    return ApiError(400, f"{place}: {why}.", param=place)
