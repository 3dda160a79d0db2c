"""What a disk holds after a process was killed, or after the power was cut, at any moment of a recorded run.

A program runs under disk_trace.c, which records its operations on files. `Disk` carries them out up to some
moment and knows what has been synced by then. After kill -9 a disk holds everything. After a power cut it
holds what was synced, and of what came later anything, in parts: any of the writes, torn ones among them.
"""

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

SOURCE = Path(__file__).with_name("disk_trace.c")
RECORD = struct.Struct("<IiqII")
NOT_KEPT = "-shm"  # SQLite makes these files anew when nobody has the database open

Names = Literal["synced", "any", "all"]  # which names of files outlive a power cut, see Cut


class Kind(IntEnum):
    """Of a record; disk_trace.c describes them."""

    OPEN = 1
    CLOSE = 2
    WRITE = 3
    TRUNCATE = 4
    SYNC_BEGIN = 5
    SYNC_END = 6
    RENAME = 7
    UNLINK = 8
    MKDIR = 9
    MARK = 10
    START = 11


@dataclass(frozen=True)
class Operation:
    """A record of disk_trace.c."""

    kind: Kind
    descriptor: int
    number: int
    path: str
    data: bytes


@dataclass(frozen=True)
class Cut:
    """After so many operations of a trace: kill -9, or a power cut, whose chances are drawn from the seed.

    `names`, after a power cut: a file has a new name, or has lost one, when its folder was synced after that
    ("synced"); or each name is any of those things that it has been since ("any"), or the last of them
    ("all"). File systems differ.
    """

    position: int
    names: Names | None = None  # None: kill -9
    seed: int = 0


@cache
def missing() -> str | None:
    """Why nothing can be recorded here; None: it can be."""
    if sys.platform != "linux":
        return "Operations on files are recorded by way of LD_PRELOAD, which is for Linux."
    return None if _compiler() else "There is no C compiler (cc, gcc, clang or c++) for disk_trace.c."


@cache
def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "c++"))), None)


@cache
def _library() -> bytes:
    """disk_trace.c, compiled."""
    compiler = _compiler()
    assert compiler
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "disk_trace.so"
        command = [
            compiler,
            "-x",
            "c",
            "-shared",
            "-fPIC",
            "-O1",
            "-pthread",
            "-o",
            str(library),
            str(SOURCE),
        ]
        subprocess.run(command, check=True)
        return library.read_bytes()


def preloaded(folder: Path) -> str:
    """What LD_PRELOAD has to be for disk_trace.c, whose library is put into that folder."""
    library = folder / "disk_trace.so"
    library.write_bytes(_library())
    return f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()


def run(command: Sequence[str | Path], prefix: str, scratch: Path) -> None:
    """Run a program that starts its traces itself; recorded is what has a path that begins with `prefix`."""
    environment = os.environ | {"LD_PRELOAD": preloaded(scratch), "DISK_TRACE_PREFIX": prefix}
    subprocess.run(command, env=environment, check=True)


def read_trace(file: Path) -> list[Operation]:
    """All operations of a trace, in order."""
    data, place, operations = file.read_bytes(), 0, []
    while place < len(data):
        kind, descriptor, number, path_length, length = RECORD.unpack_from(data, place)
        path_end = place + RECORD.size + path_length
        path = data[place + RECORD.size : path_end].decode()
        operations.append(Operation(Kind(kind), descriptor, number, path, data[path_end : path_end + length]))
        place = path_end + length
    return operations


@dataclass(frozen=True)
class _Write:
    offset: int
    data: bytes


@dataclass(frozen=True)
class _Truncate:
    size: int


def _change(content: bytearray, change: _Write | _Truncate) -> None:
    end = change.size if isinstance(change, _Truncate) else change.offset + len(change.data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if isinstance(change, _Write):
        content[change.offset : end] = change.data
    else:
        del content[end:]


@dataclass(eq=False)
class _File:
    """`pending`: changes that have not been synced, after `count` that have."""

    synced: bytearray = field(default_factory=bytearray)
    pending: list[_Write | _Truncate] = field(default_factory=list)
    count: int = 0

    def sync(self, count: int) -> None:
        """The first `count` changes are on the disk."""
        done = max(0, count - self.count)
        for change in self.pending[:done]:
            _change(self.synced, change)
        del self.pending[:done]
        self.count += done

    def content(self, chance: Random | None) -> bytes:
        """What is found later; without `chance` everything is."""
        content = bytearray(self.synced)
        kept = chance.choice((0.0, 0.5, 0.9, 1.0)) if chance else 1.0
        for change in self.pending:
            if chance is None:
                _change(content, change)
            elif chance.random() < kept:
                if isinstance(change, _Write) and chance.random() < 0.2:
                    change = _Write(change.offset, change.data[: chance.randrange(len(change.data))])
                _change(content, change)
        return bytes(content)


_Entries = dict[str, "_File | _Folder | None"]  # None: there is nothing of that name


@dataclass(eq=False)
class _Folder:
    """`pending` and `count`: see _File."""

    now: _Entries = field(default_factory=dict)
    synced: _Entries = field(default_factory=dict)
    pending: list[_Entries] = field(default_factory=list)
    count: int = 0

    def change(self, entries: _Entries) -> None:
        self.now |= entries
        self.pending.append(entries)

    def sync(self, count: int) -> None:
        done = max(0, count - self.count)
        for entries in self.pending[:done]:
            self.synced |= entries
        del self.pending[:done]
        self.count += done

    def entries(self, names: Names, chance: Random | None) -> _Entries:
        """What is found later."""
        if names == "all":
            return self.now
        if names == "synced" or chance is None:
            return self.synced
        been = {name: [entry] for name, entry in self.synced.items()}
        for entries in self.pending:
            for name, entry in entries.items():
                been.setdefault(name, [None]).append(entry)
        if chance.random() < 0.5:  # all that has been made is there, and the old may be in place of the new
            been = {name: [entry for entry in entries if entry] for name, entries in been.items()}
        return {name: chance.choice(entries or [None]) for name, entries in been.items()}


class Disk:
    """The files below `root` as a trace leaves them. `base`: a folder with what was there before."""

    def __init__(self, root: Path, operations: Sequence[Operation], base: Path | None = None) -> None:
        self._root, self._operations, self._position = root, operations, 0
        self._top = _loaded(base) if base else _Folder()
        self._open: dict[int, _File | _Folder] = {}
        self._syncs: dict[int, tuple[_File | _Folder, int]] = {}  # by number: how many changes it covers

    def advance(self, position: int) -> None:
        """Carry out the operations up to this one, which is not before those done already."""
        assert position >= self._position
        for operation in self._operations[self._position : position]:
            self._apply(operation)
        self._position = position

    def rebuild(self, cut: Cut, target: Path) -> None:
        """Make a folder of what is found after the cut, which is not before an earlier one."""
        self.advance(cut.position)
        if cut.names is None:
            _write(self._top, target, "all", None)
        else:
            _write(self._top, target, cut.names, Random(cut.seed))

    def _apply(self, operation: Operation) -> None:
        match operation:
            case Operation(Kind.START):
                self._open.clear()
                self._syncs.clear()
            case Operation(Kind.OPEN, descriptor, flags, path):
                self._open[descriptor] = self._opened(path, flags)
            case Operation(Kind.CLOSE, descriptor):
                del self._open[descriptor]
            case Operation(Kind.WRITE, descriptor, offset, _, data):
                self._file(descriptor).pending.append(_Write(offset, data))
            case Operation(Kind.TRUNCATE, descriptor, size):
                self._file(descriptor).pending.append(_Truncate(size))
            case Operation(Kind.SYNC_BEGIN, descriptor, number):
                node = self._open[descriptor]
                self._syncs[number] = node, node.count + len(node.pending)
            case Operation(Kind.SYNC_END, _, number):
                node, count = self._syncs.pop(number)
                node.sync(count)
            case Operation(Kind.RENAME, _, _, path, data):
                folder, name = self._place(path)
                other, new = self._place(data.decode())
                assert folder is other, "no rename moves a file to another folder"
                folder.change({name: None, new: folder.now[name]})
            case Operation(Kind.UNLINK, _, _, path):
                folder, name = self._place(path)
                folder.change({name: None})
            case Operation(Kind.MKDIR, _, _, path):
                folder, name = self._place(path)
                folder.change({name: _Folder()})

    def _opened(self, path: str, flags: int) -> "_File | _Folder":
        if Path(path) == self._root:
            return self._top
        folder, name = self._place(path)
        node = folder.now.get(name)
        if node is None:
            node = _File()
            folder.change({name: node})
        elif flags & os.O_TRUNC and isinstance(node, _File):
            node.pending.append(_Truncate(0))
        return node

    def _place(self, path: str) -> tuple[_Folder, str]:
        """The folder that a path lies in, and its name there."""
        *parents, name = Path(path).relative_to(self._root).parts
        folder = self._top
        for parent in parents:
            inside = folder.now[parent]
            assert isinstance(inside, _Folder)
            folder = inside
        return folder, name

    def _file(self, descriptor: int) -> _File:
        node = self._open[descriptor]
        assert isinstance(node, _File)
        return node


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder that a crash may keep."""
    files = (file for file in folder.rglob("*") if file.is_file() and not file.name.endswith(NOT_KEPT))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def cuts(
    operations: Sequence[Operation], count: int, names: Sequence[Names | None], seed: int
) -> Iterator[Cut]:
    """Moments in ascending order, with each kind of names in turn.

    Half of them are just after a mark, when most has been promised and least needs to have been synced; a
    quarter are just after what changes names, or what is certain.
    """
    draw = Random(seed)
    turning = {Kind.RENAME, Kind.UNLINK, Kind.MKDIR, Kind.SYNC_END, Kind.TRUNCATE}
    places = list(enumerate(operations, 1))
    marks = [place for place, operation in places if operation.kind is Kind.MARK]
    turns = [place for place, operation in places if operation.kind in turning]
    among = [draw.choices((marks, turns, range(len(operations) + 1)), (2, 1, 1))[0] for _ in range(count)]
    positions = sorted(draw.choice(places) for places in among)
    kinds = [names[number % len(names)] for number in range(count)]
    draw.shuffle(kinds)
    for position, kind in zip(positions, kinds, strict=True):
        yield Cut(position, kind, draw.getrandbits(32))


def _loaded(path: Path) -> _Folder:
    entries: _Entries = {
        file.name: _loaded(file) if file.is_dir() else _File(bytearray(file.read_bytes()))
        for file in sorted(path.iterdir())
    }
    return _Folder(dict(entries), entries)


def _write(folder: _Folder, target: Path, names: Names, chance: Random | None) -> None:
    target.mkdir()
    for name, node in folder.entries(names, chance).items():
        if isinstance(node, _Folder):
            _write(node, target / name, names, chance)
        elif node is not None and not name.endswith(NOT_KEPT):
            (target / name).write_bytes(node.content(chance))
