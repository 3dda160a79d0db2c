"""POST /v1/completions: raw prompts, or with `suffix` the text between them and the suffix.

With `echo` a row's text begins with its prompt, and with `logprobs` its logprobs with those of the prompt.
Then they end with the entry of the id that ended the text, as clients that score prompts leave the last one
out.
"""

from msgspec.structs import replace

from routes.http.errors import Json, openai_field
from routes.http.generate import Prepared
from routes.http.schemas import Prompts
from routes.openai.legacy_logprobs import LegacyLogprobs
from routes.openai.reply import OpenAIReply
from routes.openai.schemas import CompletionBody
from rwkv_batch.chat.checkpoints import END_OF_TEXT
from rwkv_batch.chat.templates import fill_in_the_middle
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta

DEFAULT_MAX_TOKENS = 16


def prepare(body: Json, model_id: str) -> Prepared:
    """Raises ApiError 400 for what cannot be served."""
    completion = CompletionBody.from_json(body)
    if completion.best_of not in (None, completion.n):
        raise openai_field("best_of", "input should be equal to n; completions are not ranked here")
    texts = [p for p in completion.prompt if isinstance(p, str)]  # all or none
    if completion.suffix and not texts:
        raise openai_field("suffix", "this is only allowed when the prompt is text")
    if completion.suffix and completion.echo and completion.logprobs is not None:
        raise openai_field(
            "echo", "a prompt with a suffix has no logprobs here; send echo or logprobs, not both"
        )
    # where there is no text, a document begins
    prompts: Prompts = [p or [END_OF_TEXT] for p in completion.prompt]
    if completion.suffix:
        prompts = [fill_in_the_middle(text, completion.suffix) for text in texts]
    max_tokens = DEFAULT_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens
    request = completion.request(
        prompts, max_tokens, top_logprobs=completion.logprobs, grammar=completion.grammar()
    )
    if completion.echo and completion.logprobs is not None:
        # It cannot be paused: what is left of the reply would have no place for the prompt's logprobs.
        request = replace(request, prompt_logprobs=completion.logprobs, return_bytes=True, pausable=False)
    elif completion.echo and not texts:
        request = replace(request, return_bytes=True)
    return Prepared(request, completion.stream, CompletionReply(model_id, request, completion))


class CompletionReply(OpenAIReply):
    """The reply to a request that was made of `body`."""

    def __init__(self, model_id: str, request: GenerateRequest, body: CompletionBody) -> None:
        super().__init__("cmpl-", "text_completion", "text_completion", model_id, body.include_usage)
        self._request, self._echo, self._prompts = request, body.echo, body.prompt
        rows = len(request.prompts) * request.n
        self._logprobs = (
            [LegacyLogprobs(body.logprobs) for _ in range(rows)] if body.logprobs is not None else []
        )
        self._ids: list[list[int]] = []  # of each prompt, if the reply says them
        self._bytes: list[list[bytes]] = []  # of the tokens of each prompt, if the reply needs them
        self._begun: set[int] = set()  # rows of which something has been said

    def whole(self, job: Job, deltas: list[RowDelta]) -> Json:
        self._ids, self._bytes = job.acceptance.prompt_ids, job.acceptance.prompt_bytes
        return super().whole(job, deltas)

    def first(self, job: Job) -> list[Json]:
        """The prompts to be echoed, or with logprobs nothing: those come with a row's first text."""
        self._ids, self._bytes = job.acceptance.prompt_ids, job.acceptance.prompt_bytes
        if not self._echo or self._logprobs:
            return []
        nothing = (RowDelta(row, "", 0) for row in range(job.rows) if self._prompts[row // self._request.n])
        return [self.event(self.whole_choice(delta)) for delta in nothing]

    def whole_choice(self, row: RowDelta) -> Json:
        """The choice of a row's first delta: the prompt comes in front."""
        prompt, logprobs = row.row // self._request.n, row.logprobs
        self._begun.add(row.row)
        text = self._echoed(prompt) + row.text if self._echo else row.text
        choice: Json = {
            "index": row.row,
            "text": text,
            "logprobs": None,
            "finish_reason": row.finish_reason,
            **self.row_error(row),
        }
        if self._logprobs:
            front = self._bytes[prompt][0] if self._echo else None
            choice["logprobs"] = self._logprobs[row.row].take(row.prompt + logprobs, front)
        if self._request.return_ids:
            choice |= {"prompt_token_ids": self._ids[prompt], "token_ids": row.ids}
        return choice

    def new_choices(self, delta: RowDelta) -> list[Json]:
        if not (delta.text or delta.logprobs or delta.ids or delta.prompt or delta.finish_reason):
            return []
        if delta.row not in self._begun:
            return [self.whole_choice(delta)]
        choice: Json = {
            "index": delta.row,
            "text": delta.text,
            "logprobs": self._logprobs[delta.row].take(delta.logprobs) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
            **self.row_error(delta),
        }
        return [choice | {"token_ids": delta.ids} if self._request.return_ids else choice]

    def _echoed(self, prompt: int) -> str:
        """The text of a prompt."""
        given = self._prompts[prompt]
        return given if isinstance(given, str) else b"".join(self._bytes[prompt]).decode(errors="replace")
