"""The file of keys: one record for each client, with the hash of its key and what it may use.

All front ends of a host read the same file, and look at it again as soon as it has changed. The key itself
is in no file: it is random, so a plain SHA-256 of it is enough to recognize it.
"""

import fcntl
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

MOST_KEYS = 1024  # of a file that are not revoked
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
HASH = re.compile(r"[0-9a-f]{64}")
SECRET = "sk-rwkv-"  # what keys begin with, so that they are found where they should not be
Priority = Literal["interactive", "batch"]
MOST = 2**62 - 1  # of a limit, so that sums with it fit in 64 bits
Limit = Annotated[int, Meta(ge=0, le=MOST)]
Seconds = Annotated[float, Meta(ge=0, lt=253402300800)]  # since 1970, before the year 10000

log = logging.getLogger(__name__)


class KeysError(Exception):
    """The file cannot be used as it is. The message is one sentence with the way out."""


class Key(Struct, frozen=True, omit_defaults=True):
    """One client. A limit that is None does not hold."""

    name: str  # what it has stored belongs to this name
    hash: str  # SHA-256 of its key, 64 hexadecimal digits
    place: int  # of its counts (ledger.py); no two keys that are not revoked have the same
    created: Seconds
    models: list[str] | None = None  # names of those that it may use; None: all
    adapters: list[str] | None = None  # the same
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # of prompts and answers together
    tokens_per_day: Limit | None = None
    rows: Limit | None = None  # at once
    batch_bytes: Limit | None = None  # of its files of batches, with what came of them
    priority: Priority = "interactive"
    sessions: bool = True  # whether it may store sessions and responses
    admin: bool = False  # whether it sees what belongs to all, and changes what all use
    ends: str | None = None  # the last day on which it is taken, YYYY-MM-DD, UTC
    revoked: Seconds | None = None

    @property
    def ended(self) -> bool:
        return self.ends is not None and datetime.now(UTC).date() > date.fromisoformat(self.ends)

    @property
    def limited(self) -> bool:
        """Whether anything is counted for it before a request is taken."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day, self.rows)
        return any(limit is not None for limit in limits)

    def may_use_model(self, name: str) -> bool:
        return self.models is None or name in self.models

    def may_use_adapter(self, name: str) -> bool:
        return self.adapters is None or name in self.adapters


class KeyFile(Struct, frozen=True):
    """What the file holds, as JSON."""

    keys: list[Key] = []


class _Records(Struct, frozen=True):
    """What a file of keys holds, before its records are looked at."""

    keys: list[msgspec.Raw] = []


def hash_of(secret: bytes) -> str:
    return sha256(secret).hexdigest()


def read(path: str | Path) -> list[Key]:
    """All records of the file. Raises KeysError."""
    try:
        records = msgspec.json.decode(Path(path).read_bytes(), type=_Records).keys
    except FileNotFoundError:
        raise KeysError(
            f"there is no file {path}; python -m rwkv_batch.keys add {path} NAME makes one"
        ) from None
    except OSError as error:
        raise KeysError(f"{path} cannot be read ({error.strerror}); make it readable to the server") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KeysError(
            f"{path} is no file of keys ({error}); write it with python -m rwkv_batch.keys"
        ) from None
    found = [_record(path, number, each) for number, each in enumerate(records, 1)]
    taken = [key for key in found if key.revoked is None]
    for what, values in (
        ("name", [key.name for key in found]),
        ("hash", [key.hash for key in taken]),
        ("place", [key.place for key in taken]),  # each would clear what the other has counted
    ):
        for twice in (value for value, count in Counter[str | int](values).items() if count > 1):
            raise KeysError(f"{path} has two keys of the {what} {twice}; remove one")
    return found


def _record(path: str | Path, number: int, data: msgspec.Raw) -> Key:
    """Raises KeysError for a record that no command of this package has written."""
    try:
        key = msgspec.json.decode(data, type=Key)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        whose = repr(_name(data) or number)
        what, _, field = str(error).partition(" - at `$.")
        why = f"{field.rstrip('`')}: {what}" if field else what
        raise KeysError(
            f"{path} has a broken record, {whose} ({why}); write it with python -m rwkv_batch.keys"
        ) from None
    with suppress(ValueError):
        if key.ends is not None:
            date.fromisoformat(key.ends)
        if NAME.fullmatch(key.name) and 0 <= key.place < MOST_KEYS and HASH.fullmatch(key.hash):
            return key
    raise KeysError(f"{path} has a broken record, {key.name[:64]!r}; write it with python -m rwkv_batch.keys")


def _name(data: msgspec.Raw) -> str:
    """What a record that cannot be used has for a name; nothing where it has none."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found: Any = msgspec.json.decode(data)
        if isinstance(found, dict) and isinstance(name := found.get("name"), str):
            return name[:64]
    return ""


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Alone, as two commands at once would lose one of their changes."""
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeysError(f"{path} cannot be changed ({error.strerror}); choose a folder of your own") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def change(path: str | Path, make: Callable[[list[Key]], list[Key]]) -> list[Key]:
    """Put what `make` makes of the records in their place, for readers all at once. Raises KeysError."""
    path = Path(path)
    with _changing(path):
        keys = make(read(path) if path.exists() else [])
        data = msgspec.json.format(msgspec.json.encode(KeyFile(keys)), indent=1)
        new = path.with_name(f"{path.name}.new")
        try:
            mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
            owner = path.stat() if path.exists() else path.parent.stat()
            new.unlink(missing_ok=True)  # of a command that was killed, or a link to another file
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with os.fdopen(descriptor, "wb") as file:
                if os.geteuid() == 0:  # the server may run as another user
                    os.fchown(descriptor, owner.st_uid, owner.st_gid)
                file.write(data + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except OSError as error:
            raise KeysError(f"{path} cannot be written ({error.strerror}); nothing has changed") from None
    return keys


def add(path: str | Path, wanted: Key) -> str:
    """Add this record with a new key, which is returned and kept nowhere. Raises KeysError.

    Its hash, place and time are chosen here.
    """
    if not NAME.fullmatch(wanted.name):
        raise KeysError(
            f"{wanted.name[:80]!r} is no name of a key; use at most 64 letters, digits and -._ of ASCII"
        )
    secret = SECRET + secrets.token_urlsafe(32)

    def make(keys: list[Key]) -> list[Key]:
        if same := next((key for key in keys if key.name == wanted.name), None):
            why = "was revoked, and what it has stored keeps its name" if same.revoked else "is there already"
            raise KeysError(f"the key {same.name} {why}; choose another name")
        taken = {key.place for key in keys if key.revoked is None}
        place = next((number for number in range(MOST_KEYS) if number not in taken), None)
        if place is None:
            raise KeysError(f"{path} has {MOST_KEYS} keys, and no more fit; revoke some")
        return [*keys, replace(wanted, hash=hash_of(secret.encode()), place=place, created=time.time())]

    change(path, make)
    return secret


def revoke(path: str | Path, name: str) -> None:
    """Let the key of that name be taken no more. Raises KeysError."""

    def make(keys: list[Key]) -> list[Key]:
        if not any(key.name == name and key.revoked is None for key in keys):
            raise KeysError(f"there is no key {name[:80]} in {path}, or it is revoked already")
        now = time.time()
        return [replace(key, revoked=now) if key.name == name else key for key in keys]

    change(path, make)


def read_and_copy(path: str | Path, copy: str | Path) -> list[Key]:
    """`read`, and put what was read in the place of the copy. Raises KeysError.

    Of several processes that do so, the last one has read the file last. A copy that cannot be written stays.
    """
    with _changing(Path(copy)):
        keys = read(path)
        new = Path(f"{copy}.new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(KeyFile(keys)))
            os.replace(new, copy)
        except OSError:
            with suppress(OSError):  # the next one is written over it
                new.unlink(missing_ok=True)
    return keys


class Keyring:
    """The keys of a file as a process of the server knows them. Raises KeysError."""

    def __init__(self, path: str | Path, copy: str | Path = "") -> None:
        """copy: where the server keeps what was last read, for processes that begin while that cannot be."""
        self._path, self._copy = path, copy
        self._reading = threading.Lock()
        self._problem = ""  # why the file cannot be read now
        self._seen = self._stamp()
        try:
            self._take(self._read())
        except KeysError as error:
            if not copy:
                raise
            self._take(read(copy))
            self._report(error)

    def named(self, name: str) -> Key | None:
        """The record of the key of that name that is not revoked, for what runs later in its name."""
        key = self._by_name.get(name)
        return None if key is None or key.revoked is not None else key

    def find(self, secret: bytes) -> Key | None:
        """The record of a key that is not revoked."""
        return self._by_hash.get(hash_of(secret))

    def is_revoked(self, key: Key) -> bool:
        """Whether the key of such a record is not taken any more."""
        return key.hash not in self._by_hash

    def refresh(self, again: bool = True) -> bool:
        """Read the file again if it has changed; whether that has brought other keys.

        `again`: what could not be read is tried again also without a change, as it may be readable now.
        """
        with self._reading:  # who comes second finds what the first has read
            stamp = self._stamp()
            if stamp == self._seen and not (again and self._problem):
                return False
            self._seen = stamp
            try:
                self._take(self._read())
            except KeysError as error:
                self._report(error)
                return False
            self._problem = ""
            return True

    def _read(self) -> list[Key]:
        return read_and_copy(self._path, self._copy) if self._copy else read(self._path)

    def _report(self, error: KeysError) -> None:
        if self._problem != str(error):
            log.error("--keys: %s; the keys from before are still taken", error)
        self._problem = str(error)

    def _take(self, keys: list[Key]) -> None:
        self._by_name = {key.name: key for key in keys}
        self._by_hash = {key.hash: key for key in keys if key.revoked is None}

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
