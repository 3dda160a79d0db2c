"""Text completions in OpenAI's form: the prompt as it stands, or with `suffix` as a fill-in-the-middle
prompt.
"""

from routes.chat.templates import fill_in_the_middle
from routes.http.replies import RowResult
from routes.openai.schemas import CompletionBody, bad, parse, refuse
from routes.openai.shared import (
    END_OF_TEXT,
    NOT_HERE,
    LegacyLogprobs,
    OpenAIReply,
    engine_request,
    wants_usage,
)
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, TokenLogprob

DEFAULT_MAX_TOKENS = 16
REFUSED = NOT_HERE | {"session_id": "sessions are not available on this route; use chat completions"}


def prepare(body: dict, model_id: str) -> tuple[GenerateRequest, bool, "CompletionReply"]:
    """The engine's request, whether to stream, and how to reply. Raises ApiError 400 for what cannot be
    served.
    """
    refuse(body, REFUSED)
    completion = parse(CompletionBody, body)
    if completion.best_of not in (None, completion.n):
        raise bad("best_of", "input should be equal to n; completions are not ranked here")
    if completion.echo and completion.logprobs is not None:
        raise bad("echo", "the prompt has no logprobs here; send echo or logprobs, not both")
    texts = [p for p in completion.prompt if isinstance(p, str)]  # all or none
    for field in ("echo", "suffix"):
        if getattr(completion, field) and not texts:
            raise bad(field, "this is only allowed when the prompt is text")
    if completion.suffix:
        prompts: list[str | list[int]] = [fill_in_the_middle(text, completion.suffix) for text in texts]
    else:
        prompts = [p or [END_OF_TEXT] for p in completion.prompt]  # where there is no text, a document begins
    max_tokens = DEFAULT_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens
    request = engine_request(completion, prompts, max_tokens, (), (0.0, 0.0), completion.logprobs)
    echoes = [
        p if completion.echo and isinstance(p, str) else ""
        for p in completion.prompt
        for _ in range(completion.n)
    ]
    return (
        request,
        completion.stream,
        CompletionReply(model_id, echoes, completion.logprobs, wants_usage(completion)),
    )


class CompletionReply(OpenAIReply):
    """One reply: `echoes` holds the text that stands before each row's own."""

    def __init__(self, model_id: str, echoes: list[str], logprobs: int | None, include_usage: bool) -> None:
        super().__init__("cmpl-", "text_completion", "text_completion", model_id, include_usage)
        self._echoes = echoes
        self._logprobs = None if logprobs is None else [LegacyLogprobs(logprobs) for _ in echoes]

    def whole(self, job: Job, rows: list[RowResult]) -> dict:
        return self.body(
            job,
            rows,
            [
                self._choice(i, self._echoes[i] + row.text, row.logprobs, row.finish_reason)
                for i, row in enumerate(rows)
            ],
        )

    def first(self, job: Job) -> list[dict]:
        return [self.event(self._choice(i, echo, [], None)) for i, echo in enumerate(self._echoes) if echo]

    def events(self, deltas: list[RowDelta]) -> list[dict]:
        self.count(deltas)
        return [
            self.event(self._choice(d.row, d.text, d.logprobs, d.finish_reason))
            for d in deltas
            if d.text or d.logprobs or d.finish_reason
        ]

    def _choice(self, index: int, text: str, logprobs: list[TokenLogprob], finish_reason: str | None) -> dict:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].take(logprobs) if self._logprobs else None,
            "finish_reason": finish_reason,
        }
