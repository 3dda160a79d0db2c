"""Verify an audit log: python -m rwkv_batch.audit verify FILE."""

import argparse
import fcntl
import os
import sys
from contextlib import suppress
from hashlib import sha256
from typing import BinaryIO

from rwkv_batch.audit.lines import FIRST, AuditError, verify


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rwkv_batch.audit", description=verify.__doc__)
    commands = parser.add_subparsers(required=True, metavar="verify")
    check = commands.add_parser("verify", help="whether no line was changed, taken out or put in")
    check.add_argument("file", metavar="FILE", help="that of --audit-log")
    check.add_argument("--last", metavar="HASH", help="that the log must hold, kept from an earlier check")
    options = parser.parse_args(argv)
    try:
        with open(options.file, "rb") as file:
            count, last = verify(file, _size(file))
        if options.last and not _holds(options.file, options.last):
            raise AuditError(f"no line has the hash {options.last}: the end of the log was taken off")
    except OSError as error:
        print(f"error: {options.file} cannot be read ({error.strerror})", file=sys.stderr)
        return 2
    except AuditError as error:
        print(f"error: {options.file}: {error}", file=sys.stderr)
        return 1
    print(f"{count} lines, none changed; the last has the hash {last}")
    return 0


def _size(file: BinaryIO) -> int:
    """Bytes of the log while no server writes to it: what comes later may be half a line when it is read."""
    with suppress(OSError):  # where files have no locks
        fcntl.flock(file, fcntl.LOCK_SH)
    try:
        return os.fstat(file.fileno()).st_size
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def _holds(path: str, wanted: str) -> bool:
    if wanted == FIRST:  # the log had no line then
        return True
    with open(path, "rb") as file:
        return any(sha256(line[:-1]).hexdigest() == wanted for line in file)


if __name__ == "__main__":
    sys.exit(main())
