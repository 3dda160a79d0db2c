"""The rows of a request, with their lives."""

import secrets
from dataclasses import dataclass

from msgspec.structs import replace

from rwkv_batch.engine.rows.beginnings import Beginnings
from rwkv_batch.engine.rows.lives import Fresh, MixtureMember, SharedPrompt
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.stored_turns import StoredTurn, Turns
from rwkv_batch.engine.scheduling.row import Life, Row, RowAdapter, RowDraws
from rwkv_batch.wire.protocol import GenerateRequest, MixturePart, RequestKey

Start = tuple[MixturePart, RowAdapter | None]  # a state in which rows run, and what they run with
LEAST_TOKENS = 16  # of a prompt that is shared; a shorter one is fed as fast as its state is copied


@dataclass(frozen=True)
class RowMaker:
    """For all requests of an engine."""

    parts: EngineParts
    beginnings: Beginnings
    turns: Turns

    def rows_of(
        self,
        request: GenerateRequest,
        key: RequestKey,
        prompts: list[list[int]],
        target: str | None,
        starts: list[Start],
    ) -> list[Row]:
        """The rows of a request, or those of a paused one that had not finished.

        Those of a mixture follow each other. target: of a turn, the session.
        """
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        if len(starts) > 1:  # with a seed of their own, as FlashInfer would draw each by itself
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        if request.rows:
            places = [
                (row.number, prompt, row.drawn) for prompt, row in zip(prompts, request.rows, strict=True)
            ]
        else:
            numbers = request.row_numbers or range(len(prompts) * request.n)
            places = [(number, prompts[i // request.n], []) for i, number in enumerate(numbers)]
        rows, lives = list[Row](), list[Life]()
        for place, (number, prompt, drawn) in enumerate(places):
            if place % request.n == 0:  # the next prompt
                lives = self._lives(request, prompt, target, starts)
            draws = RowDraws(seed)
            members = [Row(key, number, prompt, request, life, draws) for life in lives]
            if len(members) > 1:
                draws.members, draws.weights = members, [part.weight for part, _ in starts]
            for row in members if drawn else ():
                row.resume(drawn, self.parts.tokenizer)
            rows += members
        return rows

    def _lives(
        self,
        request: GenerateRequest,
        prompt: list[int],
        target: str | None,
        starts: list[Start],
    ) -> list[Life]:
        """Of the rows of one prompt: one for each state of the mixture."""
        parts, beginnings, turn = self.parts, self.beginnings, request.turn
        tokens, scored = len(prompt) - 1, request.prompt_logprobs is not None  # which follow from feeding it
        shared = request.n > 1 and len(starts) == 1 and tokens >= LEAST_TOKENS and not scored
        lives: list[Life] = []
        for part, adapter in starts:
            life: Life
            if turn:
                life = (
                    MixtureMember(parts, beginnings) if lives else StoredTurn(self.turns, turn, target=target)
                )
            else:
                life = (
                    SharedPrompt(parts, beginnings, tokens, request.n) if shared else Fresh(parts, beginnings)
                )
            life.start_state, life.adapter = part.start_state, adapter
            lives.append(life)
        return lives
