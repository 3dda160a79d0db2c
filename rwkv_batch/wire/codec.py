"""Messages between front ends and the engine as bytes: msgpack."""

from contextlib import suppress

import msgspec

from rwkv_batch.wire.commands import Command, LoadAdapter, LoadModel, RemoveAdapter, RemoveModel
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


def compacted(changes: list[bytes], change: bytes) -> list[bytes]:
    """The changes of models and adapters, with one more, without those that it makes void.

    Made one after the other they lead to the same models, in the same order, with the same adapters. Models
    are removed last, as the only one cannot be. One that was removed and comes back is the last in order.
    """
    made = [(each, _to_engine.decode(each)) for each in changes]
    message = _to_engine.decode(change)
    removals = 0
    while removals < len(made) and isinstance(made[-1 - removals][1], RemoveModel):
        removals += 1
    front, behind = made[: len(made) - removals], made[len(made) - removals :]
    match message:
        case LoadModel(name=name):
            front = [each for each in front if not _is_adapter(each[1], name)]
            loaded = [at for at, (_, other) in enumerate(front) if _is_load(other, name)]
            if loaded:
                front[loaded[0]] = change, message
            else:
                front += [each for each in behind if _is_removal(each[1], name)]
                front.append((change, message))
                behind = [each for each in behind if not _is_removal(each[1], name)]
        case RemoveModel(name=name):
            front = [each for each in front if not _is_about(each[1], name)]
            behind = [*(each for each in behind if not _is_removal(each[1], name)), (change, message)]
        case LoadAdapter(to_model=model, key=key):
            front = [each for each in front if not _is_adapter(each[1], model, key)] + [(change, message)]
        case RemoveAdapter(to_model=model, key=key):
            front = [each for each in front if not _is_adapter(each[1], model, key)]
        case _:
            front.append((change, message))
    return [encoded for encoded, _ in front + behind]


def _is_load(message: ToEngine, name: str) -> bool:
    return isinstance(message, LoadModel) and message.name == name


def _is_adapter(message: ToEngine, model: str, key: str | None = None) -> bool:
    """key: None: any."""
    return isinstance(message, LoadAdapter) and message.to_model == model and key in (None, message.key)


def _is_removal(message: ToEngine, name: str) -> bool:
    return isinstance(message, RemoveModel) and message.name == name


def _is_about(message: ToEngine, model: str) -> bool:
    return _is_removal(message, model) or _is_load(message, model) or _is_adapter(message, model)


def decode_events(data: bytes) -> list[Event]:
    """Raises msgspec.DecodeError when `data` is no list of events."""
    return _events.decode(data)
