"""The header Idempotency-Key: a turn that is sent again under the same key is stored once.

See rwkv_batch/engine/rows/repeats.py for what becomes of it.
"""

import hashlib

from msgspec.structs import replace

from routes.http.errors import ApiError
from routes.http.exchange import HttpRequest
from rwkv_batch.wire.protocol import REQUEST_BYTES, GenerateRequest

HEADER = "idempotency-key"
LONGEST = 255  # characters


def key_of(http: HttpRequest) -> str:
    """The key that the request names, or "". Raises ApiError 400."""
    key = http.headers.get(HEADER) or ""
    if len(key) > LONGEST:
        raise ApiError(400, f"Idempotency-Key should be at most {LONGEST} characters.")
    return key


def with_key(http: HttpRequest, request: GenerateRequest, keeps_texts: bool) -> GenerateRequest:
    """The request with the id of its turn, if it names a key and its turn is stored. Raises ApiError 400.

    keeps_texts: whether the server stores what was said, of which the reply would be made.
    """
    turn, key = request.turn, key_of(http)
    if not key or turn is None or turn.request or not (turn.target or turn.branch):
        return request
    if not keeps_texts:
        raise ApiError(
            400, "Idempotency-Key: this server stores no texts, so no reply can be given again; leave it out."
        )
    if request.top_logprobs is not None:
        raise ApiError(400, "Idempotency-Key: logprobs are not stored; leave out one of the two.")
    return replace(request, turn=replace(turn, request=digest(turn.target or f"{turn.branch}:", key)))


def digest(scope: str, key: str) -> bytes:
    """REQUEST_BYTES of a key in its scope, the session that the turn is stored in."""
    data = scope.encode(errors="surrogatepass") + b"\0" + key.encode()
    return hashlib.blake2b(data, digest_size=REQUEST_BYTES).digest()
