"""What the two OpenAI routes have in common: from body to engine request, and the parts of replies."""

import codecs
import time
from collections.abc import Sequence
from uuid import uuid4

from routes.http.errors import openai_error
from routes.http.replies import RowResult
from routes.openai.schemas import MAX_ROWS, OpenAIBody, bad
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, Sampling, SessionTurn, TokenLogprob

END_OF_TEXT = 0
LEAST_LOGPROB = -9999.0  # OpenAI's number for "very unlikely"; JSON has no infinity
NOT_HERE = {
    "store": "completions are not stored here; leave it out or send false",
}


def engine_request(
    body: OpenAIBody,
    prompts: list[str | list[int]],
    max_tokens: int,
    default_stops: Sequence[str],
    alphas: tuple[float, float],
    top_logprobs: int | None,
    turn: SessionTurn | None = None,
) -> GenerateRequest:
    """`alphas`: the route's presence and frequency, which hold unless the client sends a penalty of OpenAI's.

    Stops: id 0 and `default_stops`, or `stop_tokens` in their place; `stop` adds to either.
    """
    if len(prompts) * body.n > MAX_ROWS:
        raise bad("n", f"prompts times n should be at most {MAX_ROWS}")
    presence, frequency = (
        alphas if body.presence_penalty is None and body.frequency_penalty is None else (0.0, 0.0)
    )
    stops = [END_OF_TEXT, *default_stops] if body.stop_tokens is None else body.stop_tokens
    ids = [s for s in stops if isinstance(s, int) and not (body.ignore_eos and s == END_OF_TEXT)]
    return GenerateRequest(
        id=uuid4().hex,
        prompts=prompts,
        max_tokens=max_tokens,
        sampling=Sampling(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            alpha_presence=presence if body.alpha_presence is None else body.alpha_presence,
            alpha_frequency=frequency if body.alpha_frequency is None else body.alpha_frequency,
            alpha_decay=body.alpha_decay,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=body.logit_bias,
            seed=None if body.seed is None else body.seed % 2**63,  # the engine's seeds are not negative
        ),
        n=body.n,
        stop_ids=ids,
        stop_strings=[s for s in stops if isinstance(s, str)] + body.stop,
        flush_tokens=max(body.chunk_size, 1) if body.stream else 0,
        top_logprobs=top_logprobs,
        prefix_cache=body.use_prefix_cache,
        turn=turn,
    )


def wants_usage(body: OpenAIBody) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


class OpenAIReply:
    """The frame of every reply: one id and time for all its events, usage, errors."""

    def __init__(self, prefix: str, kind: str, stream_kind: str, model_id: str, include_usage: bool) -> None:
        self._whole = {
            "id": prefix + uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": model_id,
        }
        self._event = {**self._whole, "object": stream_kind}
        self._include_usage = include_usage
        self._completion_tokens = 0

    def body(self, job: Job, rows: list[RowResult], choices: list[dict]) -> dict:
        return {**self._whole, "choices": choices, "usage": _usage(job, sum(r.tokens for r in rows))}

    def event(self, choice: dict) -> dict:
        event = {**self._event, "choices": [choice]}
        return {**event, "usage": None} if self._include_usage else event

    def count(self, deltas: list[RowDelta]) -> None:
        self._completion_tokens += sum(d.tokens for d in deltas)

    def last(self, job: Job) -> list[dict]:
        """The usage, if the client asked for it."""
        return (
            [{**self._event, "choices": [], "usage": _usage(job, self._completion_tokens)}]
            if self._include_usage
            else []
        )

    def error(self, message: str, status: int) -> dict:
        return openai_error(message, status)


def _usage(job: Job, completion: int) -> dict:
    prompt = sum(job.prompt_tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(job.cached_tokens)},
    }


def chat_logprobs(tokens: list[TokenLogprob]) -> dict:
    """The `logprobs` of a chat choice."""
    content = [
        _chat_token(t.token, t.logprob) | {"top_logprobs": [_chat_token(*top) for top in t.top]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: bytes, logprob: float) -> dict:
    return {
        "token": token.decode(errors="replace"),
        "bytes": list(token),
        "logprob": max(logprob, LEAST_LOGPROB),
    }


class LegacyLogprobs:
    """The `logprobs` of a completion's row, piece by piece: offsets go on where the last piece ended.

    `top` is how many alternatives were asked for; the drawn token always stands among them.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0  # characters of the row's text before the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, tokens: list[TokenLogprob]) -> dict:
        offsets = []
        for t in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(t.token))
        return {
            "tokens": [_legacy_token(t.token) for t in tokens],
            "token_logprobs": [max(t.logprob, LEAST_LOGPROB) for t in tokens],
            "top_logprobs": [_legacy_top(t) for t in tokens] if self._top else None,
            "text_offset": offsets,
        }


def _legacy_top(drawn: TokenLogprob) -> dict[str, float]:
    return {
        _legacy_token(token): max(logprob, LEAST_LOGPROB)
        for token, logprob in [*drawn.top, (drawn.token, drawn.logprob)]
    }


def _legacy_token(token: bytes) -> str:
    """Part of a character has no text of its own: it is written `bytes:\\xe4\\xbd`, as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
