"""A fake engine whose answers are given, piece by piece, for what a browser makes of them."""

import itertools
from collections.abc import Sequence

from fake_engine import ChatEngine

from rwkv_batch.wire.protocol import Event, GenerateRequest, Progress, RowDelta

SILENCE = ""  # no piece comes from there on, and no end
PACE = 0.0001  # seconds between two pieces, so that they come over time


class ScriptedEngine(ChatEngine):
    """A prompt that holds a key of `answers` is answered with its pieces, one a token, as far as SILENCE."""

    def __init__(self, address: str) -> None:
        self.answers: dict[str, Sequence[str]] = {}
        super().__init__(address)

    def answer(self, request: GenerateRequest) -> list[tuple[float, Event]]:
        events = super().answer(request)
        pieces = next((given for key, given in self.answers.items() if key in str(request.prompts[0])), None)
        if pieces is None:
            return events
        spoken = list(itertools.takewhile(lambda piece: piece != SILENCE, pieces))
        deltas = [RowDelta(0, piece, 1) for piece in spoken]
        if len(spoken) == len(pieces):
            deltas.append(RowDelta(0, "", 0, "stop"))
        progress = [(PACE * i, Progress(request.id, [delta])) for i, delta in enumerate(deltas)]
        return [events[0], *progress]
