"""The rows of a request, with their lives."""

import secrets
from dataclasses import dataclass

from msgspec.structs import replace

from rwkv_batch.engine.rows.adapters import Adapters
from rwkv_batch.engine.rows.beginnings import Beginnings
from rwkv_batch.engine.rows.lives import Fresh, MixtureMember, SharedPrompt
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.stored_turns import Turns
from rwkv_batch.engine.scheduling.row import Life, Row, RowAdapter, RowDraws
from rwkv_batch.sampling.params import check, drawable
from rwkv_batch.wire.protocol import GenerateRequest, MixturePart, RequestKey

Start = tuple[MixturePart, RowAdapter | None]  # a state in which rows run, and what they run with
LEAST_TOKENS = 16  # of a prompt that is shared; a shorter one is fed as fast as its state is copied


@dataclass(frozen=True)
class RowMaker:
    """For all requests of an engine."""

    parts: EngineParts
    beginnings: Beginnings
    turns: Turns
    adapters: Adapters

    def rows_of(self, request: GenerateRequest, key: RequestKey) -> list[Row]:
        """The rows of a request, or those of a paused one that had not finished.

        Those of a mixture follow each other. Raises ValueError, Refusal, StoreError.
        """
        check(request.sampling, drawable(self.parts.weights.vocab))
        states = self.beginnings.check(request)
        self.parts.prompts.check(request)
        starts = [(part, self.adapters.of(request, part.start_state)) for part in states]
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        if len(starts) > 1:  # with a seed of their own, as FlashInfer would draw each by itself
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        begun = [self._begun(request, given, starts) for given in request.prompts]
        past = [row.drawn for row in request.rows]  # of a paused request, which has a prompt for each row
        numbers = [row.number for row in request.rows] or request.row_numbers or range(len(begun) * request.n)
        rows = list[Row]()
        for place, number in enumerate(numbers):
            prompt, lives = begun[place // request.n]
            draws = RowDraws(seed)
            members = [Row(key, number, prompt, request, life, draws) for life in lives]
            if len(members) > 1:
                draws.members, draws.weights = members, [part.weight for part, _ in starts]
            for row in members if past and past[place] else ():
                row.resume(past[place], self.parts.tokenizer)
            rows += members
        return rows

    def _begun(
        self, request: GenerateRequest, given: str | list[int], starts: list[Start]
    ) -> tuple[list[int], list[Life]]:
        """The tokens of a prompt, and the lives of its rows: one for each state of the mixture."""
        lives: list[Life]
        if request.turn:
            turn = self.turns.life_of(request, request.turn, starts[0][1])
            prompt = turn.prompt(request)
            lives = [turn, *(MixtureMember(self.parts, self.beginnings) for _ in starts[1:])]
        else:
            prompt = self.parts.prompts.encode(given, request.prefix_ids)
            lives = [self._fresh(request, prompt, mixed=len(starts) > 1) for _ in starts]
        for life, (part, adapter) in zip(lives, starts, strict=True):
            life.start_state, life.adapter = part.start_state, adapter
        return prompt, lives

    def _fresh(self, request: GenerateRequest, prompt: list[int], mixed: bool) -> Fresh:
        tokens, scored = len(prompt) - 1, request.prompt_logprobs is not None  # which follow from feeding it
        if request.n > 1 and not mixed and not scored and tokens >= LEAST_TOKENS:
            return SharedPrompt(self.parts, self.beginnings, tokens, request.n)
        return Fresh(self.parts, self.beginnings)
