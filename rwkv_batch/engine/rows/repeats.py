"""Turns that are sent again: what is stored with a turn, so that its reply can be given once more.

A client that has lost the reply to a turn cannot know whether the turn was stored. It sends the turn again
under the same Idempotency-Key. The front end makes an id of that key and of the session's name
(`SessionTurn.request`, routes/http/idempotency.py). The id, a digest of what was asked and how the text ended
are stored with the turn. Sent again, the turn is found by the id, and its stored text is the reply.
"""

import hashlib
from dataclasses import dataclass

import msgspec

from rwkv_batch.state.entries import REQUEST_ID, Turn
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta, SessionTurn

OTHER_BODY = "The Idempotency-Key was sent before with another prompt, max_tokens or past; send a new key."


class _Ending(msgspec.Struct, frozen=True, array_like=True):
    """How the text of a turn has ended, and what was asked."""

    asked: bytes
    finish_reason: str
    tokens: int  # that were drawn
    stop: str


_ending = msgspec.msgpack.Decoder(_Ending)


@dataclass(frozen=True)
class StoredReply:
    """A turn that is stored already. `key`: of its session; "": not known."""

    key: str
    turn: Turn

    @property
    def continued(self) -> bool:
        """Whether it went on from a state of its session."""
        return self.turn.number > 1

    def answers(self, turn: SessionTurn, request: GenerateRequest) -> bool:
        """Whether the turn of the request is the one that was stored."""
        return self._ending.asked == asked(turn, request)

    def delta(self, row: int, text: str, with_ids: bool) -> RowDelta:
        """The whole reply. text: of the turn's completion."""
        end = self._ending
        ids = list(self.turn.completion) if with_ids else []
        return RowDelta(row, text, end.tokens, end.finish_reason, stop=end.stop, ids=ids)

    @property
    def _ending(self) -> _Ending:
        return _ending.decode(self.turn.request[REQUEST_ID:])


def stored_with(turn: SessionTurn, request: GenerateRequest, last: RowDelta, tokens: int) -> bytes:
    """Turn.request of a turn; empty unless it has a key. tokens: that were drawn."""
    if not turn.request:
        return b""
    end = _Ending(asked(turn, request), last.finish_reason or "", tokens, last.stop)
    return turn.request + msgspec.msgpack.encode(end)


def asked(turn: SessionTurn, request: GenerateRequest) -> bytes:
    """A digest of what a turn asks for: what it continues, its prompt, and its length."""
    data = msgspec.msgpack.encode((turn.source, request.prompts, request.max_tokens))
    return hashlib.blake2b(data, digest_size=8).digest()
