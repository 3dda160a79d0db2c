"""GET /v1/models and /v1/models/{id} for Anthropic's clients, which send the version of their protocol."""

from typing import Annotated

from pydantic import Field
from robyn import Response

from routes.anthropic.shapes import AnthropicModel, AnthropicModels
from routes.http.errors import anthropic_shape, openai_field
from routes.http.exchange import HttpRequest, HttpResponse, json_response
from routes.http.frontend import Frontend
from routes.http.replies import timestamp
from routes.http.route import Handler
from routes.http.schemas import RequestBody
from routes.http.served import Served, list_served, served_in_path

VERSION = "anthropic-version"


class ModelsQuery(RequestBody):
    """The URL parameters of GET /v1/models."""

    field_error = staticmethod(openai_field)

    limit: Annotated[int, Field(ge=1, le=1000)] = 20
    after_id: str = ""
    before_id: str = ""


def for_anthropic(theirs: Handler, others: Handler) -> Handler:
    """The handler of a path that clients of OpenAI ask for too, which `others` answers."""

    async def handler(front: Frontend, http: HttpRequest) -> HttpResponse:
        if not http.headers.get(VERSION):
            return await others(front, http)
        http.shape = anthropic_shape
        return await theirs(front, http)

    return handler


async def models(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/models: a page of what is served. Raises ApiError."""
    listed = await list_served(front, http)
    given = {name: value for name in ModelsQuery.model_fields if (value := http.parameter(name))}
    query = ModelsQuery.from_json(given)
    names = [each.name for each in listed]
    for field, name in (("after_id", query.after_id), ("before_id", query.before_id)):
        if name and name not in names:
            raise openai_field(field, "input should be the id of one of the models")
    first = names.index(query.after_id) + 1 if query.after_id else 0
    end = names.index(query.before_id) if query.before_id else len(names)
    inside = listed[first:end]
    backwards = query.before_id and not query.after_id
    page = inside[-query.limit :] if backwards else inside[: query.limit]
    found: AnthropicModels = {
        "data": [_model(each) for each in page],
        "has_more": len(page) < len(inside),
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }
    return json_response(http, found)


async def model(front: Frontend, http: HttpRequest) -> Response:
    """GET /v1/models/{id}. Raises ApiError."""
    return json_response(http, _model(await served_in_path(front, http)))


def _model(each: Served) -> AnthropicModel:
    return {
        "type": "model",
        "id": each.name,
        "display_name": each.name,
        "created_at": timestamp(each.created),
        "lifecycle": "active",
    }
