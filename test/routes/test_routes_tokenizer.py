"""The routes of the vocabulary over HTTP, against an engine for which a byte is a token."""

import itertools
import random
from dataclasses import replace

import msgspec
import pytest
from fake_engine import INFO
from frontend_process import FrontendProcess
from jinja2.sandbox import ImmutableSandboxedEnvironment

from routes.chat.jinja import jinja_template
from rwkv_batch.chat import templates
from rwkv_batch.chat.checkpoints import CHAT_TEMPLATES

G1C = msgspec.structs.replace(INFO, model="big", checkpoint="rwkv7-g1c-7.2b")
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}


@pytest.fixture(scope="module")
def server():
    with FrontendProcess(infos=[INFO, G1C]) as process:
        yield process


def tokenized(server, **body) -> list[int]:
    reply = server.http.post("/tokenize", json=body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] > 0
    return found["tokens"]


def test_a_text_and_back(server):
    assert tokenized(server, prompt="a世") == list("a世".encode())
    assert tokenized(server, prompt="") == []
    assert server.http.post("/detokenize", json={"tokens": list("a世".encode())}).json() == {"prompt": "a世"}
    assert server.http.post("/detokenize", json={"tokens": [65, 200]}).json() == {"prompt": "A\ufffd"}
    whole = server.http.post("/tokenize", json={"prompt": "é!", "return_token_strs": True}).json()
    assert whole["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]


def test_a_chat_is_what_chat_completions_feed(server):
    for model, options in itertools.product(
        ("fake-rwkv", "big"), ({}, {"think_type": "free"}, {"tools": [TOOL]}, {"system": "Be brief."})
    ):
        body = {"model": model, "messages": [HI], **options}
        found = tokenized(server, **body)
        server.http.post("/openai/v1/chat/completions", json=body)
        request = server.engine.requests[-1]
        assert found == [*request.prefix_ids, *request.prompts[0].encode()]
        counted = server.http.post("/v1/tokens/count", json=body)
        assert counted.json() == {"tokens": len(found)}
    open_ended = tokenized(
        server, messages=[HI, HELLO], continue_final_message=True, add_generation_prompt=False
    )
    assert bytes(open_ended).decode().endswith("Assistant: Hello")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_counts(server):
    assert server.http.post("/v1/tokens/count", json={"text": "abc"}).json() == {"tokens": 3}
    assert server.http.post("/v1/tokens/count", json={"contents": ["abc", "de"]}).json() == {"tokens": 5}
    assert server.http.post("/v1/tokens/count", json={"contents": []}).json() == {"tokens": 0}


def test_the_vocabulary_has_one_special_token(server):
    info = server.http.get("/tokenizer_info").json()
    assert tokenized(server, prompt=info["eos_token"]) == [info["eos_token_id"]] == [0]
    assert tokenized(server, prompt=info["eos_token"] + "!") == list(b"<|endoftext|>!")
    assert [
        server.http.get("/tokenizer_info", params={"model": name}).json()["add_bos_token"]
        for name in ("fake-rwkv", "big")
    ] == [True, True]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [HI]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ("/tokenize", {"messages": [HI], "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": [HI], "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": [HI], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [65536]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/v1/tokens/count", {}, "text"),
        ("/v1/tokens/count", {"text": "a", "contents": ["b"]}, "text"),
        ("/v1/tokens/count", {"contents": "b"}, "contents"),
    ],
)
def test_bad_fields_are_named(server, path, body, field):
    reply = server.http.post(path, json=body)
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert reply.status_code == 400 and field in message and message.endswith(".") and "\n" not in message


def test_models_are_chosen_and_passwords_asked_for(server):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        server.http.post(path, json=body | {"model": "big"})
        assert server.engine.commands[-1].to_model == "big"
        assert server.http.post(path, json=body | {"model": "gpt-4"}).status_code == 404
    assert server.http.get("/tokenizer_info", params={"model": "gpt-4"}).status_code == 404
    with FrontendProcess(password="W") as locked:
        for path in ("/tokenize", "/detokenize", "/v1/tokens/count"):
            assert locked.http.post(path, json={"prompt": "a", "tokens": [1], "text": "a"}).status_code == 401
        assert locked.http.get("/tokenizer_info").status_code == 401
        assert locked.http.get("/tokenizer_info", params={"password": "W"}).status_code == 200


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_the_jinja_template_makes_the_servers_own_text(name, keep):
    environment = ImmutableSandboxedEnvironment()  # as clients render those of models
    style = replace(CHAT_TEMPLATES[name], keep_blank_lines=keep)
    template = environment.from_string(jinja_template(style))
    words = ["Hi", "a\n\nb", " c ", "d\r\n\r\n\ne\n", "世界", "", " \n ", "<b>&\"'", "{{ x }}"]
    lines = [
        "",
        "a",
        "```",
        "```py",
        " ```",
        "````",
        "~~~",
        "~~~~ x",
        "``` a`b",
        "User: b",
        "  c",
        "Tool",
        "`",
    ]
    words += ["\n".join(random.Random(seed).choices(lines, k=12)) for seed in range(40)]
    rng = random.Random(7)
    for _ in range(300):
        roles = rng.choices(["system", "developer", "user", "assistant"], k=rng.randint(1, 6))
        messages = [{"role": role, "content": rng.choice(words)} for role in roles]
        parsed = [templates.Message(m["role"], m["content"]) for m in messages]
        own = style.style(templates.ASSISTANT, style.think_type).continuing(parsed)
        head = not templates.continues(parsed)
        wanted = templates.chat(parsed, style=own)
        assert template.render(messages=messages, add_generation_prompt=head) == wanted
