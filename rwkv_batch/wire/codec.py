"""Messages between front ends and the engine as bytes: msgpack."""

from contextlib import suppress

import msgspec

from rwkv_batch.wire.commands import Command
from rwkv_batch.wire.protocol import Cancel, Event, GenerateRequest, WatchLoad, WireMessage

ToEngine = GenerateRequest | Cancel | WatchLoad | Command

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_addressed = msgspec.msgpack.Decoder(WireMessage)
_paused: msgspec.msgpack.Decoder[GenerateRequest] = msgspec.msgpack.Decoder(GenerateRequest)
_events = msgspec.msgpack.Decoder(list[Event])


def encode(message: ToEngine | list[Event]) -> bytes:
    return _encoder.encode(message)


def decode_paused(data: bytes) -> GenerateRequest:
    """The request in a document of PAUSED. Raises msgspec.DecodeError."""
    return _paused.decode(data)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.DecodeError when `data` is no such message."""
    return _to_engine.decode(data)


def id_of(data: bytes) -> str | None:
    """The id of a message that is otherwise not understood; None if it has none."""
    with suppress(msgspec.DecodeError):
        return _addressed.decode(data).id
    return None


def decode_events(data: bytes) -> list[Event]:
    """Raises msgspec.DecodeError when `data` is no list of events."""
    return _events.decode(data)
