"""What a sequence has drawn, as text: decoded, searched for stop strings, kept until a delta takes it."""

from rwkv_batch.text.stops import AnswerStops, StopStrings
from rwkv_batch.text.tokenizer import TextDecoder, Tokenizer
from rwkv_batch.wire.protocol import GenerateRequest, TokenLogprob


class RowText:
    """The text of one sequence. `stop` is the stop string that has ended it."""

    __slots__ = ("_decoded", "_decoder", "_logprobs", "_pieces", "_shown", "_stops", "plain")

    def __init__(self, request: GenerateRequest) -> None:
        self._decoder = TextDecoder()
        self._stops = _stops_of(request)
        self._pieces: list[str] = []  # text that no delta has taken
        self._decoded = 0  # characters, held-back ones included
        self._shown = 0  # characters that deltas have or will have shown
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # not taken: (where its text begins, entry)
        # Whether there is nothing to take but text.
        self.plain = not self._stops and request.top_logprobs is None and request.prompt_logprobs is None

    def __bool__(self) -> bool:
        """Whether there is text to take."""
        return bool(self._pieces)

    def feed(self, data: bytes) -> bool:
        """The bytes of a token. Whether they complete a stop string; what comes before that can be taken."""
        return self._add(self._decoder.feed(data))

    def finish(self) -> bool:
        """No more comes, and what was held back can be taken. Whether a stop string has ended the text."""
        stopped = self._add(self._decoder.finish())
        if self._stops and not stopped:
            self._show(self._stops.finish())
            stopped = self._stops.stopped
        return stopped

    def add_logprob(self, entry: TokenLogprob) -> None:
        """Of the token whose bytes come next."""
        self._logprobs.append((self._decoded, entry))

    def drop_unshown_logprobs(self) -> None:
        """A stop string has ended the text: logprobs of the tokens behind its end go with their text."""
        self._logprobs = [(start, entry) for start, entry in self._logprobs if start < self._shown]

    def take(self) -> str:
        """The text that can be taken, which is gone then."""
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else "".join(pieces)

    def take_logprobs(self, whole: bool) -> list[TokenLogprob]:
        """Those of the tokens whose text has been taken; whole: of all tokens."""
        shown = sum(1 for start, _ in self._logprobs if start < self._shown)
        ready = len(self._logprobs) if whole else shown
        entries = [entry for _, entry in self._logprobs[:ready]]
        self._logprobs = self._logprobs[ready:]
        return entries

    def skip(self, tokens: list[int], tokenizer: Tokenizer) -> None:
        """These have been drawn and their text has been sent before."""
        for token in tokens:
            self.feed(tokenizer.token_bytes(token))
        self._pieces = []

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
    def is_whole(self) -> bool:
        """Whether all that has been drawn is shown: no part of a character or stop string is held back."""
        return self._decoded == self._shown and not self._decoder.inside

    @property
    def may_stop(self) -> bool:
        """Whether stop strings are looked for."""
        return self._stops is not None

    @property
    def stop(self) -> str:
        """The stop string that has ended the text, if one has."""
        return self._stops.found if self._stops else ""

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
