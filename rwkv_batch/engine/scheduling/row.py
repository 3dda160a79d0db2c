"""One row: a prompt, what has been drawn after it, and the text that leaves for its reader.

What it is fed is in `row_input.py`, its text in `row_text.py`. Where it begins and what becomes of it is its
life, which is the engine's (`engine/rows`).
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from msgspec.structs import replace

from rwkv_batch.engine.constraints.masks import RowConstraint
from rwkv_batch.engine.scheduling.row_input import TokenInput
from rwkv_batch.engine.scheduling.row_text import RowText
from rwkv_batch.runner.protocol import LAST
from rwkv_batch.text.lookup import Lookup
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import Event, GenerateRequest, RequestKey, RowDelta, TokenLogprob

Outbox = list[tuple[RequestKey, Event]]  # collected during a step for the front ends

_arrivals = itertools.count()
# Why no step takes a row, as bits: its request may be paused; it leaves its slot.
PAUSING, LEAVING = 1, 2


class RowState(Enum):
    """Where a row is between arrival and its last delta.

    It is LOADING before PREFILLING if another row or a session has its state, and again before FINALIZING if
    the state of a turn must be computed once more.
    """

    WAITING = "waiting"  # it has no slot
    LOADING = "loading"  # a state comes into its slot
    PREFILLING = "prefilling"  # tokens of its prompt are left to feed
    DECODING = "decoding"  # each step feeds the token drawn last
    FINALIZING = "finalizing"  # its text has ended; its state is brought to exactly that end and stored
    FINISHED = "finished"  # nothing more is fed


# Looked up for every row at every step, and a global is found faster than a member of an enumeration.
WAITING, LOADING, PREFILLING = RowState.WAITING, RowState.LOADING, RowState.PREFILLING
DECODING, FINALIZING, FINISHED = RowState.DECODING, RowState.FINALIZING, RowState.FINISHED


@dataclass(eq=False)
class RowAdapter:
    """An adapter that rows run with, or a start state that counts as one (see `rows/adapters.py`).

    `slot`: where it is on the device; None: not there.
    """

    name: str
    digest: str  # hexadecimal
    number: int  # distinguishes those that are not the same, in this process
    model: int  # the id of the model with it, in the database
    slot: int | None = None


Beginning = dict[int, Any]  # what slots begin with, as of States.replace


@dataclass(eq=False, kw_only=True)
class Life(ABC):
    """What a row begins with, and what becomes of it; which row, in that of several, is an argument."""

    keeps_state: ClassVar[bool] = False  # whether a row is fed for its state, though it draws nothing
    start_state: str = ""  # the name of the state in which it begins
    adapter: RowAdapter | None = None
    target: str | None = None  # the session that its state is stored under; one row of each runs
    abandoned: bool = False  # it was dropped, and its row is there only until its state has been loaded

    @property
    def stored(self) -> bool:
        """Whether its text has been answered, and its state is all that is left to do."""
        return False

    def paused(self, row: "Row") -> GenerateRequest:
        """The row's request, with what it needs to go on once it has been paused."""
        return row.request

    @abstractmethod
    def cached_tokens(self, row: "Row") -> int:
        """How many tokens of its prompt need not be fed, as far as is known before it begins.

        Raises Refusal.
        """

    @abstractmethod
    def begin(self, row: "Row") -> Beginning:
        """It has its slot. What that begins with; empty: its state comes later, or the row has ended.

        Raises Refusal.
        """

    @abstractmethod
    def reached(self, row: "Row") -> None:
        """Its state has seen its input as far as a cut."""

    @abstractmethod
    def text_ended(self, row: "Row", delta: RowDelta) -> None:
        """The reader gets this delta, and nothing more is drawn."""

    @abstractmethod
    def drop(self, row: "Row", reason: str) -> None:
        """Nobody reads what it draws. reason: for the metrics, unless it has been answered."""


@dataclass(eq=False, slots=True)
class RowDraws:
    """How a row draws.

    The rows of a mixture have it in common: they are fed the same tokens in different states and draw as one.
    """

    seed: int
    members: Sequence["Row"] = ()  # of a mixture; the first leads
    weights: Sequence[float] = ()  # of these, which sum to 1
    constraint: RowConstraint | None = None  # what binds the text
    ahead: bool = False  # whether it can be fed LAST
    lookup: Lookup | None = None  # of its drafts, once it has had any

    @property
    def may_begin(self) -> bool:
        """Whether its first draw need not wait for a mask, or for other rows of a mixture."""
        return (self.constraint is None or self.constraint.can_draw) and all(
            row.state is PREFILLING and row.input.left == 1 for row in self.members
        )


@dataclass(eq=False, slots=True)
class Row:
    """One sequence of tokens, in one slot. It knows what comes next, and not when it runs.

    `input` is fed first: the prompt, and in front of it what a session's stored state lacks. Then each drawn
    token is, as it comes.
    """

    key: RequestKey
    number: int  # in its request
    prompt: list[int]
    request: GenerateRequest
    life: Life
    draws: RowDraws
    slot: int | None = None
    state: RowState = WAITING
    held: int = 0  # why no step takes it: PAUSING, LEAVING
    drawn: list[int] = field(default_factory=list)  # a stop id does not count
    drawn_fed: int = 0  # how many of these the state has seen
    in_flight: int = 0  # draws that are queued and not known yet
    arrival: int = field(default_factory=_arrivals.__next__)
    input: TokenInput = field(init=False)
    text: RowText = field(init=False)

    def __post_init__(self) -> None:
        self.input, self.text = TokenInput(self.prompt), RowText(self.request, self.number)

    @property
    def leads(self) -> bool:
        """Whether its draws are the reader's; the others of a mixture only add to them."""
        members = self.draws.members
        return not members or members[0] is self

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Which of two rows gets a slot first: the lower one."""
        return self.request.batch, self.request.deadline or math.inf, self.arrival

    @property
    def together(self) -> "Sequence[Row]":
        """The rows that draw as one: those of its mixture, or itself."""
        return self.draws.members or [self]

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
            bound = self.draws.constraint
            if not self.in_flight:
                return bound is None or bound.can_draw
            ahead = self.draws.ahead and (bound is None or not bound.slow)
            return ahead and len(self.drawn) + self.in_flight < self.request.max_tokens
        return (self.state is PREFILLING or self.state is FINALIZING) and self.tokens_to_feed > 0

    @property
    def waits_for_draw(self) -> bool:
        """Whether it goes on when its last draw is known, and not before."""
        more = len(self.drawn) + self.in_flight < self.request.max_tokens
        return self.state is DECODING and self.in_flight > 0 and more and not self.can_step

    @property
    def tokens_to_feed(self) -> int:
        """Of the input that is left, how much the next steps may feed: its last token draws."""
        left = self.input.left
        return left if self.state is not PREFILLING or self.draws.may_begin else left - 1

    @property
    def known_draws_left(self) -> int:
        """How many tokens it will draw if no stop id or string ends it before."""
        if self.draws.constraint:  # masks depend on what was drawn
            return 1
        return self.request.max_tokens - len(self.drawn) - self.in_flight

    def draws_after(self, count: int) -> bool:
        """Whether a token is drawn after a step that feeds it `count` tokens."""
        return self.state is DECODING or (self.state is PREFILLING and count >= self.input.left)

    def next_tokens(self, count: int) -> list[int]:
        """What the next step feeds: `count` of its input, or the token drawn last."""
        if self.state is DECODING:
            return [LAST] if self.in_flight else self.drawn[-1:]
        return self.input.next(count)

    def advance(self, count: int) -> bool:
        """It has been fed its next `count` tokens. Whether its state is kept there: see TokenInput.cuts."""
        if self.state is DECODING:
            self.drawn_fed += count
            return False
        at_cut = self.input.advance(count)
        if self.state is PREFILLING and not self.input.left:
            self.state = DECODING
        return at_cut

    def admit(self, slot: int) -> None:
        """It runs in this slot from now on."""
        self.slot, self.state = slot, PREFILLING

    def leave(self, kept: Any) -> None:
        """It has no slot, and goes on in another one, with this state."""
        self.state, self.input.kept, self.held = WAITING, kept, self.held & ~LEAVING

    def come_back(self) -> Any:
        """It has a slot again. Returns the state in which it left the one before."""
        self.state = PREFILLING if self.input.left else DECODING
        kept, self.input.kept = self.input.kept, None
        return kept

    def begin_turn(self, prompt: list[int]) -> None:
        """A turn's prompt, which is known when the turn begins."""
        self.prompt, self.input = prompt, TokenInput(prompt + self.drawn)

    def begin_loading(self) -> None:
        """A state comes into its slot."""
        self.state = LOADING

    def loaded(self, replay: list[int]) -> None:
        """Its slot holds a state, after which these tokens come before what is left to feed."""
        self.input.tokens = replay + self.input.tokens
        self.state = FINALIZING if self.text.finish_reason else PREFILLING

    def resume(self, drawn: list[int], tokenizer: Tokenizer) -> None:
        """It has drawn these before it was paused, and their text has been sent."""
        self.text.skip(drawn, tokenizer)
        self.drawn, self.drawn_fed = list(drawn), len(drawn)
        self.input = TokenInput(self.prompt + drawn)

    def finish(self, reason: str, stop_id: int | None = None) -> None:
        """Its text ends behind the token drawn last."""
        self.text.finish(reason, stop_id)
        self.state = FINISHED

    def fail(self, why: str) -> RowDelta:
        """It cannot go on, and ends behind the token drawn last; its last delta. why: one sentence."""
        self.finish("error")
        self.text.prompt_logprobs.clear()
        return replace(self.text.take(self.drawn), finish_reason="error", error=why)

    def finalize(self, tokens: list[int]) -> None:
        """The text has ended. `tokens` are still fed, nothing is drawn; then the state is stored."""
        self.input, self.state = TokenInput(tokens), FINALIZING
        self.held = 0  # what was to be paused has ended before that

    def end(self) -> None:
        """Nothing more is fed."""
        self.state = FINISHED

    def take_drawn(self, token: int, data: bytes, logprob: TokenLogprob | None) -> None:
        """A token was drawn after the prompt and everything before it; `data` are its bytes."""
        request, text = self.request, self.text
        if not request.max_tokens:  # it was fed for its state, or the logprobs of its prompt
            self.finish("length")
            return
        if token in text.stop_ids:
            self.drawn_fed -= self.in_flight  # steps queued since leave the row out
            if logprob and request.prompt_logprobs is not None:
                # Who scores prompts takes the last entry for that of what was drawn.
                text.add_logprob(logprob)
            self.finish("stop", token)
            return
        self.drawn.append(token)
        if logprob:
            text.add_logprob(logprob)
        text.feed(data)
        if text.finish_reason:
            self.state = FINISHED
        elif len(self.drawn) >= request.max_tokens:
            self.finish("length")

    def take_several(self, tokens: list[int], tokenizer: Tokenizer) -> int:
        """Tokens were drawn without a look at them; how many count. See `take_drawn`."""
        goes_on = len(self.drawn) + len(tokens) < self.request.max_tokens
        if goes_on and not self.text.may_stop and self.text.stop_ids.isdisjoint(tokens):
            self.in_flight -= len(tokens)
            self.drawn += tokens
            self.text.feed(b"".join(map(tokenizer.token_bytes, tokens)))
            return len(tokens)
        for count, token in enumerate(tokens):
            if not self.generating:
                self.in_flight -= len(tokens) - count
                return count
            self.in_flight -= 1
            self.take_drawn(token, tokenizer.token_bytes(token), None)
        return len(tokens)
