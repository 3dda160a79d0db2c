"""A model behind a URL: any server of OpenAI's completions that takes token ids and echoes logprobs."""

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from msgspec.structs import asdict

from rwkv_batch.evaluate.asks import Ask, EvaluationError, ModelAnswer
from rwkv_batch.text.tokenizer import END_OF_TEXT
from rwkv_batch.wire.protocol import TokenLogprob

MOST_TOP = 5  # OpenAI's limit
PROMPTS = 32  # of a request
LONG = 8192  # tokens of prompts, from which on a request takes no more
SAMPLING = ("temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty", "seed")
NOT_UNDERSTOOD = (KeyError, TypeError, ValueError, IndexError, AttributeError)  # of another form than ours
WITHIN = 3600.0  # seconds: a reply comes when all of its prompts are read

Json = dict[str, Any]


class RemoteModel:
    """Sends several requests at a time, each with as many prompts as can be asked for alike."""

    most_top = MOST_TOP

    def __init__(self, url: str, password: str | None = None, model: str = "", concurrency: int = 8) -> None:
        """url: with or without /v1. model: ""; the server's default. Raises EvaluationError."""
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if password is not None:
            self._headers["Authorization"] = f"Bearer {password}"
        self._model = model or self._first_model()
        self._concurrency, self._fingerprint = concurrency, ""

    @property
    def name(self) -> str:
        """The fingerprint is known once something was answered."""
        made_by = f" ({self._fingerprint})" if self._fingerprint else ""
        return f"{self._model}{made_by} at {self._base}"

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, ModelAnswer]]:
        with ThreadPoolExecutor(self._concurrency) as pool:
            calls: dict[Future[Json], list[int]] = {
                pool.submit(self._call, "/completions", self._body([asks[i] for i in places])): places
                for places in _alike(asks)
            }
            try:
                for call in as_completed(calls):
                    reply, places = call.result(), calls[call]
                    self._fingerprint = reply.get("system_fingerprint") or ""
                    choices = {choice["index"]: choice for choice in reply["choices"]}
                    for number, place in enumerate(places):
                        yield place, _answer(choices[number], asks[place])
            except NOT_UNDERSTOOD as error:
                raise self._not_understood(error) from error
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _first_model(self) -> str:
        reply = self._call("/models")
        try:
            return str(reply["data"][0]["id"])
        except NOT_UNDERSTOOD as error:
            raise self._not_understood(error) from error

    def _not_understood(self, error: Exception) -> EvaluationError:
        why = f"{error!r}"[:80]
        return EvaluationError(f"{self._base} answers in a form that is not understood ({why}).")

    def _body(self, asks: list[Ask]) -> Json:
        first = asks[0]
        sampling = {name: value for name, value in asdict(first.sampling).items() if name in SAMPLING}
        body: Json = {
            "model": self._model,
            "prompt": [ask.prompt for ask in asks],
            "max_tokens": first.max_tokens,
            "return_token_ids": True,
            "ignore_eos": END_OF_TEXT not in first.stop_ids,
            "stop_tokens": list(first.stop_ids),
            **{name: value for name, value in sampling.items() if value is not None},
        }
        if first.stops:
            body["stop"] = list(first.stops)
        if first.sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in first.sampling.logit_bias.items()}
        if first.score_from is not None:
            body |= {"echo": True, "logprobs": max(first.top or 0, 1)}
        elif first.top is not None:
            body["logprobs"] = first.top
        return body

    def _call(self, path: str, body: Json | None = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self._base + path, data, self._headers), timeout=WITHIN) as reply:
                found: Json = json.load(reply)
        except HTTPError as error:
            why = _reason(error.read())
            raise EvaluationError(f"{self._base}{path} answered {error.code}: {why}") from error
        except (URLError, OSError, HTTPException, ValueError) as error:  # cut off, or no HTTP or JSON at all
            reason = getattr(error, "reason", error)
            raise EvaluationError(f"{self._base}{path} does not answer: {reason}.") from error
        if isinstance(found, dict) and "error" in found:  # of a reply that had begun when it failed
            raise EvaluationError(f"{self._base}{path} failed: {_reason(json.dumps(found).encode())}")
        return found


def _reason(body: bytes) -> str:
    """The sentence in the body of an error, or the beginning of the body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return " ".join(body.decode(errors="replace").split())[:200]


def _alike(asks: Sequence[Ask]) -> Iterator[list[int]]:
    """The places of asks that one request can hold, as they differ in their prompts only."""
    groups: dict[str, list[int]] = {}
    tokens: dict[str, int] = {}
    for place, ask in enumerate(asks):
        what = (ask.max_tokens, ask.sampling, ask.stop_ids, ask.stops, ask.top, ask.score_from is None)
        # With a seed it depends on the place in a request what is drawn.
        key = repr(what if ask.sampling.seed is None else (*what, place))
        group = groups.setdefault(key, [])
        group.append(place)
        tokens[key] = tokens.get(key, 0) + len(ask.prompt)
        if len(group) == PROMPTS or tokens[key] >= LONG:
            yield groups.pop(key)
            del tokens[key]
    yield from groups.values()


def _answer(choice: Json, ask: Ask) -> ModelAnswer:
    if choice.get("error"):  # of this text, while others went on
        raise EvaluationError(f"A text failed: {_reason(json.dumps(choice).encode())}")
    entries = _entries(choice["logprobs"]) if choice.get("logprobs") else []
    text, scored = choice["text"], list[TokenLogprob]()
    if ask.score_from is not None:
        scored, entries = entries[ask.score_from : len(ask.prompt)], entries[len(ask.prompt) :]
        if len(scored) != len(ask.prompt) - ask.score_from:
            raise ValueError("logprobs of the prompt are missing")
        text = "".join(entry.token.decode(errors="replace") for entry in entries)
    return ModelAnswer(text, choice.get("token_ids") or [], choice["finish_reason"], entries, scored)


def _entries(given: Json) -> list[TokenLogprob]:
    tops = given["top_logprobs"] or [None] * len(given["tokens"])
    columns = zip(given["tokens"], given["token_logprobs"], tops, strict=True)
    return [
        TokenLogprob(_bytes(token), logprob if logprob is not None else 0.0, _likeliest_first(top or {}))
        for token, logprob, top in columns
    ]


def _likeliest_first(top: dict[str, float]) -> list[tuple[bytes, float]]:
    """Of equally likely ones in the server's own order."""
    return [(_bytes(token), logprob) for token, logprob in sorted(top.items(), key=lambda item: -item[1])]


def _bytes(token: str) -> bytes:
    """Parts of characters are written `bytes:\\xe4\\xbd`."""
    if re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", token):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()
