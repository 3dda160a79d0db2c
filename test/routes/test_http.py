"""HTTP as every route speaks it: ids, CORS, wrong paths and methods, passwords, logs."""

import re
from types import SimpleNamespace

import pytest
from fake_engine import INFO
from frontend_process import PASSWORD, FrontendProcess
from native_calls import CHAT, TRANSLATE, V1

from routes.callers.caller import Caller
from routes.http.access import authorized
from routes.http.errors import ApiError
from routes.table import ROUTES, TRANSLATIONS

ENCODED = "pass%20word%20%26%2B%2541"
BEARER = {"authorization": f"Bearer {PASSWORD}"}


@pytest.mark.parametrize("path", ["/v1/models", "/openai/v1/models", "/v1/models/"])
def test_models(server, path):
    listed = server.http.get(path).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], type(model["created"])) == ("fake-rwkv", "model", int)


@pytest.mark.parametrize(
    "send",
    [
        lambda http, h: http.get("/health", headers=h),
        lambda http, h: http.post(V1, json={"contents": ["a"]}, headers=h),
        lambda http, h: http.post(V1, json={"contents": ["a"], "stream": True}, headers=h),
        lambda http, h: http.post(V1, json={}, headers=h),
        lambda http, h: http.post(V1, json={"contents": ["late"]}, headers=h),
        lambda http, h: http.get("/nowhere", headers=h),
        lambda http, h: http.put(V1, headers=h),
        lambda http, h: http.options(V1, headers=h),
    ],
)
def test_every_reply_has_an_id_and_cors(server, send):
    answer = send(server.http, {"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["access-control-allow-methods"] == "GET, POST, PUT, PATCH, DELETE, OPTIONS"
    assert answer.headers["access-control-allow-headers"] == "Content-Type, Authorization"
    assert re.fullmatch("[0-9a-f]{32}", send(server.http, {}).headers["x-request-id"])


@pytest.mark.parametrize("strange", ["x" * 129, "a b", "é".encode()])
def test_a_strange_id_is_replaced(server, strange):
    made = [
        server.http.get("/health", headers={"x-request-id": strange}).headers["x-request-id"]
        for _ in range(2)
    ]
    assert all(re.fullmatch("[0-9a-f]{32}", m) for m in made)
    assert made[0] != made[1]


@pytest.mark.parametrize("path", [V1, CHAT, TRANSLATE, "/health", "/v1/models", "/", "/nowhere/at/all"])
def test_preflight(locked, path):
    answer = locked.http.options(
        path,
        headers={
            "origin": "chrome-extension://amkbmndfnliijdhojkpoglbnaaahippg",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,x-stainless-lang",
            "access-control-request-private-network": "true",
        },
    )
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-max-age"] == "86400"
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert answer.headers["access-control-allow-headers"] == "Content-Type, Authorization, x-stainless-lang"
    assert "access-control-allow-private-network" not in locked.http.options(path).headers


@pytest.mark.parametrize(
    ("method", "path", "status", "openai"),
    [
        ("POST", "/", 405, False),
        ("POST", "/nowhere", 404, False),
        ("POST", "/v1/embeddings", 404, True),
        ("DELETE", "/openai/v1/x", 404, True),
        ("GET", V1, 405, True),
        ("PATCH", CHAT, 405, True),
        ("POST", "/v1/models", 405, True),
        ("PUT", "/health", 405, False),
        ("GET", TRANSLATE, 405, False),
    ],
)
def test_wrong_paths_and_methods_are_json(server, method, path, status, openai):
    answer = server.http.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert path in (error["message"] if openai else error)
    if status == 405:
        assert answer.headers["allow"] == (
            "GET, HEAD, OPTIONS" if path in ("/", "/v1/models", "/health") else "POST, OPTIONS"
        )


def form(error: object) -> object:
    """What an error is made of, no matter what it says."""
    return {name: form(each) for name, each in error.items()} if isinstance(error, dict) else None


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.methods} {route.path}")
def test_every_error_has_the_form_of_its_family(server, locked, route):
    expected = form(route.shape(ApiError(400, "no")))
    path = re.sub(r":\w+", "some", route.path)
    wrong = server.http.request("PUT" if "PATCH" in route.methods else "PATCH", path)
    assert (wrong.status_code, form(wrong.json())) == (405, expected)
    if route.path not in (
        "/",
        "/health",
        "/health/live",
        "/health/ready",
        "/page/:file",
        "/page/vendor/:file",
        "/v1/server/status",
        *TRANSLATIONS,
    ):
        shut = locked.http.request(route.methods.split()[0], path)
        assert (shut.status_code, form(shut.json())) == (401, expected)
    if "POST" in route.methods and route.path not in ("/v1/state/upload", "/v1/state/import"):
        for body in (b"{", b"[]", b"\xff"):
            broken = server.http.post(path, content=body)
            assert 400 <= broken.status_code < 500 and form(broken.json()) == expected


def test_a_batch_of_prompts_has_native_errors_on_the_route_that_it_shares(server):
    for fields in ({"contents": ["Hi"], "max_tokens": -1}, {"contents": []}):
        assert isinstance(server.http.post(V1, json=fields).json()["error"], str)
    for fields in ({}, {"prompt": "Hi"}, {"messages": [], "contents": []}, {"messages": 5}):
        for headers in ({}, BEARER):
            answer = server.http.post(V1, json=fields, headers=headers)
            assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/v1/embeddings", "no embeddings"),
        ("/openai/v1/embeddings", "no embeddings"),
        ("/v1/audio/speech", "text only"),
        ("/v1/responses/compact", "previous_response_id"),
        ("/v1/messages/batches", "at once"),
        ("/v1/embeddings2", "lists the routes"),
    ],
)
def test_a_route_of_another_server_says_what_to_do_instead(server, path, reason):
    answer = server.http.post(path, json={"input": "Hi"})
    assert answer.status_code == 404
    assert path in answer.json()["error"]["message"] and reason in answer.json()["error"]["message"]


OF_OPENAI, OF_ANTHROPIC = {"message", "type", "param", "code"}, {"message", "type"}


@pytest.mark.parametrize(
    ("path", "meant", "form"),
    [
        ("/chat/completions", "/v1/chat/completions", OF_OPENAI),
        ("/v1/v1/messages", "/v1/messages", OF_ANTHROPIC),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions", OF_OPENAI),
        ("/openai/deployments/rwkv7/chat/completions", "/v1/chat/completions", OF_OPENAI),
        ("//v1/models", "/v1/models", OF_OPENAI),
        ("/v1/api/chat", "/api/chat", None),
        ("/token/translate", "/translate", None),
        ("/a/b/c/d/e/f/g/h/i/v1/responses", "/v1/responses", OF_OPENAI),
        ("/v1/v1/embeddings", "no embeddings", OF_OPENAI),
    ],
)
def test_a_client_with_a_wrong_base_url_is_shown_the_route(server, path, meant, form):
    """In the form that the client reads, which is that of the route; None: a sentence."""
    answer = server.http.post(f"{str(server.http.base_url).rstrip('/')}{path}", json={})
    error = answer.json()["error"]
    assert (answer.status_code, set(error) if isinstance(error, dict) else None) == (404, form)
    sentence = error["message"] if isinstance(error, dict) else error
    assert path in sentence and meant in sentence.removeprefix(f"There is no {path} ")


def test_head(server):
    for path in ("/health", "/v1/models"):
        answer = server.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("headers", "query", "body", "passes"),
    [
        (BEARER, "", {}, True),
        ({"authorization": f"Bearer   {PASSWORD}"}, "", {}, True),
        ({}, "", {"password": PASSWORD}, True),
        ({}, f"?password={ENCODED}", {}, True),
        ({}, "?password=pass+word+%26%2B%2541", {}, True),
        ({}, f"?x=1&password=wrong&password={ENCODED}", {}, True),
        ({"authorization": "Bearer wrong"}, "", {"password": PASSWORD}, True),
        ({}, "", {}, False),
        ({"authorization": f"bearer {PASSWORD}"}, "", {}, True),
        ({"authorization": f"BEARER {PASSWORD}"}, "", {}, True),
        ({"authorization": f"Bearers {PASSWORD}"}, "", {}, False),
        ({"authorization": f"Basic {PASSWORD}"}, "", {}, False),
        ({"authorization": PASSWORD}, "", {}, False),
        ({}, "", {"password": PASSWORD + " "}, False),
        ({}, "", {"password": None}, False),
        ({}, "", {"password": [PASSWORD]}, False),
        ({}, "?password=", {}, False),
        ({}, "?password=%FF", {}, False),
    ],
)
@pytest.mark.parametrize(
    ("path", "rest"),
    [
        (V1, {"contents": ["a"]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/FIM/v1/batch-FIM", {"prefix": ["a"], "suffix": ["b"]}),
    ],
)
def test_password(locked, path, rest, headers, query, body, passes):
    answer = locked.http.post(path + query, json=rest | body, headers=headers)
    assert answer.status_code == (200 if passes else 401)
    if not passes:
        error = answer.json()["error"]
        openai = path in (CHAT, "/v1/completions") or (path == V1 and isinstance(error, dict))
        assert (error["message"] if openai else error) == "Unauthorized: invalid or missing password"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"max_tokens":-1}',
        b'{"contents":["\\ud800"],"password":"x"}',
        b"\xff",
    ],
)
def test_the_password_is_judged_before_the_body(locked, body):
    assert locked.http.post(V1, content=body).status_code == 401
    assert locked.http.post(V1, content=body, headers=BEARER).status_code in (400, 413)


def test_passwords_of_any_script():
    def request(header: str | None, *query: str) -> SimpleNamespace:
        headers = {"authorization": header}
        return SimpleNamespace(headers=headers, query={"password": list(query)}, caller=Caller())

    def front(password: str) -> SimpleNamespace:
        return SimpleNamespace(settings=SimpleNamespace(password=password), accounts=None)

    assert authorized(front("пароль 密码"), request(None), {"password": "пароль 密码"})
    assert authorized(front("密码"), request(None, "%E5%AF%86%E7%A0%81"))
    assert not authorized(front("密码"), request("Bearer ??", "%E5"), {"password": "密"})


def test_what_a_password_guards(locked):
    assert locked.http.get("/health").json() == {"status": "ready"}
    assert locked.http.get(f"/health?password={ENCODED}").json() == {"status": "ready", "model": "fake-rwkv"}
    assert locked.http.get("/v1/models").status_code == 401
    assert locked.http.get("/v1/models", headers=BEARER).status_code == 200
    body = {"target_lang": "zh-CN", "text_list": ["Hi"]}
    assert locked.http.post(TRANSLATE, json=body).status_code == 200
    with FrontendProcess(password=PASSWORD, protect_translate=True) as process:
        assert process.http.post(TRANSLATE, json=body).status_code == 401
        assert process.http.post(TRANSLATE + f"?password={ENCODED}", json=body).status_code == 200


def test_logs_hold_one_line_a_request_and_nothing_secret(locked):
    secret = "Xyzzy and plugh"
    for query in (f"?password={ENCODED}", ""):
        locked.http.post(
            V1 + query, json={"contents": [secret], "password": PASSWORD}, headers={"x-request-id": "log-1"}
        )
        locked.http.post(
            V1 + query, json={"contents": [secret], "password": PASSWORD, "stop_tokens": [[secret]]}
        )
    line = r"INFO POST /v1/chat/completions 200 \d+ ms log-1"
    assert locked.logs(lambda text: len(re.findall(line, text)) >= 2)
    log = locked.log.read_text()
    assert len(re.findall(line, log)) == 2
    assert "plugh" not in log and ENCODED not in log and PASSWORD not in log


def test_every_reply_names_the_weights(server):
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/chat/completions", {"contents": ["a"]}), ("/openai/v1/chat/completions", chat)):
        for stream in (False, True):
            reply = server.http.post(path, json=body | {"stream": stream})
            assert reply.headers["x-model-fingerprint"] == INFO.fingerprint
            said = "messages" in body
            assert (f'"system_fingerprint":"{INFO.fingerprint}"' in reply.text) == said
    assert "x-model-fingerprint" in reply.headers["access-control-expose-headers"]
