"""One sequence: a prompt, what has been drawn after it, and the text that leaves for its reader."""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from msgspec.structs import replace

from rwkv_batch.engine.constraints.masks import RowConstraint
from rwkv_batch.engine.scheduling.row_text import RowText
from rwkv_batch.runner.protocol import LAST
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import LEAST_SUM, Event, GenerateRequest, RowDelta, TokenLogprob

RequestKey = tuple[bytes, str]  # (front end, request id)
Outbox = list[tuple[RequestKey, Event]]  # collected during a step for the front ends

_arrivals = itertools.count()


class SequenceState(Enum):
    """Where a sequence is between arrival and its last delta.

    A turn is LOADING before PREFILLING if it continues a session, and again before FINALIZING if its state
    must be computed once more.
    """

    WAITING = "waiting"  # it has no slot
    LOADING = "loading"  # the state of its session is being copied into its slot
    PREFILLING = "prefilling"  # tokens of its prompt are left to feed
    DECODING = "decoding"  # each step feeds the token drawn last
    FINALIZING = "finalizing"  # its text has ended; its state is brought to exactly that end and stored
    FINISHED = "finished"  # nothing more is fed


# Looked up for every sequence at every step, and a global is found faster than a member of an enumeration.
WAITING, LOADING, PREFILLING = SequenceState.WAITING, SequenceState.LOADING, SequenceState.PREFILLING
DECODING, FINALIZING, FINISHED = SequenceState.DECODING, SequenceState.FINALIZING, SequenceState.FINISHED


@dataclass(eq=False)
class RowAdapter:
    """An adapter that rows run with, or a start state that counts as one (see `engine.row_adapters`).

    `slot`: where it is on the device; None: not there.
    """

    name: str
    digest: str  # hexadecimal
    number: int  # distinguishes those that are not the same, in this process
    model: int  # the id of the model with it, in the database
    slot: int | None = None


Beginning = dict[int, Any]  # what slots begin with, as of States.replace


class Life(ABC):
    """What a row begins with, and what becomes of it: see `lives.py` and `stored_turns.py`."""

    @property
    def stored(self) -> bool:
        """Whether its text has ended and is being stored, with its state or without."""
        return False

    @abstractmethod
    def begin(self, row: "Sequence") -> Beginning:
        """What its slot, which it has just got, begins with; nothing if that comes later.

        Raises StartStateMissing.
        """

    @abstractmethod
    def reached(self, row: "Sequence", cut: int) -> None:
        """A step has been queued that feeds it up to one of its cuts."""

    @abstractmethod
    def text_ended(self, row: "Sequence", delta: RowDelta) -> None:
        """Its text has finished, with this delta."""

    @abstractmethod
    def drop(self, row: "Sequence", reason: str) -> None:
        """Nobody wants it any more, or it has failed. reason: for the metrics."""


@dataclass(eq=False, slots=True)  # attributes of objects without slots are found slower from 31 on
class Sequence:
    """A row of a request, from the queue to its last delta.

    `request` and `key` are those of the whole request; `row` is this sequence's place in it. `to_feed` is
    what the state sees before anything is drawn: the `prompt`, what was drawn after it before a pause, and in
    front of both what a session's stored state lacks. Then it sees each drawn token as it is fed back.
    """

    key: RequestKey
    row: int
    prompt: list[int]
    request: GenerateRequest
    seed: int
    target: str | None = None  # the session that its state is stored under; one sequence of each runs
    start_state: str = ""  # the name of the state in which it begins
    mixture: "Mixture | None" = None
    adapter: RowAdapter | None = None
    constraint: RowConstraint | None = None  # what binds its text; those of a mixture share it
    life: "Life" = field(init=False)  # which a row of the engine has from its request on
    waits_for_state: bool = False  # another row feeds its prompt
    held: bool = False  # no step takes it, until it is known whether its request is paused
    slot: int | None = None
    state: SequenceState = WAITING
    fed: int = 0  # of the tokens in `to_feed`
    drawn: list[int] = field(default_factory=list)  # a stop id does not count
    drawn_fed: int = 0  # how many of these the state has seen
    in_flight: int = 0  # draws that are queued and not known yet
    runs_ahead: bool = False  # can be fed LAST
    cuts: list[int] = field(default_factory=list)  # prompt lengths at which a step must end, ascending
    cut_past: list[int] = field(default_factory=list)  # in front of the prompt, where states at cuts are kept
    finish_reason: str | None = None
    arrival: int = field(default_factory=_arrivals.__next__)
    to_feed: list[int] = field(init=False)  # FINALIZING: what brings the state to the end of the text
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # not sent
    _text: RowText = field(init=False)
    _stop_ids: frozenset[int] = field(init=False)
    _stop_id: list[int] = field(default_factory=list)  # that ended it
    _sent: int = 0  # drawn tokens that deltas have counted
    _loaded_state: SequenceState = PREFILLING  # what follows LOADING

    def __post_init__(self) -> None:
        self.to_feed, self._text = self.prompt, RowText(self.request)
        self._stop_ids = frozenset(self.request.stop_ids)

    @property
    def leads(self) -> bool:
        """Whether its draws are the row's; the others of a mixture only add to it."""
        return self.mixture is None or self.mixture.members[0] is self

    @property
    def together(self) -> "list[Sequence]":
        """The sequences of its row: those of its mixture, or itself."""
        return self.mixture.members if self.mixture else [self]

    @property
    def requested_prompt(self) -> str | list[int]:
        """The prompt as it is in the request."""
        request = self.request
        if request.rows:
            return next(
                p for p, row in zip(request.prompts, request.rows, strict=True) if row.number == self.row
            )
        return request.prompts[self.row // request.n]

    @property
    def tokens_left(self) -> int:
        """Tokens to feed before anything is drawn, or, FINALIZING, before the state is at the text's end."""
        return len(self.to_feed) - self.fed

    @property
    def generating(self) -> bool:
        """Whether what is drawn for it counts: it has neither finished nor been dropped."""
        return self.state is DECODING or self.state is PREFILLING

    @property
    def can_step(self) -> bool:
        """Whether the next step can have it: what it is fed is known, or need not be."""
        if self.held:
            return False
        if self.state is DECODING:
            bound = self.constraint
            if not self.in_flight:
                return bound is None or bound.can_draw
            ahead = self.runs_ahead and (bound is None or not bound.slow)
            return ahead and len(self.drawn) + self.in_flight < self.request.max_tokens
        return (self.state is PREFILLING or self.state is FINALIZING) and self.tokens_to_feed > 0

    @property
    def waits_for_draw(self) -> bool:
        """Whether it goes on when its last draw is known, and not before."""
        more = len(self.drawn) + self.in_flight < self.request.max_tokens
        return self.state is DECODING and self.in_flight > 0 and more and not self.can_step

    @property
    def tokens_to_feed(self) -> int:
        """Of `tokens_left`, how many the next steps may feed.

        A sequence of a mixture waits with its last token for the others, as they draw together; one that a
        grammar binds waits for its first mask.
        """
        left = self.tokens_left
        if self.state is not PREFILLING:
            return left
        if self.waits_for_state:
            return 0
        waits = self.mixture and not self.mixture.at_end
        return left - 1 if waits or (self.constraint and not self.constraint.can_draw) else left

    def draws_after(self, count: int) -> bool:
        """Whether a token is drawn after a step that feeds it `count` tokens."""
        return self.state is DECODING or (self.state is PREFILLING and count >= self.tokens_left)

    def next_tokens(self, count: int) -> list[int]:
        """What the next step feeds: `count` of the tokens left, or the token drawn last."""
        if self.state is DECODING:
            return [LAST] if self.in_flight else self.drawn[-1:]
        return self.to_feed[self.fed : self.fed + count]

    @property
    def may_overrun(self) -> bool:
        """Whether the state may have seen more than the text when that ends."""
        return self._text.may_stop

    def has_drawn(self, kept: list[int], count: int) -> bool:
        """Whether the first `count` of the tokens kept of its text are those that it has drawn first."""
        return count <= len(kept) and kept[:count] == self.drawn[:count]

    @property
    def known_draws_left(self) -> int:
        """How many tokens it will draw if no stop id or string ends it before."""
        if self.constraint:  # masks depend on what was drawn
            return 1
        return self.request.max_tokens - len(self.drawn) - self.in_flight

    def advance(self, count: int) -> None:
        """It has been fed its next `count` tokens."""
        if self.state is DECODING:
            self.drawn_fed += count
            return
        self.fed += count
        self.cuts = [cut for cut in self.cuts if cut > self.fed]
        if self.state is PREFILLING and not self.tokens_left:
            self.state = DECODING

    def bind(self, constraint: RowConstraint) -> None:
        """Its row draws what this allows."""
        for seq in self.together:
            seq.constraint = constraint

    def admit(self, slot: int) -> None:
        """It runs in this slot from now on."""
        self.slot, self.state = slot, PREFILLING

    def begin_turn(self, prompt: list[int]) -> None:
        """A turn's prompt, which is known when the turn begins."""
        self.prompt, self.to_feed = prompt, prompt + self.drawn

    def begin_loading(self) -> None:
        """A state is being copied into its slot."""
        self._loaded_state = FINALIZING if self.state is FINALIZING else PREFILLING
        self.state = LOADING

    def loaded(self, replay: list[int]) -> None:
        """Its slot holds a state, after which these tokens come before what is left to feed."""
        self.to_feed, self.state = replay + self.to_feed, self._loaded_state

    def resume(self, drawn: list[int], tokenizer: Tokenizer) -> None:
        """It has drawn these before it was paused, and their text has been sent."""
        self._text.skip(drawn, tokenizer)
        self.drawn, self.drawn_fed, self._sent = list(drawn), len(drawn), len(drawn)
        self.to_feed = self.prompt + drawn

    def pause(self) -> RowDelta:
        """The last delta of a sequence that will be resumed: text that is held back comes then."""
        self.finish_reason = "paused"
        return self._take_delta()

    def withdraw(self) -> RowDelta:
        """The last delta of a sequence whose prompt is not read yet; a paused one can be resumed again."""
        self.finish_reason = "paused" if self.drawn else "stop"
        return RowDelta(self.row, "", 0, self.finish_reason)

    def stop(self) -> RowDelta:
        """The last delta of a sequence that is to end with what it has drawn."""
        self._finish("stop")
        return self._take_delta()

    def finalize(self, tokens: list[int]) -> None:
        """The text has ended. `tokens` are still fed, nothing is drawn; then the state is stored."""
        self.to_feed, self.fed, self.cuts, self.state = tokens, 0, [], FINALIZING

    def end(self) -> None:
        """Nothing more is fed."""
        self.state = FINISHED

    def take_drawn(self, token: int, data: bytes, logprob: TokenLogprob | None) -> None:
        """A token was drawn after the prompt and everything before it; `data` are its bytes."""
        if token in self._stop_ids:
            self.drawn_fed -= self.in_flight  # steps queued since leave the row out
            self._stop_id = [token]
            if logprob and self.request.prompt_logprobs is not None:
                # Who scores prompts takes the last entry for that of what was drawn.
                self._text.add_logprob(logprob)
            self._finish("stop")
            return
        if not self.request.max_tokens:  # it was fed for the logprobs of its prompt
            self._finish("length")
            return
        self.drawn.append(token)
        if logprob:
            self._text.add_logprob(logprob)
        if self._text.feed(data):
            self._finish_at_stop_string()
        elif len(self.drawn) >= self.request.max_tokens:
            self._finish("length")

    def take_several(self, tokens: list[int], tokenizer: Tokenizer) -> int:
        """As `take_drawn` of tokens that were drawn without a look at them. How many of them count."""
        goes_on = len(self.drawn) + len(tokens) < self.request.max_tokens
        if goes_on and not self._text.may_stop and self._stop_ids.isdisjoint(tokens):
            self.in_flight -= len(tokens)
            self.drawn += tokens
            self._text.feed(b"".join(map(tokenizer.token_bytes, tokens)))
            return len(tokens)
        for count, token in enumerate(tokens):
            if not self.generating:
                self.in_flight -= len(tokens) - count
                return count
            self.in_flight -= 1
            self.take_drawn(token, tokenizer.token_bytes(token), None)
        return len(tokens)

    def take_delta(self) -> RowDelta | None:
        """The next delta if it is due: enough tokens with some text or ids, or the sequence has finished."""
        if self.finish_reason:
            return self._take_delta()
        due = len(self.drawn) - self._sent >= self.request.flush_tokens > 0
        is_there = due and (self._text or (self.request.return_ids and self._text.is_whole))
        return self._take_delta() if is_there else None

    def _take_delta(self) -> RowDelta:
        """All that can be sent."""
        before, self._sent = self._sent, len(self.drawn)
        text, tokens = self._text.take(), self._sent - before
        if self._text.plain and not self.request.return_ids:
            return RowDelta(self.row, text, tokens, self.finish_reason)
        entries = self._text.take_logprobs(whole=self.finish_reason is not None)
        ids = self.drawn[before:] + self._stop_id if self.request.return_ids else []
        stop = self._text.stop if self.finish_reason else ""
        prompt, self.prompt_logprobs = self.prompt_logprobs, []
        return RowDelta(self.row, text, tokens, self.finish_reason, entries, stop, ids, prompt)

    def shown_tokens(self, tokenizer: Tokenizer) -> list[int]:
        """As of `RowText`."""
        return self._text.shown_tokens(self.drawn, tokenizer)

    def _finish(self, reason: str) -> None:
        """Finish after the token drawn last: what was held back is shown too."""
        if self._text.finish():
            self._finish_at_stop_string()
        else:
            self._set_finished(reason)

    def _finish_at_stop_string(self) -> None:
        self._set_finished("stop")
        self._text.drop_unshown_logprobs()

    def _set_finished(self, reason: str) -> None:
        self.finish_reason, self.state = reason, FINISHED


@dataclass(eq=False)
class Mixture:
    """The sequences of one row, which are fed the same tokens in different states and draw together."""

    weights: list[float]  # of the members; they sum to 1
    members: list[Sequence] = field(default_factory=list)

    @property
    def at_end(self) -> bool:
        """Whether all of them have just the last token before the first draw left."""
        return all(
            seq.state is PREFILLING
            and seq.tokens_left == 1
            and (seq.constraint is None or seq.constraint.can_draw)
            for seq in self.members
        )


def mixed(request: GenerateRequest) -> tuple[list[str], list[float]]:
    """The start states in which each row of a request runs, and their weights, which sum to 1.

    States without weight are left out, but for the first one of a turn: it is the session's. Raises
    ValueError for weights that cancel each other out.
    """
    parts = [part for i, part in enumerate(request.mixture) if part.weight or (request.turn and i == 0)]
    if not request.mixture:
        return [request.start_state], [1.0]
    total, size = sum(part.weight for part in parts), sum(abs(part.weight) for part in parts)
    if not abs(total) > LEAST_SUM * size:
        raise ValueError("The weights of the mixture sum to 0; give weights with another sum.")
    return [part.start_state for part in parts], [part.weight / total for part in parts]


def rows_of(
    request: GenerateRequest,
    key: RequestKey,
    prompts: list[list[int]],
    seed: int,
    target: str | None,
    tokenizer: Tokenizer,
) -> list[Sequence]:
    """The rows of a request, or those of a paused one that had not finished.

    Raises ValueError for a mixture that cannot be.
    """
    if request.rows:
        places = [(row.number, prompt, row.drawn) for prompt, row in zip(prompts, request.rows, strict=True)]
    else:
        places = [(row, prompts[row // request.n], []) for row in range(len(prompts) * request.n)]
    states, weights = mixed(request)
    if len(states) > 1:  # with a seed of their own, as FlashInfer would draw each by itself
        request = replace(request, sampling=replace(request.sampling, seed=seed))
    sequences = []
    for number, prompt, drawn in places:
        mixture = Mixture(weights) if len(states) > 1 else None
        for place, state in enumerate(states):
            stored = target if place == 0 else None
            seq = Sequence(key, number, prompt, request, seed, stored, state, mixture)
            if drawn:
                seq.resume(drawn, tokenizer)
            if mixture:
                mixture.members.append(seq)
            sequences.append(seq)
    return sequences
