"""Ollama's routes over HTTP with its official client, against an engine that echoes prompts."""

import json
import time

import ollama
import pytest
from fake_engine import INFO
from frontend_process import PASSWORD, FrontendProcess
from msgspec import structs

from routes.http.errors import ApiError
from routes.ollama import prepare
from routes.ollama.template import go_template
from rwkv_batch import __version__
from rwkv_batch.chat.checkpoints import CHAT_TEMPLATES
from rwkv_batch.chat.templates import ASSISTANT
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import AdapterInfo, RowDelta, TokenLogprob

BEARER = {"authorization": f"Bearer {PASSWORD}"}
HI = [{"role": "user", "content": "Hi"}]
HEAD = "Assistant: <think>\n</think>\n"
ECHO = f"User: Hi\n\n{HEAD}"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


def client_of(front: FrontendProcess, headers: dict[str, str]) -> ollama.Client:
    return ollama.Client(host=f"http://127.0.0.1:{front.port}", headers=headers)


@pytest.fixture(scope="module")
def client(front: FrontendProcess) -> ollama.Client:
    return client_of(front, BEARER)


def chat(**fields):
    return prepare.chat({"messages": HI, **fields}, "m", FrontendConfig(chat_template="g1"))


def text(**fields):
    return prepare.text({"prompt": "Hi", **fields}, "m", FrontendConfig(chat_template="g1"))


def test_a_stream_has_the_characters_that_end_lines_in_unicode(client: ollama.Client):
    said = "one\u2028two\u2029three\x85four\x0bfive"
    parts = client.chat(model="rwkv7", messages=[{"role": "user", "content": said}], stream=True)
    assert "".join(part.message.content for part in parts) == ECHO.replace("Hi", said)


@pytest.mark.parametrize("name", ["fake-rwkv", "fake-rwkv:latest", "rwkv7"])
def test_a_chat_is_answered_whole_and_in_lines(client: ollama.Client, name: str):
    whole = client.chat(model=name, messages=HI)
    assert (whole.message.role, whole.message.content) == ("assistant", ECHO)
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "stop", len(ECHO))
    assert whole.prompt_eval_count == len(ECHO)
    parts = list(client.chat(model=name, messages=HI, stream=True))
    assert "".join(part.message.content for part in parts) == ECHO
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", len(ECHO))


def test_a_prompt_is_a_chat_unless_it_is_raw_or_has_a_suffix(client: ollama.Client):
    def said(**fields) -> str:
        return client.generate(model="rwkv7", **fields).response

    assert said(prompt="Hi") == ECHO
    assert text(system="Be brief.").request.prompts == [f"System: Be brief.\n\n{ECHO}"]
    assert said(prompt="Hi", raw=True) == "Hi"
    assert said(prompt="a = ", suffix="\nb") == "✿prefix✿✿suffix✿\nb✿middle✿a = "
    parts = client.generate(model="rwkv7", prompt="Hi", raw=True, stream=True)
    assert "".join(part.response for part in parts) == "Hi"


def test_it_streams_unless_told_otherwise(front: FrontendProcess):
    body = {"model": "rwkv7", "messages": HI}
    streamed = front.http.post("/api/chat", json=body, headers=BEARER)
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == ECHO and lines[-1]["done"] is True
    whole = front.http.post("/api/chat", json=body | {"stream": False}, headers=BEARER)
    assert whole.headers["content-type"].startswith("application/json")
    assert whole.json()["message"]["content"] == ECHO


def test_a_stream_that_waits_stays_json(client: ollama.Client):
    """The engine is silent for longer than a stream is."""
    parts = list(client.chat(model="rwkv7", messages=[{"role": "user", "content": "!late"}], stream=True))
    assert "".join(part.message.content for part in parts).startswith("late") and parts[-1].done


def test_durations_are_those_of_the_clock(front: FrontendProcess, client: ollama.Client):
    began = time.monotonic()
    parts = client.chat(model="rwkv7", messages=[{"role": "user", "content": "!half"}], stream=True)
    assert next(parts).message.content
    first = time.monotonic()
    time.sleep(0.1)  # which is measured
    last = time.monotonic()
    front.engine.release()
    *_, reply = parts
    elapsed = (time.monotonic() - began) * 1e9
    assert reply.eval_duration >= (last - first) * 1e9
    assert reply.prompt_eval_duration > 0
    assert abs(reply.prompt_eval_duration + reply.eval_duration - reply.total_duration) <= 2
    assert reply.total_duration <= elapsed


@pytest.mark.parametrize("ask", ["chat", "generate"])
def test_nothing_to_generate_loads_the_model(front: FrontendProcess, client: ollama.Client, ask: str):
    before = len(front.engine.requests)
    reply = getattr(client, ask)(model="fake-rwkv", keep_alive="5m")
    assert (reply.done, reply.done_reason) == (True, "load")
    assert len(front.engine.requests) == before


def test_what_is_served_is_listed_and_shown(front: FrontendProcess, client: ollama.Client):
    model, label = client.list().models
    assert (model.model, model.digest) == (INFO.model, INFO.fingerprint)
    assert (label.model, label.digest) == ("rwkv7", INFO.fingerprint)
    shown = client.show(f"{INFO.model}:latest")
    assert shown.details == model.details == client.show("rwkv7").details
    assert shown.modelinfo["rwkv.block_count"] == INFO.layers
    assert {"completion", "tools", "insert", "thinking"} <= set(shown.capabilities)
    older = front.http.post("/api/show", json={"name": INFO.model}, headers=BEARER)
    assert older.json()["details"]["family"] == "rwkv"
    assert front.http.post("/api/show", json={}, headers=BEARER).status_code == 400


def test_every_name_that_works_is_listed():
    adapter = AdapterInfo("capitals", "5eed" * 8, 4, 1.0, "capitals.pth")
    with FrontendProcess() as process:
        assert process.engine
        process.engine.adapters[adapter.name] = adapter
        there = client_of(process, {})
        names = [each.model for each in there.list().models]
        assert names == [INFO.model, f"{INFO.model}:capitals", "rwkv7", "capitals"]
        for name in names:
            assert there.chat(model=name, messages=HI).done
            assert process.http.get(f"/v1/models/{name}").status_code == 200
        assert [each.model for each in there.ps().models] == [INFO.model]


def test_clients_find_what_they_look_for_in_a_model(front: FrontendProcess, client: ollama.Client):
    """That it is loaded and stays, uses tools, takes a text of any length, and a version they know."""
    (loaded,) = client.ps().models
    assert loaded.model == INFO.model and loaded.expires_at and loaded.expires_at.year == 9999
    assert (loaded.size_vram, loaded.context_length) == (0, 2**31 - 1)
    shown = client.show("rwkv7")
    assert shown.modelinfo["rwkv.context_length"] == loaded.context_length
    for part in ("{{ .Tools }}", "{{ .Suffix }}", "{{ .System }}", "User: ", "<tool_call>"):
        assert part in shown.template
    version = front.http.get("/api/version", headers=BEARER).json()
    assert version["rwkv_batch"] == __version__
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4)  # which editors ask for


def test_on_a_gpu_a_model_takes_its_memory():
    with FrontendProcess(infos=[structs.replace(INFO, device="cuda:0", weight_bytes=5)]) as process:
        (loaded,) = client_of(process, {}).ps().models
        assert (loaded.size, loaded.size_vram) == (5, 5)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_the_template_is_that_of_the_checkpoint(name: str):
    chosen = CHAT_TEMPLATES[name]
    text = go_template(chosen)
    assert text.count("{{ if ") + text.count("{{ range ") == text.count("{{ end }}")
    assert chosen.tools.before in text
    empty = chosen.style(ASSISTANT, chosen.think_type).thought
    assert text.endswith(f"<think{{{{ else }}}}{empty}{{{{ end }}}}{{{{ end }}}}")


def test_embeddings_are_refused_by_name(client: ollama.Client):
    for call in (client.embed, client.embeddings):
        with pytest.raises(
            ollama.ResponseError, match=r"no /api/embed(dings)? here: models that write"
        ) as refused:
            call("rwkv7", "Hi")
        assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="/loadmodel"):
        client.pull("rwkv7")


def test_errors_have_ollamas_form(front: FrontendProcess, client: ollama.Client):
    def refused(call, *args, **fields) -> tuple[int, str]:
        with pytest.raises(ollama.ResponseError) as error:
            call(*args, **fields)
        return error.value.status_code, error.value.error

    assert refused(client_of(front, {}).list)[0] == 401
    assert refused(client.chat, model="other", messages=HI)[0] == 404
    assert refused(client.show, "other")[0] == 404
    status, sentence = refused(client.chat, model="rwkv7", messages=HI, options={"temperature": 9})
    assert status == 400 and sentence.startswith("`options.temperature`: ")
    for word, expected in [("overloaded", 429), ("unavailable", 503), ("invalid", 400), ("fail", 500)]:
        messages = [{"role": "user", "content": f"!{word}"}]
        status, sentence = refused(client.chat, model="rwkv7", messages=messages)
        assert status == expected and "The fake engine" in sentence
    broken = client.chat(model="rwkv7", messages=[{"role": "user", "content": "!broken"}], stream=True)
    assert "The fake engine broke down." in refused(list, broken)[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(front: FrontendProcess, stream: bool):
    body = {"messages": [{"role": "user", "content": "!hang"}], "stream": stream}
    with front.client() as http, http.stream("POST", "/api/chat", json=body, headers=BEARER) as reply:
        assert reply.status_code == 200
    request = front.engine.requests[-1]
    assert front.engine.wait_for(lambda: request.id in front.engine.cancelled, 30)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_thoughts_and_calls_have_fields_of_their_own(size: int):
    said = f">Hm.</think>\nLook: {CALL}"
    pieces = [said[i : i + size] for i in range(0, len(said), size)]
    request, _, reply = chat(think=True, tools=[TOOL])
    lines = [line for piece in pieces for line in reply.events([RowDelta(0, piece, 1)])]
    lines += reply.events([RowDelta(0, "", 0, "stop")])
    lines += reply.last(Job(request, lambda _: None))
    messages = [line["message"] for line in lines]
    assert "".join(m.get("thinking", "") for m in messages) == "Hm."
    assert "".join(m["content"] for m in messages) == "Look:"
    calls = [call for m in messages for call in m.get("tool_calls", [])]
    assert calls == [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]
    whole = chat(think=True, tools=[TOOL]).reply.whole(
        Job(request, lambda _: None), [RowDelta(0, said, 9, "stop")]
    )
    assert whole["message"] == {
        "role": "assistant",
        "content": "Look:",
        "thinking": "Hm.",
        "tool_calls": calls,
    }


def test_logprobs_come_with_their_tokens():
    token = TokenLogprob(b"Hi", -0.5, [(b"Hi", -0.5)])
    request, _, reply = text(logprobs=True, top_logprobs=1)
    assert request.top_logprobs == 1
    (line,) = reply.events([RowDelta(0, "Hi", 1, None, [token])])
    checked = ollama.GenerateResponse.model_validate(line)
    assert (checked.logprobs[0].token, checked.logprobs[0].top_logprobs[0].logprob) == ("Hi", -0.5)
    assert text().request.top_logprobs is None


def test_options_are_those_of_the_engine():
    options = {"temperature": 0.1, "top_k": 3, "top_p": 0.2, "seed": 7, "num_predict": 9, "stop": ["x"]}
    request = text(raw=True, options=options | {"num_ctx": 4096, "repeat_penalty": 1.0}).request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.1, 3, 0.2, 7)
    assert (request.max_tokens, request.stop_strings) == (9, ["x"])
    endless = text(options={"num_predict": -1, "seed": -1}).request
    assert endless.max_tokens == 2**31 - 1 and endless.sampling.seed is None
    cut = text(options={"repeat_penalty": 1.1, "min_p": 0.05}).request.sampling
    assert (cut.repetition_penalty, cut.min_p) == (1.1, 0.05)
    penalties = chat(options={"presence_penalty": 0.5, "frequency_penalty": 0.25}).request.sampling
    assert (penalties.presence_penalty, penalties.frequency_penalty) == (0.5, 0.25)
    assert penalties.alpha_presence == 0


@pytest.mark.parametrize("name", ["num_predict", "max_tokens", "n_predict"])
def test_the_limit_of_a_text_has_several_names_among_the_options(name):
    assert text(options={name: 7}).request.max_tokens == 7
    assert text(options={name: 7, "num_predict": 7}).request.max_tokens == 7


def test_fields_of_other_protocols_count_among_the_options():
    fields = {"top_a": 0.1, "alpha_presence": 0.5, "alpha_frequency": 0.25, "alpha_decay": 0.9}
    more = {"repetition_penalty": 1.2, "logit_bias": {"7": 2}, "stop_tokens": [3], "ignore_eos": True}
    request = text(options=fields | more).request
    assert request == structs.replace(text(**fields, **more).request, id=request.id)
    assert (request.sampling.top_a, request.sampling.logit_bias, request.stop_ids) == (0.1, {7: 2}, [3])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_predict": 3, "max_tokens": 4}, "max_tokens"),
        ({"max_tokens": 3, "n_predict": 4}, "n_predict"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repetition_penalty"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"logit_bias": {"65530": 1}}, "logit_bias"),
    ],
)
def test_options_that_contradict_or_are_wrong_are_named(options, name):
    with pytest.raises(ApiError, match=rf"^`options\.{name}`: "):
        text(options=options)


def test_the_prompt_of_a_chat_is_that_of_the_openai_route():
    called = {"function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [called], "thinking": "Hm."},
        {"role": "tool", "content": "sunny", "tool_name": "get_weather"},
    ]
    (prompt,) = chat(messages=messages).request.prompts
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'
    turns = f"System: Be brief.\n\nUser: Weather?\n\nAssistant: {call}\n\nTool: sunny\n\n{HEAD}"
    assert prompt == turns
    (thinking,) = chat(think="high").request.prompts
    assert thinking == "User: Hi\n\nAssistant: <think"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": [{"role": "user", "content": " "}]}, "`messages`: "),
        ({"messages": [{"role": "bot", "content": "x"}]}, "`messages[0].role`: "),
        ({"messages": [{"role": "user", "images": ["aGk="]}]}, "`messages[0].images`: "),
        ({"tools": [{"type": "function", "function": {}}]}, "`tools[0].function.name`: "),
        ({"format": "xml"}, "`format`: must be "),
        ({"format": ["json"]}, "`format`: must be "),
        ({"format": "json", "guided_regex": "a"}, "`format`: guided_regex says"),
        ({"format": "json", "ignore_eos": True}, "`ignore_eos`: "),
        ({"return_token_ids": True}, "`return_token_ids`: "),
        ({"think": "hard"}, "`think`: "),
        ({"options": 5}, "`options`: "),
        ({"options": {"typical_p": 0.1}}, "`options.typical_p`: "),
        ({"options": {"repeat_penalty": 0}}, "`options.repeat_penalty`: "),
        ({"options": {"mirostat": 2}}, "`options.mirostat`: "),
        ({"options": {"dry_multiplier": 0.8}}, "`options.dry_multiplier`: "),
        ({"options": {"num_predict": -3}}, "`options.num_predict`: "),
        ({"n": 2}, "`n`: "),
        ({"response_format": {"type": "json_object"}}, "`response_format`: "),
        ({"session_id": "s"}, "`session_id`: "),
        ({"reasoning_effort": "high"}, "`reasoning_effort`: "),
        ({"top_logprobs": 2}, "`top_logprobs`: "),
        ({"system": "Be brief."}, "`system`: "),
        ({"tool_choice": "required"}, "`tool_choice`: "),
        ({"num_predict": 4}, "`num_predict`: "),
    ],
)
def test_what_cannot_be_honoured_is_named(fields, sentence):
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert refused.value.status == 400 and refused.value.message.startswith(sentence)


@pytest.mark.parametrize("place", [{"raw": True}, {"suffix": "x"}])
@pytest.mark.parametrize(
    "fields",
    [
        {"system": "Be brief."},
        {"think": True},
        {"think": "high"},
        {"think_type": "fast"},
        {"chat_template_kwargs": {"rwkv_prompt_template": "bot"}},
    ],
)
def test_what_only_a_chat_has_is_refused_of_other_prompts(fields, place):
    (name,) = fields
    with pytest.raises(ApiError, match=rf"^`{name}`: a prompt that is raw"):
        text(**fields, **place)
    assert text(**place, system="", think=False).request.prompts


def test_a_prompt_of_white_space_is_refused():
    with pytest.raises(ApiError, match=r"^`prompt`: must hold a text"):
        text(prompt=" \n")
    assert text(prompt=" ", raw=True).request.prompts == [" "]


@pytest.mark.parametrize("strict", [False, True])
def test_the_schema_of_a_strict_tool_binds_its_calls(strict):
    function = {"name": "weather", "parameters": {"type": "object"}, "strict": strict}
    bound = chat(tools=[{"type": "function", "function": function}]).request.grammar
    assert (bound is not None) == strict


@pytest.mark.parametrize("field", ["images", "template", "context", "messages", "tools"])
def test_a_field_of_a_prompt_that_cannot_be_honoured_is_named(field):
    assert text(**{field: None}) and text(**{field: ""})
    with pytest.raises(ApiError, match=f"^`{field}`: "):
        text(**{field: ["x"]})
