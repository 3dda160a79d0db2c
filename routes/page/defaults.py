"""How answers are drawn where the page's options say nothing: it shows that in its fields."""

from robyn import Response
from typing_extensions import TypedDict

from routes.http.access import demand_access
from routes.http.errors import Json
from routes.http.exchange import HttpRequest, json_response
from routes.http.frontend import Frontend
from routes.http.model_field import read_model, with_defaults
from routes.http.start_states import choose_state
from routes.openai.chat import prepare
from rwkv_batch.chat.checkpoints import settings_for

QUESTION: Json = {"messages": [{"role": "user", "content": "?"}]}


class PageDefaults(TypedDict):
    """By the names of the fields of /v1/chat/completions."""

    temperature: float
    top_p: float
    top_k: int
    alpha_presence: float
    alpha_frequency: float
    alpha_decay: float
    max_tokens: int
    stop: list[str]


async def defaults(front: Frontend, http: HttpRequest) -> Response:
    """GET /page/defaults.json: those of the model that the URL names. Raises ApiError."""
    demand_access(front, http)
    fields = QUESTION | {"model": http.parameter("model")}
    named = await read_model(front, http, fields)
    if state := await choose_state(front, http, fields, named):
        fields = state.with_defaults(fields, is_chat=True)
    fields = with_defaults(named.model, fields)
    request = prepare(fields, named.model.model, settings_for(named.model, front.settings)).request
    sampling, stop = request.sampling, fields.get("stop") or []
    found: PageDefaults = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "alpha_presence": sampling.alpha_presence,
        "alpha_frequency": sampling.alpha_frequency,
        "alpha_decay": sampling.alpha_decay,
        "max_tokens": request.max_tokens,
        "stop": [stop] if isinstance(stop, str) else list(stop),
    }
    return json_response(http, found)
