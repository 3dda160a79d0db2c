"""POST /v1/completions: raw prompts, or with `suffix` the text between them and the suffix."""

import codecs

from routes.chat.templates import fill_in_the_middle
from routes.http.errors import Json, openai_field
from routes.http.generate import Prepared
from routes.http.schemas import END_OF_TEXT, Prompts
from routes.openai.reply import LEAST_LOGPROB, OpenAIReply
from routes.openai.schemas import CompletionBody
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta, TokenLogprob

DEFAULT_MAX_TOKENS = 16


def prepare(body: Json, model_id: str) -> Prepared:
    """Raises ApiError 400 for what cannot be served."""
    completion = CompletionBody.from_json(body)
    if completion.best_of not in (None, completion.n):
        raise openai_field("best_of", "input should be equal to n; completions are not ranked here")
    if completion.echo and completion.logprobs is not None:
        raise openai_field("echo", "the prompt has no logprobs here; send echo or logprobs, not both")
    texts = [p for p in completion.prompt if isinstance(p, str)]  # all or none
    for field in ("echo", "suffix"):
        if getattr(completion, field) and not texts:
            raise openai_field(field, "this is only allowed when the prompt is text")
    # where there is no text, a document begins
    prompts: Prompts = [p or [END_OF_TEXT] for p in completion.prompt]
    if completion.suffix:
        prompts = [fill_in_the_middle(text, completion.suffix) for text in texts]
    max_tokens = DEFAULT_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens
    request = completion.request(
        prompts, max_tokens, top_logprobs=completion.logprobs, grammar=completion.grammar()
    )
    echoes = [
        p if completion.echo and isinstance(p, str) else ""
        for p in completion.prompt
        for _ in range(completion.n)
    ]
    reply = CompletionReply(model_id, echoes, completion.logprobs, completion.include_usage)
    return Prepared(request, completion.stream, reply)


class CompletionReply(OpenAIReply):
    """`echoes` holds the text that stands before each row's own."""

    def __init__(self, model_id: str, echoes: list[str], logprobs: int | None, include_usage: bool) -> None:
        super().__init__("cmpl-", "text_completion", "text_completion", model_id, include_usage)
        self._echoes = echoes
        self._logprobs = None if logprobs is None else [LegacyLogprobs(logprobs) for _ in echoes]

    def whole_choice(self, row: RowDelta) -> Json:
        return self._choice(row.row, self._echoes[row.row] + row.text, row.logprobs, row.finish_reason)

    def first(self, job: Job) -> list[Json]:
        return [self.event(self._choice(i, echo, [], None)) for i, echo in enumerate(self._echoes) if echo]

    def new_choices(self, delta: RowDelta) -> list[Json]:
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return []
        return [self._choice(delta.row, delta.text, delta.logprobs, delta.finish_reason)]

    def _choice(self, index: int, text: str, logprobs: list[TokenLogprob], finish_reason: str | None) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].take(logprobs) if self._logprobs else None,
            "finish_reason": finish_reason,
        }


class LegacyLogprobs:
    """The `logprobs` of a completion's row, piece by piece: offsets go on where the last piece ended.

    `top` is how many alternatives were asked for; the drawn token always stands among them.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0  # characters of the row's text before the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, tokens: list[TokenLogprob]) -> Json:
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
