"""Errors as each service has them."""

from routes.http.errors import ApiError, Json

STATUSES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
STATUSES |= {429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}


def deepl_shape(error: ApiError) -> Json:
    """An error in DeepL's form."""
    return {"message": error.message}


def deeplx_shape(error: ApiError) -> Json:
    """An error in DeepLX's form."""
    return {"code": error.status, "message": error.message}


def google_shape(error: ApiError) -> Json:
    """An error in the form of Google's Cloud Translation."""
    reason = {
        "message": error.message,
        "domain": "global",
        "reason": "invalid" if error.status < 500 else "backendError",
    }
    status = STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": error.status, "message": error.message, "errors": [reason], "status": status}}


def plain_shape(error: ApiError) -> Json:
    """An error in the form of LibreTranslate, MTranServer and others."""
    return {"error": error.message}
