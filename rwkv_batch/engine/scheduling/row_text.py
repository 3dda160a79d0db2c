"""What a row has drawn, as text: decoded, searched for stop strings, kept until a delta takes it."""

from rwkv_batch.text.stops import AnswerStops, StopStrings
from rwkv_batch.text.tokenizer import TextDecoder, Tokenizer
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, TokenLogprob


class RowText:
    """The text of one row, from its first token to its last delta. `finish_reason`: why it has ended."""

    __slots__ = (
        "_decoded",
        "_decoder",
        "_drafts",
        "_flush_tokens",
        "_logprobs",
        "_number",
        "_pieces",
        "_plain",
        "_sent",
        "_shown",
        "_stop_id",
        "_stops",
        "finish_reason",
        "prompt_logprobs",
        "stop_ids",
    )

    def __init__(self, request: GenerateRequest, number: int) -> None:
        """number: of the row, which its deltas have."""
        self._number = number
        self._flush_tokens = request.flush_tokens
        self._decoder = TextDecoder()
        self._stops, self.stop_ids = _stops_of(request), frozenset(request.stop_ids)
        self._pieces: list[str] = []  # text that no delta has taken
        self._decoded = 0  # characters, held-back ones included
        self._shown = 0  # characters that deltas have or will have shown
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # not taken: (where its text begins, entry)
        self.prompt_logprobs: list[TokenLogprob] = []  # not taken
        self._sent = 0  # drawn tokens that deltas have counted
        # What ended it, where deltas say ids; None: they do not.
        self._stop_id: list[int] | None = [] if request.return_ids else None
        self._drafts: tuple[int, int] | None = None  # accepted and rejected tokens that no delta has counted
        self.finish_reason: str | None = None
        # Whether there is nothing to take but text.
        scored = request.top_logprobs is not None or request.prompt_logprobs is not None
        self._plain = not (self._stops or scored or request.return_ids)

    def feed(self, data: bytes) -> None:
        """The bytes of a token. If they complete a stop string, the text ends before that."""
        if self._add(self._decoder.feed(data)):
            self._end_at_stop_string()

    def finish(self, reason: str, stop_id: int | None = None) -> None:
        """No more comes, and what was held back is shown. stop_id: that has ended it."""
        self.finish_reason = reason
        if stop_id is not None and self._stop_id is not None:
            self._stop_id = [stop_id]
        stopped = self._add(self._decoder.finish())
        if self._stops and not stopped:
            self._show(self._stops.finish())
            stopped = self._stops.stopped
        if stopped:
            self._end_at_stop_string()

    def add_logprob(self, entry: TokenLogprob) -> None:
        """Of the token whose bytes come next."""
        self._logprobs.append((self._decoded, entry))

    def count_draft(self, tokens: int, accepted: int) -> None:
        """Of so many tokens that were drafted so many have been accepted."""
        before = self._drafts or (0, 0)
        self._drafts = before[0] + accepted, before[1] + tokens - accepted

    def next_delta(self, drawn: list[int]) -> RowDelta | None:
        """That of a row that has drawn these, if it is due: enough tokens with text or ids, or all."""
        if not self.finish_reason:
            if not len(drawn) - self._sent >= self._flush_tokens > 0:
                return None
            if not self._pieces and (self._stop_id is None or not self._is_whole):
                return None
        return self.take(drawn)

    def take(self, drawn: list[int]) -> RowDelta:
        """All that can be sent of a row that has drawn these."""
        before, self._sent = self._sent, len(drawn)
        pieces, self._pieces = self._pieces, []
        text, tokens = pieces[0] if len(pieces) == 1 else "".join(pieces), self._sent - before
        if self._plain and not self._drafts:
            return RowDelta(self._number, text, tokens, self.finish_reason)
        entries = self._take_logprobs()
        ids = [] if self._stop_id is None else drawn[before:] + self._stop_id
        stop = self._stops.found if self._stops and self.finish_reason else ""
        prompt, self.prompt_logprobs = self.prompt_logprobs, []
        (accepted, rejected), self._drafts = self._drafts or (0, 0), None
        return RowDelta(
            self._number,
            text,
            tokens,
            self.finish_reason,
            entries,
            stop,
            ids,
            prompt,
            accepted=accepted,
            rejected=rejected,
        )

    def skip(self, tokens: list[int], tokenizer: Tokenizer) -> None:
        """These have been drawn and their text has been sent before."""
        for token in tokens:
            self.feed(tokenizer.token_bytes(token))
        self._pieces, self._sent = [], len(tokens)

    def shown_tokens(self, drawn: list[int], tokenizer: Tokenizer) -> list[int]:
        """Of the tokens drawn those of exactly the text that was shown.

        A token that a stop string cuts apart is replaced by those of its beginning.
        """
        if self._decoded == self._shown:
            return drawn
        decoder, text, length, whole = TextDecoder(), "", 0, 0  # text: behind the first `whole` tokens
        for count, token in enumerate(drawn, 1):
            text += decoder.feed(tokenizer.token_bytes(token))
            if length + len(text) > self._shown:
                return drawn[:whole] + tokenizer.encode(text[: self._shown - length])
            if not decoder.inside:
                text, length, whole = "", length + len(text), count
        return drawn

    @property
    def may_stop(self) -> bool:
        """Whether stop strings are looked for."""
        return self._stops is not None

    @property
    def _is_whole(self) -> bool:
        """Whether all that has been drawn is shown: no part of a character or stop string is held back."""
        return self._decoded == self._shown and not self._decoder.inside

    def _end_at_stop_string(self) -> None:
        """Logprobs of the tokens behind its end go with their text."""
        self.finish_reason = "stop"
        self._logprobs = [(start, entry) for start, entry in self._logprobs if start < self._shown]

    def _take_logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens whose text has been taken; of all tokens where the text has ended."""
        shown = sum(1 for start, _ in self._logprobs if start < self._shown)
        ready = len(self._logprobs) if self.finish_reason else shown
        entries = [entry for _, entry in self._logprobs[:ready]]
        self._logprobs = self._logprobs[ready:]
        return entries

    def _add(self, text: str) -> bool:
        self._decoded += len(text)
        stopped = False
        if self._stops:
            text, stopped = self._stops.feed(text)
        self._show(text)
        return stopped

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._shown += len(text)


def _stops_of(request: GenerateRequest) -> StopStrings | None:
    if late := request.late_stops:
        return AnswerStops(
            request.stop_strings, late.strings, late.opens, late.closes, late.rest, late.inside
        )
    return StopStrings(request.stop_strings) if request.stop_strings else None
