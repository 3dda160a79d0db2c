"""What an evaluation asks of a model, and what it gets, wherever the model runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rwkv_batch.text.tokenizer import END_OF_TEXT, Tokenizer, tokenizer_of
from rwkv_batch.wire.protocol import Sampling, TokenLogprob

GREEDY = Sampling(temperature=0.0)
TOKENIZER = Tokenizer()  # of all models that are asked: see `demand_texts`


class EvaluationError(Exception):
    """An evaluation that cannot go on; one sentence."""


@dataclass(frozen=True)
class Ask:
    """A prompt, and what is wanted of it: a text after it, logprobs of its own tokens, or both."""

    prompt: list[int]
    max_tokens: int = 0
    sampling: Sampling = GREEDY
    stop_ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    top: int | None = None  # None: no logprobs; n: those of what is drawn, and of the n likeliest
    score_from: int | None = None  # logprobs of the prompt's tokens from this place on, at least 1


@dataclass(frozen=True)
class ModelAnswer:
    """Logprobs have the likeliest token first among the others."""

    text: str
    ids: list[int]  # that were drawn; without them where a server does not say them
    finish_reason: str
    drawn: list[TokenLogprob]
    scored: list[TokenLogprob]  # of the prompt's tokens


class AskedModel(Protocol):
    """A model, here or behind a URL."""

    @property
    def name(self) -> str:
        """What to call it, with the fingerprint of its weights."""

    @property
    def most_top(self) -> int:
        """The largest `Ask.top` that it answers."""

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, ModelAnswer]]:
        """The answers as they come, each with its place in `asks`. Raises EvaluationError."""


def is_likeliest(entry: TokenLogprob) -> bool:
    """Whether greedy decoding gives this token."""
    return entry.top[0][0] == entry.token


def demand_texts(rows: int) -> None:
    """Raises EvaluationError for a model whose head has so many rows if its ids are not World's."""
    try:
        tokenizer_of(rows).demand_texts()
    except ValueError as error:
        raise EvaluationError(str(error)) from error


def document(text: str) -> list[int]:
    """The tokens of a text from its beginning: the end of the text before comes first."""
    return [END_OF_TEXT, *TOKENIZER.encode(text)]
