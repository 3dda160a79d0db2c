"""GET /v1/usage: what keys have used, by model and day (UTC)."""

import asyncio
import sqlite3
from datetime import date
from functools import partial
from typing import Annotated

from pydantic import AfterValidator
from robyn import Response

from routes.callers.caller import Role, not_allowed
from routes.http.access import demand_access
from routes.http.errors import ApiError, openai_field
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from routes.http.schemas import RequestBody
from routes.native.shapes import KeyLimits, KeyUsage, UsageTotal
from rwkv_batch.keys.records import Key, KeysError
from rwkv_batch.keys.usage import FIRST_DAY, LAST_DAY


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError("must be a day, such as 2027-01-31") from None


Day = Annotated[str, AfterValidator(_day)]


class UsageQuery(RequestBody):
    """The URL parameters."""

    field_error = staticmethod(openai_field)

    start: Day | None = None  # the first day
    end: Day | None = None  # the last day
    key: str | None = None  # whose usage; the operator sees that of all without it


async def usage(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/usage: of the key that asks; the password and keys of admins see all. Raises ApiError.

    What has ended is in it within a second.
    """
    demand_access(front, http)
    if front.accounts is None:
        raise ApiError(404, "Nothing is counted, as the server has no keys (--keys).")
    given = {name: http.parameter(name) for name in UsageQuery.model_fields if name in http.query}
    fields, caller = UsageQuery.from_json(given), http.caller
    asked = caller.owner if caller.owner_asked else None
    name = fields.key or asked or (None if caller.role is Role.OPERATOR else caller.name)
    if caller.role is not Role.OPERATOR and name != caller.name:
        raise not_allowed("see the usage of others")
    read = partial(front.accounts.read_now, name, fields.start or FIRST_DAY, fields.end or LAST_DAY)
    try:
        found = await asyncio.get_running_loop().run_in_executor(None, read)
    except (sqlite3.Error, KeysError) as error:
        raise ApiError(
            503, f"The usage of keys cannot be read now ({error}); try again in a moment."
        ) from None
    requests, prompt, cached, completion = (
        sum(numbers) for numbers in zip((0, 0, 0, 0), *(used[3:] for used in found), strict=True)
    )
    total: UsageTotal = {
        "requests": requests,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    body: KeyUsage = {
        "object": "usage",
        "key": name,
        "limits": _limits(caller.key) if caller.key and caller.key.name == name else None,
        "total": total,
        "data": [
            {
                "key": used.key,
                "model": used.model,
                "day": used.day,
                "requests": used.requests,
                "prompt_tokens": used.prompt_tokens,
                "cached_tokens": used.cached_tokens,
                "completion_tokens": used.completion_tokens,
            }
            for used in found
        ],
    }
    return json_response(http, body)


def _limits(key: Key) -> KeyLimits:
    return {
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "tokens_per_day": key.tokens_per_day,
        "rows": key.rows,
        "batch_bytes": key.batch_bytes,
    }
