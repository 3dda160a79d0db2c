"""Files of exported sessions: tokens, a state, or both.

A file with a state only is a snapshot (snapshot.py), the format of the first version. Any other one is

    offset  length
    0       8       magic
    8       4       format version
    12      4       CRC-32 of everything that follows
    16              msgpack, see `Exported`
"""

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec
from torch import Tensor

from rwkv_batch.state.entries import EMPTY_DIGEST, NONE, SnapshotError, Turn, digest, pack, unpack
from rwkv_batch.state.snapshot import Damaged, Transfer, tensor_from_bytes

What = Literal["both", "tokens", "state"]  # of a session, that a file holds

MAGIC = b"RWKV7SN\n"
VERSION = 1
MOST_TOKENS = 1 << 53  # of a session, and more than any has
_FIXED = struct.Struct("<8sII")


class ExportedTurn(msgspec.Struct, frozen=True, array_like=True):
    """A turn of the log. Tokens are packed (entries.pack)."""

    prompt: bytes
    completion: bytes
    created: float


class Exported(msgspec.Struct, frozen=True):
    """A session."""

    fingerprint: str  # of the model
    vocabulary: int
    start: int  # tokens before the first turn that are not known
    turns: list[ExportedTurn]
    position: int  # tokens that the image's state has seen: the end of a turn, or `start`
    image: bytes  # a snapshot, or none
    beginning: bytes = b""  # a snapshot of the state at `start`, where the image is a later one

    @property
    def past_unknown(self) -> bool:
        """Whether the session begins in a state: one whose tokens are not known, or a start state."""
        begins = self.image and self.position == self.start
        return bool(self.start or self.beginning or begins or not self.turns)


class Imported(NamedTuple):
    """A session from a file, and its states in this server's layout."""

    content: Exported
    image: Tensor | None = None
    beginning: Tensor | None = None


def encode(exported: Exported) -> bytes:
    """The file."""
    data = msgspec.msgpack.encode(exported)
    return _FIXED.pack(MAGIC, VERSION, zlib.crc32(data)) + data


def decode(data: bytes) -> Exported:
    """Raises SnapshotError."""
    if len(data) < _FIXED.size:
        raise Damaged("The file is cut short.")
    _, version, checksum = _FIXED.unpack_from(data)
    if version != VERSION:
        raise SnapshotError(
            f"The file has format {version}, but this server reads format {VERSION}; use the version that "
            "wrote it."
        )
    content = memoryview(data)[_FIXED.size :]
    if zlib.crc32(content) != checksum:
        raise Damaged("The file is damaged: its checksum is wrong.")
    try:
        exported = msgspec.msgpack.decode(content, type=Exported)
        tokens = [token for turn in exported.turns for token in unpack(turn.prompt) + unpack(turn.completion)]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Damaged(f"The file cannot be read ({error}).") from error
    if tokens and max(tokens) >= exported.vocabulary:
        raise Damaged("The file holds tokens that its model does not have.")
    if not exported.turns and not exported.image:
        raise Damaged("The file holds neither tokens nor a state.")
    end = exported.start + len(tokens)
    in_order = 0 <= exported.start <= end <= MOST_TOKENS and 0 <= exported.position <= end
    if not in_order or not all(math.isfinite(turn.created) for turn in exported.turns):
        raise Damaged("The file holds numbers that no session has.")
    return exported


def from_turns(
    turns: list[Turn], model: tuple[str, int], position: int, image: bytes, beginning: bytes = b""
) -> Exported:
    """A session from its turns, the oldest first, of which the first may stand for an unknown past."""
    start = turns[0].end if turns and turns[0].past_unknown else 0
    known = [turn for turn in turns if not turn.past_unknown]
    packed = [ExportedTurn(pack(turn.prompt), pack(turn.completion), turn.created) for turn in known]
    return Exported(*model, start, packed, position, image, beginning)


def read(
    data: bytes, transfer: Transfer, model: tuple[str, int], *, any_model: bool, tokens: bool
) -> Imported:
    """A session from a file, for a server with this model. Raises SnapshotError.

    `any_model`: whether the tokens of another model with the same vocabulary are of use. `tokens`: whether
    any are.
    """
    if not data.startswith(MAGIC):
        header, image = transfer.fitted(tensor_from_bytes(data))
        return Imported(Exported(*model, header.tokens, [], header.tokens, b""), image)
    exported = decode(data)
    if exported.fingerprint == model[0] and exported.vocabulary != model[1]:
        raise Damaged(f"The file is of {exported.vocabulary} different tokens, and its model has {model[1]}.")
    if exported.fingerprint != model[0]:
        if not any_model or exported.past_unknown or exported.vocabulary != model[1]:
            raise SnapshotError(
                f"The session was made by another model ({exported.fingerprint}, and this one is "
                f"{model[0]}); continue it with the model that made it."
            )
        exported = msgspec.structs.replace(exported, position=0, image=b"")
    state, beginning = (
        transfer.fitted(tensor_from_bytes(image))[1] if image else None
        for image in (exported.image, exported.beginning)
    )
    if tokens:
        if exported.past_unknown and beginning is None:
            if state is None:
                raise Damaged("The file holds tokens whose beginning is not known, and no state.")
            exported = _from_image(exported)
        return Imported(exported, state, beginning)
    end = _ends(exported)[-1]
    if state is None or exported.position != end:
        raise SnapshotError(
            "This server stores no tokens, and the file has no state at its end; export it with what=state."
        )
    return Imported(msgspec.structs.replace(exported, start=end, turns=[], beginning=b""), state)


def _ends(exported: Exported) -> list[int]:
    """How many tokens the session has at its beginning and at the end of each turn."""
    lengths = (len(unpack(turn.prompt)) + len(unpack(turn.completion)) for turn in exported.turns)
    return list(accumulate(lengths, initial=exported.start))


def _from_image(exported: Exported) -> Exported:
    """The session without the turns before its image: there is no state to which one could go back.

    Such files were written until 2026-11. Raises Damaged.
    """
    ends = _ends(exported)
    if exported.position not in ends:
        raise Damaged("The file's state is not that of the end of a turn.")
    turns = [turn for turn, end in zip(exported.turns, ends[1:], strict=True) if end > exported.position]
    return msgspec.structs.replace(exported, start=exported.position, turns=turns)


def to_turns(exported: Exported, first: Turn, new_id: Callable[[], int]) -> list[Turn]:
    """The turns, with the model of `first`, which stands for an unknown past, and its id for the first."""
    turns = [first] if exported.past_unknown else []
    for place, turn in enumerate(exported.turns):
        prompt, completion = unpack(turn.prompt), unpack(turn.completion)
        before = turns[-1] if turns else None
        turns.append(
            replace(
                first,
                id=new_id() if before else first.id,
                parent=before.id if before else NONE,
                number=place + 1,
                start=before.end if before else 0,
                prompt=prompt,
                completion=completion,
                created=turn.created,
                digest=digest(before.digest if before else EMPTY_DIGEST, prompt, completion),
            )
        )
    return turns
