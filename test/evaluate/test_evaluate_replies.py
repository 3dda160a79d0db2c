"""Servers whose replies are not what an evaluation can work with: each is one sentence."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rwkv_batch.evaluate.asks import Ask, EvaluationError
from rwkv_batch.evaluate.mmlu import MultipleChoice, mmlu
from rwkv_batch.evaluate.remote import RemoteModel

PROMPTS = [Ask([1], 1), Ask([2], 1)]
CHOICE = {"index": 0, "text": " A", "finish_reason": "length", "logprobs": None}
LETTER = {"tokens": [" A"], "token_logprobs": [-0.1], "top_logprobs": [None]}


class OtherServer(ThreadingHTTPServer):
    """Answers everything with `reply`, of which it promises `more` bytes than it sends."""

    reply: object = None
    more = 0


class Answering(BaseHTTPRequestHandler):
    server: OtherServer

    def do_GET(self) -> None:
        body = json.dumps(self.server.reply).encode()
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(200)
        self.send_header("content-length", str(len(body) + self.server.more))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def other() -> Iterator[OtherServer]:
    with OtherServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url(server: OtherServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("reply", [{}, [], {"data": []}, {"data": [{}]}, {"data": None}, 5])
def test_models_in_another_form(other: OtherServer, reply: object):
    other.reply = reply
    with pytest.raises(EvaluationError, match=r"not understood .*\.$"):
        RemoteModel(url(other))


@pytest.mark.parametrize(
    "reply", [{}, [], {"choices": [CHOICE]}, {"choices": [CHOICE, CHOICE]}, {"choices": [5]}]
)
def test_answers_in_another_form(other: OtherServer, reply: object):
    other.reply = reply
    with pytest.raises(EvaluationError, match=r"not understood .*\.$"):
        list(RemoteModel(url(other), model="m").answers(PROMPTS))


def test_a_reply_that_is_cut_off(other: OtherServer):
    other.reply, other.more = {"choices": []}, 5
    with pytest.raises(EvaluationError, match="does not answer"):
        list(RemoteModel(url(other), model="m").answers(PROMPTS))


@pytest.mark.parametrize("error", ["It broke.", {"message": "It broke.", "type": "server_error"}])
def test_a_choice_that_failed_while_others_were_answered(other: OtherServer, error: object):
    other.reply = {"choices": [CHOICE, CHOICE | {"index": 1, "finish_reason": "error", "error": error}]}
    with pytest.raises(EvaluationError, match=r"A text failed: It broke\."):
        list(RemoteModel(url(other), model="m").answers(PROMPTS))


@pytest.mark.parametrize("text", ["", " AB", " the"])
def test_a_choice_that_is_no_letter_is_not_counted(other: OtherServer, text: str):
    other.reply = {"choices": [CHOICE | {"text": text, "logprobs": LETTER}]}
    with pytest.raises(EvaluationError, match="logit_bias has no effect"):
        mmlu(RemoteModel(url(other), model="m"), [MultipleChoice("?", ["x", "y"], 0)])
    other.reply = {"choices": [CHOICE | {"logprobs": LETTER}]}
    found = mmlu(RemoteModel(url(other), model="m"), [MultipleChoice("?", ["x", "y"], 0)])
    assert found.summary["accuracy"] == 1
