"""One row: a prompt, what has been drawn after it, and the text that leaves for its reader."""

import itertools
from dataclasses import dataclass, field

from rwkv_batch.text.stops import StopStrings
from rwkv_batch.text.tokenizer import TextDecoder, Tokenizer
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, TokenLogprob

LAST = -1  # in place of a token: what the row drew last, which is not known yet

_numbers = itertools.count()


@dataclass(eq=False)
class Sequence:
    """A row of a request, from the queue to its last delta.

    `request` and `key` are those of the whole request; `row` is this row's place in it. What the state sees
    is first the `prompt`, then each drawn token as it is fed back.
    """

    key: tuple[bytes, str]  # (front end, request id)
    row: int
    prompt: list[int]
    request: GenerateRequest
    seed: int
    target: str | None = (
        None  # the session that this row's state is stored under; no two rows with the same one run
    )
    slot: int | None = None
    ready: bool = True  # the slot holds the state to go on from
    fed: int = 0  # prompt tokens the state has seen
    returned: int = 0  # drawn tokens the state has seen
    drawn: list[int] = field(default_factory=list)  # a stop id does not count
    cuts: list[int] = field(default_factory=list)  # prompt lengths at which a step must end, ascending
    finish_reason: str | None = None
    flying: int = 0  # draws that are queued and not known yet
    foreseen: bool = False  # can be fed LAST
    closing: bool = False  # the text has ended; the state is brought to its end and then stored
    number: int = field(default_factory=_numbers.__next__)  # order of arrival

    def __post_init__(self) -> None:
        self._decoder = TextDecoder()
        self._stops = StopStrings(self.request.stop_strings) if self.request.stop_strings else None
        self._stop_ids = frozenset(self.request.stop_ids)
        self._text: list[str] = []  # text since the last delta
        self._sent = 0  # drawn tokens that deltas have counted
        self._decoded = 0  # characters decoded so far, held-back ones included
        self._shown = 0  # characters the reader has been or is being shown
        self._logprobs: list[
            tuple[int, TokenLogprob]
        ] = []  # not yet sent: (where the token's text begins, entry)

    @property
    def prompt_left(self) -> int:
        return len(self.prompt) - self.fed

    @property
    def can_step(self) -> bool:
        """Whether the next step can have this row: what it is to be fed is known, or need not be."""
        more = self.foreseen and len(self.drawn) + self.flying < self.request.max_tokens
        return self.ready and (not self.flying or self.closing or more)

    @property
    def waits(self) -> bool:
        """Whether it still wants to know what is drawn for it: it has neither ended nor been dropped."""
        return self.finish_reason is None and self.slot is not None

    def next_tokens(self, count: int) -> list[int]:
        """What the next step feeds: `count` prompt tokens, or the token drawn last."""
        if self.prompt_left:
            return self.prompt[self.fed : self.fed + count]
        return [LAST] if self.flying else [self.drawn[-1]]

    def took(self, count: int) -> None:
        """The step has been run: the state has seen those tokens."""
        if self.prompt_left:
            self.fed += count
            if self.cuts and self.cuts[0] <= self.fed:
                self.cuts = [cut for cut in self.cuts if cut > self.fed]
        else:
            self.returned += 1

    def take_drawn(self, token: int, data: bytes, logprob: TokenLogprob | None) -> None:
        """A token was drawn after the prompt and everything before it; `data` are its bytes."""
        if token in self._stop_ids:
            self.returned -= self.flying  # steps queued since leave the row out
            self._finish("stop")
            return
        self.drawn.append(token)
        if logprob:
            self._logprobs.append((self._decoded, logprob))
        if self._decode(self._decoder.feed(data)):
            self._end_at_stop_string()
        elif len(self.drawn) >= self.request.max_tokens:
            self._finish("length")

    def take_delta(self) -> RowDelta | None:
        """The news for the reader, if it is time for them: enough tokens with some text, or the row has
        ended.
        """
        tokens = len(self.drawn) - self._sent
        due = self._text and tokens >= self.request.flush_tokens > 0
        if not due and not self.finish_reason:
            return None
        ready = (
            len(self._logprobs)
            if self.finish_reason
            else sum(1 for start, _ in self._logprobs if start < self._shown)
        )
        delta = RowDelta(
            self.row,
            "".join(self._text),
            tokens,
            self.finish_reason,
            [entry for _, entry in self._logprobs[:ready]],
        )
        self._text, self._sent, self._logprobs = [], len(self.drawn), self._logprobs[ready:]
        return delta

    def kept(self, tokenizer: Tokenizer) -> list[int]:
        """The tokens of exactly the text that was shown. A token that a stop string cuts apart is replaced by
        those of its rest.
        """
        if self._decoded == self._shown:
            return self.drawn
        decoder, length = TextDecoder(), 0
        for count, token in enumerate(self.drawn):
            text = decoder.feed(tokenizer.token_bytes(token))
            if length + len(text) > self._shown:
                return self.drawn[:count] + tokenizer.encode(text[: self._shown - length])
            length += len(text)
        return self.drawn

    def close(self, tokens: list[int]) -> None:
        """The text has ended, and the state is to see `tokens` yet, with nothing drawn after them."""
        self.prompt, self.fed, self.cuts, self.closing = tokens, 0, [], True

    def _decode(self, text: str) -> bool:
        """New text of the model's. True: it completes a stop string; what comes before that has
        been queued.
        """
        self._decoded += len(text)
        stopped = False
        if self._stops:
            text, stopped = self._stops.feed(text)
        self._show(text)
        return stopped

    def _show(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._shown += len(text)

    def _finish(self, reason: str) -> None:
        """End after the token drawn last: what was held back leaves too."""
        if self._decode(self._decoder.finish()):
            self._end_at_stop_string()
            return
        if self._stops:
            self._show(self._stops.finish())
            if self._stops.stopped:
                self._end_at_stop_string()
                return
        self.finish_reason = reason

    def _end_at_stop_string(self) -> None:
        """Logprobs of the tokens behind the end of the text go with their text."""
        self.finish_reason = "stop"
        self._logprobs = [(start, entry) for start, entry in self._logprobs if start < self._shown]
