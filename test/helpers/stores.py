"""What the tests of the database share: conversations, and snapshots of tiny states."""

import contextlib
import random
import sqlite3
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch

from rwkv_batch.state.entries import (
    EMPTY_DIGEST,
    NONE,
    Head,
    Operation,
    PutImage,
    PutTurn,
    Refused,
    Removed,
    RowDamaged,
    Session,
    Turn,
    digest,
)
from rwkv_batch.state.exported import Exported, to_turns
from rwkv_batch.state.log.protocol import SessionStore
from rwkv_batch.state.slots import DeviceStates
from rwkv_batch.state.snapshot import SnapshotLayout, parts, seal

MODEL, VOCABULARY = "m", 70_000
PATIENCE = 60.0  # seconds until something that does not come is a failure


def random_tokens(seed: int, count: int, below: int = VOCABULARY) -> list[int]:
    """Random token ids, which are the same for the same seed."""
    return random.Random(seed).choices(range(below), k=count)


def next_turn(
    id_: int,
    parent: Turn | None = None,
    prompt: Sequence[int] = (1, 2),
    completion: Sequence[int] = (3,),
    model: int = 1,
    created: float = 1.5,
) -> Turn:
    """A turn that continues another one, or begins a conversation."""
    past = parent.digest if parent else EMPTY_DIGEST
    return Turn(
        id_,
        parent.id if parent else NONE,
        parent.number + 1 if parent else 1,
        parent.end if parent else 0,
        list(prompt),
        list(completion),
        created,
        model,
        digest(past, prompt, completion),
    )


def unknown_past(id_: int, tokens: int = 5, model: int = 1) -> Turn:
    """A turn that stands for a state whose tokens are not known."""
    return Turn(id_, NONE, 0, tokens, [], [], 1.5, model, random.Random(id_).randbytes(16))


def chain(
    first: int,
    lengths: Sequence[int],
    parent: Turn | None = None,
    model: int = 1,
    created: float = 1.5,
) -> list[Turn]:
    """Turns one after the other, the oldest first, with random tokens."""
    turns: list[Turn] = []
    for id_, length in enumerate(lengths, first):
        said = random_tokens(1_000_000 + id_, 2)
        parent = next_turn(id_, parent, random_tokens(id_, length), said, model, created)
        turns.append(parent)
    return turns


def turns_of(content: Exported, first: Turn) -> list[Turn]:
    """The turns of a file, with ids from that of `first` on."""
    return to_turns(content, first, count(first.id + 1).__next__)


def session(key: str, turn: Turn, updated: float = 1.5) -> Session:
    """A session that ends with this turn."""
    return Session(key, turn.head(0), updated)


def put_image(
    turn: Turn, size: int = 1000, saves: int | None = None, used: float = 1.5, model: int | None = None
) -> PutImage:
    """The row of the image of a turn's end."""
    return PutImage(
        turn.id,
        turn.model if model is None else model,
        turn.end,
        turn.end if saves is None else saves,
        size,
        used,
    )


def head(turn: int, tokens: int = 100, imaged: int = 0) -> Head:
    """The end of a turn of which nothing else matters."""
    return Head(turn, 1, tokens, random.Random(turn).randbytes(16), 1, imaged)


def tiny_states(slots: int = 1, layers: int = 1, wkv: torch.dtype = torch.float32) -> DeviceStates:
    return DeviceStates(slots, layers, 64, torch.float16, wkv)


def tiny_layout(model: str = MODEL, layers: int = 1, wkv: torch.dtype = torch.float32) -> SnapshotLayout:
    return SnapshotLayout.from_states(tiny_states(1, layers, wkv), model)


def body(of: SnapshotLayout, seed: int = 0) -> torch.Tensor:
    """A snapshot with random contents that is not sealed yet."""
    data = torch.zeros(of.size, dtype=torch.uint8)
    numbers = torch.Generator().manual_seed(seed)
    for part in parts(data, of):
        part.copy_(torch.randn(part.shape, generator=numbers))
    return data


def sealed(of: SnapshotLayout, tokens: int = 5, digest: bytes = b"", seed: int = 0) -> torch.Tensor:
    """A snapshot with random contents."""
    data = body(of, seed)
    seal(data, of, tokens, 17.5, digest)
    return data


def do(store: SessionStore, *operations: Operation) -> Removed:
    """One transaction; what it has removed. Raises Refused."""
    (outcome,) = store.commit([operations])
    if isinstance(outcome, Refused):
        raise outcome
    return outcome


def put_all(store: SessionStore, *turns: Turn) -> None:
    do(store, *map(PutTurn, turns))


def has(store: SessionStore, turn: Turn) -> bool:
    try:
        return store.read_turn(turn.id) == turn
    except RowDamaged:
        return False


def keys(store: SessionStore, after: str | None = None, limit: int = 1000, prefix: str = "") -> list[str]:
    return [found.key for found in store.list_sessions(after, limit, prefix)]


def raw(path: Path, statement: str, *values: object) -> None:
    """Change a closed database behind the server's back."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(statement, values)


def in_order(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: name.encode("utf-8", "surrogatepass"))


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}
