"""Errors as each service has them."""

from routes.http.errors import ApiError, Json

STATUSES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
STATUSES |= {429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}


def deepl_shape(error: ApiError) -> Json:
    """As DeepL has it."""
    return {"message": error.message}


def deeplx_shape(error: ApiError) -> Json:
    """As DeepLX has it."""
    return {"code": error.status, "message": error.message}


def google_shape(error: ApiError) -> Json:
    """As Google's Cloud Translation has it."""
    reason = {
        "message": error.message,
        "domain": "global",
        "reason": "invalid" if error.status < 500 else "backendError",
    }
    status = STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": error.status, "message": error.message, "errors": [reason], "status": status}}


def plain_shape(error: ApiError) -> Json:
    """As LibreTranslate, MTranServer and others have it."""
    return {"error": error.message}
